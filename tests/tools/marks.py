"""Marks of parameters."""

from collections.abc import Mapping
from typing import Any

import pytest


def sanitized(cases: Mapping[str, Any], *names: str) -> list[Any]:
    """The cases as parameters; the named ones run under compute-sanitizer too, and first on a GPU."""
    marks = (pytest.mark.sanitize, pytest.mark.gpu)
    return [pytest.param(case, id=name, marks=marks if name in names else ()) for name, case in cases.items()]
