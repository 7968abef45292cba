"""Trains the demo of slices: a U-Net of stock modules and one of ours, from the same weights on real data."""

import dataclasses
from statistics import mean

import pytest

from examples.demo import picture, slices, training
from examples.demo import report as demo_report

from .harness import Result
from .replay import CLOCK, report_step

SLOW_ON = "cuda"
# contender -> network of the demo.
NAMES = {"eager": "eager", "ours": "fusedseg"}
# Less than a third of the steps of the demo: enough for both networks to segment, and for 55 timed steps.
STEPS = 60
# Voxels of 3 mm: slices have less than half of the values that they have with voxels of 2 mm.
SIZES = {"cpu": dataclasses.replace(slices.SIZES["cpu"], resolution=3)}


@pytest.fixture(scope="module")
def outcome(device, report, pytestconfig):
    """The results of both networks after training.  It also writes the picture and the closing note."""
    problem = slices.problem(device, SIZES.get(device.type))
    networks = training.build(problem, device, seed=0)
    # The progress bar goes to the terminal.
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print()
        trainings = training.train(problem, networks, STEPS)
    outcome = demo_report.evaluate(problem, trainings, seed=0)
    path = report.directory / "mni152.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        picture.draw(file, problem, outcome)
    report.notes.append(
        "\n".join(
            [
                f"MNI152: {STEPS} training steps of a U-Net, optimizer included; IoU on the held-out front",
                *demo_report.lines(problem, outcome),
                f"picture: {path}",
            ]
        )
    )
    report.write(
        "mni152",
        {
            name: {
                "step_ms": 1e3 * of.step_seconds,
                "kept_bytes": of.kept_bytes,
                "peak_bytes": of.peak_bytes,
                "iou": of.iou,
                "first_loss": of.losses[0],
                "last_loss": of.losses[-1],
            }
            for name, of in ((name, outcome.figures[network]) for name, network in NAMES.items())
        },
    )
    steps = {name: trainings[network].seconds[training.WARMUP_STEPS :] for name, network in NAMES.items()}
    return outcome, steps


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("contender", NAMES)
def test_step(outcome, contender, benchmark):
    figures, steps = outcome[0].figures[NAMES[contender]], outcome[1][contender]
    result = Result(step=steps, kept=figures.kept_bytes, peak=figures.peak_bytes)
    report_step(benchmark, "training step on MNI152", contender, result)


def test_both_start_from_the_same_loss(outcome, device):
    eager, ours = (of.losses[0] for of in outcome[0].figures.values())
    # The tolerance of one forward, in fp32 on a CPU and in bf16 on a GPU.
    assert ours == pytest.approx(eager, rel=1e-2 if device.type == "cuda" else 1e-4)


def test_both_segment_the_held_out_part(outcome):
    eager, ours = (mean(of.iou.values()) for of in outcome[0].figures.values())
    # Rounding makes the two trainings drift apart, as two eager runs with different seeds do.
    assert min(eager, ours) > 0.6
    assert abs(ours - eager) < 0.05
