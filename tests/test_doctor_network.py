"""The network of ``fusedseg doctor --gpu``: rewrites take part in it, and one that makes it wrong is found."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fusedseg import _torch
from fusedseg.compiler import settings
from fusedseg.compiler.rewrite import channels_last
from fusedseg.doctor import gpu, network
from tests.ops.test_replay import direct as direct

pytestmark = pytest.mark.usefixtures("compiled_afresh", "strides_of_a_gpu")
CPU = torch.device("cpu")
JOB = gpu.Job("cpu", gpu.NETWORK, "bfloat16")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Nothing is left out in the end.  The interpreter takes seconds for each step of the volume of a GPU."""
    monkeypatch.setenv("FUSEDSEG_WITHOUT", "")
    monkeypatch.setattr(network, "SHAPE", (2, 1, 8, 8, 8))


def test_rewrites_take_part_on_a_gpu(direct, monkeypatch):
    """Triton's kernels run in the interpreter, and choices are those for a GPU."""
    monkeypatch.setattr(channels_last, "is_faster", lambda x: x.dtype is torch.bfloat16)
    # The third step is the first one that makes launches again, and each of the two images has one.
    monkeypatch.setattr(network, "STEPS", 4)
    found = network.test(CPU, torch.bfloat16, "")
    assert not found.kind, found
    assert {*settings.OPTIONAL} <= {name for name, count in settings.written.items() if count}, found
    assert any(row.calls.count < network.STEPS for row in direct)
    # One step tells that nothing is written.
    monkeypatch.setattr(network, "STEPS", 1)
    assert not network.test(CPU, torch.bfloat16, ",".join(settings.OPTIONAL)).kind
    assert not any(settings.written.values())


def test_a_rewrite_that_is_wrong_is_found(monkeypatch):
    """A call that casts many tensors leaves one value of the first one as it was."""
    copy, few = _torch.foreach_copy, ("ahead", "casts")

    def wrong(made, tensors):
        copy(made, tensors)
        made[0].view(-1)[0] = 100

    def here(jobs, seconds):
        for job in jobs:
            yield gpu.Outcome(job, network.test(CPU, torch.bfloat16, job.without)._asdict())

    monkeypatch.setattr(_torch, "foreach_copy", wrong)
    monkeypatch.setattr(gpu, "run", here)
    monkeypatch.setattr(network, "STEPS", 1)
    monkeypatch.setattr(settings, "OPTIONAL", {name: settings.OPTIONAL[name] for name in few})
    found = network.test(CPU, torch.bfloat16, "")
    assert found.kind == "wrong result"
    assert "in step 0 is off by" in found.text
    assert gpu.advice(JOB) == "It is right without casts: set FUSEDSEG_WITHOUT=casts, and please report it"


def test_the_page_has_every_name():
    text = (Path(__file__).parents[1] / "docs" / "first_use.md").read_text()
    _, table = text.split("| name | what is left out |\n|---|---|\n")
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", table.split("\n\n")[0], re.MULTILINE) == [*settings.OPTIONAL.items()]


def test_names_may_have_spaces_between(monkeypatch):
    monkeypatch.setenv("FUSEDSEG_WITHOUT", "casts, replays")
    assert settings.left_out() == {"casts", "replays"}
