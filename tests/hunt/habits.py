"""Habits of real training that take several steps, or that reach around autograd; and the odd corners of PyTorch."""

import torch

from tests.hunt.grow import HALF, Grower, floats, picking
from tests.hunt.steps import scalar, weight_dtype


def _unkept(g: Grower) -> str | None:
    """A tensor whose memory autograd does not keep: a write that it cannot see changes no gradient."""
    return g.pick(lambda t: t.is_floating_point() and t.numel() > 0 and not g.keeps(t))


def hidden_write(g: Grower) -> None:
    """A change that no version counter shows."""
    name = _unkept(g)
    if name is None:
        return
    writes = [
        f"{name}.data.mul_(2)", f"{name}.data.add_(1)", f"{name}.data[:1] = 0.3", f"{name}.data.copy_({name}.data * 3)",
        f"{name}.detach().numpy()[...] = 0.5", f"np.copyto({name}.detach().numpy(), 0.25)",
        f"torch.from_numpy({name}.detach().numpy()).mul_(1.5)", f"{name}.detach().set_({name}.data).mul_(0.5)",
    ]  # fmt: skip
    g.step("hidden write", g.rng.choice(writes), outs=0)


def changed_then_hidden(g: Grower) -> None:
    """A source that is changed in place, read, and changed again unseen."""
    name = _unkept(g)
    if name is None or g.step("in place", f"{name}.{g.rng.choice(('add_(1)', 'mul_(0.5)', 'neg_()'))}", outs=0) is None:
        return
    reads = (f"F.pad({name}, (1,) * 2)", f"F.relu({name})", f"torch.cat([{name}, {name}], 1)", f"{name} + 0.5",
             f"F.interpolate({name}, scale_factor=2)")  # fmt: skip
    read = g.step("activation", g.rng.choice(reads))
    if read is not None:
        g.step("custom Function", f"SaveInput.apply({read})")
        if not g.keeps(g.of(name)):
            g.step("hidden write", f"{name}.data.mul_(2)", outs=0)


def foreign_memory(g: Grower) -> None:
    """Memory of numpy's."""
    buffer = g.new("b")
    g._set_up("memory", f"{buffer} = filled({g.rng.randrange(999)}, {g.shape})")
    make = g.rng.choice((f"torch.from_numpy({buffer})", f"torch.from_dlpack({buffer})", f"torch.as_tensor({buffer})"))
    name = g.step("memory", make)
    if name is None:
        return
    reads = (f"{name}.float().div(255)", f"{name}.float() * 0.5", f"F.relu({name})", f"{name}.double()",
             f"{name} - 0.4",
             f"F.pad({name}, (1, 1))", f"F.interpolate({name}[None], scale_factor=2)[0]",
             f"{name}.clone()")  # fmt: skip
    read = g.step("memory", g.rng.choice(reads))
    if read is not None:
        w = g.leaf((1,) * g.of(read).dim(), g.of(read).dtype)
        g.step("binary", f"{read} * {w}")


def parameter_change(g: Grower) -> None:
    """A parameter changed as an optimizer does, where autograd does not keep it."""
    names = [n for n, t in g.log.leaves.items() if t.requires_grad and not g.keeps(t)]
    if not names:
        return
    name = g.rng.choice(names)
    with g.block("no_grad", "with torch.no_grad():"):
        code = g.rng.choice((f"{name}.mul_(1.5)", f"{name}.add_(0.5)", f"{name}.copy_({name} * 0.5)"))
        g.step("parameter change", code, outs=0)


