"""Steps of arithmetic and shape, as templates.

{x}     a floating tensor          {y}     another that broadcasts with it, of any dtype
{n}     an integer tensor          {b}     a boolean tensor that broadcasts with {x}
{s}     a number                   {flag}  True or False
{d}     a dimension of {x}         {w}     a parameter for the channels of {x}
"""

import re

import torch

from tests.hunt.grow import HALF, WRITES, Grower, floats

INPLACE_FUNCTIONS = (
    "relu", "leaky_relu", "elu", "silu", "mish", "hardswish", "relu6", "hardtanh", "selu", "celu", "hardsigmoid",
    "rrelu", "threshold",
)  # fmt: skip

ACTIVATIONS = [
    *(f"F.{name}({{x}}, {'0.1, 0.2, ' if name == 'threshold' else ''}inplace={{flag}})" for name in INPLACE_FUNCTIONS),
    "F.leaky_relu({x}, 0.2, {flag})", "F.elu({x}, alpha=0.7, inplace={flag})", "F.hardtanh({x}, -0.5, 0.6, {flag})",
    "F.relu_({x})", "F.leaky_relu_({x}, 0.3)", "F.elu_({x})", "torch.relu({x})", "torch.relu_({x})", "{x}.relu()",
    "{x}.relu_()", "{x}.sigmoid_()", "{x}.sigmoid()", "torch.sigmoid({x})", "torch.sigmoid_({x})", "F.sigmoid({x})",
    "torch.tanh({x})", "{x}.tanh_()", "F.tanh({x})", "torch.tanh_({x})", "F.gelu({x})",
    "F.gelu({x}, approximate='tanh')", "F.softplus({x})", "F.softsign({x})", "F.logsigmoid({x})", "F.tanhshrink({x})",
    "F.softshrink({x}, 0.2)", "F.hardshrink({x})", "F.prelu({x}, {w})", "torch.prelu({x}, {w})", "F.softmax({x}, {d})",
    "F.log_softmax({x}, dim={d})", "{x}.softmax({d})", "F.glu(torch.cat([{x}, {x}], {d}), {d})", "{x}.exp().log1p()",
    "torch.clamp({x}, -1, 1)", "{x}.clamp_(min=-0.5)", "{x}.abs().sqrt()", "{x}.sin()", "torch.cos({x})",
    "{x}.erf()", "torch.special.expit({x})", "{x}.square()", "{x} ** 2", "{x}.pow(3) * 0.1", "{x}.abs()",
    "{x}.neg_()", "-{x}", "F.silu(input={x}, inplace={flag})", "F.relu(input={x})", "torch.relu(input={x})",
]  # fmt: skip

BINARY = [
    "{x} + {y}", "{y} + {x}", "{x} - {y}", "{y} - {x}", "{x} * {y}", "{y} * {x}", "{x} / ({y}.abs() + 1)",
    "torch.add({x}, {y})", "torch.add({x}, {y}, alpha={s})", "torch.sub({x}, {y}, alpha=2)", "torch.mul({x}, {y})",
    "{x}.add({y})", "{x}.sub({y})", "{x}.mul({y})", "{x}.div({y}.abs() + 1.5)", "torch.div({x}, {y}.abs() + 2)",
    "{x}.add_({y})", "{x}.sub_({y})", "{x}.mul_({y})", "{x}.div_({y}.abs() + 1)", "{x}.add_({y}, alpha={s})",
    "{y}.add_({x})", "{y}.mul_({x})",
    "operator.iadd({x}, {y})", "operator.isub({x}, {y})", "operator.imul({x}, {y})",
    "torch.maximum({x}, {y})", "torch.min({x}, {y})", "torch.where({b}, {x}, {y})", "torch.where({x} > {y}, {x}, {y})",
    "torch.where({b}, {x}, {s})", "torch.lerp({x}, {y}, 0.3)", "{x}.lerp_({y}, 0.3)", "torch.addcmul({x}, {y}, {y})",
    "torch.addcmul({x}, {x}, {y}, value={s})", "{x}.addcmul_({y}, {y}, value=0.5)",
    "torch.addcdiv({x}, {y}, {x}.abs() + 1)", "{x}.masked_fill({b}, {s})", "{x}.masked_fill_({b}, {s})",
    "torch.hypot({x}, {y}.abs() + 0.1)", "torch.logaddexp({x}, {y})", "torch.rsub({x}, {y})", "{x} * {b}", "{x} + {n}",
    "{x} * {n}", "{n} + {x}", "{x} == {y}", "{x} > {y}", "{x}.gt(0)", "torch.lt({x}, {s})",
]  # fmt: skip

