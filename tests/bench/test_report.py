"""Goals, tables, comparisons, plots and the section in docs/benchmarks.md are made from the benches' results."""

import json

import pytest

from bench import (
    test_conv_abn,
    test_convert,
    test_inplace_abn,
    test_inplace_norm_act,
    test_launch,
    test_max_pool,
    test_unet,
)
from bench.contenders import CONTENDERS as NORM_CONTENDERS
from bench.contenders import conv_contenders
from bench.files import ReportError, load
from bench.gpu import goals
from bench.harness import Result
from bench.report import BEGIN, END, changes, main, report_lines, write_into
from bench.results import Section

# Cases that run by default on a GPU, by the stem of their file.
CASES = {
    "inplace_abn": test_inplace_abn.CASES["cuda"],
    "inplace_norm_act": test_inplace_norm_act.CASES["cuda"],
    "conv_abn": test_conv_abn.CASES["cuda"],
    "max_pool": test_max_pool.CASES["cuda"],
    "unet": [case for case in test_unet.CASES["cuda"] if not case.slow],
    "convert": test_convert.CASES["cuda"],
    "launch": test_launch.CASES["cuda"],
}
CONTENDERS = {
    "inplace_abn": NORM_CONTENDERS,
    "inplace_norm_act": test_inplace_norm_act.CONTENDERS,
    "conv_abn": conv_contenders("cuda", inference=False),
    "max_pool": test_max_pool.contenders("cuda"),
    "unet": test_unet.CASES["cuda"][1].contenders(),
    "convert": next(iter(test_convert.CASES["cuda"].values())).contenders(),
    "launch": test_launch.CONTENDERS,
}
MIB = 2**20


def result(forward: float, backward: float, kept: int = 4, peak: int = 8) -> Result:
    return Result(*([seconds] * 5 for seconds in (forward, backward, forward + backward)), kept * MIB, peak * MIB)


def write(folder, stem: str, case: str, results: dict[str, Result], gpu: str | None = "NVIDIA H200") -> None:
    section = Section("A bench", cases={case: results}, tensor_bytes={case: 4 * MIB})
    machine = {"torch": "2.11.0", "commit": "abc", **({"gpu": gpu} if gpu else {})}
    folder.mkdir(exist_ok=True)
    content = {"machine": machine, "title": section.title, "results": section.to_json()}
    (folder / f"{stem}.json").write_text(json.dumps(content))


LARGE = "batch 8x64x512x512 bf16 nchw"


def norm_run(folder, ours: float = 1.0, eager: float = 10.0, **options) -> None:
    copy = Result([0.62] * 5, [0.0] * 5, [0.62] * 5)
    write(
        folder,
        "inplace_abn",
        LARGE,
        {
            "eager": result(eager, 2 * eager, kept=8),
            "compiled": result(2.0, 1.0),
            "aggressive": Result(refused="z off by 1"),
            "ours": result(ours, 2 * ours),
            "copy": copy,
        },
        **options,
    )


def test_every_goal_is_of_a_case_that_runs():
    for goal in goals.goals():
        assert goal.case in map(str, CASES[goal.stem])
        # A case with figures of every contender has a value for the goal.
        case = {"tensor_bytes": 1, "contenders": {name: figures() for name in (*CONTENDERS[goal.stem], "copy")}}
        assert goal.value(case) > 0


def figures():
    times = {part: {"median_ms": 1.0} for part in ("forward", "backward", "step")}
    return {**times, "kept_bytes": 1, "peak_bytes": 1}


def test_goals_are_judged(tmp_path):
    norm_run(tmp_path)
    of_case = {v.goal.figure: v for v in goals.judge(load(tmp_path)) if v.goal.case == LARGE}
    judged = {figure: (v.value if v.value is None else round(v.value, 3), v.met) for figure, v in of_case.items()}
    assert judged == {
        # We move 3 passes in 1 s, and the copy moves 2 passes in 0.62 s.
        "forward: bandwidth on 3 passes / copy's": (0.93, True),
        "forward / eager": (0.1, True),
        "forward / compiled": (0.5, True),
        "backward: bandwidth on 5 passes / copy's": (0.775, False),
        "backward / eager": (0.1, True),
        "backward / compiled": (2.0, False),
        "peak of a step, in T": (2.0, True),
    }
    missing = [v for v in goals.judge(load(tmp_path)) if v.goal.stem == "unet"]
    assert {(v.value, v.met, v.why) for v in missing} == {(None, False, "no unet.json")}


