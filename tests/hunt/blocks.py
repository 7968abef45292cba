"""How a program is put together: inputs, blocks (autocast, no_grad, checkpoints), and the loss."""

from tests.hunt import habits, layers, steps
from tests.hunt.grow import HALF, Grower, Maker

DEEPEST = 4


def autocast(g: Grower) -> None:
    dtype = g.rng.choice(("torch.bfloat16", "torch.bfloat16", "torch.float16"))
    options = g.rng.choice(("", "", ", cache_enabled=False", ", enabled=False"))
    with g.block("autocast", f'with torch.autocast("cpu", {dtype}{options}):'):
        some(g, 1, 5)


def modes(g: Grower) -> None:
    """Adds a block in which autograd records less, or in which hooks and modes of other libraries are active."""
    # The hooks keep the layout.  Hooks that return the tensor itself are left out, because autograd then checks no
    # version and eager mode computes with the values that a saved tensor holds at that time.
    copying = "torch.autograd.graph.saved_tensors_hooks(lambda t: copy.deepcopy(t.detach()), lambda t: t)"
    headers = ("with torch.no_grad():", "with torch.no_grad():", "with torch.enable_grad():", "with Quiet():",
               "with torch.set_grad_enabled(False):", f"with {copying}:")  # fmt: skip
    header = g.rng.choice(headers)
    if g.chance(g.rates.odd):
        header = g.rng.choice(("with Spy():", "with torch.inference_mode():"))
    with g.block("mode", header):
        some(g, 1, 3)


def checkpointed(g: Grower) -> None:
    tensors = [n for n in g.frames[-1] if g.of(n).is_floating_point()]
    if not tensors or len(g.frames) > 2:
        return
    arguments = sorted(set(g.rng.choices(tensors[-5:], k=2)))
    with g.function(arguments) as name:
        some(g, 1, 4)
    options = g.rng.choice((
        "use_reentrant=False", "use_reentrant=False", "use_reentrant=True",
        "use_reentrant=False, preserve_rng_state=False", "use_reentrant=True, preserve_rng_state=False",
        "use_reentrant=False, determinism_check='none'",
    ))  # fmt: skip
    result = g.stack[-1][-1].body[-1].code.removeprefix("return ")
    if "=True," in options + "," and not g.of(result).requires_grad and not g.chance(0.1):
        # Such a checkpoint raises an error in backward.
        options = "use_reentrant=False"
    if g.chance(0.15):
        g.step("call", f"{name}({', '.join(arguments)})")
        return
    g.step("checkpoint", f"checkpoint({name}, {', '.join(arguments)}, {options})")


BLOCKS: list[tuple[int, Maker]] = [(2, modes), (3, checkpointed)]
USUAL: list[tuple[int, Maker]] = [
    (12, steps.activation), (10, steps.binary), (6, steps.scalar_step), (8, layers.convolution), (8, layers.norm),
    (3, layers.norm_function), (2, layers.norm_twice), (4, layers.pool), (1, layers.unpool), (4, layers.interpolate),
    (3, layers.pad), (4, layers.dropout), (1, layers.embedding), (6, steps.view), (5, steps.join), (2, steps.split),
    (3, steps.reduction), (3, steps.product), (1, steps.out), (1, steps.complex_step), (2, steps.custom),
    (1, habits.two_outputs), (1, habits.hook), (1, habits.early_backward), (2, habits.hidden_write),
    (1, habits.changed_then_hidden), (1, habits.foreign_memory), (1, habits.parameter_change), (2, habits.mixed_sum),
    (1, habits.shared_memory), (2, habits.broadcast_sum),
]  # fmt: skip
ODD: list[tuple[int, Maker]] = [(4, habits.odd), (2, habits.inference_features)]


def chosen(g: Grower) -> Maker:
    rates = g.rates
    if len(g.stack) <= DEEPEST and g.chance(rates.blocks):
        return g.weighted(BLOCKS)
    if len(g.stack) <= DEEPEST and g.chance(rates.autocast):
        return g.rng.choice((autocast, autocast, autocast, habits.stale_cast))
    if g.chance(rates.mixed * 0.4):
        return steps.cast
    if g.chance(rates.odd):
        return g.weighted(ODD)
    if g.chance(rates.inplace * 0.2):
        return steps.in_place
    return g.weighted(USUAL)


def some(g: Grower, least: int, most: int) -> None:
    for _ in range(g.rng.randint(least, most)):
        g.choose(g)(g)


def grow(g: Grower) -> None:
    """Adds the inputs, the steps, some programs' in a region of autocast, and the loss."""
    x = g.leaf(g.shape, g.dtype, grad=g.chance(0.8))
    g.step("input", g.rng.choice((f"{x}.view_as({x})", f"{x} * 1", f"{x}.view_as({x})")))
    if g.rates.mixed:
        g.step("input", f"{g.leaf(g.shape, g.rng.choice(HALF))}.clone()")
    if g.chance(1.5 * g.rates.autocast):
        with g.block("autocast", 'with torch.autocast("cpu", torch.bfloat16):'):
            body(g)
    else:
        body(g)
    loss(g)


def body(g: Grower) -> None:
    some(g, 4, 14)
    if g.chance(0.5):
        loss(g)


def loss(g: Grower) -> None:
    """Adds the present tensors that require a gradient to the loss."""
    if "loss" not in g.space:
        g.step("loss", "loss = torch.zeros((), dtype=torch.float64)", outs=0)
    names = [n for n in g.frames[0] if g.of(n).requires_grad]
    for name in names[-6:] if g.chance(0.6) else g.rng.sample(names, min(4, len(names))):
        t = g.of(name)
        if t.is_complex():
            continue
        term = g.rng.choice((f"{name}.square().sum()", f"{name}.double().square().sum()", f"({name} * 0.7).sum()",
                             f"{name}.sum()", f"{name}.float().pow(2).sum()",
                             f"F.mse_loss({name}, {name}.detach() + 1)",
                             f"torch.sigmoid({name}).sum()"))  # fmt: skip
        g.step("loss", f"loss = loss + {term}", outs=0)
