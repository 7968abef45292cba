"""Max-pooling that keeps one byte per output element: the code of the position of the maximum in its window.

Everything after the codes is linear.  Backward sends dz to the positions that the codes name, and its gradient picks
values from the same positions, so that gradients of any order are right.  Eager calls go through ``MaxPoolFunction``;
under ``torch.compile`` the op ``fusedseg::max_pool`` runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from .. import unfused
from ..at_size import Compared, Rounded, U, checked, exactly
from ..check import HALF, check_dtype, check_input, has_values, is_computed
from ..conv.geometry import per_dimension
from ..double_backward import refuse_batches
from ..layout import FORMATS, dense, layout_of, suggests_channels_last
from ..registry import Result, family, graph_op
from ..self_test.cases import SHAPE, TOLERANCE, image, stock
from . import aten_max_pool
from .windows import Pool

OP = "fusedseg.max_pool"
FAMILY = "pool"
MAX_POSITIONS = 256


def _empty(shape: Sequence[int], rows: bool, like: Tensor, dtype: torch.dtype) -> Tensor:
    fmt = FORMATS[len(shape)] if rows else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=fmt)


def _dense_as(t: Tensor, rows: bool) -> Tensor:
    """``t`` as channels_last (``rows``) or contiguous; it is copied if it has another format."""
    return t.contiguous(memory_format=FORMATS[t.dim()] if rows else torch.contiguous_format)


def _rows(x: Tensor) -> bool:
    """Whether a dense tensor is channels_last and not contiguous as well."""
    return not x.is_contiguous()


def _positions(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """The positions that codes name in a channel, (N, C, windows), which are some position if a code is wrong."""
    index = aten_max_pool.indices(codes.clamp(max=math.prod(pool.kernel) - 1), size, pool)
    return index.clamp_(0, math.prod(size) - 1).flatten(2)


def _forward_results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """A pool copies values.  A code is right if it names a position of the largest value."""
    x, z, codes, rows, pool = before
    for n in (slice(n, n + 1) for n in range(len(x))):
        exact = torch.empty_like(z[n])
        of = None if codes is None else torch.empty_like(codes[n])
        aten_max_pool.forward(x[n], exact, of, rows, pool)
        yield exactly(exact).near("z", z[n])
        if codes is not None and of is not None:
            named = x[n].flatten(2).gather(2, _positions(codes[n], tuple(x.shape[2:]), pool)).view(exact.shape)
            says = exact.isfinite()
            yield Compared("codes", codes[n], of, (named == exact) | ~says, says)


@checked(FAMILY, _forward_results)
def _launch_forward(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    from ...kernels.max_pool import max_pool_fwd

    with _backend.launching(x):
        max_pool_fwd(x, z, codes, rows, pool.kernel, (pool.stride, pool.padding, pool.dilation, 1))


def _backward_results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """Each position adds the gradients of the windows whose maximum it is, in any order."""
    dz, codes, dx, _, pool = before
    size = tuple(dx.shape[2:])
    for n in (slice(n, n + 1) for n in range(len(dx))):
        index, added = _positions(codes[n], size, pool), dz[n].flatten(2).double()
        # Sums into one dimension are deterministic where a program asks for that.
        begins = torch.arange(0, dx[n].numel(), math.prod(size), device=dx.device).view(*index.shape[:2], 1)
        exact, terms = (
            v.new_zeros(dx[n].numel()).index_add_(0, (index + begins).flatten(), v.flatten())
            for v in (added, added.abs())
        )
        yield Rounded(exact, math.prod(pool.kernel) * U * terms).stored(dx.dtype).near("dx", dx[n])


@checked(FAMILY, _backward_results)
def _launch_backward(dz: Tensor, codes: Tensor, dx: Tensor, rows: bool, pool: Pool) -> None:
    from ...kernels.max_pool import max_pool_bwd

    with _backend.launching(dz):
        max_pool_bwd(dz, codes, dx, rows, pool.kernel, (pool.stride, pool.padding, pool.dilation, 1))


def forward(x: Tensor, pool: Pool, coded: bool) -> tuple[Tensor, Tensor | None]:
    """z and, if ``coded``, the codes, both in the memory format of ``x``."""
    x, _ = dense(x)
    rows = _rows(x)
    shape = (*x.shape[:2], *pool.output_size(tuple(x.shape[2:])))
    z = _empty(shape, rows, x, x.dtype)
    codes = _empty(shape, rows, x, torch.uint8) if coded else None
    if is_computed(x, FAMILY):
        run = _launch_forward if _backend.use_triton(x, FAMILY) else aten_max_pool.forward
        run(x, z, codes, rows, pool)
    return z, codes


def _pool(kernel, stride, padding, dilation, ceil_mode) -> Pool:
    return Pool(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), ceil_mode)


def backward(dz: Tensor, codes: Tensor, size: Sequence[int], rows: bool, *window: Any) -> Tensor:
    """dx, with the spatial size ``size``.  ``window`` has the fields of a ``Pool``."""
    pool = _pool(*window)
    dx = _empty((*codes.shape[:2], *size), rows, dz, dz.dtype)
    if is_computed(dx, FAMILY):
        run = _launch_backward if _backend.use_triton(dz, FAMILY) else aten_max_pool.backward
        run(_dense_as(dz, rows), _dense_as(codes, rows), dx, rows, pool)
    return dx


def pick(ddx: Tensor, codes: Tensor, size: Sequence[int], rows: bool, *window: Any) -> Tensor:
    """The transpose of ``backward``: for each window the value of ``ddx`` at the position of its maximum.

    It always runs on aten, because it is rarely needed.
    """
    if ddx.numel() == 0 or not has_values(ddx):
        return _empty(codes.shape, rows, ddx, ddx.dtype)
    return _dense_as(aten_max_pool.pick(ddx, codes, _pool(*window)), rows)


class MaxPoolFunction(torch.autograd.Function):
    """The op in eager mode; it keeps the codes for backward."""

    @staticmethod
    def forward(ctx, x, pool):
        z, codes = forward(x, pool, True)
        # These values come from x, because a result with one position per channel does not tell the layout of x.
        ctx.size, ctx.rows, ctx.pool = tuple(x.shape[2:]), _rows(dense(x)[0]), pool
        ctx.save_for_backward(codes)
        # As in the stock function, a missing gradient of the output gives no gradient of the input.  An optimizer would
        # treat zeros as a gradient.
        ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx, dz):
        if dz is None:
            return None, None
        (codes,) = ctx.saved_tensors
        refuse_batches(OP, dz)
        # If backward itself is differentiated, the op has a gradient.
        run = max_pool_backward_op if torch.is_grad_enabled() else backward
        return run(dz, codes, ctx.size, ctx.rows, *ctx.pool), None


# The fields of a ``Pool`` in the schemas of the ops.
WINDOW = "SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode"


def functional(x, *flat):
    """The functional op: returns z and the codes; the codes are empty unless ``coded``."""
    *window, coded = flat
    z, codes = forward(x, _pool(*window), coded)
    return z, x.new_empty(0, dtype=torch.uint8) if codes is None else codes


def _setup_context(ctx, inputs, output):
    x, *pool, _ = inputs
    _, codes = output
    ctx.mark_non_differentiable(codes)
    ctx.size, ctx.rows, ctx.pool = x.shape[2:], _rows(dense(x)[0]), pool
    ctx.save_for_backward(codes)


def _op_backward(ctx, dz, *unused):
    (codes,) = ctx.saved_tensors
    if not codes.numel() and dz.numel():
        raise RuntimeError(f"{OP}: backward needs codes, and the op was called with coded=False")
    return max_pool_backward_op(dz, codes, ctx.size, ctx.rows, *ctx.pool), *(None,) * 6


def _linear_setup_context(ctx, inputs, output):
    _, codes, ctx.size, ctx.rows, *ctx.pool = inputs
    ctx.save_for_backward(codes)


def _transposed(transpose: Callable, ctx, t):
    (codes,) = ctx.saved_tensors
    return transpose(t, codes, ctx.size, ctx.rows, *ctx.pool), *(None,) * 8


# The fakes are the functions themselves, because they compute nothing for tensors without values.
max_pool_op = graph_op(
    f"max_pool(Tensor x, {WINDOW}, bool coded) -> (Tensor, Tensor)",
    functional,
    gradient=(_op_backward, _setup_context),
    row={"reads": "exact", "positions": True, "eager_keeps_input": True, "layout": "keeps"},
    served=True,
)
# Both ops are linear in their first argument, and each is the transpose of the other.
LINEAR = f"(Tensor t, Tensor codes, SymInt[] size, bool rows, {WINDOW}) -> Tensor"
max_pool_backward_op = graph_op(
    f"max_pool_backward{LINEAR}",
    backward,
    gradient=(lambda ctx, t: _transposed(max_pool_pick_op, ctx, t), _linear_setup_context),
    row={"reads": "interpolates", "cheap": False, "dense": True, "layout": "keeps"},
    served=True,
)
max_pool_pick_op: Any = graph_op(
    f"max_pool_pick{LINEAR}",
    pick,
    gradient=(lambda ctx, t: _transposed(max_pool_backward_op, ctx, t), _linear_setup_context),
    row={"reads": "follows", "cheap": False},
)


def parse_pool(
    op: str,
    dims: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
) -> Pool:
    """The arguments of a pool as a ``Pool``.  Raises ValueError if an argument is out of range."""

    # Without types, which the compiler before PyTorch 2.10 cannot follow in an inner function.
    def parsed(name, value, least):
        if isinstance(value, Sequence) and len(value) == 1:
            value = value[0]
        return per_dimension(op, name, value, dims, least)

    kernel = parsed("kernel_size", kernel_size, 1)
    # As in torch, an empty stride stands for the size of the window.
    steps = kernel if stride is None or (isinstance(stride, Sequence) and not stride) else parsed("stride", stride, 1)
    pool = Pool(kernel, steps, parsed("padding", padding, 0), parsed("dilation", dilation, 1), bool(ceil_mode))
    if any(2 * p > k for p, k in zip(pool.padding, kernel, strict=True)):
        raise ValueError(f"{op}: padding must be at most half of kernel_size {kernel}, got {pool.padding}")
    if math.prod(kernel) > MAX_POSITIONS:
        raise ValueError(
            f"{op}: kernel_size must have at most {MAX_POSITIONS} positions, which one byte can number, got {kernel}; "
            f"use torch.nn.MaxPool{dims}d"
        )
    return pool


def check(op: str, x: Tensor, pool: Pool) -> None:
    """Raises ValueError or TypeError if the pool does not fit ``x``, (N, C, *spatial)."""
    check_dtype(op, "x", x.dtype)
    size = tuple(x.shape[2:])
    if min(x.shape[1:]) < 1:
        raise ValueError(f"{op}: x must not be empty beyond its batch, got {tuple(x.shape)}")
    if min(pool.output_size(size)) < 1:
        raise ValueError(
            f"{op}: kernel_size {pool.kernel} with dilation {pool.dilation} does not fit in x {tuple(x.shape)} with "
            f"padding {pool.padding}"
        )
    kernel, stride, padding, dilation, _ = pool
    for n, count, s, p, d, k in zip(size, pool.output_size(size), stride, padding, dilation, kernel, strict=True):
        # Only a window that begins in the padding can step over all of x.
        if d > 1 and any(-(-(p - o * s) // d) >= k or -(p - o * s) % d >= n for o in range(min(count, -(-p // s)))):
            raise ValueError(
                f"{op}: x {tuple(x.shape)} has no element at the positions of one window of kernel_size {pool.kernel} "
                f"with dilation {pool.dilation} and padding {pool.padding}, so the window has no maximum"
            )


def of_stock(dims: int, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Pool] | None:
    """The argument and the pool that equal PyTorch's pool of ``x`` with these further arguments; None if none do."""
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    named = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, **dict(zip(names, args, strict=False))}
    named |= kwargs
    if named.pop("return_indices", False) or x.dim() != dims + 2 or layout_of(x) is None:
        return None
    try:
        pool = parse_pool("max_pool", dims, **named)
        check("max_pool", x, pool)
    except (TypeError, ValueError):
        # A byte cannot number the positions of this window, or the stock function must raise its own error.
        return None
    # The stock function returns a contiguous result here, for example for some views of a single image.
    return x if x.is_contiguous() or suggests_channels_last(x) else x.contiguous(), pool


