"""A backend of ``torch.compile`` that keeps less for backward, for any stock model; see docs/compiler.md."""

from .. import _torch
from .backend import backend
from .estimate import NotCompiled, estimate
from .module_errors import name_module
from .notes import report
from .report import Graph, Report
from .subclasses import trace_meta_tensors

__all__ = ["Graph", "NotCompiled", "Report", "backend", "estimate", "report"]

_torch.call_around(trace_meta_tensors, name_module)


__dir__ = __all__.copy
