"""Sentences about a report: what keeps the most bytes, and which module or function would keep fewer.

It knows the modules of this package by name only.  The only import from another layer is the table of activations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..activation import OTHERS, TABLE
from .tables import mib
from .trace import Row, Storage

NORMS = ("BatchNorm", "GroupNorm", "LayerNorm", "InstanceNorm")
# The beginnings of the names of autograd's nodes for activations.
ACTIVATIONS = tuple(({row.node for row in TABLE.values()} | {other.node for other in OTHERS}) - {""})
# A saving below this share of the kept bytes gets no sentence.
WORTH = 0.01
# A loss that keeps less than this share gets no sentence.
LOSS_WORTH = 0.05
# The class of a loss, and the classes of fusedseg.losses that replace it.
LOSSES = {name: name for name in (
    "CrossEntropyLoss", "DC_and_BCE_loss", "DC_and_CE_loss", "DC_and_topk_loss", "DiceCELoss", "DiceFocalLoss",
    "FocalLoss", "TopKLoss",
)}  # fmt: skip
LOSSES |= {
    "DeepSupervisionWrapper": "DeepSupervision",
    "DiceLoss": "DiceLoss (for MONAI's) or fusedseg.losses.SMPDiceLoss (for segmentation_models_pytorch's)",
    "TverskyLoss": "TverskyLoss (for MONAI's) or fusedseg.losses.SMPTverskyLoss (for segmentation_models_pytorch's)",
}


@dataclass(frozen=True)
class Finding:
    """A saving that is available.

    Attributes:
        what: the kind of tensors that are kept, such as "concatenations".
        nbytes: bytes that are kept now.
        after: bytes that would be kept instead.
        piece: the module or function of fusedseg that keeps fewer bytes.
    """

    what: str
    nbytes: int
    after: int
    piece: str

    @property
    def saving(self) -> int:
        return self.nbytes - self.after

    def __str__(self) -> str:
        return f"{self.what}: {mib(self.nbytes)} MiB → {mib(self.after)} MiB with {self.piece}"


@dataclass(frozen=True)
class Rule:
    """A rule that finds a saving.

    what: the name in the finding.  applies: whether the rule applies to a saved storage.  after: the bytes that would
    be kept instead of a storage.  piece: the replacement; {dims} in it stands for the number of spatial dimensions.
    """

    what: str
    applies: Callable[[Storage], bool]
    after: Callable[[Storage], int]
    piece: str


def _named(op: str, names: tuple[str, ...]) -> bool:
    return any(name in op for name in names)


def _only_norm(storage: Storage) -> bool:
    """Whether only norms and activations keep the storage, and a norm is among them or has made it."""
    ops = [op for _, op in storage.savers]
    if not all(_named(op, NORMS + ACTIVATIONS) for op in ops) or len(storage.shape) < 3:
        return False
    return any(_named(op, NORMS) for op in ops) or "norm" in storage.op


# A storage counts under the first rule that applies to it.
RULES = (
    Rule(
        "max-pool indices",
        lambda storage: storage.kind == "pool indices" and storage.dtype.itemsize > 1,
        lambda storage: storage.nbytes // storage.dtype.itemsize,
        "fusedseg.MaxPool{dims}d",
    ),
    Rule(
        "concatenations",
        lambda storage: storage.kind == "concatenation",
        lambda storage: 0,
        "fusedseg.ConvABN{dims}d or fusedseg.nn.JoinConv{dims}d, which take the parts",
    ),
    Rule(
        "enlarged maps",
        lambda storage: storage.kind == "upsampled",
        lambda storage: 0,
        "fusedseg.functional.Interpolated as the input of fusedseg.ConvABN{dims}d or fusedseg.nn.JoinConv{dims}d",
    ),
    Rule(
        "inputs of norms and activations, beside their results",
        _only_norm,
        lambda storage: 0,
        "fusedseg.convert(model), or where the activation is LeakyReLU, ELU or none with fusedseg.InPlaceABN",
    ),
)


def findings(kept: Sequence[Storage], saved: int) -> list[Finding]:
    """The savings available in the storages that are kept, which have ``saved`` bytes, the largest first."""
    found, left = [], list(kept)
    for rule in RULES:
        hit = [storage for storage in left if rule.applies(storage)]
        left = [storage for storage in left if not rule.applies(storage)]
        before, after = sum(s.nbytes for s in hit), sum(rule.after(s) for s in hit)
        if before - after >= WORTH * max(saved, 1):
            dims = max((len(storage.shape) for storage in hit), default=4) - 2
            found.append(Finding(rule.what, before, after, rule.piece.format(dims=dims)))
    return sorted(found, key=lambda finding: -finding.saving)


def of_loss(storages: Sequence[Storage], rows: Sequence[Row], start: int, saved: int) -> list[str]:
    """A sentence about what the loss keeps for backward, if it keeps copies of the outputs: numbers, and no masks.

    ``start`` is the number of the event with which backward begins, and ``saved`` has the bytes that forward keeps.
    """
    kept = [s for s in storages if s.phase == "loss" and s.born < start and (s.freed is None or s.freed >= start)]
    numbers = sum(storage.nbytes for storage in kept if storage.dtype.is_floating_point)
    if numbers < LOSS_WORTH * max(saved, 1):
        return []
    names = [r.layer_type for r in rows if r.phase == "loss" and r.hook_type == "pre" and r.layer_type in LOSSES]
    # A module comes before its parts.  If it only calls another loss at each resolution, that loss has to change too.
    changed = names[: 2 if names[:1] == ["DeepSupervisionWrapper"] else 1]
    instead = " with ".join(f"fusedseg.losses.{LOSSES[name]}" for name in changed) + " keeps"
    if not changed:
        instead = "the losses of fusedseg.losses keep"
    whose = f"The loss, {names[0]}, keeps" if names else "The loss keeps"
    return [
        f"{whose} {mib(sum(storage.nbytes for storage in kept))} MiB for backward, beside the outputs; {instead} "
        "nothing but the outputs."
    ]
