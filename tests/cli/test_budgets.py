"""What trades arithmetic or noise for bytes on the command line: ``plan``, its ``--curve``, ``profile --compare``."""

import json
import sys

import pytest

from fusedseg.__main__ import main
from tests.nnunet import PlainConvUNet

NETWORK, TINY = "tests.cli.test_budgets:small", "tests.cli.test_budgets:tiny"
VOLUME = ["--input", "2,1,16,16,16"]


def small():
    return PlainConvUNet(widths=(8, 16))


def tiny():
    """Makes two blocks and the last convolution: a plan runs dozens of steps."""
    return PlainConvUNet(widths=(8,))


def test_profile_of_the_backend_with_bits(capsys):
    argv = ["profile", NETWORK, *VOLUME, "--compare"]
    assert main([*argv, "eager,fusedseg-compile,fusedseg-compile+bits=4"]) == 0
    out = capsys.readouterr().out
    assert out.count("counted on its graphs\nPlainConvUNet: 1 graph") == 2
    exact, packed = (float(line.split("(")[1][:4]) for line in out.splitlines() if "kept for backward   " in line)
    assert packed < 0.5 * exact
    assert main([*argv, "eager,fusedseg-compile+bits=5"]) == 2
    assert "option bits must be 8, 4 or None, got 5" in capsys.readouterr().err
    assert main([*argv, "fusedseg+bits=4"]) == 2
    assert "--compare: expected eager, or fusedseg, amp, checkpoint joined by +" in capsys.readouterr().err


def test_plan_ends_with_the_line_of_the_backend(capsys, tmp_path):
    """Where eager mode does not fit, and the compiled stock model does without repeated arithmetic."""
    figures = tmp_path / "plan.json"
    argv = ["plan", TINY, *VOLUME, "--optimizer", "none", "--reserve", "0", "--budget"]
    assert main([*argv, "1GiB", "--json", str(figures)]) == 0
    options = {option["label"]: option for option in json.loads(figures.read_text())["options"]}
    compiled, eager = options["fusedseg-compile"], options["eager"]
    assert compiled["kept_bytes"] < 0.6 * eager["kept_bytes"]
    # Packing would raise the peak of so small a network, so it keeps its values as they are.
    assert options["fusedseg-compile+bits=4"]["kept_bytes"] == compiled["kept_bytes"]
    assert options["fusedseg-compile+amp"]["kept_bytes"] < 0.6 * compiled["kept_bytes"]
    capsys.readouterr()
    assert main([*argv, f"{compiled['total_bytes']}B"]) == 0
    out = capsys.readouterr().out
    assert "fusedseg-compile+amp" in out
    assert compiled["code"] == 'model = torch.compile(model, backend="fusedseg")'
    assert out.splitlines()[-1].strip() == compiled["code"]


def test_a_curve_without_matplotlib_is_refused_at_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plan", NETWORK, *VOLUME, "--curve", str(tmp_path / "curve.png")]) == 2
    assert '--curve needs matplotlib: pip install "fusedseg[plot]"' in capsys.readouterr().err


def test_plan_draws_a_curve(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    # Compiling takes seconds; tests/memory/test_curve.py has a curve of compiled models.
    monkeypatch.setattr("fusedseg.cli.plan.partitions", None)
    picture, figures = tmp_path / "curve.png", tmp_path / "curve.json"
    argv = ["plan", NETWORK, *VOLUME, "--curve", str(picture), "--json", str(figures)]
    assert main(argv) == 0
    assert "bytes kept against arithmetic repeated" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    ways = json.loads(figures.read_text())["curve"]["ways"]
    assert list(ways) == ["eager", "checkpoint", "fusedseg"]
    assert main(argv) == 2
    assert "exists: choose another path, or pass --overwrite" in capsys.readouterr().err
    assert main([*argv[:-4], "--curve", str(tmp_path / "curve.txt")]) == 2
    assert "fusedseg plan: curve writes " in capsys.readouterr().err
