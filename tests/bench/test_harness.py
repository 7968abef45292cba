"""The benches' harness: what it refuses, what it counts, and whose times it reports."""

import torch
from torch import nn

from bench.harness import Missing, compete, disagreement
from bench.jobs import LayerJob
from bench.replay import Clock

TOLERANCE = dict.fromkeys(("z", "dx", "dweight", "dbias"), 1e-4)


def make_data() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16, 16, requires_grad=True)
    return {"x": x, "dz": torch.randn_like(x), "weight": torch.rand(4) + 0.5, "bias": torch.randn(4)}


def layer(slope: float) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(slope, inplace=True))


def expected(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    exact = {name: value.detach().double() for name, value in data.items()}
    exact["x"].requires_grad_()
    job = LayerJob(layer(0.01).double(), exact)
    out = job.forward(job.prepare())
    return job.results(out, job.backward(out))


def absent() -> LayerJob:
    raise Missing("not installed")


def test_wrong_contenders_are_refused_and_absent_ones_named():
    data = make_data()
    results = compete(
        {
            "eager": lambda: LayerJob(layer(0.01), data),
            "wrong": lambda: LayerJob(layer(0.02), data),
            "absent": absent,
        },
        {"": lambda: expected(data)},
        TOLERANCE,
        torch.device("cpu"),
        seconds=0.0,
    )
    assert results["wrong"].refused.startswith("z off by ")
    assert results["wrong"].step == []
    assert results["absent"].missing == "not installed"
    eager = results["eager"]
    assert eager.refused == eager.missing == ""
    assert len(eager.step) == len(eager.forward) == len(eager.backward) == 5
    assert all(
        step >= forward + backward
        for step, forward, backward in zip(eager.step, eager.forward, eager.backward, strict=True)
    )
    # x and z, mean and rstd; the parameters are not counted
    assert eager.kept == 2 * data["x"].nbytes + 2 * 4 * 4
    # x, z, and in backward the gradients of z's activation and of x
    assert eager.peak >= 4 * data["x"].nbytes


def test_nan_is_refused():
    assert disagreement({"z": float("nan")}, {}, TOLERANCE) == "z off by nan > 1.0e-04"


def test_twice_eagers_own_error_is_allowed():
    assert disagreement({"z": 3e-4}, {"z": 2e-4}, TOLERANCE) == ""
    assert disagreement({"z": 5e-4}, {"z": 2e-4}, TOLERANCE) == "z off by 5.0e-04 > 4.0e-04"


def test_the_clock_replays_the_samples():
    clock = Clock()
    clock.load([0.5, 0.25])
    readings = [clock() for _ in range(4)]
    assert [readings[1] - readings[0], readings[3] - readings[2]] == [0.5, 0.25]
