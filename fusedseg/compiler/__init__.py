"""A backend of ``torch.compile`` that keeps less for backward, for any stock model; see docs/compiler.md."""

from .. import _torch
from .backend import backend
from .module_errors import name_module
from .report import Graph, Report, report
from .unrun import partitions

__all__ = ["Graph", "Report", "backend", "partitions", "report"]

_torch.call_at_the_end(name_module)


def __dir__() -> list[str]:
    return __all__
