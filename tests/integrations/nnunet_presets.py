"""``python -m tests.integrations.nnunet_presets``: which of nnU-Net's presets fits which card, for ``docs/nnunet.md``.

nnU-Net's own planners plan ``3d_fullres`` for a dataset like Task03_Liver of the Medical Segmentation Decathlon.  Each
planned step is counted on tensors without values, under float16 autocast, with the state of nnU-Net's optimizer: in
eager mode, and with the backend as ``nnUNetTrainerFusedseg`` compiles on a GPU.  The loss is not counted.
"""

import contextlib
import functools
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
from nnunetv2.experiment_planning.experiment_planners.residual_unets import residual_encoder_unet_planners as residual

from fusedseg.compiler.estimate import estimate_ways
from fusedseg.integrations.nnunet.plans import Planned, read
from fusedseg.memory.fake import bytes_before, eager_step, fake_inputs, fake_mode, fake_model
from fusedseg.memory.step_bytes import StepBytes
from tests.integrations.nnunet_plans import NAME, dataset_json, fingerprint

# What nnU-Net's planner finds for Task03_Liver: the median shape and spacing, and the number of images.
LIVER = {"shape": (482, 512, 512), "spacing": (1.0, 0.767578125, 0.767578125)}
LABELS, IMAGES = 3, 131
PRESETS = {
    "default": ExperimentPlanner,
    "ResEnc M": residual.nnUNetPlannerResEncM,
    "ResEnc L": residual.nnUNetPlannerResEncL,
    "ResEnc XL": residual.nnUNetPlannerResEncXL,
}
GIB = 2**30
OURS: dict[str, Any] = {"codegen": "aten", "memory_format": torch.channels_last_3d}
# What PyTorch reserved on an H100 for a step of the default preset, compiled in this way, without CUDA graphs, divided
# by its peak: 3006 and 1927 MiB (bench/results/).
RESERVED = 1.56
# A process takes about half a GiB of a GPU for CUDA itself.
CONTEXT = GIB // 2
CARDS = (8, 12, 16, 24, 32, 40, 48, 80)


def card(before: int, peak: int) -> str:
    """The smallest card that holds what is there before the step, what PyTorch reserves for it, and the context."""
    needed = before + RESERVED * peak + CONTEXT
    return next((f"{size} GB" for size in CARDS if needed <= size * GIB), "none")


class Step(NamedTuple):
    """A planned step: batch, channels and patch, the bytes that are there before it, and what each way needs."""

    size: tuple[int, ...]
    before: int
    eager: StepBytes
    exact: StepBytes
    four: StepBytes

    def row(self, name: str) -> str:
        """The GiB before the step and at its peaks, and the cards for the compiled network."""
        eager, *ours = (way.with_workspaces for way in (self.eager, self.exact, self.four))
        cells = [name, "×".join(map(str, self.size)), f"{self.before / GIB:.1f}", f"{eager / GIB:.1f}"]
        cells += [f"{peak / GIB:.1f}, {card(self.before, peak)}" for peak in ours]
        return f"| {' | '.join(cells)} |"


def plan(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Any, spacing: Any) -> Planned:
    """What the planner of a preset plans for images of this shape and spacing."""
    fingerprint(folder, monkeypatch, dataset_json(LABELS, numTraining=IMAGES), shape, spacing)
    planner = PRESETS[name](NAME)
    # The planner prints its plans.
    with contextlib.redirect_stdout(io.StringIO()):
        planner.plan_experiment()
    return read(folder / "preprocessed" / NAME / f"{planner.plans_identifier}.json")


def count(planned: Planned) -> Step:
    """Counts a step of the stock network in contiguous memory, and of the compiled one in channels_last_3d."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.99, nesterov=True)
    laid_out = planned.build().to(memory_format=torch.channels_last_3d)
    size = (planned.batch, *planned.sample)
    with fake_mode():
        inputs = fake_inputs(size, torch.float32)
        stock = fake_model(planned.build, torch.float32)
        before = bytes_before(stock, inputs, optimizer=optimizer)
        eager = eager_step(stock, inputs, autocast=torch.float16).needs
        inputs = [image.contiguous(memory_format=torch.channels_last_3d) for image in inputs]
        network = fake_model(laid_out, torch.float32)
        reports = estimate_ways(network, inputs, [OURS, {**OURS, "bits": 4}], torch.float16)
    exact, four = (report.steps()[1] for report in reports)
    return Step(size, sum(before.values()), eager, exact, four)


def rows() -> Iterator[str]:
    for name in PRESETS:
        with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as folder:
            yield count(plan(name, Path(folder), patched, **LIVER)).row(name)


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)
