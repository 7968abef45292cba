"""``python -m fusedseg profile`` and ``plan``."""

import csv
import json

import pytest

from fusedseg.__main__ import main

RESNET = "tests.resnet:ResNet18"
IMAGE = ["--input", "2,3,64,64"]


def test_profile_prints_a_report(capsys):
    assert main(["profile", RESNET, *IMAGE]) == 0
    out = capsys.readouterr().out
    assert "eager: ResNet18, one training step on fake tensors" in out
    assert "Kept for backward" in out
    assert "with fusedseg.MaxPool2d" in out
    assert max(map(len, out.splitlines())) <= 120


def test_profile_compares_and_writes(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"found.{name}" for name in ("csv", "json", "png", "trace", "pickle")}
    argv = [
        "profile",
        RESNET,
        "--input",
        "8x3x64x64",
        "--compare",
        "eager,fusedseg,checkpoint",
        "--optimizer",
        "adamw",
    ]
    argv += ["--csv", str(files["csv"]), "--json", str(files["json"]), "--plot", str(files["png"])]
    argv += ["--chrome-trace", str(files["trace"]), "--snapshot", str(files["pickle"]), "--rows"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "fusedseg stands for fusedseg.convert(model)." in out
    assert "Rows of checkpoint, in MiB" in out
    assert all(path.stat().st_size for path in files.values())
    reports = {report["label"]: report for report in json.loads(files["json"].read_text())["reports"]}
    eager, ours, checkpoint = (reports[label] for label in ("eager", "fusedseg", "checkpoint"))
    assert ours["saved_bytes"] < 0.75 * eager["saved_bytes"]
    assert ours["convolutions"]["recomputed"] == 0 < checkpoint["convolutions"]["recomputed"]
    with files["csv"].open(newline="") as file:
        assert {row["exp"] for row in csv.DictReader(file)} == set(reports)
    # a second time
    assert main(argv) == 2
    assert "found.csv exists: choose another path, or pass --overwrite" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0


def test_profile_on_real_tensors(capsys):
    assert main(["profile", RESNET, *IMAGE, "--device", "cpu", "--compare", "fusedseg,eager"]) == 0
    assert "one training step on cpu tensors" in capsys.readouterr().out


def test_a_preset_is_compared_with_its_plain_twin(capsys, tmp_path):
    argv = ["profile", "unet3d_small", "--input", "1,1,32,32,16", "--dtype", "fp16", "--compare", "eager,fusedseg"]
    assert main([*argv, "--json", str(tmp_path / "found.json")]) == 0
    eager, ours = json.loads((tmp_path / "found.json").read_text())["reports"]
    assert ours["saved_bytes"] < 0.4 * eager["saved_bytes"]
    assert eager["saved_by"]["dtype"]["float16"] > 0.8 * eager["saved_bytes"]
    assert "fusedseg stands for the preset's fused blocks." in capsys.readouterr().out


def test_a_preset_of_two_encoders_in_fp32(capsys):
    # conversion of the dtype, to the one it has, was refused on tensors without values
    argv = ["profile", "lidar_optical_unet", "--input", "1,5,32,32", "--input", "1,3,32,32"]
    assert main([*argv, "--compare", "eager,fusedseg+amp"]) == 0
    assert "fusedseg+amp" in capsys.readouterr().out


def test_plan_prints_a_table(capsys, tmp_path):
    argv = [
        "plan",
        RESNET,
        "--input",
        "3,64,64",
        "--budget",
        "1GiB",
        "--batch",
        "16",
        "--json",
        str(tmp_path / "plan.json"),
    ]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "needs for batch 16" in out
    assert "Cheapest for batch 16: eager" in out
    assert json.loads((tmp_path / "plan.json").read_text())["cheapest"] == "eager"
    assert main(argv) == 2
    assert "plan.json exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["profile", "unet", *IMAGE],
            "MODEL must be one of lidar_optical_unet, unet3d_large, unet3d_small, or package",
        ),
        (["profile", "nowhere.at:all", *IMAGE], "cannot import nowhere.at: No module named 'nowhere'"),
        (["profile", "tests.resnet:ResNet19", *IMAGE], "tests.resnet has no ResNet19"),
        (["profile", "tests.resnet:BasicBlock", *IMAGE], "needs some: missing a required argument: 'in_channels'"),
        (["profile", "math:pi", *IMAGE], "pi must be a module or build one, and is a float"),
        (
            ["profile", RESNET, "--input", "2,4,64,64"],
            "does not run as eager on 2×4×64×64 fp32: RuntimeError: Given groups=1",
        ),
        (
            ["profile", RESNET, *IMAGE, "--compare", "eager,fast"],
            "--compare: expected eager, or fusedseg, amp, checkpoint",
        ),
        (["profile", RESNET, *IMAGE, "--csv", "/nowhere/rows.csv"], "there is no folder /nowhere"),
        (["plan", RESNET, "--input", "3,64,64", "--budget", "16"], "budget must be a number with one of B, KB"),
        (["plan", RESNET, "--input", "3,64,64", "--budget", "9MiB"], "ResNet18 with batch 1 needs"),
        (["plan", RESNET, "--input", "4,64,64", "--budget", "9GiB"], "does not run: RuntimeError: Given groups=1"),
    ],
    ids=["preset", "module", "name", "arguments", "kind", "input", "compare", "folder", "unit", "budget", "plan input"],
)
def test_refusals(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["2,3,x", "0,3,4,4", ""])
def test_shapes_that_are_none(shape, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["profile", RESNET, "--input", shape])
    assert "a shape is positive integers joined by commas" in capsys.readouterr().err
