"""Networks of a seed, as people write them, for ``fusedseg.convert``: everything in float64."""

import random

import torch

from tests.hunt import blocks, layers, steps
from tests.hunt.blocks import some
from tests.hunt.grow import Grower, Maker, floats, growing_network, picking
from tests.hunt.prelude import LATER
from tests.hunt.program import Network, Step

SHAPES = ((2, 4, 8, 8), (2, 4, 9, 10), (2, 4, 9, 10), (1, 4, 8, 8), (2, 4, 4, 4, 4), (2, 4, 9), (3, 4, 2, 2))
ACTIVATIONS = (
    "nn.ReLU(inplace=True)", "nn.ReLU()", "nn.LeakyReLU(0.1, inplace=True)", "nn.LeakyReLU()", "nn.ELU()", "nn.SiLU()",
    "nn.GELU()", "nn.Mish(inplace=True)", "nn.Hardswish()", "nn.ReLU6(inplace=True)", "nn.Tanh()", "nn.Sigmoid()",
    "nn.PReLU()", "nn.LeakyReLU(0.0)", "nn.Softplus()", "nn.ELU(inplace=True)", "nn.Hardtanh()", "nn.Identity()",
)  # fmt: skip

# Those that have an inverse, so that norms are in place, and two others.
CHAINED = (
    "nn.LeakyReLU(0.1, inplace=True)", "nn.LeakyReLU()", "nn.ELU()", "nn.ReLU()", "nn.SiLU()", "nn.PReLU()",
)  # fmt: skip


@picking(floats(3, 4, 5))
def unit(g: Grower, name: str) -> None:
    """Convolution, norm and activation as modules, in one of the usual orders, some of them shared."""
    rng = g.rng
    n, c = g.of(name).dim() - 2, g.of(name).shape[1]

    def made(expression: str) -> str:
        used = [m for m, module in g.log.modules.items() if type(module).__name__ in expression]
        return rng.choice(used) if used and g.chance(0.2) else g.module(expression)

    kernel, padding = rng.choice(((1, 0), (3, 1)))
    bias = g.chance(0.5)
    out = rng.choice((c, c, 4))
    norms = (f"nn.BatchNorm{n}d({out})", f"nn.BatchNorm{n}d({out})", f"nn.InstanceNorm{n}d({out}, affine=True)",
             f"nn.GroupNorm({2 if out % 2 == 0 else 1}, {out})", f"nn.BatchNorm{n}d({out}, momentum=None)",
             f"nn.BatchNorm{n}d({out}, affine=False)",
             f"nn.InstanceNorm{n}d({out}, track_running_stats=True)")  # fmt: skip
    if len(g.frames) > 1:
        # Inside a checkpoint a fused module moves its running statistics once, and the stock module twice.
        norms = (norms[2], norms[3], f"nn.BatchNorm{n}d({out}, track_running_stats=False)")
    conv = made(f"nn.Conv{n}d({c}, {out}, {kernel}, padding={padding}, bias={bias})")
    norm, act = made(rng.choice(norms)), made(rng.choice(ACTIVATIONS))
    drop = [g.module(f"nn.Dropout({rng.choice((0.0, 0.3))}, inplace={g.chance(0.3)})")] if g.chance(0.2) else []
    if g.chance(0.1):
        drop = [g.module("nn.Identity()")]
    order = rng.choice(
        ([conv, norm, *drop, act],) * 4 + ([conv, act, norm], [norm, act, conv], [conv, norm], [conv, act])
    )
    if g.chance(0.08):
        g.step("mode", f"{norm}.{rng.choice(('eval', 'train'))}()", outs=0)
    for part in order:
        if part == act and g.chance(0.3):
            result = g.step("activation", steps.filled(g, rng.choice(steps.ACTIVATIONS)).replace("{x}", name))
            name = result or name
            continue
        # The result goes to the same variable, as people write it, or to a new one, so that both can be read again.
        name = g.step("unit", f"{part}({name})") or name


@picking(floats(3, 4, 5))
def chain(g: Grower, name: str) -> None:
    """Convolution, norm and activation in one block or one expression: no other step reads what is between them."""
    n, c = g.of(name).dim() - 2, g.of(name).shape[1]
    norms = (f"nn.BatchNorm{n}d(4)", f"nn.InstanceNorm{n}d(4, affine=True)", "nn.GroupNorm(2, 4)")
    conv = f"nn.Conv{n}d({c}, 4, 3, padding=1, bias={g.chance(0.5)})"
    norm, act = g.rng.choice(norms[len(g.frames) > 1 :]), g.rng.choice(CHAINED)
    if g.chance(0.7):
        # ``convert`` serves the call of such a block.
        after = g.rng.choice(("", "", ", nn.Dropout(0.0)", f", nn.Conv{n}d(4, 4, 1)"))
        g.step("unit", f"{g.module(f'nn.Sequential({conv}, {norm}, {act}{after})')}({name})")
        return
    conv, norm, act = g.module(conv), g.module(norm), g.module(act)
    g.step("unit", f"{act}({norm}({conv}({name})))")