def stale_cast(g: Grower) -> None:
    """A weight that changes after autocast has cast it: the copy in autocast's cache does not change."""
    name = g.pick(lambda t: t.dim() in (2, 4) and t.is_floating_point() and t.shape[1] > 0)
    if name is None or g.dtype not in (*HALF, g.of(name).dtype):
        return
    x = g.of(name)
    shape = (x.shape[1], x.shape[1], *[1] * (x.dim() - 2))
    w = g.leaf(shape, torch.float32, scale=0.5)
    call = "F.linear" if x.dim() == 2 else "F.conv2d"
    with g.block("autocast", 'with torch.autocast("cpu", torch.bfloat16):'):
        if g.step("stale cast", f"{call}({name}, {w})") is None:
            return
        with g.block("no_grad", "with torch.no_grad():"):
            g.step("parameter change", f"{w}.mul_(1.5)", outs=0)
        out = g.step("stale cast", f"{call}({name}, {w})")
        if out is not None:
            g.step("activation", f"F.silu({out})")


def hook(g: Grower) -> None:
    if g.log.modules and g.chance(0.2):
        # Modules in the program call the hook each time.
        g.step("hook", f"{g.rng.choice(list(g.log.modules))}.register_forward_hook(lambda m, i, out: out * 2)", outs=0)
        return
    name = g.pick(lambda t: t.requires_grad)
    if name is None:
        return
    hooks = [f"{name}.register_hook(lambda g: g * 0.5)", f"{name}.retain_grad()",
             f"{name}.register_hook(lambda g: None)",
             f"{name}.grad_fn.register_hook(lambda into, out: None)"]  # fmt: skip
    g.step("hook", g.rng.choice(hooks), outs=0)


def early_backward(g: Grower) -> None:
    """A backward pass before the program has ended."""
    name = g.pick(lambda t: t.requires_grad and t.is_floating_point())
    if name is None or len(g.frames) > 1:
        return
    calls = [f"{name}.sum().backward(retain_graph=True)", f"({name} * {name}).mean().backward(retain_graph=True)",
             f"log.note('early gradient', torch.autograd.grad({name}.square().sum(), {name})[0])"]  # fmt: skip
    g.step("early backward", g.rng.choice(calls), outs=0)


@picking(floats())
def two_outputs(g: Grower, name: str) -> None:
    g.step("custom Function", f"TwoOutputs.apply({name})", outs=3)


@picking(floats())
def shared_memory(g: Grower, name: str) -> None:
    """Functions of torch with arguments by name, and results that share one memory under several names."""
    out = g.step("view", f"{name}.view_as({name})")
    if out is not None:
        g.step("activation", f"F.relu({out}, inplace=True)")


@picking(floats())
def mixed_sum(g: Grower, name: str) -> None:
    """A value of half precision that is rebuilt, and a tensor of more precision, or of a larger shape, added to it."""
    x = g.of(name)
    chain = g.step("scalar", f"F.{g.rng.choice(('relu', 'silu', 'mish'))}({name} * 1)")
    if chain is not None and g.chance(0.6):
        chain = g.step("scalar", f"{chain} + 1")
    if chain is None:
        return
    shape = tuple(1 if g.chance(0.4) else n for n in x.shape)
    if g.chance(0.3):
        shape = (2, *x.shape)
    dtype = g.rng.choice((torch.float32, torch.float64, x.dtype)) if g.rates.mixed or x.dtype in HALF else x.dtype
    w = g.leaf(shape, dtype)
    total = g.step("binary", g.rng.choice((f"{chain} + {w}", f"{chain} - {w}", f"{chain} * {w}", f"{w} + {chain}")))
    if total is not None:
        g.step("activation", f"{total}.square()")


