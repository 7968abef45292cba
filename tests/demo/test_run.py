"""``python -m examples.demo``: the arguments that it refuses, the text that it prints, and the files that it writes."""

import dataclasses
import importlib
import json
import subprocess
import sys

import pytest
import torch

from examples.demo import training
from examples.demo.__main__ import DEMOS, main

# The package's attribute of this name is the function, so the module is imported by its name.
command = importlib.import_module("examples.demo.run")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def extras():
    for name in command.EXTRAS:
        pytest.importorskip(name)


@pytest.fixture
def tiny(extras, monkeypatch):
    """Sets networks of few channels and small batches for the demos."""
    for name in DEMOS:
        module = importlib.import_module(f"examples.demo.{name}")
        size = dataclasses.replace(module.SIZES["cpu"], widths=(2, 4), batch=2, steps=2)
        if name == "slices":
            size = dataclasses.replace(size, resolution=4)
        monkeypatch.setitem(module.SIZES, "cpu", size)
    monkeypatch.setattr(training, "SETTLED_BATCHES", 2)


@pytest.mark.parametrize("name", DEMOS)
def test_a_run_prints_and_writes(tiny, name, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert main([name, "--out", str(out), "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "step 1 of 2: eager loss ",
        "IoU, white matter",
        "kept for backward",
        "peak of a step",
        "time of a step",
        "largest difference",
    ):
        assert text in printed
    picture, figures = out / f"{name}.png", json.loads((out / f"{name}.json").read_text())
    assert picture.read_bytes().startswith(PNG)
    assert (figures["demo"], figures["steps"], figures["seed"]) == (name, 2, 5)
    eager, ours = figures["networks"]["eager"], figures["networks"]["fusedseg"]
    # Both first steps have the same weights and the same batch, and differ by fp32 rounding.
    assert ours["losses"][0] == pytest.approx(eager["losses"][0], rel=1e-4)
    assert ours["kept_bytes"] < eager["kept_bytes"]
    for found in (eager, ours):
        assert all(0 <= value <= 1 for value in found["iou"].values())
        assert len(found["losses"]) == 2


@pytest.mark.slow
def test_a_run_into_a_file_logs_nothing(extras, tmp_path):
    """PyTorch's profiler logged lines of SyncActivityProfilerHandler, and tqdm drew its bar into files.

    `.ci/run` looks at the errors of a demo too.
    """
    command = [sys.executable, "-m", "tests.demo.small", "slices", "--steps", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "fusedseg_demo" / "slices.png").exists()


def test_nothing_is_overwritten_unless_asked_for(tiny, tmp_path, capsys):
    earlier = tmp_path / "slices.png"
    earlier.write_text("mine")
    arguments = ["slices", "--steps", "1", "--out", str(tmp_path)]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert f"{earlier} exists" in message
    assert "--overwrite" in message
    assert earlier.read_text() == "mine"
    assert main([*arguments, "--overwrite"]) == 0
    assert earlier.read_bytes().startswith(PNG)


def test_a_file_that_comes_during_the_run_is_not_overwritten(tmp_path):
    from fusedseg.memory.tables import write_json

    path = tmp_path / "slices.json"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_json({}, path, overwrite=False)
    assert path.read_text() == "mine"


def test_missing_packages_are_named_with_what_installs_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "EXTRAS", ("torch", "no_such_package", "nor_this_one"))
    assert main(["volume", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message == (
        'demo volume: needs no_such_package and nor_this_one, not installed here: pip install -e ".[demo]"\n'
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=["no steps", "no GPU"],
)
def test_what_cannot_be_done_is_refused(extras, arguments, message, tmp_path, capsys):
    assert main(["slices", "--out", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err == f"demo slices: {message}\n"


def test_a_file_in_the_place_of_the_folder_is_refused(extras, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["slices", "--out", str(tmp_path / "taken")]) == 2
    assert "--out" in capsys.readouterr().err


def test_settled_statistics_are_those_of_the_final_weights(tiny):
    """After many passes over one batch, the statistics are those of this batch, whatever they were before."""
    problem = importlib.import_module("examples.demo.slices").problem(torch.device("cpu"))
    batch = problem.batch(torch.Generator().manual_seed(0))
    networks = training.build(problem, torch.device("cpu"), seed=0)
    training.settle(dataclasses.replace(problem, batch=lambda generator: batch), networks, torch.Generator())
    for net in networks.values():
        first = net.incs[0][0]
        seen = first.conv(batch.images[0]).transpose(0, 1).flatten(1)
        norm = next(module for module in first.modules() if hasattr(module, "running_mean"))
        # The statistics are computed in fp32 over about ten thousand values.
        torch.testing.assert_close(norm.running_mean, seen.mean(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.running_var, seen.var(1), rtol=1e-4, atol=1e-5)
        assert norm.momentum == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
def test_held_out_overlap_is_that_of_eager(extras, name, tmp_path):
    """With the default steps and seed, only rounding distinguishes the overlap of the two networks."""
    assert main([name, "--out", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / f"{name}.json").read_text())
    assert figures["largest_iou_difference"] <= 0.02
    assert figures["fusedseg / eager"]["kept"] < 0.5
    # Both networks must have learned: networks that learn nothing are equal too.  They find one class, and 0 of others.
    assert min(figures["networks"]["eager"]["iou"].values()) > 0.3


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_come_every_ten_seconds_where_stderr_is_no_terminal(is_terminal, monkeypatch, capsys):
    """``python -m examples.demo slices | tee log`` printed nothing for its whole run."""
    now = 100.0
    monkeypatch.setattr(command.time, "monotonic", lambda: now)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    lines = command.ProgressLines()
    for step in range(1, 26):
        now += 1.0
        lines.say(f"step {step}")
    printed = [] if is_terminal else ["step 1 (1 s)", "step 11 (11 s)", "step 21 (21 s)"]
    assert capsys.readouterr().out.splitlines() == printed
