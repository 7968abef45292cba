"""The graphs of cuDNN, which a stand-in for its package computes with PyTorch's ops in float32."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fusedseg.ops.conv import choice, cudnn_graphs, norm_conv
from tests.ops.test_norm_conv import CASES, Case


class Node:
    """A tensor of a graph: how it is computed from others, and its size where it was set."""

    def __init__(self, compute, dim=None, stride=None):
        self.compute, self.dim, self.stride = compute, dim, stride

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, given):
        return self

    set_output = set_data_type

    def get_dim(self):
        return self.dim

    def get_stride(self):
        return self.stride


class Graph:
    """``cudnn.pygraph``; plan 0 cannot be built."""

    def __init__(self, **options):
        self.values = {}

    def value(self, node):
        if node not in self.values:
            self.values[node] = node.compute()
        return self.values[node]

    def tensor(self, name, dim, stride, data_type):
        return Node(None, dim, stride)

    def _pointwise(function):
        return lambda self, a, b, compute_data_type: Node(lambda: function(self.value(a), self.value(b)))

    add, sub, mul = _pointwise(torch.add), _pointwise(torch.sub), _pointwise(torch.mul)

    def relu(self, input, negative_slope, compute_data_type):  # noqa: A002
        return Node(lambda: F.leaky_relu(self.value(input), negative_slope))

    def leaky_relu_backward(self, loss, input, negative_slope, compute_data_type):  # noqa: A002
        return Node(lambda: torch.where(self.value(input) > 0, 1.0, negative_slope) * self.value(loss))

    def reduction(self, input, mode, compute_data_type):  # noqa: A002
        made = Node(None)
        made.compute = lambda: self.value(input).sum(
            [d for d, n in enumerate(made.dim) if n == 1 != self.value(input).shape[d]], keepdim=True
        )
        return made

    def conv_fprop(self, image, weight, stride, padding, dilation, compute_data_type):
        given = stride, padding, dilation, False, [0] * len(stride), 1
        return Node(lambda: torch.convolution(self.value(image), self.value(weight), None, *given))

    def conv_dgrad(self, loss, filter, stride, padding, dilation, compute_data_type):  # noqa: A002
        given = None, stride, padding, dilation, False, [0] * len(stride), 1, [True, False, False]
        made = Node(None)
        made.compute = lambda: torch.ops.aten.convolution_backward(
            self.value(loss), torch.empty(made.dim), self.value(filter), *given
        )[0]
        return made

    def validate(self):
        pass

    build_operation_graph = validate

    def create_execution_plans(self, modes):
        assert len(modes) == 2

    def get_execution_plan_count(self):
        return 3

    def build_plan_at_index(self, plan):
        if plan == 0:
            raise RuntimeError("cannot be built")

    def get_workspace_size_plan_at_index(self, plan):
        return 0

    def execute_plan_at_index(self, given, workspace, plan, handle):
        assert plan > 0
        self.values = {node: t for node, t in given.items() if node.compute is None}
        for node, t in given.items():
            if node.compute is not None:
                assert list(t.shape) == node.dim
                assert list(t.stride()) == node.stride
                t.copy_(self.value(node))


PACKAGE = SimpleNamespace(
    data_type=SimpleNamespace(FLOAT="float", HALF="half", BFLOAT16="bfloat16"),
    reduction_mode=SimpleNamespace(ADD="add"),
    heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
    pygraph=Graph,
    set_stream=lambda handle, stream: None,
)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setattr(cudnn_graphs, "_package", lambda: PACKAGE)
    monkeypatch.setattr(cudnn_graphs, "_handle", lambda device: None)
    monkeypatch.setattr(cudnn_graphs, "_built", {})
    monkeypatch.setattr(cudnn_graphs, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(choice, "cuda_seconds", lambda run: 1.0)


def single(call):
    """A call in float32."""
    return type(call)(*(t.float() if isinstance(t, torch.Tensor) else t for t in call))


@pytest.mark.parametrize("name", [name for name in CASES if "planes" not in name])
def test_graphs_compute_what_the_meaning_says(name):
    case = Case(name)
    for call in map(single, (case.call, case.gradient)):
        found, sums = cudnn_graphs.compute(call)
        wanted, right = norm_conv.meaning(call)
        assert found.stride() == wanted.stride()
        # Sums of at most 200 products in float32.
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums, right, rtol=1e-4, atol=1e-3)


def test_without_norms_there_are_no_vectors():
    """Of a convolution alone, with a bias, nothing is summed."""
    call = Case("batch, leaky_relu, stride 2").call
    alone = dict.fromkeys(("weight", "bias", "mean", "rstd", "after", "running_mean", "running_var"))
    call = single(call._replace(**alone))
    found, sums = cudnn_graphs.compute(call)
    assert sums is None
    torch.testing.assert_close(found, norm_conv.meaning(call)[0], rtol=1e-4, atol=1e-4)


def test_a_graph_is_built_once_for_a_kind_of_call():
    for _ in range(2):
        cudnn_graphs.compute(single(Case("batch, relu").call))
    (built,) = cudnn_graphs._built.values()
    assert built.plan == 1


@pytest.mark.parametrize(
    ("proposed", "faster", "repeats", "wanted"),
    [(True, True, False, True), (True, False, False, False), (False, True, False, False), (True, True, True, False)],
    ids=["faster", "slower", "not proposed", "results must repeat"],
)
def test_who_computes_a_call_on_a_gpu(proposed, faster, repeats, wanted, monkeypatch):
    """A measurement chooses, unless there is nothing to measure."""
    asked = []

    def recorded(kind, x, results):
        asked.append(kind)
        try:
            triton, aten = results("triton"), results("aten")
        except choice.Unserved:
            return choice.Record(2.0, 1.0, 0.0, True)
        assert len(triton) == len(aten)
        torch.testing.assert_close(triton, aten, rtol=1e-4, atol=1e-4)
        return choice.Record(0.5 if faster else 2.0, 1.0, 0.0, True)

    def refused(self, modes):
        raise RuntimeError("no plan")

    monkeypatch.setattr(norm_conv._backend, "on_gpu", lambda t: True)
    monkeypatch.setattr(choice, "recorded", recorded)
    monkeypatch.setattr(choice, "must_repeat", lambda: repeats)
    if not proposed:
        monkeypatch.setattr(Graph, "create_execution_plans", refused)
    case = Case("batch, leaky_relu, stride 2")
    for call in map(single, (case.call, case.gradient)):
        assert norm_conv._kernels(call) is (cudnn_graphs.compute if wanted else None)
    assert len(asked) == (0 if repeats else 2)


def test_no_plan_is_an_error_that_the_choice_turns_into_the_stock_way(monkeypatch):
    monkeypatch.setattr(cudnn_graphs, "MOST_PLANS", 1)
    with pytest.raises(RuntimeError, match="no plan of cuDNN can be built"):
        cudnn_graphs.compute(single(Case("batch, relu").call))