@picking(lambda t: t.is_floating_point() and t.dim() >= 3 and t.shape[1] > 0)
def broadcast_sum(g: Grower, name: str) -> None:
    """A branch of fewer elements, which is rebuilt, plus a tensor that autograd keeps anyway; one may be half."""
    c = g.of(name).shape[1]
    v = g.step("binary", f"{name} * {g.leaf((1,) * g.of(name).dim(), g.of(name).dtype)}")
    if v is None:
        return
    g.step("activation", f"F.{g.rng.choice(('silu', 'mish', 'gelu'))}({v})")
    cuts = (f"{name}[:1]", f"{name}[..., :1]", f"{name}[..., :1, :]", f"{name}.mean(1, keepdim=True)", f"{name}")
    small = g.step("view", g.rng.choice(cuts))
    if small is None:
        return
    if g.chance(g.rates.mixed):
        small = g.step("cast", f"{small}.{g.rng.choice(('bfloat16()', 'half()', 'double()'))}") or small
    norms = (f"F.group_norm({small}, 1)", f"F.batch_norm({small}, None, None, training=True)", f"{small} * 1.5")
    branch = g.step("norm", g.rng.choice(norms))
    branch = branch and g.step("activation", f"F.{g.rng.choice(('silu', 'relu', 'elu', 'hardswish'))}({branch})")
    if branch is not None:
        sums = (f"{branch} + {v}", f"{branch} - {v}", f"{branch} * {v}", f"torch.add({branch}, {v}, alpha=2)")
        total = g.step("binary", g.rng.choice(sums))
        if total is not None:
            w = g.leaf((1, c, *[1] * (g.of(total).dim() - 2)), g.of(total).dtype)
            g.step("binary", g.rng.choice((f"{total} * {w}", f"{total}.square()", f"SaveInput.apply({total})")))


ODD = [
    "torch.vmap(F.relu)({x})", "torch.vmap(lambda v: F.silu(v) * 2 + v)({x})",
    "torch.vmap(lambda v: v.flatten()[:2])({x})",
    "torch.vmap(lambda i: {x}[0].flatten()[i])(torch.tensor([0, 1]))", "reloaded(F.relu({x}).detach())",
    "reloaded(torch.cat([{x}, {x}]).detach())", "torch.empty(2, 3, device='meta').relu().shape.numel() + {x}",
    "F.relu(torch.empty(2, 3, 4, 4, device='meta')) is None or {x} * 1",
    "torch.nested.nested_tensor([{x}[:1].flatten(), {x}.flatten()]).relu().to_padded_tensor(0.0)",
    "jitted('torch.sigmoid(x) + 1')({x})",
    "torch.autograd.functional.jacobian(lambda v: F.relu(v).flatten()[:3], {x}, vectorize=True).sum(0)",
    "torch.autograd.grad(F.silu({x}).flatten()[:2], {x}, torch.eye(2, dtype={x}.dtype), is_grads_batched=True)[0]",
    "torch.autograd.functional.vjp(lambda v: F.silu(v) + v, {x})[1]", "torch.func.vmap(F.relu, in_dims=-1)({x})",
    "torch.autograd.grad(F.silu({x} * 1).sum(), {x}, create_graph=True)[0]",
    "torch.autograd.functional.hvp(lambda v: (F.silu(v) ** 2).sum(), {x}, {x}.detach())[1]",
    "{x}.to_sparse().to_dense()", "F.relu({x}).detach().clone().requires_grad_()",
    "torch.quantize_per_tensor({x}.detach().float(), 0.1, 0, torch.qint8).dequantize()", "{x}.to_mkldnn().to_dense()",
]  # fmt: skip


@picking(floats())
def odd(g: Grower, name: str) -> None:
    g.step("odd", g.rng.choice(ODD).replace("{x}", name))


@picking(lambda t: t.is_floating_point() and t.dim() > 1)
def inference_features(g: Grower, name: str) -> None:
    """Features of a frozen encoder, made in inference mode and used outside of it."""
    with g.block("inference_mode", "with torch.inference_mode():"):
        out = g.step("inference features", g.rng.choice((f"F.relu({name})", f"{name} * 2", f"{name}.clone()")))
    if out is not None:
        used = (f"torch.cat([{out}, {name}], 1)", f"F.interpolate({out}, scale_factor=2)", f"{out} + {name}",
                f"F.pad({out}, (1, 1))", f"{out} * {scalar(g)} + {name}")  # fmt: skip
        out = g.step("inference features", g.rng.choice(used))
        if out is not None:
            w = g.leaf((1,) * g.of(out).dim(), weight_dtype(g, g.of(out)))
            g.step("binary", f"{out} * {w}")
