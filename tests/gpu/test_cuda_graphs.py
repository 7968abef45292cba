"""The option ``cudagraphs``: recorded steps give the bits of steps that are not recorded.

A CPU has no graphs.  There a stand-in runs in place of PyTorch's trees, and the tests see what the trees are told.
"""

import copy
import inspect
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg import _torch
from fusedseg.compiler import settings
from fusedseg.compiler.codegen import cuda_graphs
from tests.compiler.networks import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_afresh")]
STEPS = 5


class Net(nn.Module):
    """Running statistics, dropout, a concatenation, an enlarged map and a pool."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.down = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.01),
            nn.Dropout(0.2),
        )  # fmt: skip
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        skip = self.first(x)
        return self.last(torch.cat([skip, F.interpolate(self.down(skip), scale_factor=2.0)], 1))


def train(net, run, device, accumulate=1, sizes=(24,)):
    """The losses, gradients and buffers of some steps, copied: a recording writes over what the last step returned."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(1)
    optimizer, found = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            size = sizes[step % len(sizes)]
            loss = run(torch.randn(2, 3, size, size, generator=generator).to(device)).square().mean()
            loss.backward()
        found.append([loss.detach().clone(), *(p.grad.clone() for p in net.parameters())])
        optimizer.step()
        if step == 2 and len(sizes) == 1:
            net.eval()
            with torch.no_grad():
                found.append([run(torch.ones(2, 3, 24, 24, device=device)).clone()])
            net.train()
    return [*found, [buffer.clone() for buffer in net.buffers()]]


@pytest.mark.parametrize("options", [{}, {"budget": 0.2}, {"memory_format": torch.channels_last}], ids=str)
def test_bits_of_an_unrecorded_step(device, only_on_a_gpu, options):
    torch.manual_seed(0)
    net = Net().to(device)
    other = copy.deepcopy(net)
    wanted = train(net, compiled(net, "aten", **options), device)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # The trees' own advice about several sizes.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*option cudagraphs has no effect")
        found = train(other, compiled(other, "aten", cudagraphs=True, **options), device)
    for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert all(map(torch.equal, mine, theirs)), step
    manager = torch._inductor.cudagraph_trees.get_manager(device.index or 0, create_if_none_exists=False)
    assert manager is not None
    assert manager.new_graph_id().id > 0


def test_a_gradient_that_a_replay_has_overwritten_raises(device, only_on_a_gpu):
    """Accumulation: the second backward would add to a gradient whose memory the second forward has reused."""
    run = compiled(Net().to(device), "aten", cudagraphs=True)
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        train(run._orig_mod, run, device, accumulate=2)


def test_several_sizes(device):
    """A recording holds for one size.  A graph for several sizes was recorded too, and replayed for another size."""
    torch.manual_seed(0)
    net = Net().to(device)
    other = copy.deepcopy(net)
    wanted = train(net, compiled(net, "aten"), device, sizes=(24, 16))
    torch._dynamo.reset()
    settings.say_once.cache_clear()
    with pytest.warns(UserWarning, match="option cudagraphs has no effect") as said:
        found = train(other, compiled(other, "aten", cudagraphs=True), device, sizes=(24, 16))
    why = "compiled for several sizes" if device.type == "cuda" else "tensors on cpu"
    assert any(why in str(warning.message) for warning in said)
    assert all(all(map(torch.equal, mine, theirs)) for mine, theirs in zip(found, wanted, strict=True))


@pytest.fixture
def told(monkeypatch, device):
    """What PyTorch's trees are told, on a CPU: the static inputs and those that are written, of each graph.

    PyTorch's own function must take it.
    """
    if device.type == "cuda":
        pytest.skip("a stand-in for PyTorch's trees, for a machine without a GPU")
    from torch._inductor import cudagraph_trees

    parts, found = _torch.cuda_graph_parts(), []
    # The first one takes any argument, and hands it on to the second one.
    takes = [inspect.signature(f) for f in (parts.cudagraphify_impl, cudagraph_trees.cudagraphify)]

    def stand_in(run, inputs, static, **given):
        for signature in takes:
            signature.bind(run, inputs, static, **given)
        found.append({"static": set(static), "inputs": len(inputs), **given})
        return lambda arguments: run(arguments)

    monkeypatch.setattr(_torch, "cuda_graph_parts", lambda: parts)
    monkeypatch.setattr(parts, "cudagraphify_impl", stand_in)
    return found


def test_other_parts_of_the_trees_take_what_they_are_given():
    """A forward that is recorded before a backward that is not, and ``torch._dynamo.reset``."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    parts = _torch.cuda_graph_parts()
    inspect.signature(parts.get_manager).bind(0, create_if_none_exists=False)
    inspect.signature(parts.reset).bind()
    inspect.signature(CUDAGraphTreeManager.set_to_running_backward).bind(None)


def test_what_the_trees_are_told(told):
    """Only the image and the gradient of the output are copied before a replay; running statistics are written."""
    net = Net()
    with (
        mock.patch.object(cuda_graphs, "why_not", return_value=""),
        mock.patch.object(cuda_graphs, "devices_of", return_value={torch.device("cuda", 0)}),
    ):
        run = compiled(net, "aten", cudagraphs=True)
        run(torch.randn(2, 3, 24, 24)).square().mean().backward()
        net.eval()
        with torch.no_grad():
            run(torch.randn(2, 3, 24, 24))
    forward, backward, inference = told
    assert all(of["inputs"] - len(of["static"]) == 1 for of in told)
    assert len(forward["mutated_input_idxs"]) == 3
    assert set(forward["mutated_input_idxs"]) <= forward["static"]
    assert [of["is_backward"] for of in told] == [False, True, False]
    assert [of["is_inference"] for of in told] == [False, False, True]
    assert not backward["mutated_input_idxs"]
    assert not inference["mutated_input_idxs"]


def test_no_backward_is_recorded_without_its_forward(told):
    """With bits, forward has a number on the CPU, and backward has none.

    What a forward keeps that is not recorded lies elsewhere in each step, and each step would be a new recording.
    """
    reasons = iter(["it has tensors on cpu", "", ""])
    with (
        mock.patch.object(cuda_graphs, "why_not", side_effect=lambda *given: next(reasons)),
        mock.patch.object(cuda_graphs, "devices_of", return_value={torch.device("cuda", 0)}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        run = compiled(nn.Conv2d(3, 4, 1), "aten", cudagraphs=True)
        run(torch.randn(1, 3, 4, 4)).sum().backward()
    assert not told


def test_a_graph_that_cannot_be_recorded_says_why(told):
    settings.say_once.cache_clear()
    run = compiled(nn.Conv2d(3, 4, 1), "aten", cudagraphs=True)
    with pytest.warns(UserWarning, match="option cudagraphs has no effect .* because it has tensors on cpu"):
        run(torch.randn(1, 3, 4, 4)).sum().backward()
    assert not told
