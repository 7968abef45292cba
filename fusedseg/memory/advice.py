"""Sentences about a report: what keeps the most bytes, and which module or function would keep fewer.

It knows the modules of this package by name only.  The only import from another layer is the table of activations.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..activation import OTHERS, TABLE
from .record import NO_SIZE, Record
from .tables import mib
from .trace import Storage

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


def findings(report: Record) -> list[Finding]:
    """The savings available, the largest first."""
    found = []
    left = report.saved_storages
    for rule in RULES:
        hit = [storage for storage in left if rule.applies(storage)]
        left = [storage for storage in left if not rule.applies(storage)]
        before, after = sum(s.nbytes for s in hit), sum(rule.after(s) for s in hit)
        if before - after >= WORTH * max(report.saved, 1):
            dims = max((len(storage.shape) for storage in hit), default=4) - 2
            found.append(Finding(rule.what, before, after, rule.piece.format(dims=dims)))
    return sorted(found, key=lambda finding: -finding.saving)


def summary(report: Record) -> str:
    resident = report.resident_by_kind()
    there = ", ".join(f"{kind} {mib(nbytes)}" for kind, nbytes in resident.items())
    lines = [
        f"{report.parameters:,} parameters. Forward keeps {mib(report.saved)} MiB for backward. The step peaks at "
        f"{mib(report.peak)} MiB, in {report.peak_phase}, on top of the {mib(report.resident)} MiB that were there "
        f"before it ({there}): {mib(report.total)} MiB in all."
    ]
    if report.allocator_peak is not None:
        lines.append(f"CUDA's allocator had handed out {mib(report.allocator_peak)} MiB at most, rounded up by block.")
    lines += _largest(report)
    lines += _loss(report)
    at_peak = report.peak_by("kind")
    if at_peak:
        alive = ", ".join(f"{kind} {mib(nbytes)}" for kind, nbytes in list(at_peak.items())[:4])
        lines.append(f"Alive at the peak, largest first: {alive}.")
    if report.convolutions["recomputed"]:
        lines.append(
            f"Backward runs {report.convolutions['recomputed']} convolutions a second time: "
            f"{report.recomputed:+.0%} arithmetic."
        )
    found = findings(report)
    if found:
        less = sum(finding.saving for finding in found)
        lines.append(f"Savings available, {mib(less)} MiB of the {mib(report.saved)} kept:")
        lines += [f"  • {finding}" for finding in found]
    return "\n".join(lines)


def _loss(report: Record) -> list[str]:
    """A sentence about what the loss keeps for backward, if it keeps copies of the outputs: numbers, and no masks."""
    start = report.marks.get("backward", 0)
    kept = [
        s for s in report.storages if s.phase == "loss" and s.born < start and (s.freed is None or s.freed >= start)
    ]
    numbers = sum(storage.nbytes for storage in kept if storage.dtype.is_floating_point)
    if numbers < LOSS_WORTH * max(report.saved, 1):
        return []
    names = [r.layer_type for r in report.rows if r.phase == "loss" and r.hook_type == "pre" and r.layer_type in LOSSES]
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


def _largest(report: Record) -> list[str]:
    """A sentence about the spatial size that keeps the most, compared with the size of the parameters."""
    sizes = {size: nbytes for size, nbytes in report.saved_by("size").items() if size != NO_SIZE}
    if not sizes:
        return []
    size, nbytes = next(iter(sizes.items()))
    weights = report.resident_by_kind().get("parameters", 0)
    text = f"Tensors of spatial size {size} are {nbytes / report.saved:.0%} of what is kept"
    if weights < report.saved / 4:
        text += f"; the parameters weigh {mib(weights)} MiB, so fewer channels at this size save more than fewer layers"
    return [f"{text}."]
