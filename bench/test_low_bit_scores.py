"""The Dice of small trainings with 8 and 4 bits of the compiler backend beside that of exact ones.

A 2D U-Net of stock modules is trained on the slices of the demo (``examples/demo/slices.py``): for each seed from the
same weights, on the same batches.  The Dice is that of the part of the brain that no training has seen, over the
classes without the background.
"""

import copy
import dataclasses
from statistics import mean, stdev

import pytest
import torch

from examples.demo import slices, training
from fusedseg.compiler import backend

from .results import markdown

SEEDS = range(5)
WAYS = {"exact": {}, "8 bits": {"bits": 8}, "4 bits": {"bits": 4}}
STEPS, WIDTHS = 200, (8, 16, 32)


def scores(seed: int, device: torch.device) -> dict[str, tuple[float, int]]:
    """For each way of training the mean Dice, and the bytes that a step keeps."""
    problem = slices.problem(device, dataclasses.replace(slices.SIZES["cpu"], widths=WIDTHS))
    torch.compiler.reset()
    torch.manual_seed(seed)
    first = problem.network()
    networks = {name: copy.deepcopy(first).to(device) for name in WAYS}
    for name, options in WAYS.items():
        networks[name].compile(backend=backend, options={"codegen": "aten", "seed": seed, **options})
    training.train(problem, networks, STEPS, seed, plain=dict.fromkeys(WAYS, True))
    batch, found = problem.batch(torch.Generator().manual_seed(seed)), {}
    for name, net in networks.items():
        predicted = training.predict(net, problem.held_out.images)
        overlaps = training.intersection_over_union(predicted, problem.held_out.labels, problem.classes)
        dice = mean(2 * iou / (1 + iou) for iou in list(overlaps.values())[1:])
        found[name] = dice, training.count_bytes(net, True, problem, batch)[0]
    return found


@pytest.mark.slow
def test_scores(report, device):
    found = [scores(seed, device) for seed in SEEDS]
    dice = {name: [one[name][0] for one in found] for name in WAYS}
    rows = [
        [
            name,
            *(f"{value:.4f}" for value in of),
            f"{mean(of):.4f}",
            f"{stdev(of):.4f}",
            f"{found[0][name][1] / 2**20:.2f}",
        ]
        for name, of in dice.items()
    ]
    head = ["Dice", *(f"seed {seed}" for seed in SEEDS), "mean", "deviation", "MiB kept"]
    report.notes.append("\n".join([f"{STEPS} steps", "", *markdown(head, rows)]))
    for name in WAYS:
        # The deviation between seeds is how well a training of other weights and batches repeats.
        assert abs(mean(dice[name]) - mean(dice["exact"])) <= stdev(dice["exact"])
