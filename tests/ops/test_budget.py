"""The scope with a budget: what it keeps, and gradients that are the same to the last bit."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg import recompute
from fusedseg.memory import SavedBytes, measure
from fusedseg.ops.recompute import twice
from fusedseg.ops.recompute.choice import Budget
from fusedseg.ops.recompute.guide import Follow, Observe, choose
from tests.ops.test_recompute_networks import CASES

pytestmark = pytest.mark.usefixtures("no_choices")


def everything():
    """A scope in which every call runs twice that may."""
    return recompute.guided(Observe)


def step(fn, params, scope, amp=False):
    with scope, torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out = fn()
    grads = torch.autograd.grad(out.double().square().mean(), params, allow_unused=True)
    return [out.detach(), *grads]


def assert_bits(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        assert g is None or torch.equal(g, e)


def assert_same(make, least=1):
    """``make()`` returns a function of no arguments and the tensors to differentiate by."""
    results = []
    observed = Observe()
    for scope in (nullcontext(), recompute.guided(lambda: observed)):
        torch.manual_seed(0)
        fn, params = make()
        results.append(step(fn, params, scope))
    assert_bits(*results)
    assert observed.graph is not None
    assert len(observed.graph.choosable) >= least


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((True, None), TypeError, "budget must be a fraction"),
        (([0.3], None), TypeError, "budget must be a fraction"),
        ((0.0, None), ValueError, "above 0.0 and at most 1.0"),
        ((float("nan"), None), ValueError, "above 0.0 and at most 1.0"),
        ((1.5, None), ValueError, "above 0.0 and at most 1.0"),
        ((0, None), ValueError, "positive number"),
        (("6 apples", None), ValueError, "6 apples"),
        ((0.3, "2%"), TypeError, "extra_flops must be a number"),
        ((None, -0.1), ValueError, "at least 0"),
        ((None, float("inf")), ValueError, "finite"),
    ],
)
def test_bad_budgets(arguments, error, words):
    for call in (recompute, lambda *given, **named: fusedseg.convert(nn.ReLU(), budget=given[0], **named)):
        with pytest.raises(error, match=words):
            call(arguments[0], extra_flops=arguments[1])


def test_budgets():
    assert Budget.parse("f", None, None) is None
    assert Budget.parse("f", 0.25, None).bytes_of(1000) == 250
    assert Budget.parse("f", "6GiB", None).bytes_of(1000) == 6 * 2**30
    assert Budget.parse("f", 77, 0.5) == Budget(nbytes=77, extra_flops=0.5)
    assert Budget.parse("f", None, 1).bytes_of(1000) is None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "fp64", "amp"])
@pytest.mark.parametrize(
    "name", ["U-Net, transposed", "3D instance norm", pytest.param("ResNet-50", marks=pytest.mark.slow)]
)
def test_networks(name, precision):
    """If every call runs twice, outputs, gradients and running statistics are equal to the last bit."""
    case = CASES[name]
    dtype = torch.float64 if precision == "fp64" else torch.float32
    net = case.make(**case.small).to(dtype)
    images = [torch.randn(shape, dtype=dtype) for shape in case.small_shapes]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    results = []
    for scope in (nullcontext(), everything()):
        net.load_state_dict(state)
        got = step(lambda: net(*images), list(net.parameters()), scope, amp=precision == "amp")
        results.append([*got, *(buffer.clone() for buffer in net.buffers())])
    assert_bits(*results)


@pytest.mark.usefixtures("one_thread")
def test_converted_network_with_norms_in_place():
    case = CASES["3D instance norm"]
    net, images = case.make(**case.small), [torch.randn(shape) for shape in case.small_shapes]
    fusedseg.convert(net, example_inputs=images)
    plain = step(lambda: net(*images), list(net.parameters()), nullcontext())
    net._fusedseg_wiring.make_guide = Observe
    assert_bits(step(lambda: net(*images), list(net.parameters()), nullcontext()), plain)


def test_a_norm_in_place_needs_only_the_convolution_before_it():
    """What the norm has overwritten is rebuilt: the convolution runs again, and then the norm."""
    net = nn.Sequential(nn.Conv2d(4, 8, 3), fusedseg.InPlaceABN(8), nn.Conv2d(8, 2, 1))
    x, found = torch.randn(2, 4, 34, 34), []
    for scope in (recompute(), everything()):
        with SavedBytes([*net.parameters(), x]) as saved, scope:
            out = net(x)
        found.append((saved.nbytes, out.detach(), *torch.autograd.grad(out.square().mean(), [*net.parameters()])))
    (kept, *expected), (least, *got) = found
    assert_bits(got, expected)
    # The output of the norm has 8 channels; a few vectors are kept in addition.
    assert kept - least > 0.99 * 4 * 2 * 8 * 32 * 32


def conv_used_twice():
    conv, x = nn.Conv2d(4, 4, 3, padding=1), torch.randn(2, 4, 8, 8)
    return lambda: F.relu(conv(F.relu(conv(x)))), list(conv.parameters())


def output_used_twice():
    conv, head, x = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), torch.randn(2, 4, 8, 8, requires_grad=True)

    def run():
        y = conv(x)
        return head(F.relu(y)) + y.sigmoid() * y

    return run, [x, *conv.parameters(), *head.parameters()]


def changed_in_place():
    conv, head, x = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), torch.randn(2, 4, 8, 8)

    def run():
        y = conv(x)
        y.mul_(2).add_(1)
        return head(F.leaky_relu_(y, 0.1))

    return run, [*conv.parameters(), *head.parameters()]


def changed_in_an_unknown_way():
    conv, head, x = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), torch.randn(2, 4, 8, 8)

    def run():
        y = conv(x)
        y.detach()[0] = 0.5
        return head(F.relu(y))

    return run, [*conv.parameters(), *head.parameters()]


def input_changed_afterwards():
    conv, head, x = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), torch.randn(2, 4, 8, 8, requires_grad=True)

    def run():
        a = x * 2
        y = conv(a.detach().clone().requires_grad_())
        return head(F.relu(y)) + a.add_(1)

    return run, [x, *conv.parameters(), *head.parameters()]


def frozen():
    conv, head, x = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), torch.randn(2, 4, 9, 9, requires_grad=True)
    conv.requires_grad_(False)
    return lambda: head(F.gelu(conv(x))), [x, *head.parameters()]


def attention():
    qkv, out, x = nn.Linear(16, 48), nn.Linear(16, 16), torch.randn(2, 5, 16, requires_grad=True)

    def run():
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.gelu(out(y)) + F.gelu(x)

    return run, [x, *qkv.parameters(), *out.parameters()]


def products():
    a, b, x = (torch.randn(3, 6, 6, requires_grad=True) for _ in range(3))
    return lambda: torch.relu(torch.bmm(torch.tanh(x @ a), b)).matmul(a), [a, b, x]


def checkpoint_inside():
    conv, head, x = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), torch.randn(2, 4, 8, 8, requires_grad=True)

    def run():
        y = checkpoint(lambda t: F.relu(conv(t)), F.relu(conv(x)), use_reentrant=False)
        return head(F.relu(y))

    return run, [x, *conv.parameters(), *head.parameters()]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "make",
    [
        conv_used_twice, output_used_twice, changed_in_place, changed_in_an_unknown_way, input_changed_afterwards,
        frozen, attention, products, checkpoint_inside,
    ],
)  # fmt: skip
def test_habits(make):
    assert_same(make)


def test_a_checkpoint_around_the_scope():
    conv, head, x = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), torch.randn(2, 4, 8, 8, requires_grad=True)

    def run(scope):
        def inner(t):
            with scope():
                return head(F.relu(conv(t)))

        out = checkpoint(inner, x, use_reentrant=False)
        return torch.autograd.grad(out.square().sum(), [x, *conv.parameters(), *head.parameters()])

    assert_bits(run(everything), run(nullcontext))


def test_an_optimizer_step_before_backward_raises():
    """Eager mode raises too, because the convolution has saved its weight."""
    conv, head, x = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1), torch.randn(1, 2, 6, 6)
    for scope in (nullcontext(), everything()):
        with scope:
            loss = head(F.relu(conv(x))).sum()
        with torch.no_grad():
            conv.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("product", [lambda x, w, b: F.linear(x, w, b), lambda x, w, b: x @ w.t() + b])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_that_pytorch_computes_in_another_way_without_gradients(product, dtype, monkeypatch):
    """Products of other strides once ran again by samples, with other last bits where ``same_bits`` did not see it."""
    monkeypatch.setattr(twice, "same_bits", lambda *call: True)

    def make():
        x, w, b = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 8, 48), (8, 8), (8,)))
        return lambda: F.silu(product(F.relu(x).mT, w, b)), [x, w, b]

    assert_same(make)


def test_a_call_with_other_bits_is_kept(monkeypatch):
    """A function that gives other bits at the second call is found at its first use, and its output is kept."""
    draws = iter(range(100))

    def unsteady(x, w):
        return torch.nn.functional.conv2d(x, w) + 1e-3 * next(draws)

    row = twice._Row("unsteady", 2, lambda out, tensors: 1, saves_all=True)
    monkeypatch.setitem(twice.FUNCTIONS, unsteady, row)
    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 1, 1, requires_grad=True)
    with everything() as _, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = fusedseg.ops.recompute.recipes.innermost()
        y = twice.rule(registry, unsteady, (x, w), {}, None)
        expected = y.detach().clone()
        out = torch.sigmoid(y * y)
    assert "unsteady" in str(caught[0].message)
    (got,) = torch.autograd.grad(out.sum(), [y])
    s = torch.sigmoid(expected * expected)
    torch.testing.assert_close(got, 2 * expected * s * (1 - s))
    monkeypatch.setattr(twice, "_verdicts", {})


def test_flops_are_those_of_pytorch():
    from torch.utils.flop_counter import FlopCounterMode

    def product_attention():
        q = torch.randn(2, 3, 5, 8, requires_grad=True)
        return lambda: F.scaled_dot_product_attention(F.linear(q, torch.randn(8, 8, requires_grad=True)), q, q), []

    programs = [conv_used_twice, products]
    up, down = nn.ConvTranspose3d(3, 5, 2, 2), nn.Conv2d(4, 6, 3, groups=2, stride=2)
    programs.append(lambda: (lambda: up(torch.randn(2, 3, 4, 4, 4)), []))
    programs.append(lambda: (lambda: down(torch.randn(2, 4, 9, 9)), []))
    for make in programs:
        observed = Observe()
        fn, _ = make()
        with recompute.guided(lambda observed=observed: observed):
            fn()
        with FlopCounterMode(display=False) as counter:
            fn()
        assert sum(call.flops for call in observed.graph.calls) == counter.get_total_flops()
    fn, _ = product_attention()
    observed = Observe()
    with recompute.guided(lambda: observed):
        fn()
    # PyTorch counts no operations of attention on a CPU: two products of (5, 8) and (8, 5) for each of 2 x 3 heads.
    assert [call.flops for call in observed.graph.calls] == [2 * 2 * 3 * 5 * 8 * 8, 2 * 2 * 6 * 5 * 5 * 8]


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1),
    )  # fmt: skip


def test_a_plan_that_no_longer_fits_is_left():
    """A network whose calls differ from the plan keeps their outputs, and its gradients are right."""
    net, x = network(), torch.randn(2, 1, 16, 16)
    observed = Observe()
    with recompute.guided(lambda: observed):
        net(x)
    choice = choose(observed.graph, Budget(fraction=0.2), observed.graph.eager)
    assert choice.again
    other = nn.Sequential(net[0], nn.Conv2d(8, 8, 1), *net[1:])
    params = list(other.parameters())
    expected = step(lambda: other(x), params, nullcontext())
    assert_bits(step(lambda: other(x), params, recompute.guided(lambda: Follow(choice))), expected)


def test_prediction_is_exact():
    """The bytes that the graph predicts are those of the step."""
    with FakeTensorMode():
        net, x = network(), torch.empty(4, 1, 64, 64)
        owned = [*net.parameters(), *net.buffers()]
        observed = Observe()
        with recompute.guided(lambda: observed):
            net(x)
        plain = measure(recompute()(net), x, owned=owned).saved
        for fraction in (0.4, 0.3, 0.2, 0.1):
            choice = choose(observed.graph, Budget(fraction=fraction), observed.graph.eager, plain)
            measured = measure(recompute.guided(lambda choice=choice: Follow(choice))(net), x, owned=owned)
            # Copies of biases, one value per channel, are not in the graph.
            assert abs(measured.saved - choice.kept) <= 1024
