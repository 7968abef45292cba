"""``fusedseg profile`` and ``plan``, and the arguments that all commands for models refuse."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fusedseg.__main__ import main
from fusedseg.cli.models import PRESETS
from fusedseg.memory.tables import wrapped
from fusedseg.unet import UNet
from tests.nnunet import PlainConvUNet
from tests.resnet import ResNet18

RESNET = "tests.cli.test_memory:resnet"
# A plan compiles for each of its ways, so it takes a network of few layers.
BLOCKS = "tests.cli.test_memory:blocks"
BLOCK = "tests.cli.test_memory:block"
VOLUMES = "tests.cli.test_memory:volumes"
LEVELS = "tests.cli.test_memory:levels"
LINEAR = "tests.cli.test_memory:linear"
EMBEDS = "tests.cli.test_memory:embeds"
HALVES = "tests.cli.test_memory:halves"
IMAGE = ["--input", "2,3,64,64"]
ATEN = ["--codegen", "aten"]
# A plan in half precision counts no way with autocast.
HALF = [*ATEN, "--dtype", "fp16"]


def test_profile_prints_a_report(capsys):
    assert main(["profile", RESNET, *IMAGE, *ATEN]) == 0
    out = capsys.readouterr().out
    assert "ResNet18: the memory of one training step" in out
    assert "Kept for backward, MiB, by the module that has made it" in out
    assert "layers.0.1." in out
    # It named ops of aten.
    assert "aten" not in out
    assert max(map(len, out.splitlines())) <= 120


def test_profile_compares_and_writes(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"found.{name}" for name in ("json", "png")}
    argv = ["profile", BLOCKS, "--input", "8x3x64x64", "--optimizer", "adamw", "--codegen", "inductor"]
    argv += ["--json", str(files["json"]), "--plot", str(files["png"])]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "stands for" not in out
    assert all(path.stat().st_size for path in files.values())
    found = json.loads(files["json"].read_text())
    assert list(found["ways"]) == ["eager", "convert", "torch.compile", "fusedseg"]
    assert found["ways"]["fusedseg"]["kept"] < found["ways"]["eager"]["kept"]
    assert found["before_bytes"]["optimizer state"] > 0
    # The second run finds the files of the first run.
    assert main(argv) == 2
    assert "found.json exists: choose another path, or pass --overwrite" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0
    assert main([*argv[:-3], str(tmp_path / "new.json"), "--plot", str(tmp_path / "memory.txt")]) == 2
    assert "fusedseg profile: --plot: a picture is one of " in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_at_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["profile", BLOCKS, *IMAGE, "--plot", str(tmp_path / "memory.png")]) == 2
    assert '--plot needs matplotlib: pip install "fusedseg[plot]"' in capsys.readouterr().err


def test_profile_of_the_backend_with_options(tmp_path):
    found = []
    for options in (["--bits", "4", "--amp"], ["--budget", "0.2"]):
        path = str(tmp_path / f"{len(found)}.json")
        argv = ["profile", LEVELS, "--input", "2,1,16,16,16", "--codegen", "aten", "--json", path]
        assert main([*argv, *options]) == 0
        found.append(json.loads(Path(path).read_text())["ways"])
    packed, less = found
    # Autocast takes at least 30 % off eager mode's bytes, and bits most of the rest.
    assert packed["eager"]["kept"] < 0.7 * less["eager"]["kept"]
    assert packed["fusedseg"]["kept"] < 0.15 * packed["eager"]["kept"]
    assert less["fusedseg"]["kept"] < 0.25 * less["eager"]["kept"]
    assert less["fusedseg"]["repeated"] > 0


def test_a_preset_is_compared_with_its_plain_twin(capsys, tmp_path, monkeypatch):
    """The preset with fewer and narrower levels, which takes a tenth of the time."""
    monkeypatch.setitem(PRESETS, "unet3d_small", partial(UNet, 1, 5, dims=3, widths=(8, 16), bias=True))
    argv = ["profile", "unet3d_small", "--input", "1,1,32,32,16", "--amp", "--codegen", "aten"]
    assert main([*argv, "--json", str(tmp_path / "found.json")]) == 0
    ways = json.loads((tmp_path / "found.json").read_text())["ways"]
    assert ways["convert"]["kept"] < 0.4 * ways["eager"]["kept"]
    out = capsys.readouterr().out
    assert "convert stands for the preset's fused blocks." in out
    # Converting tensors without values to the dtype that they have raised an error.
    assert "autocast to fp16" in out


@pytest.mark.slow
def test_a_preset_of_two_encoders_in_fp32(capsys):
    argv = ["profile", "lidar_optical_unet", "--input", "1,5,32,32", "--input", "1,3,32,32"]
    assert main([*argv, "--amp", "--codegen", "aten"]) == 0
    assert "autocast to fp16" in capsys.readouterr().out


def test_plan_has_the_line_of_the_backend(tmp_path):
    """``tests/planning/test_plan.py`` checks that the answer ends with the line of the way that it chooses."""
    figures = tmp_path / "plan.json"
    argv = ["plan", VOLUMES, "--input", "2,1,16,16,16", "--optimizer", "none", "--reserve", "0", "--dtype", "fp16"]
    assert main([*argv, "--budget", "1GiB", "--codegen", "aten", "--json", str(figures)]) == 0
    options = {option["label"]: option for option in json.loads(figures.read_text())["options"]}
    compiled, eager = options["fusedseg"], options["eager"]
    assert compiled["kept_bytes"] < 0.6 * eager["kept_bytes"]
    # The line named no codegen, so that it ran other code than what was counted.
    assert compiled["code"] == 'model = torch.compile(model, backend="fusedseg", options={"codegen": "aten"})'


def test_plan_prints_a_table(capsys, tmp_path):
    argv = ["plan", BLOCK, "--input", "3,64,64", "--budget", "1GiB", "--batch", "16", *HALF]
    argv += ["--json", str(tmp_path / "plan.json")]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "fits batch 16" in out
    assert "Cheapest for batch 16: eager" in out
    assert json.loads((tmp_path / "plan.json").read_text())["cheapest"] == "eager"
    assert main(argv) == 2
    assert "plan.json exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        # ``plan`` took only shapes without the batch, and ``profile`` took only shapes with the batch.
        (["plan", BLOCK, "--input", "16,3,64,64", "--budget", "1GiB", *HALF], "Cheapest for batch 16: eager"),
        (["profile", BLOCK, "--input", "3,64,64", "--batch", "16", *ATEN], "on 16×3×64×64 fp32"),
        # A sample is a batch of one.
        (["profile", BLOCK, "--input", "3,64,64", *ATEN], "on 1×3×64×64 fp32"),
        # Without convolutions shapes are taken as they are.
        (["profile", LINEAR, "--input", "4,8", *ATEN], "on 4×8 fp32"),
        (["plan", LINEAR, "--input", "8", "--budget", "1GiB", *HALF], "Largest batch"),
        # Every input was of floating point, which no embedding takes.
        (["profile", EMBEDS, "--input", "2,16:int64"], "on 2×16 fp32"),
    ],
    ids=["plan", "profile", "sample", "no convolution", "plan, no convolution", "integers"],
)
def test_shapes(argv, message, capsys):
    assert main(argv) == 0
    assert message in capsys.readouterr().out


def blocks():
    """Makes two blocks, which can be converted."""
    return nn.Sequential(block(3, 8), block(8, 4))


def block(channels=3, out=8):
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.SiLU())


def resnet():
    return ResNet18(10, 8, stages=1)


def volumes():
    return PlainConvUNet(widths=(8,))


def levels():
    return PlainConvUNet(widths=(8, 16))


def linear():
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


def embeds():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4), nn.ReLU())


def labels():
    """Makes a network that returns labels, which have no gradient."""

    class Labels(nn.Conv2d):
        def forward(self, x):
            return super().forward(x).argmax(1)

    return Labels(3, 4, 1)


def halves():
    """A U-Net of one level that takes only even sizes."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, 2)

        def forward(self, x):
            x = self.conv(x)
            return torch.cat([x, self.up(nn.functional.max_pool2d(x, 2))], 1)

    return Halves()