SCALARS = [
    "{x} + {s}", "{x} * {s}", "{x} - {s}", "{s} - {x}", "{x} / 3", "{s} * {x}", "{x} + 1", "{x} * 1", "1 + {x}",
    "torch.add({x}, {s})", "torch.mul({x}, {s})", "torch.sub({x}, 1)", "torch.div({x}, 1.5)", "{x}.add({s}, alpha=2)",
    "{x}.add_({s})", "{x}.mul_({s})", "{x}.sub_({s})", "{x}.div_(2)", "operator.iadd({x}, {s})",
    "operator.itruediv({x}, 1.25)", "{x} + True", "{x} * torch.tensor({s})", "{x}.add(torch.tensor(1.5).double())",
    "torch.tensor(2) * {x}", "torch.tensor({s}, dtype=torch.bfloat16) + {x}", "torch.div({x}, 2, rounding_mode=None)",
    "{n} * {s}", "{n}.float()", "{n} / 3", "({x} > 0).float()", "{b}.to({x}.dtype)",
]  # fmt: skip

CASTS = [
    "{x}.to(torch.float32)", "{x}.float()", "{x}.double()", "{x}.bfloat16()", "{x}.half()", "{x}.to(torch.bfloat16)",
    "{x}.to(torch.float16)", "{x}.type(torch.float32)", "{x}.type_as({y})", "{x}.to({y})", "{x}.float()",
    "{x}.to(torch.float32, copy=True)", "{x}.to(dtype=torch.bfloat16)",
]  # fmt: skip

VIEWS = [
    "{x}[..., :-1]", "{x}[:, :2]", "{x}[:, 1:]", "{x}[:, ::2]", "{x}[0]", "{x}[..., 1:, :]", "{x}.transpose(0, {d})",
    "{x}.transpose(-1, -2)", "{x}.flip(-1)", "{x}.flatten(1)", "{x}.reshape(-1)", "{x}.reshape({x}.shape[0], -1, 1)",
    "{x}.view({x}.shape)", "{x}.view_as({x})", "{x}.contiguous()", "{x}.clone()", "torch.clone({x})",
    "{x}.contiguous(memory_format=torch.channels_last)", "{x}.to(memory_format=torch.channels_last)",
    "{x}.expand(2, *{x}.shape)[1]", "{x}.expand(2, *{x}.shape)", "{x}[:1].expand(3, *{x}.shape[1:])",
    "{x}.as_strided((4, 2), (2, 1), 1)", "{x}.as_strided((4, 3), (1, 1))", "{x}.permute(*range({x}.dim())[::-1])",
    "{x}.unsqueeze({d})", "{x}.squeeze()", "{x}.unfold(-1, 2, 1)", "{x}.diagonal(0, -2, -1)", "{x}.movedim(1, -1)",
    "{x}.narrow({d}, 0, 1)", "{x}.select({d}, 0)", "{x}.roll(1, {d})", "{x}.repeat(*[2] * {x}.dim())", "{x}.detach()",
    "{x}.t()", "{x}.mT", "{x}.unflatten(1, (2, -1))", "torch.flatten({x}, 1)", "torch.reshape({x}, (-1, 2))",
    "{x}.repeat_interleave(2, {d})", "torch.atleast_2d({x})", "{x}.index_select({d}, torch.tensor([0, 0]))",
    "{x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64))", "{x}[{x} > 0]", "{x}[torch.tensor([0, 0])]",
    "F.pixel_shuffle({x}, 2)", "F.pixel_unshuffle({x}, 2)", "F.channel_shuffle({x}, 2)", "torch.tril({x})",
]  # fmt: skip

