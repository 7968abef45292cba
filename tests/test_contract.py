"""What PyTorch asks of every op and module: ``contract.py`` lists them, and each test walks the list."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import fusedseg
from fusedseg.ops import reuse
from fusedseg.ops.registry import OPS as OPS_OF_GRAPHS
from tests.contract import MODULES, OPS, Everything, samples
from tests.tools.tensors import WAYS, Cut, channels_last, with_strides

QUICK, LONGEST = ("test_schema", "test_autograd_registration", "test_faketensor"), "test_aot_dispatch_dynamic"
by_op = pytest.mark.parametrize("name", OPS)
by_module = pytest.mark.parametrize("name", MODULES)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Backward writes over small gradients too, as it does over large ones that nobody else sees."""
    monkeypatch.setattr(reuse, "LEAST_BYTES", 1)


def leaves(name, device="cpu", empty=False, dtype=torch.float64):
    shapes = [(0, *of[1:]) if empty and of[0] == 2 and len(of) > 2 else of for of in OPS[name].shapes]
    return [torch.randn(of, dtype=torch.float64).to(device, dtype).requires_grad_() for of in shapes]


def of_batch(t):
    return t.dim() > 2 and t.shape[0] == 2


def gradients(z, given, dz=None):
    return torch.autograd.grad(z, given, z.detach().cos() if dz is None else dz, retain_graph=True, allow_unused=True)


@by_op
def test_values_and_numerical_gradients(name, backend, device):
    op, given = OPS[name], leaves(name, device)
    z, expected = op.call(*given), op.stock(*given)
    torch.testing.assert_close(z, expected)
    dz = torch.randn_like(z)
    torch.testing.assert_close(gradients(z, given, dz), gradients(expected, given, dz))
    assert torch.autograd.gradcheck(op.call, given, fast_mode=True)


@by_op
def test_equal_calls_and_a_second_backward_have_equal_bits(name, backend, device):
    op, given = OPS[name], leaves(name, device, dtype=torch.float32)
    z, again = op.call(*given), op.call(*given)
    first = gradients(z, given)
    assert torch.equal(z, again)
    for others in (gradients(z, given), gradients(again, given)):
        assert all(map(torch.equal, first, others))


@by_op
def test_an_empty_batch(name, backend, device):
    op, given = OPS[name], leaves(name, device, empty=True)
    z = op.call(*given)
    assert z.shape == op.stock(*given).shape
    found = gradients(z, given, torch.ones_like(z))
    assert [t.shape for t in found] == [t.shape for t in given]
    assert not any(map(torch.any, found))


def slice_of_rows(t):
    """Some channels of a wider tensor in channels_last."""
    return channels_last(torch.cat([t, t], 1))[:, : t.shape[1]]


@by_op
def test_other_strides(name, backend, device):
    """Arguments are read where they lie, or copied, and never written."""
    op, given = OPS[name], leaves(name, device)
    expected = op.call(*given)
    dz = torch.randn_like(expected)
    wanted = gradients(expected, given, dz)
    ways = [*(partial(with_strides, how=way) for way in WAYS[:3]), channels_last, slice_of_rows]
    for change in ways:
        others = [change(t.detach()) if of_batch(t) else t.detach().clone() for t in given]
        for t in others:
            t.requires_grad_()
        z = op.call(*others)
        torch.testing.assert_close(z, expected, rtol=1e-9, atol=1e-9)
        # The strides of dz do not depend on those of the arguments.
        more = (with_strides(dz, "permuted"), with_strides(dz, "sliced"), slice_of_rows(dz))
        for of in (dz, *(more if change is channels_last else ())):
            torch.testing.assert_close(gradients(z, others, of), wanted, rtol=1e-9, atol=1e-9)
        # As the gradient of a sum.
        one = dz.flatten()[0].expand(dz.shape)
        of_one, dense = gradients(z, others, one), gradients(expected, given, one.contiguous())
        torch.testing.assert_close(of_one, dense, rtol=1e-9, atol=1e-9)
        assert all(map(torch.equal, others, given))