PROFILE, PLAN = ["profile", RESNET], ["plan", BLOCK, "--input", "3,64,64"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["profile", "unet", *IMAGE], "MODEL must be a preset (lidar_optical_unet, unet3d_large, unet3d_small) or"),
        (["profile", "unet3d_smal", *IMAGE], "got 'unet3d_smal'; did you mean unet3d_small?"),
        (["profile", "nowhere.at:all", *IMAGE], "cannot import nowhere.at: No module named 'nowhere'"),
        (["profile", "tests.resnet:ResNet19", *IMAGE], "tests.resnet has no ResNet19; did you mean ResNet18?"),
        (["profile", "tests/resnet.py:ResNet18", *IMAGE], "from the folder that holds it: tests.resnet:ResNet18"),
        (["profile", "resnet.py:ResNet18", *IMAGE], "from the folder that holds it: resnet:ResNet18"),
        (["profile", "tests.resnet:BasicBlock", *IMAGE], "cannot be built: TypeError: BasicBlock.__init__() missing"),
        (["profile", "math:pi", *IMAGE], "pi must be a module or build one, and is a float"),
        (
            ["profile", "builtins:dict", *IMAGE],
            "cannot be built: model must be a module or build one, and built an object of class dict",
        ),
        ([*PROFILE, "--input", "2,4,64,64"], "does not run on 2×4×64×64 fp32: RuntimeError: Given groups=1"),
        (["profile", "tests.cli.test_memory:labels", *IMAGE], "the model must return a floating-point tensor, whose"),
        ([*PROFILE, *IMAGE, "--batch", "4"], "--input and --batch name different batches: 2, 4"),
        (
            ["profile", BLOCK, *IMAGE, "--codegen", "aten", "--bits", "4", "--budget", "much"],
            "budget must be a share of the bytes that eager mode keeps",
        ),
        ([*PROFILE, *IMAGE, "--json", "/nowhere/rows.json"], "there is no folder /nowhere"),
        ([*PROFILE, *IMAGE, "--json", "/", "--overwrite"], "/ is a folder: name a file in it"),
        ([*PLAN, "--budget", "16"], "budget must be a positive number with one of B, KB"),
        ([*PLAN, "--budget", "5GiB", "--reserve", "-0.1"], "at least 0 and below 1, got -0.1"),
        (
            [*PLAN, "--budget", "9KiB", *HALF],
            "fusedseg plan: Sequential with batch 1 does not fit in 9.0 KiB, of which 10% are kept back: the leanest",
        ),
        (["plan", RESNET, "--input", "4,64,64", "--budget", "9GiB"], "does not run: RuntimeError: Given groups=1"),
        (["plan", EMBEDS, "--input", "2,16:int64", "--budget", "1GiB"], "--input: plan takes no inputs of integers;"),
        # PyTorch logged the traceback of the failed op: dozens of lines before the line that helps.
        (["profile", HALVES, "--input", "1,3,33,33"], "Sizes of tensors must match"),
        (["plan", HALVES, "--input", "1,3,33,33", "--budget", "1GiB"], "Sizes of tensors must match"),
    ],
    ids=lambda value: None if isinstance(value, list) else "".join(c for c in value if c.isalnum())[:24],
)
def test_refusals(argv, message, capfd):
    assert main(argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    # The name appears once, and not as "fusedseg plan: fusedseg.memory.plan: ".
    assert line.startswith(f"fusedseg {argv[0]}: ")
    assert "fusedseg.memory" not in line


def test_an_error_in_the_users_module_names_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "unfinished.py").write_text("import torch\nwidth = depth\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["profile", "unfinished:build", *IMAGE]) == 2
    error = "cannot import unfinished: NameError: name 'depth' is not defined (unfinished.py:2)"
    assert error in capsys.readouterr().err
    assert main(["profile", "unfinishd:build", *IMAGE]) == 2
    assert "did you mean unfinished?" in capsys.readouterr().err


def test_text_is_as_wide_as_the_terminal(monkeypatch):
    """Lines of 110 columns were broken again by a terminal of 80."""
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, wrapped("word " * 50).splitlines())) < 60
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, wrapped("word " * 50).splitlines())) > 60


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["profile", RESNET, "--input", "2,3:int7"],
            "expected one of int64, int32, uint8 after the colon, got '2,3:int7'",
        ),
        (["profile", RESNET, "--input", "2,3,x"], "a shape is positive integers joined by commas, got '2,3,x'"),
        (["profile", RESNET, "--input", "0,3,4,4"], "a shape is positive integers joined by commas, got '0,3,4,4'"),
        (["profile", RESNET, "--input", ""], "a shape is positive integers joined by commas, got ''"),
        (["profile", RESNET, *IMAGE, "--batch", "0"], "argument --batch: expected a positive integer, got '0'"),
        (["profile", RESNET, *IMAGE, "--bits", "5"], "argument --bits: invalid choice: 5"),
        (PLAN, "the following arguments are required: --budget/--gpu"),
        (["profile", RESNET, *IMAGE, "--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
    ],
    ids=["dtype", "letter", "zero", "empty", "batch", "bits", "no budget", "choice"],
)
def test_what_cannot_be_parsed_is_one_line(argv, message, capsys):
    """The error once began with several lines of usage text."""
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.startswith(f"fusedseg {argv[0]}: ")
    assert line.endswith(f"; see fusedseg {argv[0]} --help")