def as_autocast(x: Tensor) -> Tensor:
    """``x`` as autocast gives it to the stock function: on a CPU, volumes in half precision become fp32."""
    casts = x.is_cpu and x.dim() == 5 and x.dtype in HALF and torch.is_autocast_enabled("cpu")
    return x.float() if casts else x


def max_pool(x: Tensor, pool: Pool) -> Tensor:
    """The op on a checked argument."""
    x = as_autocast(x)
    if unfused.wanted():
        stock: Callable[..., Tensor] = F.max_pool2d if x.dim() == 4 else F.max_pool3d
        return stock(x, *pool)
    coded = torch.is_grad_enabled() and x.requires_grad
    if torch.compiler.is_compiling():
        return max_pool_op(x, *pool, coded)[0]
    if not coded:
        return forward(x, pool, False)[0]
    return MaxPoolFunction.apply(x, pool)


def pooled(op: str, x: Tensor, pool: Pool) -> Tensor:
    """The op on an unchecked ``x``, (N, C, *spatial) or (C, *spatial)."""
    dims = len(pool.kernel)
    if isinstance(x, Tensor) and x.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"{op}: x must have shape (N, C, *spatial) or (C, *spatial) with {dims} spatial dimensions, "
            f"got {tuple(x.shape)}"
        )
    check_input(op, x)
    batch = x if x.dim() == dims + 2 else x.unsqueeze(0)
    check(op, batch, pool)
    z = max_pool(batch, pool)
    return z if batch is x else z.squeeze(0)


