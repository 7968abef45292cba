"""Marks of parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

by_layout = pytest.mark.parametrize("rows", [False, True], ids=["planes", "rows"])


def slow(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """The cases as parameters; the chosen ones are slow, because they repeat what another one of their kind shows."""
    every = list(cases)
    assert all(case in every for case in chosen), chosen

    def marked(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

    return [marked(case) if case in chosen else case for case in every]


def sanitized(cases: Mapping[str, Any], *names: str) -> list[Any]:
    """The cases as parameters; the named ones run under compute-sanitizer too, and first on a GPU."""
    marks = (pytest.mark.sanitize, pytest.mark.gpu)
    return [pytest.param(case, id=name, marks=marks if name in names else ()) for name, case in cases.items()]
