"""Which calls count as one kind, so that the comparison of one with PyTorch's ops stands for the others."""

import importlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fusedseg.activation import Activation
from fusedseg.ops import at_size, upsample
from fusedseg.ops.at_size import forms
from fusedseg.ops.layout import FORMATS, pitch_of
from fusedseg.ops.low_bit import graph as low_bit
from fusedseg.ops.low_bit.spec import lines_of
from fusedseg.ops.max_pool.windows import Pool
from fusedseg.ops.norm import exact
from fusedseg.ops.norm.call import BackwardCall, Norm, Operands, Statistics
from fusedseg.ops.norm.statistic import BATCH, INSTANCE, Statistic
from fusedseg.ops.segmentation.spec import SumsSpec, sizes_of
from tests.ops import draws
from tests.ops.test_at_size import LAUNCHERS

HALF, FULL = torch.float16, torch.float32
RELU, SILU = Activation("relu", 0.0), Activation("silu", 0.0)


def image(shape=(2, 8, 4, 6), dtype=FULL, rows=False):
    return torch.empty(shape, dtype=dtype, memory_format=FORMATS[len(shape)] if rows else torch.contiguous_format)


def vector(dtype, C=8):
    return None if dtype is None else torch.empty(C, dtype=dtype)


def has_kept(count):
    return None if count is None else SimpleNamespace(count=count)


def operands(of, weight=FULL, bias=FULL, residual=False, running=None, counts=False):
    x, moved = image(**of), (vector(running), vector(running), vector(torch.long, 1) if counts else None)
    return Operands(x, vector(weight), vector(bias), x if residual else None, None, *moved)


def norm_of(keep="input", act=RELU, eps=1e-5, momentum=0.1, own=True, over=BATCH):
    return Norm(keep, act, eps, momentum, own, over)


def split(options, *names):
    """The options with these names, and the others."""
    return {k: v for k, v in options.items() if k in names}, {k: v for k, v in options.items() if k not in names}


IMAGE, VECTORS = ("shape", "dtype", "rows"), ("weight", "bias", "residual", "running", "counts")


def norm_forward(kept=None, out=False, **options):
    of, options = split(options, *IMAGE)
    vectors, options = split(options, *VECTORS)
    given = operands(of, **vectors)
    return given, norm_of(**options), has_kept(kept), given.x if out else None


def norm_recompute(out=False, **options):
    given, norm, _, out = norm_forward(out=out, **options)
    return given, Statistics(None, given.x), norm, out


def norm_backward(kept=None, into=False, also=None, over_also=False, needs=(True,) * 5, exchange=None, **options):
    given, norm, kept, _ = norm_forward(kept, **options)
    also = also if also is None else image(given.x.shape, given.x.dtype, rows=also)
    of_forward = given, Statistics(None, given.x), norm, kept
    return (BackwardCall(given.x, *of_forward, needs, given.x if into else None, also, over_also, exchange),)


