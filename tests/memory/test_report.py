"""Figures, tables and pictures of a report."""

import json

import pytest
import torch
from torch import nn

from fusedseg.memory import compare, plot, profile
from fusedseg.memory.plot import curves


@pytest.fixture(scope="module")
def report():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
    )
    return profile(net, torch.randn(2, 3, 64, 64), label="eager", optimizer=torch.optim.AdamW)


def replayed(report, until=None):
    """Adds up the events to (bytes at the end, most bytes)."""
    current = peak = 0
    for number in report.events[:until]:
        nbytes = report.storages[number if number >= 0 else ~number].nbytes
        current += nbytes if number >= 0 else -nbytes
        peak = max(peak, current)
    return current, peak


def test_events_replay_to_the_peak(report):
    assert replayed(report)[1] == report.peak
    assert replayed(report, report.peak_event + 1)[0] == report.peak
    assert sum(storage.nbytes for storage in report.alive_at_peak) == report.peak


def test_json_has_the_figures(report):
    found = json.loads(json.dumps(report.to_dict()))
    assert (found["saved_bytes"], found["peak_bytes"]) == (report.saved, report.peak)
    assert sum(found["saved_by"]["module"].values()) == report.saved
    assert found["summary"] == report.summary()
    names = {"layer_idx", "call_idx", "layer_type", "name", "exp", "hook_type", "mem_all", "mem_cached"}
    assert names <= set(found["rows"][0])
    assert [row["mem_all"] for row in found["rows"]] == [row.mem_all for row in report.rows]
    assert {row["hook_type"] for row in found["rows"]} == {"pre", "fwd", "bwd"}


def test_curves_reach_the_peak_and_end_as_the_step_does(report):
    xs, ys = curves(report)
    total = [sum(values) for values in zip(*ys.values(), strict=True)]
    assert max(total) * 2**20 == pytest.approx(report.total)
    assert xs == sorted(xs)
    assert total[-1] * 2**20 == pytest.approx(report.resident + replayed(report)[0])


def test_pictures(report, tmp_path):
    pytest.importorskip("matplotlib")
    plot(tmp_path / "one.png", report)
    plot(tmp_path / "two.svg", report, report)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "two.svg").read_text()
    with pytest.raises(ValueError, match=r"plot writes .*png.*, got the path '.*one\.xyz'"):
        plot(tmp_path / "one.xyz", report)
    assert not (tmp_path / "one.xyz").exists()
    with pytest.raises(FileExistsError):
        plot(tmp_path / "two.svg", report)
    plot(tmp_path / "two.svg", report, overwrite=True)


def test_without_matplotlib_plot_says_what_to_install(report, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "fusedseg\[plot\]"'):
        plot(tmp_path / "one.png", report)
    assert not (tmp_path / "one.png").exists()


def test_tables_line_up(report):
    head, rule, *lines = report.table(2).splitlines()
    assert head.split()[:2] == ["module", "type"]
    assert all(len(line) <= len(rule) for line in lines)
    assert lines[-2].startswith("3 more modules")
    assert lines[-1].startswith("all")


def test_comparison_of_one_is_refused(report):
    with pytest.raises(ValueError, match="expected two reports or more, got 1"):
        compare(report)
