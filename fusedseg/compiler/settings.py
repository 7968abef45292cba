"""The options of the backend: ``torch.compile(model, backend="fusedseg", options={...})``."""

import functools
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from .. import _backend
from ..ops.layout import FORMATS
from .budget import Budget

# A compilation that takes longer shows on the terminal what it does.
QUIET_SECONDS = 5.0
OP = 'torch.compile(backend="fusedseg")'
BITS = (8, 4)
CODEGENS = ("inductor", "aten")
AS_IT_IS = "keep"
WITHOUT = "FUSEDSEG_WITHOUT"
# What WITHOUT can leave out: a pass (``passes.py``), or "ahead".  Results are the same without it, but for their last
# bits.
OPTIONAL = {
    "ahead": "kernels are compiled in threads, before the first call of a graph",
    "casts": "casts of many tensors in one call",
    "channels_last": "convolutions compute in channels_last, whatever the model's format is",
    "in_place": "results are written over inputs that nobody reads again",
    "late_bias": "a concatenation adds the biases of convolutions before it",
    "one_channel": "backward reads an image of one channel as a view in channels_last",
    "replays": "launches are made again without the op",
    "sums": "the gradient of a norm reads two gradients in place of their sum",
    "zeros": "vectors of zeros in one call",
}
# How often each of these has written something in this process.
written: Counter[str] = Counter()


def left_out() -> frozenset[str]:
    """The names in the environment variable FUSEDSEG_WITHOUT; raises ValueError for an unknown one."""
    names = frozenset(name.strip() for name in os.environ.get(WITHOUT, "").split(",")) - {""}
    if unknown := sorted(names - set(OPTIONAL)):
        raise ValueError(
            f"environment variable {WITHOUT} must have names with commas between them, of {', '.join(OPTIONAL)}; "
            f"got {', '.join(map(repr, unknown))}"
        )
    return names


@functools.cache
def say_once(text: str) -> None:
    """Warns with the name of the backend before the text, once in a process."""
    warnings.warn(f"{OP}{text}", stacklevel=2)


@dataclass(frozen=True)
class Settings:
    """What the options say.

    Attributes:
        codegen: who generates code; None chooses "inductor" for a graph of which Inductor's kernels move clearly fewer
            bytes (``traffic.py``), and "aten" for all others.
        budget: a share of the bytes that eager mode keeps, or bytes, or a text such as "6GiB" or "peak 10GiB".
        extra_flops: the arithmetic of compute-intensive ops that may run twice for it, as a share of the forward's.
        bits: the bits of a value that forward keeps for backward; None keeps values as they are.
        seed: that of the rounding.
        cudagraphs: whether a GPU's kernels are recorded as CUDA graphs and replayed.
        memory_format: ``torch.channels_last`` or ``torch.channels_last_3d``, in which all convolutions of images or of
            volumes compute; None says so of convolutions in half precision on a GPU, where copies cost less than it
            gains; "keep" leaves every tensor as it is.
        fused_convolutions: whether convolutions on a GPU compute the norms beside them, with cuDNN's frontend.
        inductor: options of Inductor, as ``torch.compile(options=...)`` takes them.
    """

    codegen: str | None = None
    budget: float | str | None = None
    extra_flops: float | None = None
    bits: int | None = None
    seed: int = 0
    cudagraphs: bool = False
    memory_format: torch.memory_format | str | None = None
    fused_convolutions: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.codegen is not None and self.codegen not in CODEGENS:
            raise ValueError(f"{OP}: option codegen must be one of {', '.join(CODEGENS)}, got {self.codegen!r}")
        if self.bits is not None and (isinstance(self.bits, (bool, float)) or self.bits not in BITS):
            raise ValueError(f"{OP}: option bits must be 8, 4 or None, got {self.bits!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"{OP}: option seed must be an integer, got {type(self.seed).__name__}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"{OP}: option seed must fit into 64 bits, got {self.seed}")
        for name, flag in (("cudagraphs", self.cudagraphs), ("fused_convolutions", self.fused_convolutions)):
            if not isinstance(flag, bool):
                raise TypeError(f"{OP}: option {name} must be True or False, got {flag!r}")
        if self.memory_format not in (None, AS_IT_IS, *FORMATS.values()):
            raise ValueError(
                f"{OP}: option memory_format must be torch.channels_last, torch.channels_last_3d, {AS_IT_IS!r} or "
                f"None, got {self.memory_format!r}"
            )
        if not isinstance(self.inductor, Mapping):
            raise TypeError(f"{OP}: option inductor must be a dict of Inductor's options, got {self.inductor!r}")
        if self.inductor and self.codegen == "aten":
            raise ValueError(f"{OP}: option inductor has no effect with codegen='aten', got {dict(self.inductor)}")
        # Raises for a wrong one.
        _ = self.limits

    @property
    def limits(self) -> Budget | None:
        """What ``budget`` and ``extra_flops`` ask for; None without them.  Raises ValueError or TypeError."""
        return Budget.parse(OP, self.budget, self.extra_flops)

    @property
    def by_inductor(self) -> bool:
        """Whether Inductor generates the code, whose kernels compute several ops each; False while it is open."""
        return self.codegen == "inductor"

    @property
    def identity(self) -> str:
        """What the caches of a compiler must tell apart."""
        return repr((self, sorted(left_out())))

    def may_round(self, device: torch.device) -> bool:
        """Whether the last bits of results on a device may differ from those of eager mode.

        They may where Inductor generates code, and where the Triton kernels of this package serve the device.  So a
        rewrite that changes last bits runs on a GPU by default, and not in the code of "aten" for a CPU.
        """
        return self.by_inductor or _backend.takes_triton(device)


NAMES = tuple(f.name for f in fields(Settings))


def parse(options: Mapping[str, Any] | None) -> Settings:
    """The options as ``Settings``; raises ValueError for an option that does not exist."""
    given = dict(options or {})
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise ValueError(
            f"{OP}: options must be among {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}; "
            "Inductor's own options go into options={'inductor': {...}}"
        )
    return Settings(**given)
