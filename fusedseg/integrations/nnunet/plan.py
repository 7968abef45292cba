"""Which patch and batch of an nnU-Net plan fit in a GPU, with and without fusedseg."""

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..._sizes import parse_bytes
from ...convert import convert
from ...memory.fake import eager_step, fake_inputs, fake_mode, fake_model
from ...memory.tables import gib, table, wrapped
from ...planning.ways import largest
from .loss import fused_loss

OP = "fusedseg.integrations.nnunet.plan"
STOCK, FUSED = "stock", "fusedseg"
# The search for a patch enlarges all axes by sixteenths of the planned patch.
PARTS = 16


class Configuration(NamedTuple):
    """One configuration of a plan.

    shape: batch, channels and patch.  strides: the product of all strides along each axis; a patch is a multiple of it.
    heads: the number of outputs.  regions: whether they are regions that may overlap.  build: makes the network.
    loss: makes nnU-Net's loss.  scales: for each output, its size relative to the patch along each axis.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    heads: int
    regions: bool
    build: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    scales: list[list[float]]

    def enlarged(self, n: int) -> tuple[int, ...]:
        """The shape with all axes of the patch at about ``n / PARTS`` of their planned size."""
        pairs = zip(self.shape[2:], self.strides, strict=True)
        # A patch of two strides leaves two values along each axis at the lowest resolution.
        return *self.shape[:2], *(max(round(size * n / PARTS / step), 2) * step for size, step in pairs)


@dataclass(frozen=True)
class Fit:
    """What one way to train needs: bytes of the planned step, the largest batch and the largest shape that fit."""

    total: int
    batch: int
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class NnunetPlan:
    """The result of ``plan``; printing it shows a table."""

    planned: Configuration
    budget: int
    usable: int
    fits: dict[str, Fit]

    @property
    def memory_target(self) -> float:
        """The ``-gpu_memory_target``, in GB, with which nnU-Net plans a step that fits after conversion.

        nnU-Net's planner knows what stock networks need.  It is told the budget, enlarged by the ratio of the stock
        step's bytes to those of the converted step.
        """
        return self.budget / 1e9 * self.fits[STOCK].total / self.fits[FUSED].total

    def __str__(self) -> str:
        name, (batch, channels, *patch) = self.planned.name, self.planned.shape
        title = f"{name}: patch {_text(patch)}, batch {batch}, channels {channels}, outputs {self.planned.heads}"
        rows = [
            (way, gib(fit.total), str(fit.batch or "none"), _text(fit.shape[2:]) if fit.shape else "none")
            for way, fit in self.fits.items()
        ]
        head = ("", "planned step needs", "largest batch", f"largest patch at batch {batch}")
        kept_back = f"{gib(self.budget - self.usable)} of {gib(self.budget)} are kept back for workspaces. "
        note = (
            f"{kept_back}One step of nnU-Net's optimizer and loss with float16 autocast in eager mode, without "
            "torch.compile, estimated on tensors without values. Let nnU-Net plan for fusedseg in this GPU with "
            f"`nnUNetv2_plan_experiment -gpu_memory_target {math.floor(self.memory_target)}` and a name of your own "
            "for the plans (`-overwrite_plans_name`)."
        )
        return "\n".join([title, "═" * len(title), table(head, rows), "", wrapped(note)])


def plan(
    plans: str | Path,
    budget: int | str,
    *,
    configuration: str = "3d_fullres",
    reserve: float = 0.1,
    progress: Callable[[str], None] | None = None,
) -> NnunetPlan:
    """Estimates a training step of an nnU-Net plan as nnU-Net trains it, and with ``nnUNetTrainerFusedseg``.

    Args:
        plans: the path of a plans file, such as ``nnUNetPlans.json`` in the folder of a preprocessed dataset.
            ``dataset.json`` lies beside it.
        budget: bytes, or a text such as "24GiB".
        configuration: the configuration in the plans file.
        reserve: the share of the budget that is kept free for workspaces and fragmentation.
        progress: a function that is called with a short text before each estimated step.

    Raises:
        ImportError: nnunetv2 is not installed.
        ValueError: the budget cannot be read; a file is absent or no plan; the plan has no such configuration.
    """
    nbytes = parse_bytes(OP, budget)
    usable = int(nbytes * (1 - reserve))
    planned = read(Path(plans), configuration)
    fits = {way: _fit(planned, way, usable, progress or (lambda _: None)) for way in (STOCK, FUSED)}
    return NnunetPlan(planned, nbytes, usable, fits)


def _fit(planned: Configuration, way: str, usable: int, say: Callable[[str], None]) -> Fit:
    """Finds the largest batch and the largest patch of one way to train."""

    # Both searches look at the planned shape.
    @functools.cache
    def total(shape: tuple[int, ...]) -> int:
        say(f"{way}, {_text(shape)}")
        return _total(planned, way == FUSED, shape)

    batch = largest(lambda n: total((n, *planned.shape[1:])), usable)
    return Fit(total(planned.shape), batch, _largest_patch(planned, total, usable))


def _largest_patch(
    planned: Configuration, total: Callable[[tuple[int, ...]], int], usable: int
) -> tuple[int, ...] | None:
    """The shape with the largest patch that fits; None if none does."""
    fits, fails = 0, PARTS
    while total(planned.enlarged(fails)) <= usable:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        # Several parts stand for the same patch, because a patch is a multiple of the strides.
        if (fits and planned.enlarged(middle) == planned.enlarged(fits)) or total(planned.enlarged(middle)) <= usable:
            fits = middle
        else:
            fails = middle
    return planned.enlarged(fits) if fits else None


def read(path: Path, configuration: str) -> Configuration:
    """Reads a configuration of a plans file with nnU-Net's own code."""
    try:
        from nnunetv2.training.loss.compound_losses import DC_and_BCE_loss, DC_and_CE_loss
        from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
        from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
        from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
        from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
        from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
    except ImportError as error:
        raise ImportError(f"{OP}: nnunetv2 must be installed, as by `pip install nnunetv2` ({error})") from error
    manager = PlansManager(_json(path))
    if configuration not in manager.available_configurations:
        known = ", ".join(manager.available_configurations)
        raise ValueError(f"{OP}: configuration must be one of {known}, got {configuration!r}")
    dataset = _json(path.parent / "dataset.json")
    config, labels = manager.get_configuration(configuration), manager.get_label_manager(dataset)
    channels = determine_num_input_channels(manager, config, dataset)
    # The sizes of the outputs under deep supervision, as nnU-Net's trainer computes them.
    strides = [list(step) for step in config.pool_op_kernel_sizes]
    scales = [[1 / math.prod(axis) for axis in zip(*strides[: i + 1], strict=True)] for i in range(len(strides) - 1)]

    def loss() -> nn.Module:
        dice: dict[str, Any] = {"batch_dice": config.batch_dice, "smooth": 1e-5, "do_bg": labels.has_regions}
        dice["ddp"] = False
        if labels.has_regions:
            ignored = labels.ignore_label is not None
            one: nn.Module = DC_and_BCE_loss({}, dice, use_ignore_label=ignored, dice_class=MemoryEfficientSoftDiceLoss)
        else:
            ignore = labels.ignore_label
            one = DC_and_CE_loss(dice, {}, ignore_label=ignore, dice_class=MemoryEfficientSoftDiceLoss)
        weights = [0.5**i for i in range(len(scales) - 1)] + [0.0 if len(scales) > 1 else 1.0]
        return DeepSupervisionWrapper(one, [w / sum(weights) for w in weights])

    build = functools.partial(
        get_network_from_plans, config.network_arch_class_name, config.network_arch_init_kwargs,
        config.network_arch_init_kwargs_req_import, channels, labels.num_segmentation_heads, allow_init=False,
        deep_supervision=True,
    )  # fmt: skip
    shape = (config.batch_size, channels, *config.patch_size)
    total = tuple(math.prod(axis) for axis in zip(*strides, strict=True))
    name = f"{manager.dataset_name}, {configuration}"
    heads = labels.num_segmentation_heads
    return Configuration(name, shape, total, heads, labels.has_regions, build, loss, scales)


def _total(planned: Configuration, fused: bool, shape: tuple[int, ...]) -> int:
    """The bytes of a whole training step, with parameters and the state of the optimizer."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.99, nesterov=True)
    with fake_mode() as mode:
        net = fake_model(planned.build, mode, torch.float32)
        loss = planned.loss()
        if fused:
            # As ``Fused`` does where nnU-Net does not compile.
            convert(net)
            loss = fused_loss(loss)
        channels, patch = planned.heads if planned.regions else 1, shape[2:]
        sizes = [tuple(round(n * part) for n, part in zip(patch, scale, strict=True)) for scale in planned.scales]
        kind = torch.bool if planned.regions else torch.int16
        targets = [torch.empty((shape[0], channels, *size), dtype=kind) for size in sizes]
        inputs = fake_inputs(shape, torch.float32)
        return eager_step(net, inputs, optimizer=optimizer, loss=loss, targets=targets, autocast=torch.float16).total


def _json(path: Path) -> dict:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{OP}: cannot read {path}: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{OP}: {path} must hold a JSON object, got {type(read).__name__}")
    return read


def _text(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))
