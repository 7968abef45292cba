"""What a function is asked and returns in a test, while it goes on working as before."""

from collections.abc import Callable
from typing import Any

import pytest


def result_of(result: Any, *given: Any, **options: Any) -> Any:
    return result


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, noted: Callable[..., Any] = result_of) -> list[Any]:
    """A list that gets an entry for each call: its result, or what ``noted`` makes of the result and the arguments."""
    found, original = [], getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        result = original(*given, **options)
        found.append(noted(result, *given, **options))
        return result

    monkeypatch.setattr(owner, name, call)
    return found