def pool_of(kernel=2, stride=2, padding=0, dilation=1, ceil_mode=False):
    return Pool((kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2, ceil_mode)


def pool_forward(coded=True, **options):
    of, options = split(options, *IMAGE)
    x = image(**of)
    return x, x, x if coded else None, of.get("rows", False), pool_of(**options)


def pool_backward(small=(2, 3), **options):
    of, options = split(options, *IMAGE)
    dx = image(**of)
    return image((*dx.shape[:2], *small), dx.dtype), None, dx, of.get("rows", False), pool_of(**options)


def linear(size=(8, 12), factors=None, corners=False):
    return upsample.Linear(size, factors, corners)


def upsample_forward(**options):
    of, options = split(options, *IMAGE)
    return image(**of), linear(**options)


def upsample_backward(small=(2, 3), **options):
    x, of = upsample_forward(**options)
    return x, small, of


def sources(channels=(8, 8), dtype=FULL, gap=0, biases=(None, FULL), shape=(2, 4, 6)):
    N, *spatial = shape
    tensors = [image((N, C + gap, *spatial), dtype, rows=True)[:, :C] for C in channels]
    y = image((N, sum(channels), *spatial), dtype, rows=True)
    return y, tensors, tuple(channels), tuple(pitch_of(x) for x in tensors), [vector(of, 4) for of in biases]


def packed(bits=8, kink=None, unit="", shape=(2, 8, 8, 8), **of):
    x = image(shape, **of)
    return x.flatten(), lines_of(x, unit), bits, 0, vector(kink and FULL, kink)


def unpacked(**options):
    flat, lines, bits, _, kink = packed(**options)
    return flat, None, kink, lines, bits


def kinks(count=16, statistics=16, dtype=FULL, weight=FULL, bias=FULL, channels=16):
    mean = vector(dtype, statistics)
    return mean, mean, vector(weight, channels), vector(bias, channels), vector(FULL, count)


def spec_of(**options):
    return SumsSpec(**{"probability": "softmax", "likelihood": "softmax", **options})


def sums_forward(target=torch.long, target_rows=False, mask=None, dense=False, **options):
    of, options = split(options, *IMAGE)
    x, spec = image(**of), spec_of(dense=dense or target_rows, **options)
    N, K, *spatial = x.shape
    target = image((N, K if spec.dense else 1, *spatial), target, rows=target_rows)
    mask = None if mask is None else torch.empty((N, *spatial), dtype=mask)
    return x, target, mask, sizes_of(x), spec


def sums_backward(**options):
    return *sums_forward(**options), None, None


def labelled(labels=torch.long, **of):
    x = image(**of)
    return x, torch.empty(len(x), x[0, 0].numel(), dtype=labels), sizes_of(x)


# The same number of values; an odd one; other strides of the same shape.
IMAGES = {
    "shape": [(2, 8, 6, 4), (4, 4, 4, 6), (1, 16, 4, 6), (2, 8, 3, 6), (2, 8, 2, 4, 3)], "dtype": [HALF, torch.float64],
    "rows": [True],
}  # fmt: skip
NORMS = {
    **IMAGES, "weight": [HALF, None], "bias": [HALF, None], "residual": [True], "keep": ["output"], "act": [SILU],
    "eps": [1e-3], "own": [False], "over": [INSTANCE, Statistic(True, 2), Statistic(True, 4)],
}  # fmt: skip
POOLS = {**IMAGES, "kernel": [3], "stride": [1], "padding": [1], "dilation": [2], "ceil_mode": [True]}
PACKED = {
    "shape": [(2, 8, 8, 9), (4, 4, 16, 16)], "dtype": [HALF], "bits": [4, 2], "kink": [8, 16], "rows": [True],
}  # fmt: skip
SPECS = {
    **IMAGES, "probability": ["sigmoid"], "likelihood": ["none"], "ignore": [0],
    "squared": [True], "minimum": [True], "dense": [True], "gamma": [2.0], "target": [torch.uint8, FULL],
    "target_rows": [True], "mask": [FULL, torch.bool],
}  # fmt: skip
# For each function that launches kernels the kind of its calls, how a call is made, and what a call may have otherwise.
KINDS = {
    "norm": (exact.forward_kind, norm_forward, NORMS | {
        "running": [FULL, HALF], "counts": [True], "kept": [1, 2, 4, 5], "out": [True]}),
    "norm again": (exact.recompute_kind, norm_recompute, NORMS | {"out": [True]}),
    # It reads rstd, and no eps.
    "gradient of a norm": (exact.backward_kind, norm_backward, {k: v for k, v in NORMS.items() if k != "eps"} | {
        "kept": [1, 2, 4, 5], "into": [True], "also": [False, True], "over_also": [True], "needs": [(False,) * 5],
        "exchange": ["sums"]}),
    "pool": (forms, pool_forward, POOLS | {"coded": [False]}),
    "gradient of a pool": (forms, pool_backward, POOLS | {"small": [(3, 3)]}),
    "upsampling": (forms, upsample_forward, IMAGES | {
        "size": [(12, 8)], "factors": [(2.0, 2.0)], "corners": [True]}),
    "gradient of upsampling": (forms, upsample_backward, IMAGES | {
        "size": [(12, 8)], "factors": [(2.0, 2.0)], "corners": [True], "small": [(3, 2)]}),
    "concatenation": (forms, sources, {
        "channels": [(4, 12), (12, 4), (16,), (4, 4, 8)], "dtype": [HALF], "gap": [8], "shape": [(2, 6, 4), (1, 8, 6)],
        "biases": [(), (None, None), (FULL, None), (FULL, FULL), (None, HALF)]}),
    "packing": (low_bit._pack_kind, packed, PACKED),
    "unpacking": (forms, unpacked, PACKED),
    "kinks": (forms, kinks, {
        "count": [32], "statistics": [4], "dtype": [torch.float64], "weight": [HALF, None], "bias": [HALF, None],
        "channels": [8]}),
    "sums": (forms, sums_forward, SPECS),
    "gradient of sums": (forms, sums_backward, SPECS),
    "moments": (forms, lambda **of: (image(**of),), IMAGES),
    "labels": (forms, labelled, IMAGES | {"labels": [torch.uint8]}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_call_with_another_option_is_of_another_kind(name):
    """A wrong hit would let a kernel go unseen: kinds did not have the dtype of a bias of a concatenation, the strides
    of a target, the channels of kinks, and whether a norm counts batches.
    """
    kind, call, others = KINDS[name]
    keys = {"": kind(*call())}
    for option, values in others.items():
        for value in values:
            keys[f"{option}={value}"] = kind(*call(**{option: value}))
    by_key = {}
    for of, key in keys.items():
        by_key.setdefault(key, []).append(of)
    assert [alike for alike in by_key.values() if len(alike) > 1] == []
    # Other tensors with the same options.
    assert kind(*call()) == keys[""]


def test_every_check_is_tested():
    """A new check needs a row of ``KINDS``, random calls in ``draws.py``, and a wrong kernel in ``test_at_size.py``."""
    importlib.import_module("fusedseg.ops.norm.triton")
    kinds = [kind for kind, _, _ in KINDS.values()]
    assert Counter(check.kind for check in at_size._checks) == Counter(kinds)
    families = {check.family for check in at_size._checks}
    assert families == {*draws.FAMILIES} == {family for *_, family in LAUNCHERS.values()}


def test_what_every_step_changes_makes_no_new_kind():
    """The momentum of a cumulative average, and more kept channels than code depends on."""
    assert exact.forward_kind(*norm_forward(momentum=0.5)) == exact.forward_kind(*norm_forward(momentum=0.1))
    assert exact.forward_kind(*norm_forward(kept=7)) == exact.forward_kind(*norm_forward(kept=6))


def test_kinds_know_the_kept_channels_that_code_depends_on():
    pytest.importorskip("triton")
    from fusedseg.kernels.launch import MAX_COLUMNS

    assert exact.MANY == MAX_COLUMNS + 1