JOINS = [
    "torch.cat([{x}, {x}], {d})", "torch.cat([{x}, {y}], 1)", "torch.cat([{x}, {y}], {d})", "torch.cat(({y}, {x}), 0)",
    "torch.concat([{x}, {y}, {x}], dim={d})", "torch.stack([{x}, {y}])", "torch.stack([{x}, {x}, {y}], {d})",
    "torch.stack([{x}, {y}]).sum(0)", "torch.hstack([{x}, {y}])", "torch.cat([{x}.expand_as({x}), {x} * 2], -1)",
]  # fmt: skip

# Steps with two results.
SPLITS = ["{x}.chunk(2, {d})", "torch.chunk({x}, 2, 1)", "{x}.split(2, 1)", "{x}.unbind(0)", "{x}.tensor_split(2, {d})",
          "torch.split({x}, [1, {x}.shape[1] - 1], 1)", "{x}.max({d})", "torch.var_mean({x}, {d})", "{x}.sort({d})",
          "torch.topk({x}, 1, {d})"]  # fmt: skip

REDUCTIONS = [
    "{x}.sum({d}, keepdim=True)", "{x}.mean({d}, keepdim=True)", "{x}.mean()", "{x}.sum() * 0.1", "{x}.amax({d}, True)",
    "{x}.var(unbiased=False)", "{x}.norm()", "{x}.std({d}, keepdim=True)", "{x}.logsumexp({d}, keepdim=True)",
    "{x}.cumsum({d}) * 0.3", "{x}.mean((0, -1), keepdim=True)", "{x}.flatten(1).mean(1)", "{x}.prod({d})",
    "F.normalize({x}, dim={d})", "F.cosine_similarity({x}, {y}, dim={d})", "F.mse_loss({x}, {y})",
    "F.smooth_l1_loss({x}, {y})", "F.binary_cross_entropy_with_logits({x}, torch.sigmoid({x}).detach())",
]  # fmt: skip

PRODUCTS = [
    "torch.matmul({x}, {x}.transpose(-1, -2)) * 0.2", "{x} @ {p}", "F.linear({x}, {q})", "F.linear({x}, {q}, None)",
    "torch.einsum('...i,ij->...j', {x}, {p})", "torch.addmm({y}, {x}, {p})", "torch.bmm({x}, {p}[None])",
    "torch.mm({x}, {p})", "torch.matmul({x}, {p})", "F.bilinear({x}, {x}, torch.stack([{p}, {p}]))",
    "F.scaled_dot_product_attention({x}, {x}, {x})", "torch.outer({x}.flatten()[:6], {x}.flatten()[-5:])",
]  # fmt: skip

IN_PLACE = [
    "{x}.add_(0.5)", "{x}[:, :2].mul_(0.5)", "{x}[0].zero_()", "{x}.transpose(0, 1).add_(1)", "{x}[..., :1] = {s}",
    "{x}[:, 0] = {x}[:, 1] * 2", "{x}[{x} > 1] = 0.5", "{x}.copy_({y})", "{x}.detach().mul_(0.7)",
    "{x}.zero_()", "{x}.fill_(0.3)", "torch.add({x}.detach(), 1, out={x}.detach())", "{x}.view(-1).add_({s})",
    "{x}.chunk(2, 1)[0].mul_(0.5)", "{x}.clamp_(-1, 1)", "{x}.relu_()", "{x}.sub_({y})", "{x}.t_()",
    "torch._foreach_mul_([{x}], 0.8)", "torch._foreach_add_([{x}], 0.1)", "{x}.as_strided((2,), (1,)).mul_(1.5)",
    "F.relu({x}[:, :1], inplace=True)", "torch.relu_({x}[..., :2])", "{x}.index_fill_({d}, torch.tensor([0]), {s})",
    "{x}.requires_grad_()", "nn.init.constant_({x}.detach(), 0.2)",
    "{x}.swapaxes_(0, 1)", "{x}.squeeze_()", "{x}.unsqueeze_(0)", "{x}.masked_fill_({b}, {s})",
]  # fmt: skip

OUT = [
    "torch.add({x}.detach(), 1, out=torch.empty_like({x}))", "torch.mul({x}.detach(), 2, out={x}.detach().clone())",
    "torch.relu({x}.detach())", "torch.sigmoid({x}.detach(), out=torch.empty(0, dtype={x}.dtype))",
    "torch.cat([{x}.detach(), {x}.detach()], out=torch.empty(0, dtype={x}.dtype))",
]  # fmt: skip

