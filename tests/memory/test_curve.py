"""``curve``, and what compiled models keep."""

import sys
from functools import partial

import pytest
from torch import nn

import fusedseg
from fusedseg.compiler import partitions as backend
from fusedseg.memory import curve
from fusedseg.memory.curve import BACKEND
from fusedseg.memory.plot import CURVES
from tests.nnunet import PlainConvUNet

SMALL, SHAPE = partial(PlainConvUNet, widths=(8, 16)), (1, 16, 16, 16)


@pytest.fixture(scope="module")
def whole():
    """The curve of a small network with a budget of the backend and two of the compiler's; what it said; its text."""
    # The package has a function of the module's name.
    module = sys.modules["fusedseg.memory.curve"]
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BACKEND_BUDGETS", (0.2,))
        patch.setattr(module, "COMPILER_BUDGETS", (0.2,))
        found = curve(SMALL, SHAPE, convert=fusedseg.convert, backend=backend, progress=said.append)
        return found, said, str(found)


def test_the_compilers_own_budgets(whole):
    eager, found = whole[0].eager, {float(point.budget or 1): point for point in whole[0].ways["torch.compile"]}
    assert found[1.0].repeated == 0.0
    assert 0.9 * eager < found[1.0].kept <= eager
    assert found[0.2].kept < 0.3 * eager
    assert 0.05 < found[0.2].repeated < 0.5


def test_the_picture_has_a_line_for_each_way(whole, tmp_path):
    """Only the table was tested: the picture had none for the backend, and the command ended with a KeyError."""
    assert set(whole[0].ways) == set(CURVES)
    pytest.importorskip("matplotlib")
    whole[0].plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError):
        whole[0].plot(tmp_path / "curve.png")


def test_curve(whole):
    found, said, text = whole
    assert list(found.ways) == ["eager", "checkpoint", "fusedseg", "torch.compile", BACKEND]
    assert found.ways["eager"][0].kept == found.eager
    assert 0.9 < found.ways["checkpoint"][0].repeated <= 1.0
    for way, points in found.ways.items():
        assert all(point.kept < point.peak <= found.ways["eager"][0].peak for point in points), way
    lines = text.splitlines()
    assert lines[0] == "PlainConvUNet, 2×1×16×16×16: bytes kept against arithmetic repeated"
    assert sum(line.startswith(BACKEND) for line in lines) == 2
    assert found.ways[BACKEND][1].kept < found.ways[BACKEND][0].kept < 0.6 * found.eager
    assert said[0] == "eager"
    assert said[-1] == BACKEND
    assert found.to_dict()["ways"]["torch.compile"][1]["budget"] == "0.2"


def test_ways_that_cannot_run_are_named():
    layers = [nn.Conv2d(3, 8, 3, padding=1), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))]
    found = curve(nn.Sequential(*layers), (3, 8, 8))
    assert "checkpoint" not in found.ways
    assert "Left out: checkpoint: Sequential has no module with 1 to 4 convolutions" in " ".join(str(found).split())
