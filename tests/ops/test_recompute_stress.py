"""Random small networks of stock functions: gradients, outputs and running statistics with and without the scope are
identical to the last bit."""

import random
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedseg.ops.recompute import recompute

SHAPE = (2, 4, 8, 8)


class Parts(nn.Module):
    """What all networks are built of; tensors that pass between steps have ``SHAPE``."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.joins = nn.ModuleDict({str(c): nn.Conv2d(c, 4, 1) for c in (8, 12)})
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4)]
        )
        self.frozen = nn.BatchNorm2d(4).eval()
        self.prelu = nn.PReLU(4)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))


ACTIVATIONS = [
    F.relu,
    lambda t, inplace: F.leaky_relu(t, 0.1, inplace=inplace),
    F.elu,
    F.silu,
    F.mish,
    F.hardswish,
    F.relu6,
    lambda t, inplace: t.relu_() if inplace else t.relu(),
    lambda t, inplace: t.sigmoid_() if inplace else torch.sigmoid(t),
    lambda t, inplace: torch.tanh(t),
    lambda t, inplace: F.gelu(t),
]


def activate(parts, rng, t):
    kind = rng.randrange(len(ACTIVATIONS) + 1)
    if kind == len(ACTIVATIONS) and t.shape[1] == 4:
        return parts.prelu(t)
    return ACTIVATIONS[min(kind, len(ACTIVATIONS) - 1)](t, inplace=rng.random() < 0.5)


def conv(parts, rng, pool):
    return rng.choice(parts.convs)(rng.choice(pool))


def norm_act(parts, rng, pool):
    norm = rng.choice([*parts.norms, parts.frozen])
    return activate(parts, rng, norm(conv(parts, rng, pool)))


def residual(parts, rng, pool):
    t = rng.choice(parts.norms)(conv(parts, rng, pool))
    other = rng.choice(pool)
    how = rng.randrange(4)
    if how == 0:
        t += other
    else:
        t = (t + other, torch.sub(t, other, alpha=2), t * other)[how - 1]
    return F.relu(t, inplace=rng.random() < 0.5)


def joined(parts, rng, pool):
    tensors = rng.choices(pool, k=rng.choice([2, 3]))
    return parts.joins[str(4 * len(tensors))](torch.cat(tensors, dim=1))


def pooled(parts, rng, pool):
    t = rng.choice(pool)
    t = rng.choice([lambda t: F.max_pool2d(t, 2), lambda t: F.max_pool2d(t, 3, 2, 1), lambda t: F.avg_pool2d(t, 2)])(t)
    if rng.random() < 0.5:
        t = activate(parts, rng, rng.choice(parts.norms)(rng.choice(parts.convs)(t)))
    mode = rng.choice(["nearest", "bilinear"])
    return F.interpolate(t, size=SHAPE[2:], mode=mode)


def padded(parts, rng, pool):
    t = F.pad(rng.choice(pool), (1, 1, 1, 1), mode=rng.choice(["constant", "reflect"]))
    return rng.choice(parts.convs)(t)[:, :, 1:-1, 1:-1]


def dropped(parts, rng, pool):
    t = rng.choice(pool)
    return rng.choice([F.dropout, F.dropout2d])(t, 0.3, inplace=rng.random() < 0.2)


def activated(parts, rng, pool):
    """Of a tensor that others may have saved."""
    return activate(parts, rng, rng.choice(pool))


def changed(parts, rng, pool):
    t = rng.choice(pool)
    how = rng.randrange(5)
    if how == 0:
        t.add_(0.5)
    elif how == 1:
        t[:, :2].mul_(0.5)
    elif how == 2:
        with torch.no_grad():
            t.mul_(1.5)
    elif how == 3:
        t = t.detach()
    else:
        # new, so that nobody has saved what no version counts
        t = F.silu(t)
        t.data.mul_(0.5)
    return t


def viewed(parts, rng, pool):
    t = rng.choice(pool)
    how = rng.randrange(4)
    if how == 0:
        # not chunk, whose views autograd does not let be changed in place
        first, second = t[:, :2], t[:, 2:]
        return torch.cat([second.sigmoid(), activate(parts, rng, first)], dim=1)
    if how == 1:
        return t.flip(3).transpose(2, 3).contiguous()
    if how == 2:
        return t.flatten(1).view(SHAPE) * parts.scale
    return t.transpose(2, 3)


def stopped(parts, rng, pool):
    with torch.no_grad():
        t = norm_act(parts, rng, pool)
    return rng.choice(parts.convs)(t)


def checkpointed(parts, rng, pool):
    seed, reentrant = rng.random(), rng.random() < 0.3
    inputs = rng.sample(pool, min(2, len(pool)))

    def run(*tensors):
        inner = random.Random(seed)
        t = norm_act(parts, inner, [*tensors])
        return residual(parts, inner, [*tensors, t])

    # dropout is not among them; the statistics move twice, with and without the scope
    return checkpoint(run, *inputs, use_reentrant=reentrant, preserve_rng_state=False)


STEPS = [conv, norm_act, norm_act, residual, joined, pooled, padded, dropped, activated, changed, viewed, stopped]
STEPS += [checkpointed]


def run(seed, scoped):
    """Everything that a network computes, in forward and two backward passes; None where autograd refuses it."""
    torch.manual_seed(seed)
    parts, x = Parts(), torch.randn(SHAPE, requires_grad=True)
    rng, scopes = random.Random(seed), random.Random(seed)
    pool = [parts.convs[0](x)]
    steps = STEPS
    with ExitStack() as stack:
        for _ in range(rng.randint(4, 14)):
            # entered anywhere, within itself too; and left before the end, after which nothing is written to
            if steps is STEPS and scopes.random() < 0.3:
                stack.enter_context(recompute() if scoped else nullcontext())
            if scopes.random() < 0.05:
                stack.close()
                steps = [conv, joined, padded]
            pool.append(rng.choice(steps)(parts, rng, pool))
            if len(pool) > 4:
                pool.pop(rng.randrange(4))
        out = sum((i + 1) * t.square().mean() for i, t in enumerate(pool))
    wanted = [x, *parts.parameters()]
    results = [out.detach(), *(t.detach().clone() for t in pool)]
    if not out.requires_grad:
        return None
    try:
        for again in (True, False):
            out.backward(retain_graph=again)
            results += [t.grad if t.grad is None else t.grad.clone() for t in wanted]
    except RuntimeError as error:
        if "modified by an inplace" in str(error):
            return None
        raise
    return [*results, *parts.buffers()]


def same(seeds):
    compared = 0
    for seed in seeds:
        plain = run(seed, False)
        if plain is None:
            continue
        inside = run(seed, True)
        assert inside is not None, f"network {seed} raises under the scope"
        for i, (got, expected) in enumerate(zip(inside, plain, strict=True)):
            equal = got is expected is None or (got is not None and torch.equal(got, expected))
            assert equal, f"network {seed} differs in result {i}"
        compared += 1
    return compared


@pytest.mark.usefixtures("one_thread")
def test_forty_networks():
    assert same(range(60)) >= 40


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_thousand_networks():
    assert same(range(1000, 2500)) >= 1000