def residual(g: Grower) -> None:
    name = g.frames[-1][-1]
    unit(g)
    other = g.frames[-1][-1]
    sums = (f"{name} + {other}", f"operator.iadd({other}, {name})", f"{other}.add_({name})",
            f"torch.add({other}, {name})",
            f"torch.cat([{name}, {other}], 1)", f"{name} * torch.sigmoid({other})")  # fmt: skip
    out = g.step("residual", g.rng.choice(sums))
    if out is not None and g.chance(0.6):
        g.step("activation", f"{g.module(g.rng.choice(ACTIVATIONS))}({out})")


@picking(floats(3, 4, 5))
def preactivated(g: Grower, name: str) -> None:
    """A norm and a shortcut that read one concatenation, as in pre-activation blocks."""
    n, rng = g.of(name).dim() - 2, g.rng
    unit(g)
    other = g.frames[-1][-1]
    joined = g.step("join", f"torch.cat([{name}, {other}], 1)")
    if joined is None:
        return
    c, out = g.of(joined).shape[1], rng.choice((4, 6))
    norms = (f"nn.BatchNorm{n}d({c})", f"nn.InstanceNorm{n}d({c}, affine=True)", f"nn.GroupNorm(1, {c})")
    # The first norm moves running statistics, as in ``unit``.
    parts = (g.module(rng.choice(norms[len(g.frames) > 1 :])), g.module(rng.choice(ACTIVATIONS)))
    branch = joined
    for part in (*parts, g.module(f"nn.Conv{n}d({c}, {out}, 3, padding=1)")):
        branch = g.step("unit", f"{part}({branch})") or branch
    shortcut = g.step("unit", f"{g.module(f'nn.Conv{n}d({c}, {out}, 1, bias=False)')}({joined})")
    g.step("residual", f"{branch} + {shortcut}")


@picking(lambda t: floats(4, 5)(t) and min(t.shape[2:]) > 1)
def heads(g: Grower, name: str) -> None:
    """Two heads at different sizes, the smaller one enlarged and added."""
    n, c = g.of(name).dim() - 2, g.of(name).shape[1]
    low = g.step("pool", f"F.avg_pool{n}d({name}, 2)")
    coarse = low and g.step("unit", f"{g.module(f'nn.Conv{n}d({c}, 3, 1)')}({low})")
    fine = g.step("unit", f"{g.module(f'nn.Conv{n}d({c}, 3, 1)')}({name})")
    if coarse is not None:
        mode = g.rng.choice(("nearest", "bilinear" if n == 2 else "trilinear"))
        large = g.step("interpolate", f"F.interpolate({coarse}, {name}.shape[2:], mode={mode!r})")
        g.step("residual", f"{fine} + {large}")


MAKERS: list[tuple[int, Maker]] = [
    (10, unit), (8, chain), (8, residual), (2, preactivated), (1, heads), (4, steps.activation), (3, steps.binary),
    (2, steps.scalar_step), (3, layers.convolution),
    (3, layers.norm), (1, layers.norm_function), (1, layers.norm_twice), (3, layers.pool), (3, layers.interpolate),
    (2, layers.pad), (1, layers.dropout), (2, steps.view), (4, steps.join), (1, steps.split), (1, steps.reduction),
    (1, steps.product), (1, steps.custom), (1, steps.in_place), (1, blocks.checkpointed), (1, blocks.modes),
]  # fmt: skip


def chosen(g: Grower) -> Maker:
    return g.weighted(MAKERS)


def grown_network(seed: int) -> Network:
    """The network of a seed; it returns its last tensors, side by side."""
    rng = random.Random(f"network {seed}")
    torch.manual_seed(0)
    g = Grower(rng.randrange(10**9), chosen)
    with growing_network(g, rng.choice(SHAPES)), g.watch():
        g.rng.choice((unit, chain))(g)
        some(g, 2, 9)
    outputs = [n for n in g.frames[0] if n != "t0" and g.of(n).is_floating_point() and g.of(n).requires_grad][-3:]
    flat = ", ".join(f"{name}.flatten()" for name in outputs or ["t0"])
    body = (*g.setup, *g.stack[0], Step("return", f"return torch.cat([{flat}])"))
    options: dict = {}
    if rng.random() < 0.4:
        options["later"] = rng.choice(list(LATER)), rng.randrange(1000)
    return Network(seed, (body,), g.shape, options)