def shared(z, given, dz):
    """A sum gives the same gradient to both of its terms."""
    other = torch.randn_like(z).requires_grad_()
    ((z + other) * 1).backward(dz)
    return other.grad


def hooked(z, given, dz):
    held = []
    z.register_hook(held.append)
    (z * 1).backward(dz)
    return held[0]


def viewed(z, given, dz):
    held = []
    z.register_hook(lambda gradient: held.append(gradient[:]))
    (z * 1).backward(dz)
    return held[0]


def asked_for(z, given, dz):
    return torch.autograd.grad(z * 1, [z, *given], dz)[0]


def of_the_caller(z, given, dz):
    z.backward(dz)
    return dz


@by_op
def test_a_gradient_that_somebody_holds_is_not_written(name, backend, device):
    op, given = OPS[name], leaves(name, device)
    for hold in (shared, hooked, viewed, asked_for, of_the_caller):
        z = op.call(*given)
        dz = torch.randn_like(z)
        wanted = dz.clone()
        assert torch.equal(hold(z, given, dz), wanted), hold


@by_op
def test_gradients_of_gradients_are_right_or_refused(name, backend, device):
    op, given = OPS[name], leaves(name, device)
    if not op.name:
        assert torch.autograd.gradgradcheck(lambda *t: op.call(*t), given, fast_mode=True)
        return
    found = torch.autograd.grad(op.call(*given).square().sum(), given, create_graph=True)
    assert all(t.isfinite().all() for t in found)
    with pytest.raises(RuntimeError, match=f"{op.name}: double backward is not supported"):
        found[0].sum().backward()


@by_op
def test_a_batch_of_gradients_is_right_or_refused(name, backend, device):
    op, given = OPS[name], leaves(name, device)
    z = op.call(*given)
    several = torch.randn(3, *z.shape, dtype=z.dtype, device=device)
    if op.name or "max_pool" in name or (name == "upsample" and backend == "triton"):
        with pytest.raises(RuntimeError, match=r"a batch of gradients .* is not supported"):
            torch.autograd.grad(z, given, several, is_grads_batched=True)
        return
    found = torch.autograd.grad(z, given, several, is_grads_batched=True, retain_graph=True)
    for place, dz in enumerate(several):
        torch.testing.assert_close([t[place] for t in found], list(gradients(z, given, dz)))


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.kept])
def test_a_tensor_that_is_kept_and_was_changed_raises(name, backend, device):
    op, given = OPS[name], leaves(name, device)
    x = given[0] * 1
    z = op.call(x, *given[1:])
    with torch.no_grad():
        (x if op.kept == "input" else z).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@by_op
def test_hooks_may_save_tensors_elsewhere(name, device):
    """``allow_mutation_on_saved_tensors`` raised KeyError for gradients that are written into a tensor."""
    op, given = OPS[name], leaves(name, device)
    expected = gradients(op.call(*given), given)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        found = gradients(op.call(*given), given)
    assert all(map(torch.equal, found, expected))


@by_op
def test_fake_tensors(name, backend):
    shapes = [t.shape for t in (OPS[name].call(*leaves(name)), *leaves(name))]
    with FakeTensorMode():
        given = leaves(name)
        z = OPS[name].call(*given)
        found = gradients(z, given)
    assert [t.shape for t in (z, *found)] == shapes
    assert all(isinstance(t, torch._subclasses.FakeTensor) for t in (z, *found))


@by_op
def test_another_default_device(name):
    """``torch.set_default_device`` is a function mode; tensors that ops make for themselves lay on its device."""
    given = leaves(name)
    expected = OPS[name].call(*given)
    wanted = gradients(expected, given)
    with torch.device("meta"):
        z = OPS[name].call(*given)
        found = torch.autograd.grad(z, given, expected.detach().cos())
    assert torch.equal(z, expected)
    assert all(map(torch.equal, found, wanted))