@family(FAMILY)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    from ...kernels.max_pool import max_pool_bwd, max_pool_fwd

    for fmt, kernel, padding in (("contiguous", 2, 0), ("channels_last", 3, 1)):
        x = image(SHAPE, dtype, device, fmt, 0)
        dz = image((*SHAPE[:2], SHAPE[2] // 2, SHAPE[3] // 2), dtype, device, fmt, 1)
        z, dx, rows = torch.empty_like(dz), torch.empty_like(x), fmt == "channels_last"
        codes = torch.empty_like(dz, dtype=torch.uint8)
        z64, dx64 = stock(partial(F.max_pool2d, kernel_size=kernel, stride=2, padding=padding), x, dy=dz)
        geometry = ((2, 2), (padding, padding), (1, 1), 1)
        max_pool_fwd(x, z, codes, rows, (kernel, kernel), geometry)
        max_pool_bwd(dz, codes, dx, rows, (kernel, kernel), geometry)
        # A pool picks values.  Its gradient adds the few windows of a position, and rounds their sum.
        yield Result(f"z ({fmt}, {kernel}x{kernel})", z, z64, 0.0)
        tolerance = 0.0 if kernel == 2 else TOLERANCE[dtype]
        yield Result(f"dx ({fmt}, {kernel}x{kernel})", dx, dx64, tolerance)
