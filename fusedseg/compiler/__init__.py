"""A backend of ``torch.compile`` that keeps less for backward, for any stock model; see docs/compiler.md."""

from .backend import backend
from .report import Graph, Report, report
from .unrun import partitions

__all__ = ["Graph", "Report", "backend", "partitions", "report"]


def __dir__() -> list[str]:
    return __all__
