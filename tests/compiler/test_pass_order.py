"""The passes are one tuple, whose order keeps what each row says of the others, and which docs/design.md shows."""

import inspect
import pkgutil
from pathlib import Path

import pytest
from torch import fx, nn

from fusedseg.compiler import estimate, partition
from fusedseg.compiler.passes import FORWARD, JOINT, PASSES, Stage, run
from fusedseg.compiler.plan import eager_mode
from fusedseg.compiler.plan.keep import LABEL

PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()


def table() -> str:
    """The passes as a table of the page."""
    rows = ["| stage | pass | graphs | when | after |", "|---|---|---|---|---|"]
    for row in PASSES:
        after = ", ".join(f"`{name}`" for name in row.after)
        rows.append(f"| {row.stage.name.lower()} | `{row.function}` | {', '.join(row.on)} | {row.when} | {after} |")
    return "\n".join(rows)


def wrong(passes) -> list[str]:
    """The rules of order that a tuple of passes breaks."""
    found = []
    for place, row in enumerate(passes):
        before = {other.function for other in passes[:place]}
        behind = {other.function for other in passes[place:]}
        found += [f"{row.function} after {name}" for name in row.after if name not in before or name in behind]
    return found


def test_the_order_keeps_the_rules():
    assert not wrong(PASSES)


@pytest.mark.parametrize("name", sorted({name for row in PASSES for name in row.after}))
def test_another_order_breaks_a_rule(name):
    last = [row for row in PASSES if row.function == name]
    assert wrong([*(row for row in PASSES if row.function != name), *last])


def test_stages_follow_each_other():
    stages = list(Stage)
    assert [row.stage for row in PASSES] == sorted((row.stage for row in PASSES), key=stages.index)


@pytest.mark.parametrize("row", PASSES, ids=lambda row: f"{row.stage.name}-{row.function}")
def test_a_row_calls_a_function_that_takes_what_it_is_given(row):
    function = pkgutil.resolve_name(f"fusedseg.compiler.{row.function}")
    inspect.signature(function).bind(*row.takes)


def test_a_pass_runs_on_its_graphs_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(eager_mode, "note_changeable", seen.append)
    graph = fx.Graph()
    assert run(Stage.TRACED, JOINT, graph)
    assert not run(Stage.TRACED, FORWARD, graph)
    assert seen == [graph]


def test_the_page_shows_the_tuple():
    assert table() in PAGE, f"docs/design.md must have this table:\n{table()}"


@pytest.mark.parametrize("options", [{}, {"budget": 0.5}, {"bits": 8}], ids=str)
def test_labels_are_written_once(options, monkeypatch):
    """Counting a decision with bits once took labels off the nodes, and put them back."""
    seen, cutting = [], partition.cut

    def cut(module, joint_inputs, outputs, labels, given):
        seen.append((labels, [node for node in module.graph.nodes if LABEL in node.meta]))
        return cutting(module, joint_inputs, outputs, labels, given)

    monkeypatch.setattr(partition, "cut", cut)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    estimate(net, (2, 3, 32, 32), options={"codegen": "aten", **options})
    ((labels, labelled),) = seen
    assert labels
    assert not labelled