@by_op
def test_autocast(name, backend, device):
    """A convolution runs in half precision, everything else in the dtype that it gets; gradients have that dtype."""
    op = OPS[name]
    for dtype in (torch.float32, torch.float64):
        given = leaves(name, device, dtype=dtype)
        with torch.autocast(device.type, torch.bfloat16):
            z = op.call(*given)
        half = op.autocast and dtype == torch.float32
        assert z.dtype == (torch.bfloat16 if half else dtype)
        assert {t.dtype for t in gradients(z, given)} == {dtype}
        # The operands of logits that are not formed are rounded as those of a convolution.
        difference = 0.1 if dtype == torch.float32 and (half or name == "ConvLogits") else 1e-4
        torch.testing.assert_close(z.to(dtype), op.stock(*given), rtol=difference, atol=difference)


def test_every_op_is_checked():
    checked = {op.name().partition(".")[0] for rows in samples().values() for op, _ in rows}
    # It counts its calls.
    assert checked == OPS_OF_GRAPHS.keys() - {"fusedseg::rounding_key"}


@pytest.mark.parametrize("name", samples())
def test_opcheck(name, backend, device):
    """``torch.library.opcheck``; on Triton, and for two of three kinds of norms, without its longest part.

    That part traces the op and runs the traced program, which holds the op, its fake and its formula of backward: both
    backends and all norms share them.
    """
    is_shared = backend == "triton" or name in ("norm of a instance", "norm of a group")
    for op, arguments in samples()[name]:
        torch.library.opcheck(op, on(device, arguments), test_utils=QUICK if is_shared else (*QUICK, LONGEST))


def on(device, arguments, change=lambda t: t):
    """The arguments of an op with a copy of each tensor on a device, which is changed."""

    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        return change(t.detach().to(device, copy=True)).requires_grad_(t.requires_grad)

    return tree_map(one, arguments)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", samples())
def test_arguments_of_other_strides(name, way, backend, device):
    """A compiler may hand them over (pytorch issue 132102): values are those of dense ones, and strides the fake's."""

    def strided(t):
        # Codes and labels must fit their places.  ``tests/ops/test_strides.py`` has vectors.
        return t if t.dim() < 3 or (way == "expanded" and not t.is_floating_point()) else with_strides(t, way)

    for op, arguments in samples()[name]:
        given = on(device, arguments, strided)
        found, expected = op(*given), op(*on(device, given, lambda t: t.contiguous()))
        with FakeTensorMode() as mode:
            fake = op(*tree_map(lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t, given))
        results = [(t,) if isinstance(t, torch.Tensor) else t for t in (found, expected, fake)]
        for mine, theirs, announced in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            assert (mine.shape, mine.stride()) == (announced.shape, announced.stride())


def made(name, device="cpu", dtype=torch.float64):
    """The module with parameters of its own, and an input."""
    module = MODULES[name]().to(device, dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5)
    size = (4, 6, 8) if name.endswith("3d") else (6, 8)
    return module, torch.randn(2, 4, *size, dtype=dtype, device=device)


def step(module, x):
    leaf = x.clone().requires_grad_()
    z = module(leaf * 1)
    return z, torch.autograd.grad((z * z.detach().cos()).sum(), [leaf, *module.parameters()])


@by_module
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(name, clone):
    module, x = made(name)
    other, before = clone(module), copy.deepcopy(module.state_dict())
    assert repr(other) == repr(module)
    found = step(other, x)
    torch.testing.assert_close(module.state_dict(), before)
    assert all(parameter.grad is None for parameter in module.parameters())
    torch.testing.assert_close(found, step(module, x))
    torch.testing.assert_close(module.state_dict(), other.state_dict())


