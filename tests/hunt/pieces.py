"""Networks with the option "bits": a stem, a few pieces of networks and losses as people write them, and a head.

Each row of the compiler's table of ops is a piece by itself.  The other pieces are written by hand here.  A piece is
code: the statements of one piece stand between semicolons, and the last one is an expression.  Places in braces:

    x, y    the last tensor, and a tensor of its shape      i, d    the axis of channels; d also other axes
    first   the first layer                                 mix     a layer across channels
    conv    a convolution of images                         linear  a layer across the last axis
    w       a parameter for each channel                    c       the number of channels
    eps, k  a small number, and a factor
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedseg.compiler.op_table import ROWS, OpRow
from tests.hunt.compiled import Compiled
from tests.hunt.grow import Grower, growing_network
from tests.hunt.prelude import Log, rounded_error
from tests.hunt.rounding import scaled

# Fewer values than the backend packs, so that it packs no input, as the reference does not.
IMAGE, TOKENS = (1, 3, 32, 32), (2, 128, 12)
WIDTH = 16
LARGEST, MOST = 150_000, 1e9

# How a function of the table is called if one tensor is not all that it needs; {f} is the function.
CALLS = {
    "prelu": "{f}({x}, {one})",
    "linear": "{f}({x}, {square})",
    **dict.fromkeys(("conv2d", "conv_transpose2d"), "{f}({x}, {kernel}, padding=1)"),
    **dict.fromkeys(("conv1d", "conv_transpose1d"), "{f}({x}.flatten(2), {kernel}[..., 0], padding=1)"),
    **dict.fromkeys(
        ("conv3d", "conv_transpose3d"), "{f}({x}[:, :, None], {kernel}[:, :, None], padding=(0, 1, 1))[:, :, 0]"
    ),
    **dict.fromkeys(("mul", "add", "sub", "maximum", "minimum"), "{f}({x}, {y})"),
    "div": "{f}({x}, {y}.abs() + 1)",
    **dict.fromkeys(("cat", "concat"), "{f}([{x}, {y}], {i})"),
    "stack": "{f}([{x}, {y}]).mean(0)",
    "roll": "{f}({x}, 3, -1)",
    **dict.fromkeys(("pad", "constant_pad_nd"), "{f}({x}, (1, 1))"),
    "flatten": "{f}({x}, 1).view({x}.shape)",
    "reshape": "{f}({x}, (-1,)).view({x}.shape)",
    "to": "{f}({x}, torch.float32).double()",
    "float": "{f}({x}).double()",
    # Rounding to half precision is a bias of its own.
    **dict.fromkeys(("half", "bfloat16"), ""),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "avg_pool2d", "max_pool2d"), "{f}({x}, 2)"),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), "{f}({x}, 16)"),
    "avg_pool1d": "{f}({x}.flatten(2), 2)",
    **dict.fromkeys(("avg_pool3d", "max_pool3d"), "{f}({x}[None], 2)[0]"),
    "adaptive_avg_pool3d": "{f}({x}[None], (None, 16, 16))[0]",
    "interpolate": "{f}({x}, size=(24, 40), mode='bilinear')",
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d"), "{f}({x}, 0.3)"),
    "dropout3d": "{f}({x}[None], 0.3)[0]",
    "batch_norm": "{f}({x}, None, None, None, None, True)",
    "group_norm": "{f}({x}, 4)",
    "layer_norm": "{f}({x}, {x}.shape[1:])",
    "bmm": "{f}({x}, {x}.mT) * 0.1",
    "baddbmm": "{f}({x}, {x}, {x}.mT @ {x}, alpha=0.1)",
    "addcmul": "{f}({x}, {x}, {y})",
    "rsub": "{f}({x}, 1.0)",
    "where": "{f}({x} > {y}, {x}, 0.3 * {x})",
    "masked_fill": "{f}({x}, {y} > 0.5, 0.0)",
    **dict.fromkeys(("sum", "mean", "var"), "{x} * {f}({x}, {d}, keepdim=True)"),
    "var_mean": "v, m = {f}({x}, {d}, keepdim=True); ({x} - m) * v",
    **dict.fromkeys(("amax", "amin"), "{x} - {f}({x}, {d}, keepdim=True)"),
    **dict.fromkeys(("rsqrt", "reciprocal"), "{f}({x}.abs() + {eps})"),
    "pow": "{f}({x}, 3)",
    "clamp": "{f}({x}, -0.5, 0.7)",
    **dict.fromkeys(("clamp_min", "clamp_max"), "{f}({x}, 0.2)"),
    **dict.fromkeys(("le", "gt"), "{x} * {f}({x}, 0.2)"),
    "detach": "{x} * {f}({x})",
    "log1p": "{f}({x}.square())",
    # They read no values.
    **dict.fromkeys(("full", "empty_like", "zeros_like", "ones_like", "full_like"), ""),
    "index_put": "{f}({x}, (torch.tensor(0),), {y}[0])",
    "scatter_add": "{f}({x}, -1, torch.zeros_like({x}, dtype=torch.int64), {y})",
}  # fmt: skip

# How a function that PyTorch's trace has under another name is called.
OF_OPS = {
    "glu": "F.glu(torch.cat([{x}, {y}], {i}), {i})",
    "log_sigmoid_forward": "F.logsigmoid({x})",
    "_log_softmax": "F.log_softmax({x}, {i})",
    "_softmax": "F.softmax({x}, {i})",
    "_fused_rms_norm": "F.rms_norm({x}, {x}.shape[-1:])",
    "view": "{x}.view(-1).view({x}.shape)",
    "repeat": "{x}.repeat(2, *[1] * ({x}.dim() - 1))",
    "index": "{x}[:, torch.arange({x}.shape[1]).flip(0)]",
    "gelu_tanh": "F.gelu({x}, approximate='tanh')",
}

NORMS = {
    "root mean square": "{x} * torch.rsqrt({x}.square().mean({d}, keepdim=True) + {eps})",
    "root mean square as a divisor": "{x} / ({x}.pow(2).mean({d}, keepdim=True) + {eps}).sqrt()",
    "layer norm by hand": "a = {x} - {x}.mean({d}, keepdim=True); "
    "a / (a.square().mean({d}, keepdim=True) + {eps}).sqrt() * {w}",
    "layer norm with var": "({x} - {x}.mean({d}, keepdim=True)) * "
    "torch.rsqrt({x}.var({d}, keepdim=True, unbiased=False) + {eps})",
    "standardised": "({x} - {x}.mean({d}, keepdim=True)) / ({x}.std({d}, keepdim=True) + {eps})",
    "F.normalize": "F.normalize({x}, dim={i})",
    "F.normalize, L1": "F.normalize({x}, 1.0, {i})",
    "L1 norm by hand": "{x} / ({x}.abs().sum({d}, keepdim=True) + {eps})",
    "L2 norm by hand": "{x} / ({x}.norm(dim={d}, keepdim=True) + {eps})",
    "maximum norm": "{x} / ({x}.abs().amax({d}, keepdim=True) + {eps})",
    "shares": "a = F.relu({x}); a / (a.sum({d}, keepdim=True) + {eps})",
    "cosine similarity": "a = {mix}({x}); {x} * F.cosine_similarity({x}, a, {i}).unsqueeze({i})",
    "standard deviation": "{x} * {x}.std({d}, keepdim=True)",
    "standard deviation as a gate": "{x} * torch.sigmoid(({x}.var({d}, keepdim=True) + {eps}).sqrt())",
    "demodulation": "a = {x} * ({w} + 1); a * torch.rsqrt(a.square().sum({d}, keepdim=True) + {eps})",
    "F.layer_norm of the last axis": "F.layer_norm({x}, {x}.shape[-1:])",
    "F.rms_norm of the last axis": "F.rms_norm({x}, {x}.shape[-1:])",
    "F.layer_norm of channels": "F.layer_norm({x}.movedim({i}, -1), ({c},)).movedim(-1, {i})",
    "F.rms_norm of channels": "F.rms_norm({x}.movedim({i}, -1), ({c},)).movedim(-1, {i})",
    "squash of capsules": "s = {x}.square().sum({i}, keepdim=True); {x} * s / (1 + s) / (s + {eps}).sqrt()",
    "hyperbolic": "{x} / (1 + (1 + {x}.square().sum({i}, keepdim=True)).sqrt())",
    "quaternions": "q = {x}.unflatten({i}, (-1, 4)); "
    "(q / (q.square().sum({i}, keepdim=True) + {eps}).sqrt()).view({x}.shape)",
    "shrinkage of groups": "{x} * F.relu(1 - {k} / ({x}.norm(dim={i}, keepdim=True) + {eps}))",
    "norm scaled": "{x} * ({k} / ({x}.norm(dim={i}, keepdim=True) + {eps})).clamp(max=1)",
}

SHARES = {
    "softmax with a temperature": "F.softmax({x} / {k}, {i})",
    "softmax of a product": "F.softmax({x} * 8, {i}) * {x}",
    "softmax by hand": "e = ({x} - {x}.amax({i}, keepdim=True)).exp(); e / e.sum({i}, keepdim=True)",
    "softmax without a maximum": "e = ({k} * {x}).exp(); e / e.sum({i}, keepdim=True)",
    "softmax with one maximum": "e = ({x} - {x}.detach().amax()).exp(); e / (e.sum({d}, keepdim=True) + {eps})",
    "log-sum-exp": "{x} - {x}.logsumexp({d}, keepdim=True)",
    "log-sum-exp by hand": "{x} * {x}.exp().sum({d}, keepdim=True).log()",
    "soft argmax": "{x} + (F.softmax({x} * 4, {i}) * {w}).sum({i}, keepdim=True)",
    "entropy": "p = F.softmax({x}, {i}); p * torch.log(p + {eps})",
    "softplus shares": "e = F.softplus({x}); e / e.sum({i}, keepdim=True)",
    "taylor softmax": "e = 1 + {x} + 0.5 * {x}.square(); e / e.sum({i}, keepdim=True)",
}

POINTWISE = {
    "focal loss": "p = torch.sigmoid({x}); -(1 - p).square() * torch.log(p + {eps})",
    "focal loss of logits": "torch.sigmoid(-{x}) ** 2 * F.softplus(-{x})",
    "Welsch": "1 - torch.exp(-0.5 * {x}.square())",
    "Student's t": "1 / (1 + {x}.square())",
    "logarithm of Student's t": "torch.log(1 + {x}.square() / 2)",
    "Laplace": "torch.exp(-{x}.abs())",
    "radial basis": "torch.exp(-({x} - {w}).square().mean({i}, keepdim=True)) * {x}",
    "Gaussian": "torch.exp(-({x} - {x}.mean({d}, keepdim=True)).square())",
    "Charbonnier": "({x}.square() + {eps}).sqrt()",
    "Geman and McClure": "{x}.square() / (1 + {x}.square())",
    "Huber": "F.smooth_l1_loss({x}, {y}, reduction='none')",
    "Dice": "p = torch.sigmoid({x}); "
    "2 * p * {y} / (p.sum({d}, keepdim=True) + {y}.abs().sum({d}, keepdim=True) + {eps})",
    "Poisson": "torch.exp({x}.clamp(max=5)) - {y} * {x}",
    "odds": "s = torch.sigmoid({x}); s / (1 - s)",
    "logit of a sigmoid": "s = torch.sigmoid({x}).clamp({eps}, 1 - {eps}); torch.log(s / (1 - s))",
    "snake": "{x} + torch.sin({k} * {x}).square() / {k}",
    "snake of channels": "a = {w}.exp(); {x} + torch.sin(a * {x}).square() / a",
    "logarithm": "torch.log(F.relu({x}) + {eps})",
    "softplus by hand": "torch.log(1 + torch.exp({x}))",
    "square root": "({x}.abs() + {eps}).sqrt()",
    "power of 1.7": "{x}.abs().pow(1.7)",
    "power as exp of log": "torch.exp(0.7 * torch.log({x}.abs() + {eps}))",
    "signed root": "torch.sign({x}) * ({x}.abs() + {eps}).sqrt()",
    "reciprocal": "1 / ({x}.abs() + 0.1)",
    "x exp": "{x} * torch.exp(-{x}.square())",
    "logarithm of a sigmoid": "torch.log(torch.sigmoid({x}) + {eps})",
    "polynomial": "{x} ** 3 + 0.5 * {x} ** 2 - {x}",
    "fourth power": "({x} ** 2) ** 2",
    "tanh with a factor": "torch.tanh({k} * {x}) * {w}",
    "tanh by hand": "e = torch.exp(2 * {x}); (e - 1) / (e + 1)",
    "swish by hand": "{x} * torch.sigmoid({k} * {x})",
    "squared ReLU": "F.relu({x}).square()",
    "ReLU that leaves few values": "F.relu({x} - 1.5)",
    "leaky ReLU by hand": "torch.maximum({x}, 0.1 * {x})",
    "soft threshold": "torch.sign({x}) * F.relu({x}.abs() - 0.5)",
    "hypot": "torch.hypot({x}, {y})",
    "atan2": "torch.atan2({x}, {y}.abs() + 0.1)",
    "channels of different sizes": "{x} * ({k} * torch.arange({x}.shape[-1]) - 3).clamp(-4, 2).mul(2.3).exp()",
    "square of a difference": "({x} - {y}).square()",
    "product": "{x} * {y}",
    "quotient": "{x} / ({y}.square() + {eps})",
    "Fourier features": "a = {mix}({x}) * 3; torch.sin(a) + torch.cos(a)",
}

GATES = {
    "squeeze and excitation": "{x} * torch.sigmoid({mix}({x}.mean({p}, keepdim=True)))",
    "GLU": "{mix}({x}) * torch.sigmoid({mix}({x}))",
    "gate of SiLU": "{mix}({x}) * F.silu({mix}({x}))",
    "gate of GELU": "{mix}({x}) * F.gelu({mix}({x}))",
    "bilinear gate": "{mix}({x}) * {mix}({x})",
    "global response norm": "g = {x}.norm(dim={p}, keepdim=True); "
    "{x} * (g / (g.mean({i}, keepdim=True) + {eps})) * {w} + {x}",
    "highway": "g = torch.sigmoid({mix}({x})); g * {x} + (1 - g) * torch.tanh({mix}({x}))",
    "residual": "{x} + F.relu({mix}({x}))",
    "layer scale": "{x} + 1e-4 * {w} * {mix}({x})",
}

OF_IMAGES = {
    "generalised mean": "F.avg_pool2d({x}.clamp(min={eps}).pow(3), 2).pow(1 / 3)",
    "L2 pool": "F.lp_pool2d({x}, 2.0, 2)",
    "soft pool": "e = ({x} / {k}).exp(); F.avg_pool2d(e * {x}, 2) / F.avg_pool2d(e, 2)",
    "local response norm": "F.local_response_norm({x}, 3)",
    "difference to the upsampled": "{x} - F.interpolate(F.avg_pool2d({x}, 2), scale_factor=2.0, mode='bilinear')",
    "token mixer of PoolFormer": "a = F.instance_norm({x}); {x} + {w} * (F.avg_pool2d(a, 3, 1, 1) - a)",
    "block of ConvNeXt": "a = {depthwise}({x}).movedim(1, -1); a = {linear}(F.layer_norm(a, ({c},))); "
    "a = {linear}(F.gelu(a)); {x} + a.movedim(-1, 1)",
    "block of ConvNeXt V2": "a = F.gelu({linear}(F.layer_norm({depthwise}({x}).movedim(1, -1), ({c},)))); "
    "g = a.norm(dim=(1, 2), keepdim=True); a = {linear}(a * (g / (g.mean(-1, keepdim=True) + {eps})) + a); "
    "{x} + a.movedim(-1, 1)",
    "residual block": "a = F.relu({norm}({conv}({x}))); F.relu({norm}({conv}(a)) + {x})",
    "block of DenseNet": "a = torch.cat([{x}, {conv}({x})], 1); {mix2}(F.relu({norm2}(a))) + {mix2}(a)",
    "norm with a residual": "{fused}({mix}({x}), residual={x})",
    "block with a norm first": "{conv}(F.silu({norm}({x}))) + {x}",
    "spatial attention": "{x} * torch.sigmoid({x}.mean(1, keepdim=True) + {x}.amax(1, keepdim=True))",
    "skip": "a = F.interpolate({conv}(F.max_pool2d({x}, 2)), scale_factor=2.0); torch.cat([a, {x}], 1)",
    "attention of positions": "a = {x}.flatten(2); a = F.softmax(a.mT @ a * 0.1, -1) @ a.mT; "
    "{x} + a.mT.view({x}.shape)",
    "attention of channels": "a = F.normalize({x}.flatten(2), dim=-1); "
    "(F.softmax(a @ a.mT * {k}, -1) @ {x}.flatten(2)).view({x}.shape)",
    "unit": "F.leaky_relu({norm}({conv}({x})), 0.1)",
    "crop": "{x}[..., : {x}.shape[-1] // 2]",
    "tokens": "{x}.flatten(2).mT",
}

QKV = "q = {linear}({x}); k = {linear}({x}); v = {linear}({x}); "
OF_TOKENS = {
    "attention by hand": QKV + "F.softmax(q @ k.mT * 0.2, -1) @ v",
    "attention without a scale": QKV + "F.softmax(3 * q @ k.mT, -1) @ v",
    "attention, own softmax": QKV + "e = q @ k.mT; "
    "e = (e - e.amax(-1, keepdim=True)).exp(); e / e.sum(-1, keepdim=True) @ v",
    "attention, exp without a maximum": QKV + "e = (q @ k.mT * 0.2).exp(); e @ v / e.sum(-1, keepdim=True)",
    "attention, squared ReLU": QKV + "F.relu(3 * q @ k.mT).square() / 128 @ v",
    "attention, ReLU shares": QKV + "a = F.relu(q @ k.mT); a / (a.sum(-1, keepdim=True) + {eps}) @ v",
    "attention, sigmoid": QKV + "torch.sigmoid(q @ k.mT - 3) @ v / 8",
    "attention, cosine": QKV + "F.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10, -1) @ v",
    "attention, temperature": QKV + "F.softmax(q @ k.mT * {w}.exp().mean() * 5, -1) @ v",
    "attention, distances": QKV
    + "a = q.square().sum(-1, keepdim=True) - 2 * q @ k.mT + k.square().sum(-1)[..., None, :]; "
    "torch.softmax(-a, -1) @ v",
    "attention, Student's t": QKV + "a = 1 / (1 + (q @ k.mT).square()); a / a.sum(-1, keepdim=True) @ v",
    "attention, linear": QKV + "q = F.elu(q) + 1; k = F.elu(k) + 1; "
    "q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT + {eps})",
    "attention, softmax of both": QKV + "F.softmax(q, -1) @ (F.softmax(k, -2).mT @ v)",
    "attention, norms of queries and keys": QKV + "q = F.layer_norm(q, ({c},)); k = F.rms_norm(k, ({c},)); "
    "F.softmax(q @ k.mT * 0.2, -1) @ v",
    "attention, heads that talk": QKV + "q = q.unflatten(-1, (4, -1)).transpose(-3, -2); "
    "k = k.unflatten(-1, (4, -1)).transpose(-3, -2); v = v.unflatten(-1, (4, -1)).transpose(-3, -2); "
    "a = (q @ k.mT).movedim(-3, -1); a = {talk}(F.softmax({talk}(a), -2)).movedim(-1, -3); "
    "(a @ v).transpose(-3, -2).flatten(-2)",
    "attention of PyTorch": QKV + "F.scaled_dot_product_attention(q, k, v)",
    "attention, rotary": QKV + "a = torch.arange({x}.shape[-2], dtype=torch.float64)[:, None] * 0.1; "
    "b, d = q.chunk(2, -1); q = torch.cat([b * a.cos() - d * a.sin(), d * a.cos() + b * a.sin()], -1); "
    "b, d = k.chunk(2, -1); k = torch.cat([b * a.cos() - d * a.sin(), d * a.cos() + b * a.sin()], -1); "
    "F.softmax(q @ k.mT * 0.2, -1) @ v",
    "rotary":
    "a, b = {linear}({x}).chunk(2, -1); torch.cat([a * b.cos() - b * a.sin(), b * a.cos() + a * b.sin()], -1)",
    "feed-forward": "{x} + {linear}(F.gelu({linear}(F.layer_norm({x}, ({c},)))))",
    "block of rms norms": "{x} + {linear}(F.silu({linear}(F.rms_norm({x}, ({c},)))))",
    "two-dimensional": "{linear}({x}.flatten(0, -2))",
    "skeleton": "a = -F.max_pool2d(-{x}, 3, 1, 1); b = F.relu({x} - F.max_pool2d(a, 3, 1, 1)); b + F.relu(a - b * a)",
    "product of values": "a = {linear}({x}); a @ (a.mT @ {x}) / 128",
    "distances of prototypes": "F.softmax(-({linear}({x}) - {w}).square(), -1)",
}  # fmt: skip

BY_HAND = NORMS | SHARES | POINTWISE | GATES
ACTIVATIONS = (
    "F.relu({x})", "F.relu({x})", "F.relu({x} - 1.5)", "F.leaky_relu({x}, 0.1)", "F.silu({x})", "F.gelu({x})", "",
    "F.relu({x}) * 3",
)  # fmt: skip
IMAGE_NORMS = (
    "nn.BatchNorm2d({n})", "nn.BatchNorm2d({n})", "nn.InstanceNorm2d({n}, affine=True)", "nn.GroupNorm(4, {n})",
    "fusedseg.BatchNormAct({n}, activation='relu')",
    "fusedseg.GroupNormAct(4, {n}, activation='silu')",
)  # fmt: skip
FUSED = ("relu", "leaky_relu", "selu", "silu", "relu6")
TOKEN_NORMS = ("nn.LayerNorm({n})", "nn.RMSNorm({n})")


def name_of(call: Callable[..., Any]) -> str:
    """A function as code."""
    name = call.__name__
    for space, owner in (("F", F), ("torch", torch), ("torch.Tensor", Tensor)):
        if getattr(owner, name, None) is call:
            return f"{space}.{name}"
    return f"{call.__module__}.{name}"


def of_row(row: OpRow) -> list[str]:
    """The pieces of a row: its calls; of a row of ops alone, each op that PyTorch has as a function."""
    calls = {name_of(call): call.__name__ for call in row.calls}
    if not row.calls:
        calls |= {f"torch.{op}": op for op in row.ops if hasattr(torch, op) and "backward" not in op and op[0] != "_"}
    found = [CALLS.get(name, "{f}({x})").replace("{f}", code) for code, name in calls.items()]
    return [code for code in found if code] + [OF_OPS[op] for op in dict.fromkeys((row.name, *row.ops)) if op in OF_OPS]


TABLE = [piece for row in ROWS for piece in of_row(row)]


class Scaled(Log):
    """A log whose modules have parameters of the usual sizes."""

    def module(self, name: str, seed: int, module: torch.nn.Module) -> torch.nn.Module:
        self.modules[name] = scaled(module, seed)
        return module


def added(g: Grower, kind: str, piece: str) -> str | None:
    """Runs and adds the statements of a piece; the name of its result, or None if it does not fit."""
    name = g.frames[-1][-1]
    places, names = _places(g, name), dict[str, str]()

    def renamed(match: re.Match) -> str:
        return names.get(match.group(), match.group())

    for statement in piece.split("; "):
        targets, _, code = statement.rpartition(" = ")
        code = re.sub(r"\{(\w+)\}", lambda match: places[match.group(1)](), code)
        code = re.sub(r"(?<![\w.'])[a-z](?![\w(='])", renamed, code)
        count = max(len(targets.split(", ")), 1)
        if g.step(kind, code, count) is None:
            return None
        names |= zip(targets.split(", "), g.frames[-1][-count:], strict=True)
    return g.frames[-1][-1]


def _places(g: Grower, name: str) -> dict[str, Callable[[], str]]:
    x = g.of(name)
    image = x.dim() == 4
    i, c = (1 if image else -1), x.shape[1 if image else -1]
    n = min(c, 2 * WIDTH)
    positions = "(2, 3)" if image else "-2"

    def module(text: str) -> Callable[[], str]:
        return lambda: g.module(text)

    def leaf(*shape: int) -> Callable[[], str]:
        return lambda: g.leaf(shape, torch.float64, scale=0.3)

    def norm(channels: int) -> Callable[[], str]:
        return lambda: g.module(g.rng.choice(IMAGE_NORMS if image else TOKEN_NORMS).replace("{n}", str(channels)))

    others = [other for other in g.frames[-1][:-1] if other != "t0" and g.of(other).shape == x.shape]
    return {
        "x": lambda: name,
        "y": lambda: g.rng.choice(others) if others and g.chance(0.5) else f"{name}.flip({i})",
        "i": lambda: str(i),
        "d": lambda: g.rng.choice((str(i), str(i), str(i), positions)),
        "p": lambda: positions,
        "c": lambda: str(c),
        "eps": lambda: g.rng.choice(("1e-5", "1e-6", "1e-8", "1e-3")),
        "k": lambda: g.rng.choice(("0.1", "0.5", "2.0", "4.0")),
        "w": leaf(c, 1, 1) if image else leaf(c),
        "one": leaf(1),
        "square": leaf(x.shape[-1], x.shape[-1]),
        "kernel": leaf(c, c, 3, 3),
        "first": module(f"nn.Conv2d({c}, {WIDTH}, 3, padding=1)" if image else f"nn.Linear({c}, {2 * WIDTH})"),
        "mix": module(f"nn.Conv2d({c}, {n}, 1)" if image else f"nn.Linear({c}, {n})"),
        "linear": module(f"nn.Linear({c}, {n})"),
        "conv": module(f"nn.Conv2d({c}, {c}, 3, padding=1)"),
        "depthwise": module(f"nn.Conv2d({c}, {c}, 7, padding=3, groups={c})"),
        "norm": norm(c),
        "norm2": norm(2 * c),
        "mix2": module(f"nn.Conv2d({2 * c}, {n}, 1)"),
        "fused": lambda: g.module(f"fusedseg.BatchNormAct({c}, activation={g.rng.choice(FUSED)!r})"),
        "talk": module("nn.Linear(4, 4)"),
    }


def _unit(g: Grower, layer: str) -> None:
    """A layer, mostly with a norm and an activation behind it."""
    added(g, "unit", layer)
    norm = "{norm}({x})"
    for kind, code in (("norm", norm if g.chance(0.7) else ""), ("activation", g.rng.choice(ACTIVATIONS))):
        if code:
            added(g, kind, code)


def _stem(g: Grower) -> None:
    if len(g.shape) == 3 and g.chance(0.3):
        added(g, "view", "{x}.flatten(0, 1)")
    _unit(g, "{first}({x})")
    if len(g.shape) == 4 and g.chance(0.5):
        _unit(g, "{conv}({x})")


def _chosen(g: Grower, seed: int, place: int) -> str:
    """A piece that fits the last tensor.  A new piece changes few of the programs that have been made before."""
    own = OF_IMAGES if g.of(g.frames[-1][-1]).dim() == 4 else OF_TOKENS
    pieces = g.rng.choice((TABLE, [*BY_HAND.values()], [*BY_HAND.values()], [*own.values()]))
    return max(pieces, key=lambda piece: random.Random(f"{seed} {place} {piece}").random())


def _joined_with(g: Grower, piece: str) -> None:
    """Adds a piece, and sometimes a sum or a product with what it read."""
    before = g.frames[-1][-1]
    if (name := added(g, "piece", piece)) is None:
        g.frames[-1].append(before)
    elif g.chance(0.2) and g.of(before).shape == g.of(name).shape:
        g.step("residual", g.rng.choice((f"{before} + {name}", f"{before} * {name}", f"{name} - 0.5 * {before}")))


def network(seed: int, shape: tuple[int, ...] | None = None, pieces: Sequence[str] = ()) -> Compiled:
    """The network of a seed, or one of given pieces; it is judged with 8 and with 4 bits, and with many inputs."""
    rng = random.Random(f"pieces {seed}")
    torch.manual_seed(0)
    g = Grower(rng.randrange(10**9), lambda g: _stem)
    g.largest, g.most = LARGEST, MOST
    g.log = g.space["log"] = Scaled()
    with growing_network(g, shape or rng.choice((IMAGE, TOKENS))):
        if not pieces:
            _stem(g)
            for place in range(rng.choice((1, 1, 2, 2, 3))):
                _joined_with(g, _chosen(g, seed, place))
            pieces = ["{mix}({x})"] if rng.random() < 0.8 else []
        for piece in pieces:
            added(g, "piece", piece)
    body = tuple(g.setup), tuple(g.stack[0])
    return Compiled(seed, body, g.shape, options={"bits": (8, 4)}, judge=rounded_error, returned=1)
