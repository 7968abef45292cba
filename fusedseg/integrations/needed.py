"""Imports a framework that an integration stands on."""

import importlib
import sys
from typing import Any


def needed(integration: str, pip: str, *names: str) -> Any:
    """Imports the first of the modules ``names`` that is installed, and returns it.

    A module that the program has imported already comes first, because a framework may be installed under two names.

    Raises:
        ImportError: no module is installed; the error names the command that installs one.
    """
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The framework is there, but a package that it imports is not: its own error says which one.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    raise ImportError(
        f"fusedseg.integrations.{integration} needs {' or '.join(names)}, which is not installed; "
        f"run: pip install {pip}"
    )
