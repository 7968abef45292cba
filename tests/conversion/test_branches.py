"""Branches on attributes in the code around fused norms: which of them the report names."""

import linecache
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

import fusedseg
from fusedseg.conversion import Branch
from tests.conversion import networks
from tests.conversion.compare import replaced
from tests.conversion.networks import LEAKY, Flagged

pytestmark = pytest.mark.usefixtures("uncounted")


@dataclass
class Config:
    flag: bool = False


class Sites(Flagged):
    """A model with one norm in place, whose forward has a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.phase, self.absent, self.config = 0, "warm-up", None, Config()
        self.downsample, self.layers, self.extra = None, nn.ModuleList(), nn.Identity()
        self.function = nn.functional.silu
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("table", torch.zeros(3))
        self.register_parameter("scale", None)

    @property
    def late(self) -> bool:
        return self.epoch > 5

    def is_late(self) -> bool:
        return self.epoch > 5

    def run(self, x):
        return self.act(self.bn(self.conv(x)))


def method(body: str) -> type[Sites]:
    """A subclass of ``Sites`` with a forward of this body, whose source ``inspect`` finds as it does in a notebook."""
    lines = ["def forward(self, x):\n", *(f"    {line}\n" for line in body.splitlines())]
    file = f"<forward {hash(body)}>"
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    names: dict = {"torch": torch, "__name__": __name__}
    exec(compile("".join(lines), file, "exec"), names)
    return type("Written", (Sites,), {"forward": names["forward"], "__module__": __name__})


NAMED = {
    "if self.flag:\n    x = x + 1\nreturn self.run(x)": [("self.flag", 2)],
    "return self.run(x if self.epoch < 3 else -x)": [("self.epoch", 2)],
    "while self.phase == 'x':\n    x = x + 1\nreturn self.run(x)": [("self.phase", 2)],
    "return self.run(x) + (self.epoch and self.flag and 1)": [("self.epoch", 2), ("self.flag", 2)],
    "y = [i for i in (1, 2) if self.flag]\nreturn self.run(x)": [("self.flag", 2)],
    "match self.phase:\n    case 'x':\n        x = -x\nreturn self.run(x)": [("self.phase", 2)],
    "if self.config.flag:\n    x = -x\nreturn self.run(x)": [("self.config.flag", 2)],
    "if self.late:\n    x = -x\nreturn self.run(x)": [("self.late", 2)],
    "if self.is_late():\n    x = -x\nreturn self.run(x)": [("self.is_late()", 2)],
    "if self.absent is not None:\n    x = -x\nreturn self.run(x)": [("self.absent", 2)],
    "if self.training and self.flag:\n    x = -x\nreturn self.run(x)": [("self.flag", 2)],
}


NOT_NAMED = [
    "if self.training:\n    x = -x\nreturn self.run(x)",
    "x = x if self.downsample is None else self.downsample(x)\nreturn self.run(x)",
    "if len(self.layers) > 0 or self.extra is None:\n    x = -x\nreturn self.run(x)",
    "if self.function is not None:\n    x = self.function(x)\nreturn self.run(x)",
    "if self.scale is not None:\n    x = self.scale * x\nreturn self.run(x)",
    "if self.table.sum() > 100:\n    x = -x\nreturn self.run(x)",
    "if x.shape[1] != self.epoch + 3 and self.epoch == 0:\n    raise ValueError\nreturn self.run(x)",
    "assert self.flag or x.shape[0] > 0\nreturn self.run(x)",
    "if x.shape[0] > 100:\n    x = -x\nreturn self.run(x)",
]


@pytest.mark.parametrize(("body", "found"), NAMED.items(), ids=[*map(repr, NAMED)])
def test_branches_that_are_named(body, found):
    report = fusedseg.convert(method(body)(), example_inputs=torch.randn(2, 3, 8, 8))
    assert [(branch.attribute, branch.line) for branch in report.branches] == found


@pytest.mark.parametrize("body", NOT_NAMED, ids=repr)
def test_branches_that_are_not_named(body):
    report = fusedseg.convert(method(body)(), example_inputs=torch.randn(2, 3, 8, 8))
    assert replaced(report)
    assert report.branches == []


def test_a_branch_on_a_buffer_of_one_element(image):
    model = method("if self.step > 3:\n    x = -x\nreturn self.run(x)")().double()
    report = fusedseg.convert(model, example_inputs=image)
    assert [branch.attribute for branch in report.branches] == ["self.step"]


def test_branches_on_training_are_named_if_one_mode_fails(image):
    model = method("if not self.training:\n    raise KeyError\nelse:\n    x = -x\nreturn self.run(x)")().double()
    report = fusedseg.convert(model, example_inputs=image)
    assert report.how == "observed in training mode"
    assert [branch.attribute for branch in report.branches] == ["self.training"]


class Inherits(Flagged):
    """Calls the inherited forward, and a method that branches."""

    def forward(self, x):
        """Has a line
        without indentation, which ``textwrap.dedent`` could not handle.
        """
        return self.late(super().forward(x))

    def late(self, x):
        return -x if self.late_flag else x

    late_flag = False


def test_methods_that_the_forward_calls_are_read(image):
    report = fusedseg.convert(Inherits().double(), example_inputs=image)
    found = [(branch.function, branch.attribute) for branch in report.branches]
    assert sorted(found) == [("Flagged.forward", "self.flag"), ("Inherits.late", "self.late_flag")]


class Around(nn.Module):
    """Two blocks, one of them of stock classes, and a branch around both."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = False
        self.blocks = nn.Sequential(Flagged(), networks.double_conv(4, 4, LEAKY()))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.blocks(x)
        return [self.head(y), y] if self.deep else self.head(y)


def test_modules_around_the_norm_are_read(image):
    report = fusedseg.convert(Around().double(), example_inputs=image)
    assert [branch[:2] + branch[4:] for branch in report.branches] == [
        ("Around.forward", "self.deep", ("blocks.0.conv", "blocks.1.0")),
        ("Flagged.forward", "self.flag", ("blocks.0.conv",)),
    ]
    text = str(report)
    assert "(leaky_relu(0.1)) (1) (2)" in text
    assert text.count("self.deep") == 1


@pytest.mark.parametrize(
    "make",
    [
        networks.ResNet,
        networks.NNUNet,
        lambda: networks.UNet(LEAKY),
        lambda: fusedseg.unet.UNet(3, 4, widths=(4, 8), plain=True),
    ],
    ids=["resnet", "nnunet", "unet", "unet of fusedseg"],
)
def test_library_code_without_settings_has_no_notes(make):
    report = fusedseg.convert(make(), example_inputs=torch.randn(2, 3, 32, 32))
    assert report.guarantee
    assert report.branches == []


def test_graphs_have_no_branches(image):
    graph = fx.symbolic_trace(Flagged().double())
    assert fusedseg.convert(graph, example_inputs=image).branches == []


def test_a_forward_without_source(image):
    model = Flagged().double()
    names: dict = {}
    exec("def forward(self, x):\n    return self.act(self.bn(self.conv(x)))", names)
    cls = type("NoSource", (Flagged,), {"forward": names["forward"]})
    model.__class__ = cls
    report = fusedseg.convert(model, example_inputs=image)
    assert report.branches == [Branch("forward", "", "", 0, ("conv",))]
    assert "\n  (1) forward: its source cannot be read, so its branches are not known" in str(report)
