"""The passes are one tuple, whose order keeps what each row says of the others, and which docs/design.md shows."""

import inspect
import pkgutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import fusedseg
from fusedseg.compiler import estimate, partition
from fusedseg.compiler.codegen import concatenation
from fusedseg.compiler.graph import POLICY
from fusedseg.compiler.passes import FORWARD, JOINT, PASSES, TRITON_INDUCTOR_OR_BITS, Pass, Stage, run
from fusedseg.compiler.plan import eager_mode
from fusedseg.compiler.settings import OPTIONAL
from tests.compiler.networks import compiled
from tests.compiler.programs import made, step

PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()


def table() -> str:
    """The passes as a table of the page."""
    rows = ["| stage | pass | graphs | when | where | without | after |", "|---|---|---|---|---|---|---|"]
    for row in PASSES:
        after, without = ", ".join(f"`{name}`" for name in row.after), f"`{row.without}`" if row.without else ""
        cells = row.stage.name.lower(), f"`{row.function}`", ", ".join(row.on), row.when, row.where, without, after
        rows.append(f"| {' | '.join(cells)} |")
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


@pytest.mark.usefixtures("strides_of_a_gpu")
def test_where_a_pass_changes_nothing(monkeypatch):
    """``tests/gpu/test_ways.py`` finds a pass that changes nothing on a GPU."""
    counts, calling = Counter(), Pass.__call__

    def call(row, given):
        count = calling(row, given)
        if row.where and not (row.where == TRITON_INDUCTOR_OR_BITS and given["settings"].bits):
            counts[row.function] += count
        return count

    monkeypatch.setattr(Pass, "__call__", call)
    monkeypatch.setattr(fusedseg, "backend", "aten")
    # Small maps are those of large images.
    monkeypatch.setattr(concatenation, "SLAB_BYTES", 2**12)
    rows, planes = torch.channels_last, torch.contiguous_format
    programs = ("skip", {}, rows), ("residual blocks", {"bits": 8}, rows), ("three gradients", {}, rows)
    for name, options, fmt in (*programs, ("skip, interpolated", {}, planes)):
        net, x = made(name, 3)
        net, x = (of.to(memory_format=fmt) for of in (net, x))
        step(net, compiled(net, **options), x)
    optional = {"rewrite.fused_convolutions:fuse_norms"}
    assert counts == dict.fromkeys({row.function for row in PASSES if row.where} - optional, 0)


def test_what_can_be_left_out_has_a_name():
    assert {*OPTIONAL} == {row.without for row in PASSES if row.without} | {"ahead"}


def test_the_page_shows_the_tuple():
    assert table() in PAGE, f"docs/design.md must have this table:\n{table()}"


@pytest.mark.parametrize("options", [{}, {"budget": 0.5}, {"bits": 8}], ids=str)
def test_policies_are_written_once(options, monkeypatch):
    """Counting a decision with bits once took policies off the nodes, and put them back."""
    seen, dividing = [], partition.divide_along_policies

    def divide(module, joint_inputs, outputs, policies, given):
        seen.append((policies, [node for node in module.graph.nodes if POLICY in node.meta]))
        return dividing(module, joint_inputs, outputs, policies, given)

    monkeypatch.setattr(partition, "divide_along_policies", divide)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    estimate(net, (2, 3, 32, 32), options={"codegen": "aten", **options})
    ((labels, labelled),) = seen
    assert labels
    assert not labelled
