"""Goals, comparisons and pages are made from the benches' results; ``test_front.py`` has the tables of real ones."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from bench import test_conv_abn, test_max_pool, test_norm_act
from bench.gpu import goals, steps, test_steps
from bench.harness import Result
from bench.report import RESULTS as MARKS
from bench.report import changes, lines_between, main, report_lines, write_into
from bench.results import Report, ReportError, load

# The benches whose default cases on a GPU have goals, and the contenders of each.
CONTENDERS = {
    "norm_act": (test_norm_act, test_norm_act.CONTENDERS),
    "conv_abn": (test_conv_abn, test_conv_abn.CONTENDERS),
    "max_pool": (test_max_pool, test_max_pool.CONTENDERS),
    "steps": (test_steps, steps.WAYS),
}
MIB = 2**20
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def result(forward: float, backward: float, kept: int = 4, peak: int = 8) -> Result:
    return Result(*([seconds] * 5 for seconds in (forward, backward, forward + backward)), kept * MIB, peak * MIB)


def write(folder, stem: str, case: str, results: dict[str, Result], gpu: str | None = "NVIDIA H200") -> None:
    # A case with wrong results fails after it is written.
    with contextlib.suppress(pytest.fail.Exception):
        Report(torch.device("cpu"), folder).add(stem, "A bench", case, results, 4 * MIB)
    path = folder / f"{stem}.json"
    machine = {"torch": "2.11.0", "commit": "abc", **({"gpu": gpu} if gpu else {})}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": machine}))


LARGE = "batch 8x64x512x512 bf16 nchw"


def norm_run(folder, ours: float = 1.0, eager: float = 10.0, **options) -> None:
    copy = Result([0.62] * 5, [0.0] * 5, [0.62] * 5)
    write(
        folder,
        "norm_act",
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
        bench, contenders = CONTENDERS[goal.stem]
        assert goal.case in map(str, bench.CASES["cuda"])
        # A case with figures of every contender has a value for the goal.
        case = {"tensor_bytes": 1, "samples": 2, "contenders": {name: figures() for name in (*contenders, "copy")}}
        assert goal.value(case) > 0


def figures():
    times = {part: {"median_ms": 1.0} for part in ("forward", "backward", "step")}
    tried = {"optimizer": {"median_ms": 6.0}}
    return {**times, "kept_bytes": 1, "peak_bytes": 1, "kernels": {"ms": 1.0}, "benchmark": tried}


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
    missing = [v for v in goals.judge(load(tmp_path)) if v.goal.stem == "steps"]
    assert {(v.value, v.met, v.why) for v in missing} == {(None, False, "no steps.json")}


def test_what_was_refused_is_not_a_figure(tmp_path):
    norm_run(tmp_path)
    assert f"refused: aggressive, {LARGE}: z off by 1" in report_lines(load(tmp_path))
    write(tmp_path, "steps", "U-Net, 8x3x512x512 bf16 nhwc", {"eager": Result(refused="logits off"),
          "ours": result(1, 1), "compiled": Result(missing="no compiler")})  # fmt: skip
    whys = {v.goal.figure: v.why for v in goals.judge(load(tmp_path)) if v.goal.case.startswith("U-Net, ")}
    assert whys == {"step / compiled": "compiled: no compiler", "step / eager": "eager: logits off"}


def test_goals_in_milliseconds_are_of_one_gpu(tmp_path):
    norm_run(tmp_path)
    assert {v.goal.gpu for v in goals.judge(load(tmp_path))} == {""}
    norm_run(tmp_path, gpu="NVIDIA H100 80GB HBM3")
    assert {v.goal.gpu for v in goals.judge(load(tmp_path))} == {"", "H100"}


@pytest.mark.parametrize("folder", sorted(RESULTS.iterdir()), ids=lambda folder: folder.name)
def test_results_of_the_repository(folder):
    files = load(folder)
    assert report_lines(files)
    for stem, content in files.items():
        assert {"gpu", "driver", "torch", "triton", "commit", "date"} <= content["machine"].keys(), stem
        assert (folder / f"{stem}.json").stat().st_size < 500_000


def test_no_goals_for_another_machine(tmp_path):
    norm_run(tmp_path, gpu=None)
    assert not [line for line in report_lines(load(tmp_path)) if "goals" in line]


def test_changes_are_those_beyond_the_spread(tmp_path):
    norm_run(tmp_path / "old")
    norm_run(tmp_path / "new", ours=0.5, eager=10.1)
    write(tmp_path / "new", "extra", "a", {"eager": result(1, 1), "ours": result(1, 1)})
    lines = changes(load(tmp_path / "old"), load(tmp_path / "new"))
    rows = [line for line in lines if line.startswith("| norm_act")]
    # A difference of 1 % in eager mode is noise.
    assert [row.split(" | ")[2:] for row in rows] == [
        ["ours", "backward, ms", "2000.0000", "1000.0000", "0.500 |"],
        ["ours", "forward, ms", "1000.0000", "500.0000", "0.500 |"],
        ["ours", "step, ms", "3000.0000", "1500.0000", "0.500 |"],
    ]
    assert lines[-1] == "only in the new: extra: a"
    assert "nothing changed" in changes(load(tmp_path / "old"), load(tmp_path / "old"))


def test_tables_are_written_between_the_marks(tmp_path):
    page = tmp_path / "results.md"
    begin, end = MARKS
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_into(page, ["new", "lines"], MARKS)
    assert page.read_text() == f"before\n{begin}\n\nnew\nlines\n{end}\nafter\n"
    assert lines_between(page, MARKS) == ["new", "lines"]
    for text in ("no marks\n", f"{end}\n{begin}\n", f"{begin}\n{begin}\n{end}\n"):
        page.write_text(text)
        with pytest.raises(ReportError, match="expected one line"):
            write_into(page, ["new"], MARKS)
        assert page.read_text() == text


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
        main([str(tmp_path), str(tmp_path), "--into", "results.md"])
