"""Runs the kernels of each family on small tensors, and compares their results with aten in float64.

The self-test at first use and ``fusedseg doctor`` share these checks.  Together the checks launch every kernel: both
memory formats, statistics that one program computes and statistics that several programs share, both forms of the
norm, the convolution in training and in eval mode, the 3x3x3 convolution and the gradient of its input, pools,
interpolations, concatenations, the sums of losses of few and of many classes, and packing.  Two more families are ways
of making calls: launches that are made again without their op, and casts of many tensors in one call.

The references are stock functions in float64 on the CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend, _torch
from .. import together, upsample
from ..ahead import compile_kernels
from ..check import HALF
from ..conv import conv3d
from ..layout import layout_of
from ..low_bit import reference as low_bit_reference
from ..low_bit.spec import lines_of
from ..replay import Allocation, Replay
from ..segmentation.spec import SumsSpec, sizes_of

EPS, MOMENTUM, SLOPE = 1e-5, 0.1, 0.01
FORMATS = {
    "contiguous": torch.contiguous_format, "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}  # fmt: skip
SHAPE = (2, 8, 16, 16)
CONV_SHAPE, CONV_CHANNELS = (2, 32, 8, 8), 64
# Logits of classes that do not fit in one tile.
MANY_CLASSES = (1, 300, 4, 8)
# The largest allowed relative errors.  Those of the norm are what docs/design.md promises.  A kernel for fp64 takes the
# slope as fp32, which rounds it by 2e-8.
NORM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The convolution also rounds its output before the norm.  In fp32 it may use TF32, which cuts off 13 bits.
CONV_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
TF32_TOLERANCE = 5e-3
# Both compute the same codes.  A division that is rounded in another way may change one of them by 1.
LOW_BIT_TOLERANCE = 1e-2
# The calls of a replay that are compared.  The first ones call the op.
REPLAYS = 7
# More parts of statistics than a program merges by itself (MAX_PARTIALS in kernels/launch.py).
PARTS = 18


class Compared(NamedTuple):
    """A result of a kernel, the same result in float64, and the largest allowed relative error."""

    what: str
    found: Tensor
    expected: Tensor
    tolerance: float


class WrongResult(Exception):
    """A kernel ran, and its result is not that of aten."""


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fmt: str, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return values.to(device, dtype, memory_format=FORMATS[fmt])


def _parameters(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight and bias of a norm.  Parameters of mixed precision are fp32."""
    of = torch.float32 if dtype in HALF else dtype
    weight, bias = (torch.linspace(a, a + 1.0, channels, dtype=of, device=device) for a in (0.5, -0.5))
    return weight, bias


def _stock(function: Callable[..., Tensor], *tensors: Tensor, dy: Tensor | None = None) -> tuple[Tensor, ...]:
    """The result of a stock function in float64, and its gradients of all tensors, if ``dy`` is given.

    All is on the CPU: there PyTorch has no op that deterministic algorithms forbid, and autograd needs no other thread,
    which may wait for this test.
    """
    leaves = [t.cpu().double().requires_grad_() for t in tensors]
    with torch.enable_grad():
        y = function(*leaves)
    return y.detach(), *(() if dy is None else torch.autograd.grad(y, leaves, dy.cpu().double()))


def _padded(parts: Tensor) -> Tensor:
    """Parts of statistics or sums, (k, parts, C), with empty parts behind them."""
    return torch.cat([parts, parts.new_zeros(parts.shape[0], PARTS - parts.shape[1], parts.shape[2])], 1)


