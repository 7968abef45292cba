"""Random networks go through ``convert``, random programs are compiled, and the hunt finds a defect."""

import json

import pytest
import torch

from fusedseg.ops.norm import eager as op
from tests.hunt import compiled, crew
from tests.hunt.judge import judged, quiet, shrunk
from tests.hunt.networks import grown_network


def found_nothing(report: crew.Report, least: int) -> None:
    """Fails with the shrunk programs, or if fewer than ``least`` programs ran to their end."""
    print(report)
    assert not report.failures, f"{report}\n\n{report.programs()}"
    assert report.counts["same"] >= least, report


def worked(kind, seeds, folder):
    """The report of seeds that run in this process, which saves the start of a worker: a crash would end it."""
    crew.work(kind, seeds, folder / "verdicts")
    report = crew.Report(kind)
    for line in map(json.loads, (folder / "verdicts").read_text().splitlines()):
        report.take(line)
    return report


@pytest.mark.usefixtures("one_thread")
def test_a_few_networks(tmp_path):
    found_nothing(worked("networks", range(15), tmp_path), 12)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["compiled", "compiled-networks", "compiled-budgets", "compiled-bits"])
def test_one_that_is_compiled(kind, tmp_path):
    found_nothing(worked(kind, (6 if kind == "compiled" else 5,), tmp_path), 1)


@pytest.mark.usefixtures("one_thread")
def test_a_defect_of_the_backend_is_found(monkeypatch):
    """A product of the generated code is wrong."""
    from fusedseg.compiler.codegen import aten

    monkeypatch.setitem(aten.DIRECT, torch.ops.aten.mul.Tensor, lambda a, b: torch.mul(a, b) * 1.5)
    program = compiled.program(6)
    with quiet():
        assert judged(program).kind == "failure"
        assert exec_fails(str(program))


def exec_fails(text):
    try:
        exec(compile(text, "<wrong>", "exec"), {})
    except AssertionError as error:
        return "differs" in str(error)
    return False


@pytest.mark.slow
def test_two_thousand_networks():
    found_nothing(crew.hunt("networks", range(2_000), jobs=2), least=1_700)


@pytest.mark.usefixtures("one_thread")
def test_a_printed_network_runs_and_shows_a_broken_norm(monkeypatch):
    """The gradients of fused norms are a little too large."""
    exec(compile(str(grown_network(0)), "<right>", "exec"), {})
    whole = op.NormFunction.backward

    def broken(ctx, dz):
        return whole(ctx, None if dz is None else dz * 1.5)

    monkeypatch.setattr(op.NormFunction, "backward", staticmethod(broken))
    wrong = next(network for network in map(grown_network, range(40)) if judged(network).kind == "failure")
    small = shrunk(wrong)
    with pytest.raises(AssertionError, match="differs"):
        exec(compile(str(small), "<wrong>", "exec"), {})
