"""``fusedseg.profile``: the ways beside each other, the modules by name, and the picture."""

import copy

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.compiler import estimate
from fusedseg.memory import measure
from fusedseg.planning.picture import points

ATEN = {"codegen": "aten"}
SHAPE = (4, 3, 32, 32)


def pyramid():
    """A network that was not used to write the code: two scales with GELU, and a sum of both."""

    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(0.1))
            self.small = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU())
            self.narrow = nn.Conv2d(32, 16, 1)
            self.head = nn.Conv2d(16, 4, 1)

        def forward(self, x):
            x = self.stem(x)
            return self.head(x + nn.functional.interpolate(self.narrow(self.small(x)), scale_factor=2))

    return Pyramid()


@pytest.fixture(scope="module")
def found():
    return fusedseg.profile(pyramid, SHAPE, options={"codegen": "inductor"}, optimizer=torch.optim.AdamW)


def test_the_ways(found):
    assert list(found.ways) == ["eager", "convert", "torch.compile", "fusedseg"]
    eager, ours = found.ways["eager"], found.ways["fusedseg"]
    x = torch.randn(SHAPE)
    real = measure(pyramid(), x, owned=[x])
    assert (eager.kept, eager.peak) == (real.saved, real.peak)
    assert found.ways["convert"].kept < eager.kept
    assert ours.kept < found.ways["torch.compile"].kept < eager.kept
    assert ours == estimate(pyramid, SHAPE, options={"codegen": "inductor"}).steps()[1]
    weights = sum(parameter.nbytes for parameter in pyramid().parameters())
    assert found.before["parameters"] == weights
    assert found.before["optimizer state"] > 2 * weights
    assert found.before["inputs"] == 4 * 3 * 32 * 32 * 4


def test_the_text_speaks_of_the_model(found):
    """A reader does not know aten's ops."""
    text = str(found)
    assert "small.2" in text
    assert "BatchNorm2d" in text
    for word in ("aten", "native", "getitem", "backward2", "_legit"):
        assert word not in text
    names = {"(inputs)", "(model)", *(name for name, _ in pyramid().named_modules())}
    assert {row.module for row in found.modules} <= names
    assert len(found.module_table(3).splitlines()) == 2 + 3 + 1
    assert max(map(len, text.splitlines())) <= 120
    assert found.to_dict()["ways"]["fusedseg"]["kept"] == found.ways["fusedseg"].kept


def test_a_model_that_cannot_compile_has_rows_of_eager_mode():
    class Refuses(nn.Linear):
        def forward(self, x):
            if torch.compiler.is_compiling():
                raise KeyError("no compiler here")
            return super().forward(x)

    found = fusedseg.profile(Refuses(8, 8), (2, 8))
    assert list(found.ways) == ["eager", "convert"]
    text = "Left out: torch.compile and fusedseg: the compiler finds no graph in the model."
    assert text in " ".join(str(found).split())


def test_autocast_and_bits(found):
    half = fusedseg.profile(pyramid, SHAPE, options={**ATEN, "bits": 4}, autocast=torch.float16, convert=None)
    assert list(half.ways) == ["eager", "fusedseg"]
    assert half.ways["eager"].kept < 0.7 * found.ways["eager"].kept
    # Packing would raise the peak of so small a network.
    assert "Option bits: not used" in str(half)


def test_progress_names_the_ways_and_the_model_is_left_as_it_was():
    said, net = [], nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())
    before = copy.deepcopy(net.state_dict())
    fusedseg.profile(net, (2, 3, 8, 8), options=ATEN, progress=said.append)
    assert said == ["eager", "convert", "fusedseg"]
    assert type(net) is nn.Sequential
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_picture(found, tmp_path):
    pytest.importorskip("matplotlib")
    for name, peak in (("eager", found.ways["eager"].peak), ("fusedseg", found.ways["fusedseg"].peak)):
        xs, ys = points(found.courses[name])
        assert max(ys) == pytest.approx(peak, rel=0.02)
        assert xs == sorted(xs)
        assert xs[0] >= 0
        assert xs[-1] < 2
    path = tmp_path / "memory.png"
    found.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError):
        found.plot(path)
    found.plot(path, overwrite=True)
    with pytest.raises(ValueError, match=r"a picture is one of .*png.*, got the path '.*memory.doc'"):
        found.plot(tmp_path / "memory.doc")


def test_without_matplotlib_the_picture_says_what_to_install(found, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'a picture needs matplotlib: pip install "fusedseg\[plot\]"'):
        found.plot(tmp_path / "memory.png")