def test_what_was_refused_is_not_a_figure(tmp_path):
    norm_run(tmp_path)
    write(tmp_path, "unet", "U-Net, 8x3x512x512 amp nhwc", {"eager": result(1, 1), "ours": result(1, 1),
          "compiled": Result(missing="no compiler"), "aggressive": Result(refused="logits off")})  # fmt: skip
    whys = {v.goal.figure: v.why for v in goals.judge(load(tmp_path)) if v.goal.case.startswith("U-Net")}
    assert whys == {
        "step / compiled": "compiled: no compiler",
        "step / aggressive": "aggressive: logits off",
        "step / eager": "",
        "kept / aggressive": "aggressive: logits off",
    }


def test_tables(tmp_path):
    norm_run(tmp_path)
    lines = report_lines(load(tmp_path))
    assert lines[0] == "torch 2.11.0, commit abc, gpu NVIDIA H200"
    assert lines[2].startswith(f"5 of {len(goals.goals())} goals met, 2 missed, ")
    head, _, row, mean = (line for line in lines[-5:] if line)
    assert head.split(" | ")[1:] == [
        "ours, ms", "forward / eager", "backward / eager", "step / eager", "step / compiled", "kept / eager",
        "peak / eager", "bandwidth / copy's |",
    ]  # fmt: skip
    assert row == f"| {LARGE} | 3000.000 | 0.10 | 0.10 | 0.10 | 1.00 | 0.50 | 1.00 | 0.83 |"
    assert mean.startswith("| geometric mean |")


def test_no_goals_for_another_machine(tmp_path):
    norm_run(tmp_path, gpu=None)
    assert not [line for line in report_lines(load(tmp_path)) if "goals" in line]


def test_changes_are_those_beyond_the_spread(tmp_path):
    norm_run(tmp_path / "old")
    norm_run(tmp_path / "new", ours=0.5, eager=10.1)
    write(tmp_path / "new", "extra", "a", {"eager": result(1, 1), "ours": result(1, 1)})
    lines = changes(load(tmp_path / "old"), load(tmp_path / "new"))
    rows = [line for line in lines if line.startswith("| inplace_abn")]
    # A difference of 1 % in eager mode is noise.
    assert [row.split(" | ")[2:] for row in rows] == [
        ["ours", "backward, ms", "2000.0000", "1000.0000", "0.500 |"],
        ["ours", "forward, ms", "1000.0000", "500.0000", "0.500 |"],
        ["ours", "step, ms", "3000.0000", "1500.0000", "0.500 |"],
    ]
    assert lines[-1] == "only in the new: extra: a"
    assert "nothing changed" in changes(load(tmp_path / "old"), load(tmp_path / "old"))


def test_tables_are_written_between_the_marks(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(page, ["new", "lines"])
    assert page.read_text() == f"before\n{BEGIN}\nnew\nlines\n{END}\nafter\n"
    for text in ("no marks\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"):
        page.write_text(text)
        with pytest.raises(ReportError, match="expected one line"):
            write_into(page, ["new"])
        assert page.read_text() == text


def test_the_page_of_benchmarks_has_the_marks():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"results": {}}'])
def test_what_no_bench_has_written_is_refused(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")


def test_command(tmp_path, capsys):
    norm_run(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert LARGE in capsys.readouterr().out
    assert main([str(tmp_path), str(tmp_path)]) == 0
    assert "nothing changed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(tmp_path), "--into", "benchmarks.md"])


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    norm_run(tmp_path)
    assert main([str(tmp_path), "--plot", str(tmp_path / "plots")]) == 0
    for name in ("times", "bytes"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