def _norm_float64(x: Tensor, dz: Tensor, weight: Tensor, bias: Tensor, slope: float) -> dict[str, Tensor]:
    """Forward and backward of BatchNorm and a (leaky) ReLU, and the running statistics, which were zeros."""
    mean, var = torch.zeros(2, x.shape[1], dtype=torch.float64)

    def norm_act(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.leaky_relu(F.batch_norm(x, mean, var, weight, bias, True, MOMENTUM, EPS), slope)

    z, dx, dweight, dbias = _stock(norm_act, x, weight, bias, dy=dz)
    return {"z": z, "dx": dx, "dweight": dweight, "dbias": dbias, "running_mean": mean, "running_var": var}


def _norm_by_kernels(
    x: Tensor, dz: Tensor, weight: Tensor, bias: Tensor, act: tuple[str, float], split: bool
) -> dict[str, Tensor]:
    """The same results from the launchers.  LeakyReLU keeps its output, and ReLU its input.

    ``split`` says that several programs share a channel, and that their statistics are merged by a kernel.
    """
    from ...kernels.norm_act import norm_act_fwd, norm_act_rebuild
    from ...kernels.norm_act_bwd import norm_act_bwd, norm_act_bwd_sums
    from ...kernels.norm_stats import norm_stats

    layout, z = layout_of(x), torch.empty_like(x)
    assert layout is not None
    running = torch.zeros(2, x.shape[1], dtype=weight.dtype, device=x.device)
    mean, rstd, _ = norm_act_fwd(
        x, z, layout, weight, bias, running_mean=running[0], running_var=running[1], training=True,
        momentum=MOMENTUM, eps=EPS, act=act, kept=None, partial=_padded(norm_stats(x, layout)) if split else None,
        batches=torch.zeros((), dtype=torch.int64, device=x.device),
    )  # fmt: skip
    found = {"z": z, "running_mean": running[0], "running_var": running[1]}
    saved, options = z, {"xhat_kept": None, "kept": None, "act": act}
    if act[0] == "relu":
        saved, options["mean"] = x, mean
        found["z rebuilt"] = torch.empty_like(x)
        norm_act_rebuild(x, found["z rebuilt"], layout, weight, bias, mean, rstd, act)
    affine = weight, bias, rstd
    sums = _padded(norm_act_bwd_sums(dz, saved, layout, *affine, **options)) if split else None
    found["dx"], found["dweight"], found["dbias"] = norm_act_bwd(
        dz, saved, layout, *affine, training=True, dparam_dtype=weight.dtype, sums=sums, **options
    )
    # In eval mode statistics are constants, so these gradients are the same for the same statistics.
    _, found["dweight in eval mode"], found["dbias in eval mode"] = norm_act_bwd(
        dz, saved, layout, *affine, training=False, dparam_dtype=weight.dtype, **options
    )
    # Two gradients of z, the second of which is a slice of channels.
    half, wide = dz * 0.5, torch.cat([dz, dz * 0.5], 1)
    wide = wide.contiguous(memory_format=FORMATS["channels_last" if layout.rows else "contiguous"])
    also, pitch = (wide[:, dz.shape[1] :], wide.shape[1]) if layout.rows else (half, layout.C)
    given = (half, saved, layout, *affine)
    found["dx of two gradients"], *_ = norm_act_bwd(
        *given, training=True, dparam_dtype=weight.dtype, also=also, pitch=pitch, **options
    )
    return found


def _norm(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    for fmt, act in (("contiguous", ("leaky_relu", SLOPE)), ("channels_last", ("relu", 0.0))):
        x, dz = (_random(SHAPE, dtype, device, fmt, seed) for seed in (0, 1))
        weight, bias = _parameters(SHAPE[1], dtype, device)
        expected = _norm_float64(x, dz, weight, bias, act[1])
        expected["z rebuilt"] = expected["z"]
        expected |= {f"{name} in eval mode": expected[name] for name in ("dweight", "dbias")}
        expected["dx of two gradients"] = expected["dx"]
        for split in (False, True):
            way = "several programs a channel" if split else "one program a channel"
            for what, found in _norm_by_kernels(x, dz, weight, bias, act, split).items():
                yield Compared(f"{what} ({fmt}, {way})", found, expected[what], NORM_TOLERANCE[dtype])


def _conv(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    from ...kernels.conv_abn import conv_abn_fwd

    C, K = CONV_SHAPE[1], CONV_CHANNELS
    weight, bias = _parameters(K, dtype, device)
    # In fp32 the taps use TF32 where the GPU has it, because "auto" takes this kernel for it.
    taps_tf32 = dtype == torch.float32 and _backend.has_tf32(device)
    for fmt, taps, training, tf32 in (
        ("channels_last", 3, True, taps_tf32),
        ("channels_last", 3, False, taps_tf32),
        ("contiguous", 1, True, False),
    ):
        x = _random(CONV_SHAPE, dtype, device, fmt, 0)
        w = _random((K, C, taps, taps), dtype, device, fmt, 1)
        geometry = ((1, 1), (taps // 2,) * 2, (1, 1), 1)
        (y,) = _stock(lambda x, w, padding=taps // 2: F.conv2d(x, w, padding=padding), x, w)
        running = y.mean((0, 2, 3)), y.var((0, 2, 3))
        norm: dict[str, Any] = {"running_mean": None, "running_var": None}
        if not training:
            norm = {name: t.to(weight) for name, t in zip(norm, running, strict=True)}
        of = F.batch_norm(y, *running, weight.cpu().double(), bias.cpu().double(), training, MOMENTUM, EPS)
        expected = F.leaky_relu(of, SLOPE)
        z = torch.empty(y.shape, dtype=dtype, device=device, memory_format=FORMATS[fmt])
        conv_abn_fwd(
            x, w, z, layout_of(x), layout_of(z), geometry, conv_bias=None, weight=weight, bias=bias, **norm,
            training=training, momentum=MOMENTUM, eps=EPS, act=("leaky_relu", SLOPE), kept=None, tf32=tf32,
        )  # fmt: skip
        mode = "training" if training else "eval mode"
        tolerance = TF32_TOLERANCE if tf32 else CONV_TOLERANCE[dtype]
        yield Compared(f"z ({fmt}, {taps}x{taps}, {mode})", z, expected, tolerance)


def _conv3d(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    # 48 channels take two steps a tap, and leave lanes idle.  The last tile and the last plane are incomplete.
    C, K = 48, 32
    x = _random((2, C, 3, 7, 33), dtype, device, "channels_last_3d", 0)
    weight = _random((K, C, 3, 3, 3), dtype, device, "contiguous", 1)
    bias = _random((K,), dtype, device, "contiguous", 2)
    dy = _random((2, K, 3, 7, 33), dtype, device, "channels_last_3d", 3)
    y64, dx64, *_ = _stock(partial(F.conv3d, padding=1), x, weight, bias, dy=dy)
    yield Compared("y", conv3d.forward(x, weight, bias), y64, NORM_TOLERANCE[dtype])
    yield Compared("dx", conv3d.input_gradient(dy, weight), dx64, NORM_TOLERANCE[dtype])


def _pool(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    from ...kernels.max_pool import max_pool_bwd, max_pool_fwd

    for fmt, kernel, padding in (("contiguous", 2, 0), ("channels_last", 3, 1)):
        x = _random(SHAPE, dtype, device, fmt, 0)
        dz = _random((*SHAPE[:2], SHAPE[2] // 2, SHAPE[3] // 2), dtype, device, fmt, 1)
        z, dx, rows = torch.empty_like(dz), torch.empty_like(x), fmt == "channels_last"
        codes = torch.empty_like(dz, dtype=torch.uint8)
        z64, dx64 = _stock(partial(F.max_pool2d, kernel_size=kernel, stride=2, padding=padding), x, dy=dz)
        geometry = ((2, 2), (padding, padding), (1, 1), 1)
        max_pool_fwd(x, z, codes, rows, (kernel, kernel), geometry)
        max_pool_bwd(dz, codes, dx, rows, (kernel, kernel), geometry)
        # A pool picks values.  Its gradient adds the few windows of a position, and rounds their sum.
        yield Compared(f"z ({fmt}, {kernel}x{kernel})", z, z64, 0.0)
        tolerance = 0.0 if kernel == 2 else NORM_TOLERANCE[dtype]
        yield Compared(f"dx ({fmt}, {kernel}x{kernel})", dx, dx64, tolerance)


def _sums_float64(x: Tensor, labels: Tensor) -> Tensor:
    """The sums of ``segmentation_sums``, from stock functions."""
    log_p = x.flatten(2).log_softmax(1)
    p, y = log_p.exp(), torch.zeros_like(log_p).scatter_(1, labels.flatten(1)[:, None].long(), 1.0)
    return torch.stack([(p * y).sum(2), p.sum(2), y.sum(2), -(log_p * y).sum(2), -log_p.sum(2)])


def _sums(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    from ...kernels.segmentation_sums import segmentation_sums_bwd, segmentation_sums_fwd

    spec = SumsSpec("softmax", "smoothed")
    for fmt, shape in (("contiguous", SHAPE), ("channels_last", SHAPE), ("contiguous", MANY_CLASSES)):
        x = _random(shape, dtype, device, fmt, 0)
        labels = _random(shape, torch.float32, device, fmt, 1).argmax(1).short()
        sizes, dx = sizes_of(x), torch.empty_like(x)
        found = segmentation_sums_fwd(x, labels, None, sizes, spec)
        segmentation_sums_bwd(torch.ones_like(found), x, labels, None, dx, sizes, spec)
        sums, of_logits = _stock(partial(_sums_float64, labels=labels.cpu()), x, dy=torch.ones_like(found))
        what = f"({fmt}, {shape[1]} classes)"
        yield Compared(f"sums {what}", found, sums, NORM_TOLERANCE[found.dtype])
        yield Compared(f"dx {what}", dx, of_logits, NORM_TOLERANCE[dtype])


def _low_bit(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    from ...kernels.low_bit import low_bit_kink, low_bit_pack, low_bit_unpack

    wide, key = torch.promote_types(dtype, torch.float32), 12345
    for fmt, bits in (("contiguous", 8), ("contiguous", 4), ("channels_last", 4)):
        x = _random(SHAPE, dtype, device, fmt, 0)
        kink = torch.linspace(-1.0, 1.0, SHAPE[1], dtype=wide, device=device)
        lines, flat = lines_of(x, "batch"), x.as_strided((x.numel(),), (1,))
        found, expected = torch.empty_like(flat), torch.empty_like(flat)
        low_bit_unpack(*low_bit_pack(flat, lines, bits, key, kink), kink, lines, bits, found)
        low_bit_reference.unpack(low_bit_reference.pack(flat, lines, bits, key, kink), kink, lines, bits, expected)
        yield Compared(f"values ({fmt}, {bits} bits)", found, expected.double(), LOW_BIT_TOLERANCE)
    mean, rstd = kink, kink + 2
    low_bit_kink(mean, rstd, weight=rstd, bias=mean, kink=(found := torch.empty_like(kink)))
    yield Compared("kinks", found, mean.double() - mean.double() / rstd.double().square(), NORM_TOLERANCE[wide])


def _concat(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    from ...kernels.concat import concat

    # Five sources take two launches.
    wide = _random((2, 40, 16, 16), dtype, device, "channels_last", 0)
    for what, channels in (("aligned", (8, 16, 8)), ("odd channels", (3, 8, 1, 4, 5))):
        sources = wide[:, 8 : 8 + sum(channels)].split(channels, dim=1)
        y = _random((2, sum(channels), 16, 16), dtype, device, "channels_last", 1)
        concat(sources, [40] * len(channels), y, y.shape[1])
        # A concatenation copies.
        expected = torch.cat([x.double() for x in sources], 1)
        yield Compared(f"y ({what})", y, expected, 0.0)
        biases = tuple(torch.ones_like(x[0, :, 0, 0]) for x in sources)
        other = torch.empty_like(y)
        concat(sources, [40] * len(channels), other, y.shape[1], biases)
        yield Compared(f"y with biases ({what})", other, expected + 1.0, NORM_TOLERANCE[dtype])


def _upsample(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    for fmt, size, corners in (("contiguous", (32, 32), False), ("channels_last", (32, 32), False),
                               ("channels_last", (21, 35), True)):  # fmt: skip
        linear = upsample.Linear(size, None, corners)
        x = _random(SHAPE, dtype, device, fmt, 0)
        dy = _random((*SHAPE[:2], *size), dtype, device, fmt, 1)
        y, dx = upsample.linear_forward(x, linear), upsample.linear_backward(dy, SHAPE[2:], linear)
        of, tolerance = f"({fmt}, {size[0]}x{size[1]})", NORM_TOLERANCE[dtype]
        y64, dx64 = _stock(partial(F.interpolate, size=size, mode="bilinear", align_corners=corners), x, dy=dy)
        yield Compared(f"y {of}", y, y64, tolerance)
        yield Compared(f"dx {of}", dx, dx64, tolerance)


def _late(values: Tensor) -> Tensor:
    """A tensor that gets its values a millisecond later, on the current stream, and is NaN until then."""
    late = torch.full_like(values, torch.nan)
    if values.is_cuda:
        _torch.cuda_sleep(2_000_000)
    return late.copy_(values)


def _training_step(x: Tensor, dz: Tensor, weight: Tensor, bias: Tensor, running: Tensor, var: Tensor) -> list[Tensor]:
    """Forward and backward of a norm, by launchers, which ask nobody whether they are right."""
    from ...kernels.norm_act import norm_act_fwd
    from ...kernels.norm_act_bwd import norm_act_bwd

    layout, act, z = layout_of(x), ("leaky_relu", SLOPE), torch.empty_like(x)
    _, rstd, _ = norm_act_fwd(
        x, z, layout, weight, bias, running_mean=running, running_var=var, training=True, momentum=MOMENTUM, eps=EPS,
        act=act, kept=None, partial=None, batches=None,
    )  # fmt: skip
    dx, dweight, dbias = norm_act_bwd(
        dz, z, layout, weight, bias, rstd, training=True, dparam_dtype=weight.dtype, xhat_kept=None, kept=None, act=act
    )
    return [z, dx, dweight, dbias]


def _replays(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    """Launches that are made again have the bits of the op, and read tensors where they are, when they have values."""
    from ...kernels.launcher import direct_stream

    again, alive = Replay(_training_step, device), list[Any]()
    weight, bias = _parameters(SHAPE[1], dtype, device)
    for call in range(REPLAYS):
        x, dz = (_random(SHAPE, dtype, device, "channels_last", 2 * call + k) for k in range(2))
        right, found = torch.zeros(2, 2, SHAPE[1], dtype=dtype, device=device)
        wanted = [*_training_step(x, dz, weight, bias, *right), right]
        x, dz = _late(x), _late(dz)
        results = [*again(direct_stream(device.index), x, dz, weight, bias, *found), found]
        # Tensors that stay alive make those of the next call lie elsewhere.
        alive.append((x, dz, results))
        for place, (mine, theirs) in enumerate(zip(results, wanted, strict=True)):
            yield Compared(f"result {place} of call {call}", mine, theirs.double(), 0.0)


def _allocated(forms: tuple[Allocation, ...], device: torch.device) -> list[Tensor]:
    made = together.allocated(forms, device, in_test=True)
    assert made is not None
    return made


def _casts(dtype: torch.dtype, device: torch.device) -> Iterator[Compared]:
    """Casts of many tensors in one call have the bits of casts one by one, and many vectors of zeros are zeros."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.flatten() for t in tensors])

    shapes: list[tuple[int, ...]] = [(n % 7 + 1, 3, 3, 3) for n in range(250)]
    # One is longer than the part that a program of PyTorch's kernel computes.
    shapes += [(65537,), (320, 320), ()]
    for half in HALF:
        given = [_random(shape, dtype, device, "contiguous", seed) for seed, shape in enumerate(shapes)]
        for of in (half, dtype):
            forms = tuple(Allocation(tuple(t.shape), t.stride(), of) for t in given)
            found, wanted = _allocated(forms, device), [t.to(of) for t in given]
            _torch.foreach_copy(found, given)
            yield Compared(f"casts from {given[0].dtype} to {of}", joined(found), joined(wanted).double(), 0.0)
            given = found
    zeros = _allocated(tuple(Allocation((n,), (1,), dtype) for n in range(1, 300)), device)
    _torch.foreach_zero(zeros)
    # An error is relative to what is right, which must not be 0.
    yield Compared("zeros plus 1", joined(zeros) + 1, torch.ones(299 * 150, dtype=torch.float64), 0.0)


Check = Callable[[torch.dtype, torch.device], Iterator[Compared]]
# For each family of kernels, the check, which launches them and yields each result beside its reference.
CHECKS: dict[str, Check] = {
    "norm": _norm, "conv": _conv, "pool": _pool, "upsample": _upsample, "concat": _concat, "sums": _sums,
    "low_bit": _low_bit, "conv3d": _conv3d, "replays": _replays, "casts": _casts,
}  # fmt: skip
# What takes the place of a family that fails, if PyTorch's own ops do not: these families are ways of making calls.
INSTEAD = {"replays": "Every op makes its launches itself", "casts": "Every cast is a call of its own"}
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "conv": tuple(CONV_TOLERANCE), "conv3d": HALF, **dict.fromkeys(INSTEAD, (torch.float32,))
}  # fmt: skip
DTYPES = {name: _DTYPES.get(name, tuple(NORM_TOLERANCE)) for name in CHECKS}


def runs_on(family: str, device: torch.device) -> bool:
    """Whether the ops use a family of kernels on a device."""
    return family != conv3d.FAMILY or conv3d.runs_on(device)


def compile_first(family: str, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels of a check in threads, before the check launches them one after the other."""
    # Kernels of PyTorch alone cast tensors, also where there is no Triton.
    if family != "casts":
        compile_kernels(lambda _: list(CHECKS[family](dtype, device)), (), device)


def compare(family: str, dtype: torch.dtype, device: torch.device) -> float:
    """Runs the check of a family, and returns the largest relative error of a result.

    Raises:
        WrongResult: a result is off by more than its tolerance.
    """
    results = list(CHECKS[family](dtype, device))
    # The results come to the host together, so that it waits for the device once.
    expected = [of.expected.to(of.found.device) for of in results]
    errors = [(of.found.double() - right).norm() / right.norm() for of, right in zip(results, expected, strict=True)]
    for of, error in zip(results, torch.stack(errors).tolist(), strict=True):
        # The condition is `not <=` instead of `>`, because NaN is no agreement either.
        if not error <= of.tolerance:
            raise WrongResult(f"{of.what} is off by {error:.1e} of its size, and {of.tolerance:.0e} is allowed")
    return max(errors).item()