COMPLEX = [
    "torch.complex({x}, {x} * 2).abs()", "torch.view_as_complex(torch.stack([{x}, {y}], -1)).real",
    "({x} * 1j).imag", "torch.fft.rfft({x}).abs()", "torch.fft.ifft(torch.fft.fft({x})).real + {x}",
    "(torch.complex({x}, {x}) * {y}).conj().real", "torch.polar({x}.abs(), {x}).real",
]  # fmt: skip

CUSTOM = [
    "SaveInput.apply({x})", "SaveOutput.apply({x})", "SaveBetween.apply({x})", "Dirty.apply({x})",
    "DirtySaved.apply({x})",
]  # fmt: skip


def scalar(g: Grower) -> str:
    return str(g.rng.choice((2, 0.5, 1.5, -0.7, 0.25, 1, 3)))


def partner(g: Grower, x: torch.Tensor) -> str:
    """The name of a tensor that broadcasts with ``x``, in either direction; a new leaf where there is none."""

    def fits(t: torch.Tensor) -> bool:
        try:
            return torch.broadcast_shapes(t.shape, x.shape).numel() < 5_000 and not t.is_complex()
        except RuntimeError:
            return False

    if g.chance(0.6):
        name = g.pick(lambda t: t.is_floating_point() and fits(t))
        if name is not None:
            return name
    shape = [1 if g.chance(0.3) else n for n in x.shape]
    shape = shape[g.rng.choice((0, 0, 0, 1, len(shape))) :]
    if g.chance(0.1) and 1 in shape:
        shape[shape.index(1)] = 3
    dtype = x.dtype
    if g.chance(g.rates.mixed):
        dtype = g.rng.choice((torch.float32, torch.float64, *HALF))
    return g.leaf(tuple(shape), dtype, grad=g.chance(0.8))


def filled(g: Grower, template: str) -> str | None:
    """The template with its places filled."""
    name = g.pick(floats())
    if name is None:
        return None
    x = g.of(name)

    def value(match: re.Match) -> str:
        place = match.group(1)
        if place == "x":
            return name
        if place == "y":
            other = partner(g, x)
            # x.mul_(x) saves the tensor that it overwrites, which eager mode does not notice in a checkpoint.
            return f"{name}.detach().clone()" if other == name and WRITES.search(template) else other
        if place == "s":
            return scalar(g)
        if place == "flag":
            return str(g.chance(g.rates.inplace))
        if place == "d":
            return str(g.rng.randrange(x.dim()) if x.dim() else 0)
        if place == "n":
            return g.leaf(tuple(x.shape), g.rng.choice((torch.int64, torch.int32, torch.uint8)))
        if place == "b":
            shape = tuple(1 if g.chance(0.2) else n for n in x.shape)
            return g.leaf(shape, torch.bool)
        if place == "w":
            return g.leaf((x.shape[1] if x.dim() > 1 else 1,), weight_dtype(g, x), scale=0.3)
        width = x.shape[-1] if x.dim() else 1
        shape = (width, 5) if place == "p" else (g.rng.choice((3, width)), width)
        return g.leaf(shape, weight_dtype(g, x), scale=0.4)

    return re.sub(r"\{(\w+)\}", value, template)


def weight_dtype(g: Grower, x: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter that is used with ``x``."""
    return torch.float32 if torch.is_autocast_enabled("cpu") and g.chance(0.8) else x.dtype


def of_table(kind: str, table: list[str], outs: int = 1):
    def make(g: Grower) -> None:
        template = g.rng.choice(table)
        if "_(" in template and outs and not g.chance(g.rates.inplace + 0.2):
            return
        code = filled(g, template)
        if code is not None:
            g.step(kind, code, outs)

    return make


activation = of_table("activation", ACTIVATIONS)
binary = of_table("binary", BINARY)
scalar_step = of_table("scalar", SCALARS)
cast = of_table("cast", CASTS)
view = of_table("view", VIEWS)
join = of_table("join", JOINS)
split = of_table("split", SPLITS, outs=2)
reduction = of_table("reduction", REDUCTIONS)
product = of_table("product", PRODUCTS)
in_place = of_table("in place", IN_PLACE, outs=0)
out = of_table("out", OUT)
complex_step = of_table("complex", COMPLEX)
custom = of_table("custom Function", CUSTOM)