@by_module
def test_parameters_without_a_gradient(name):
    """If no gradient reaches a module, its parameters have none: momentum and weight decay would move them by zeros."""
    module, x = made(name)
    x, other = x.requires_grad_(), torch.ones(1, requires_grad=True)
    (Cut.apply(module(x * 1)).sum() + other).backward()
    assert other.grad is not None
    assert [key for key, parameter in module.named_parameters() if parameter.grad is not None] == []
    assert x.grad is None


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("MaxPool")])
def test_device_and_dtype(name):
    """On meta tensors too: a module once asked whether autocast is on for them, which raised an error.

    Max-pools have no parameters, and take no dtype.
    """
    module = MODULES[name](device="meta", dtype=torch.float16)
    assert {t.dtype for t in module.state_dict().values() if t.is_floating_point()} == {torch.float16}
    assert all(t.is_meta for t in module.state_dict().values())
    _, x = made(name)
    z = module(x.to("meta", torch.float16))
    z.sum().backward()
    assert z.shape == x.shape
    assert all(parameter.grad.is_meta for parameter in module.parameters())


@by_module
def test_an_input_that_is_no_tensor_or_has_another_number_of_dimensions(name):
    with pytest.raises(TypeError, match=rf"fusedseg\.(nn\.)?{name}: x must be a tensor"):
        MODULES[name]()("x")
    with pytest.raises(ValueError, match=rf"fusedseg\.(nn\.)?{name}: x must have shape .* got \(4,\)"):
        MODULES[name]()(torch.randn(4))


@by_module
def test_half_precision(name):
    module, x = made(name, dtype=torch.float32)
    expected = module(x.clone())
    for dtype in (torch.float16, torch.bfloat16):
        z = copy.deepcopy(module).to(dtype)(x.to(dtype))
        assert z.dtype == dtype
        torch.testing.assert_close(z.float(), expected, rtol=0.05, atol=0.05)


# ``test_compile_with_triton`` of the ConvABN module compiles the op of a norm on Triton: the graph holds the same ops.
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_follows_eager_mode(compiler):
    """Three steps run, with channels that become kept and a state dict that is loaded before the last; then eval mode.

    The input is in channels_last, because strides can only be wrong there.
    """
    torch._dynamo.reset()
    eager = Everything().to(torch.float64, memory_format=torch.channels_last)
    copied = copy.deepcopy(eager)
    compiled = torch.compile(copied, fullgraph=True, backend=compiler)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (eager, copied)]
    for number in range(3):
        if number == 2:
            for part in eager.parts.values():
                if "InPlace" in type(part).__name__:
                    part.weight.data[1] = 0
            copied.load_state_dict(eager.state_dict())
        x, outs = channels_last(torch.randn(2, 4, 8, 8, dtype=torch.float64)), []
        for net, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            outs.append(net(x))
            outs[-1].square().mean().backward()
        torch.testing.assert_close(*outs)
        torch.testing.assert_close([p.grad for p in copied.parameters()], [p.grad for p in eager.parameters()])
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(copied.state_dict(), eager.state_dict())
    eager.eval()
    copied.eval()
    found, expected = ([net(x), net] for net in (compiled, eager))
    torch.testing.assert_close(found[0], expected[0])
    grads = [torch.autograd.grad(out.square().mean(), [*net.parameters()]) for out, net in (found, expected)]
    torch.testing.assert_close(*grads)


def test_every_module_is_walked():
    public = {name for name in fusedseg.nn.__all__ if isinstance(getattr(fusedseg.nn, name), type)
              and issubclass(getattr(fusedseg.nn, name), nn.Module)}  # fmt: skip
    # Synchronised norms need processes; a head returns no tensor in training; JoinConv3d is JoinConv2d.
    others = {"BatchNormActSync", "InPlaceABNSync", "ConvHead2d", "ConvHead3d", "JoinConv3d"}
    assert public - others == set(MODULES)
