"""What the integrations share: the import of a framework, and a compilation."""

import importlib
import sys
from typing import Any

from torch import nn

from ..compiler import Report, backend, report
from ..compiler.settings import parse


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
            # If the framework is there but a package that it imports is not, its own error says which one.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    framework = " or ".join(dict.fromkeys(name.split(".")[0] for name in names))
    raise ImportError(
        f"fusedseg.integrations.{integration} needs {framework}, which is not installed; run: pip install {pip}"
    )


def compile_in_place(op: str, network: nn.Module, options: dict[str, Any]) -> None:
    """Compiles the calls of a network by ``torch.compile(backend="fusedseg")``; its class and its names stay.

    Raises:
        ValueError: an option is wrong; or the forward is that of a class of ``torch.nn``, which PyTorch does not
            compile.
    """
    parse(options)
    # A subclass of ``nn.Sequential`` without a forward of its own is not compiled either.
    if type(network).forward.__module__.startswith("torch.nn."):
        raise ValueError(
            f"{op}: {type(network).__name__}.compile() of PyTorch has no effect on classes of torch.nn; make a class "
            'of your own of the network, or build it as torch.compile(network, backend="fusedseg")'
        )
    network.compile(backend=backend, options=options)


def kept_by_backend(network: nn.Module) -> tuple[Report | None, str]:
    """The report of the backend on a network that has run, and a text for the log."""
    try:
        found = report(network)
    except ValueError:
        return None, f"fusedseg: the backend has compiled no graph of this {type(network).__name__}"
    return found, f"fusedseg.compiler.report, of the graphs so far:\n{found}"
