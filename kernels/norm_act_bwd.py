"""Backward of z = phi(y), y = weight * xhat + bias [+ residual], xhat = (x - mean) * rstd.

Beside rstd, weight, bias and the residual (if there is one), one tensor of the size of x is kept, which KEEP names:

    "output"   z, which gives y = phi^-1(z) and xhat = (y - bias [- residual]) / weight; and xhat of the kept channels,
               which also gives their y to phi' of elu and selu
    "input"    x, which gives xhat and y; and mean

With g = dz * phi'(y) and m values per statistics group (STAT of ``kernels/tile.py``):

    s1 = sum(g)          s2 = sum(g * xhat)            per channel of a statistics group
    dbias = sum(s1)      dweight = sum(s2)             per channel, over samples with statistics of their own
    dx = weight * rstd * (g - s1 / m - xhat * s2 / m)
    dx = weight * rstd * g                             running statistics
    dresidual = g

For a group of channels, dx = rstd * (weight * g - t1 / m - xhat * t2 / m), where t1 and t2 are the sums of
weight * s1 and weight * s2 over the group.

As in forward, there are two launches: the first computes sums, the second applies them.  A single launch does both if a
slab fits on chip.  With two launches and a residual, KEEP "output" reads the residual in both launches, and writes g in
the second.  KEEP "input" needs only x and g for dx, so the first launch writes g, and the second reads it in the dtype
of dresidual.  The first launch leaves sums per channel, which may be changed (``sums``) before the second applies them.

Where z has two readers, its gradient is dz + also, and the kernels add them while they read: a sum in memory would be
two passes more.  In rows ``also`` may be a slice of the channels of a wider tensor, whose rows are P apart.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from .activation import act_grad, act_grad_of_input, act_inverse
from .launch import MAX_COLUMNS, ONCHIP_BWD, acc_dtype, most_registers, onchip_blocks, split_blocks, vector_of
from .launcher import Launcher, plan
from .norm_act import Norm, load_affine, load_channel, load_slot
from .norm_stats import COUNTS, Parts, few, load_sums, merged, parts_tile
from .tile import (
    Kept,
    Shape,
    aligned_sizes,
    as_rows,
    channel_sum,
    channels_of,
    folded,
    group_sum,
    kept_offsets,
    slab_offsets,
    tile_count,
    tile_offsets,
    tile_start,
)

# The large tensors that backward reads; P is the pitch of ``also`` in rows, or None if it is C.
Inputs = namedtuple("Inputs", "saved_ptr dz_ptr also_ptr residual_ptr P")
# What backward makes of them.  FEW is the number of kept channels if ``with_columns`` reads them, and otherwise 0.
How = namedtuple("How", "KEEP FEW ACT PARAM CLAMP ACC ALIGN")


@triton.jit
def is_lost(w, b, HAS_RESIDUAL: tl.constexpr, CLAMP: tl.constexpr):
    """Whether rounding y takes all of xhat, so that xhat counts as 0.  Such channels are kept, once they are known.

    A list of kept channels may be a step older than the parameters.  fusedseg/ops/norm/kept.py has the same formula.
    """
    size = tl.abs(b)
    if HAS_RESIDUAL:
        size = tl.maximum(size, 1.0)
    # CLAMP is an eighth of the dtype's epsilon.
    return tl.abs(w) < tl.maximum(size * (8 * CLAMP), 2.0**-112)


@triton.jit
def with_columns(xhat, kept, tile, sizes, SHAPE, FEW: tl.constexpr):
    """xhat of a tile of rows with that of the FEW kept channels.

    All threads of a row load the same few values.  An address for each element of the tile would take 100 registers.
    """
    n0, _ = tile_start(tile.j, sizes, SHAPE)
    n = n0 + tl.arange(0, SHAPE.BLOCK_N)[:, None]
    for k in tl.static_range(FEW):
        exists = n < sizes.N
        column = tl.load(kept.ptr + (tl.cast(tile.i, tl.int64) * sizes.N + n) * FEW + k, mask=exists, other=0.0)
        xhat = tl.where(kept.slot == k, column.to(xhat.dtype), xhat)
    return xhat


@triton.jit
def also_offsets(inputs, tile, at, sizes, SHAPE, ALIGN: tl.constexpr):
    """The offsets of a tile in ``also``; ALIGN divides its pitch P, or in planes the number of channels."""
    offs = tile.offs
    if inputs.also_ptr is not None and inputs.P is not None and SHAPE.ROWS:
        wide = aligned_sizes(sizes.N, inputs.P, sizes.S, True, ALIGN)
        offs = tile_offsets(tile.j, at, wide, SHAPE, True).offs
    return offs


@triton.jit
def grad_and_xhat(inputs, tile, at, norm, kept, sizes, SHAPE, HOW, EVICT: tl.constexpr):
    """g and xhat of one tile; masked values are 0."""
    ACC: tl.constexpr = HOW.ACC
    also_offs = also_offsets(inputs, tile, at, sizes, SHAPE, HOW.ALIGN)
    saved = tl.load(inputs.saved_ptr + tile.offs, mask=tile.mask, other=0.0, eviction_policy=EVICT).to(ACC)
    dz = tl.load(inputs.dz_ptr + tile.offs, mask=tile.mask, other=0.0, eviction_policy=EVICT).to(ACC)
    if inputs.also_ptr is not None:
        dz += tl.load(inputs.also_ptr + also_offs, mask=tile.mask, other=0.0, eviction_policy=EVICT).to(ACC)
    w = norm.weight
    shift = norm.bias
    if inputs.residual_ptr is not None:
        shift = norm.bias + tl.load(inputs.residual_ptr + tile.offs, mask=tile.mask, other=0.0).to(ACC)
    if HOW.KEEP == "input":
        xhat = tl.where(tile.mask, (saved - norm.mean) * norm.rstd, 0.0)
        g = act_grad_of_input(dz, xhat * w + shift, HOW.ACT, HOW.PARAM)
    else:
        lost = is_lost(w, norm.bias, inputs.residual_ptr is not None, HOW.CLAMP)
        inverse = tl.where(lost, 0.0, 1.0 / tl.where(lost, 1.0, w))
        y = act_inverse(saved, HOW.ACT, HOW.PARAM, HOW.CLAMP)
        xhat = tl.where(tile.mask, (y - shift) * inverse, 0.0)
        if kept.ptr is not None:
            if HOW.FEW > 0:
                xhat = with_columns(xhat, kept, tile, sizes, SHAPE, HOW.FEW)
            else:
                mask = tile.mask & (kept.slot >= 0)
                side = kept_offsets(tile, kept, sizes, SHAPE)
                xhat = tl.where(mask, tl.load(kept.ptr + side, mask=mask, other=0.0).to(ACC), xhat)
        g = act_grad(dz, saved, HOW.ACT, HOW.PARAM)
        if kept.ptr is not None and (HOW.ACT == "elu" or HOW.ACT == "selu"):
            # Near the limit of z, rounding takes the digits of phi'(y) = z + p too.  The sign of z decides on which
            # side of the kink a value is.
            y = tl.minimum(xhat * w + shift, 0.0)
            g = tl.where((kept.slot >= 0) & (saved < 0), act_grad_of_input(dz, y, HOW.ACT, HOW.PARAM), g)
    return g, xhat


@triton.jit
def grad_of_input(g, xhat, s1, s2, w, rstd, STAT: tl.constexpr):
    """dx from g and xhat; s1 and s2 are means over the statistics group."""
    if STAT == "group":
        dx = (g * w - s1 - xhat * s2) * rstd
    else:
        dx = (g - s1 - xhat * s2) * (w * rstd)
    return dx


@triton.jit
def store_grads(dx_ptr, dresidual_ptr, tile, dx, g, EVICT: tl.constexpr):
    tl.store(dx_ptr + tile.offs, dx.to(dx_ptr.dtype.element_ty), mask=tile.mask, eviction_policy=EVICT)
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + tile.offs, g.to(dresidual_ptr.dtype.element_ty), mask=tile.mask)


@triton.jit
def store_dparams(dweight_ptr, dbias_ptr, s1, s2, u, valid):
    if dweight_ptr is not None:
        tl.store(dbias_ptr + u, s1.to(dbias_ptr.dtype.element_ty), mask=valid)
        tl.store(dweight_ptr + u, s2.to(dweight_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def norm_act_bwd_reduce_kernel(saved_ptr, dz_ptr, also_ptr, residual_ptr, dx_ptr, dresidual_ptr, partial_ptr,
                               weight_ptr, bias_ptr, mean_ptr, rstd_ptr, kept_ptr, slot_ptr, I, N, C, S, K, P,
                               tiles_per_split, splits, KEEP: tl.constexpr, FEW: tl.constexpr, D: tl.constexpr,
                               ACT: tl.constexpr, PARAM: tl.constexpr,
                               CLAMP: tl.constexpr, ACC: tl.constexpr, STAT: tl.constexpr, ALIGN: tl.constexpr,
                               ROWS: tl.constexpr,
                               BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr,
                               WHOLE: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """Leaves the sums of g and g * xhat of one split, per channel.

    With running statistics (dx_ptr is given) dx needs no sums, and is written here.
    """
    sizes = aligned_sizes(N, C, S, ROWS, ALIGN)
    SHAPE: tl.constexpr = Shape(STAT, ROWS, BLOCK_N, BLOCK_L)
    HOW: tl.constexpr = How(KEEP, FEW, ACT, PARAM, CLAMP, ACC, ALIGN)
    inputs = Inputs(saved_ptr, dz_ptr, also_ptr, residual_ptr, P)
    split = tl.program_id(1)
    at = channels_of(tl.program_id(0), sizes, SHAPE)
    u = at.i * sizes.C + at.c
    w, b = load_affine(weight_ptr, bias_ptr, at.c, at.valid, ACC)
    mean = load_channel(mean_ptr, u // D, at.valid, 0.0, ACC)
    rstd = load_channel(rstd_ptr, u // D, at.valid, 0.0, ACC)
    norm = Norm(mean, rstd, w, b)
    kept = Kept(kept_ptr, load_slot(slot_ptr, at.c, at.valid), K)
    scale = w * rstd

    s1 = tl.zeros((1, BLOCK_N * BLOCK_L // FOLD), ACC)
    s2 = tl.zeros((1, BLOCK_N * BLOCK_L // FOLD), ACC)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tile_count(sizes, SHAPE))
    for j in tl.range(first, last, num_stages=STAGES):
        tile = tile_offsets(j, at, sizes, SHAPE, WHOLE)
        g, xhat = grad_and_xhat(inputs, tile, at, norm, kept, sizes, SHAPE, HOW, EVICT)
        s1 += tl.sum(folded(g, FOLD), axis=0, keep_dims=True)
        s2 += tl.sum(folded(g * xhat, FOLD), axis=0, keep_dims=True)
        if dx_ptr is not None:
            store_grads(dx_ptr, dresidual_ptr, tile, g * scale, g, "")
        elif dresidual_ptr is not None:
            tl.store(dresidual_ptr + tile.offs, g.to(dresidual_ptr.dtype.element_ty), mask=tile.mask)
    if ROWS:
        s1, s2 = as_rows(s1, BLOCK_L), as_rows(s2, BLOCK_L)
    U = I * sizes.C
    tl.store(partial_ptr + split * U + u, channel_sum(s1, "batch", ROWS), mask=at.valid)
    tl.store(partial_ptr + (splits + split) * U + u, channel_sum(s2, "batch", ROWS), mask=at.valid)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def norm_act_bwd_apply_kernel(saved_ptr, dz_ptr, also_ptr, residual_ptr, dx_ptr, dresidual_ptr, partial_ptr, weight_ptr,
                              bias_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, kept_ptr, slot_ptr,
                              I, N, C, S, K, P, tiles_per_split, partials, KEEP: tl.constexpr, FEW: tl.constexpr,
                              D: tl.constexpr, ACT: tl.constexpr,
                              PARAM: tl.constexpr, CLAMP: tl.constexpr, ACC: tl.constexpr, STAT: tl.constexpr,
                              ALIGN: tl.constexpr,
                              ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr,
                              WHOLE: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
                              BLOCK_P: tl.constexpr):  # fmt: skip
    sizes = aligned_sizes(N, C, S, ROWS, ALIGN)
    SHAPE: tl.constexpr = Shape(STAT, ROWS, BLOCK_N, BLOCK_L)
    HOW: tl.constexpr = How(KEEP, FEW, ACT, PARAM, CLAMP, ACC, ALIGN)
    inputs = Inputs(saved_ptr, dz_ptr, also_ptr, residual_ptr, P)
    split = tl.num_programs(1) - 1 - tl.program_id(1)
    at = channels_of(tl.num_programs(0) - 1 - tl.program_id(0), sizes, SHAPE)
    u = (at.i * sizes.C + at.c) // D
    w, b = load_affine(weight_ptr, bias_ptr, at.c, at.valid, ACC)
    mean = load_channel(mean_ptr, u, at.valid, 0.0, ACC)
    rstd = load_channel(rstd_ptr, u, at.valid, 0.0, ACC)
    norm = Norm(mean, rstd, w, b)
    kept = Kept(kept_ptr, load_slot(slot_ptr, at.c, at.valid), K)
    s1, s2 = load_sums(Parts(partial_ptr, partials, I * sizes.C // D, BLOCK_P), u, at.valid, ROWS)
    if split == 0:
        store_dparams(dweight_ptr, dbias_ptr, s1, s2, u, at.valid)
    # The sums of a group of channels were multiplied by the weight when they were merged.
    m = tl.cast(sizes.N, ACC) * sizes.S * D
    s1 /= m
    s2 /= m

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tile_count(sizes, SHAPE))
    for k in tl.range(last - first, num_stages=STAGES):
        tile = tile_offsets(last - 1 - k, at, sizes, SHAPE, WHOLE)
        g, xhat = grad_and_xhat(inputs, tile, at, norm, kept, sizes, SHAPE, HOW, "")
        dx = grad_of_input(g, xhat, s1, s2, w, rstd, STAT)
        store_grads(dx_ptr, dresidual_ptr, tile, dx, g, EVICT)


@triton.jit
def norm_act_bwd_onchip_kernel(saved_ptr, dz_ptr, also_ptr, residual_ptr, dx_ptr, dresidual_ptr, weight_ptr, bias_ptr,
                               mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, kept_ptr, slot_ptr, I, N, C, S, K,
                               KEEP: tl.constexpr, FEW: tl.constexpr, D: tl.constexpr, ACT: tl.constexpr,
                               PARAM: tl.constexpr,
                               CLAMP: tl.constexpr, ACC: tl.constexpr, STAT: tl.constexpr, ALIGN: tl.constexpr,
                               ROWS: tl.constexpr,
                               BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    sizes = aligned_sizes(N, C, S, ROWS, ALIGN)
    SHAPE: tl.constexpr = Shape(STAT, ROWS, BLOCK_N, BLOCK_L)
    at, tile = slab_offsets(tl.program_id(0), I, D, sizes, SHAPE)
    u = at.i * sizes.C + at.c
    w, b = load_affine(weight_ptr, bias_ptr, at.c, at.valid, ACC)
    mean = load_channel(mean_ptr, u // D, at.valid, 0.0, ACC)
    rstd = mean
    if KEEP == "input":
        rstd = load_channel(rstd_ptr, u // D, at.valid, 0.0, ACC)
    norm = Norm(mean, rstd, w, b)
    kept = Kept(kept_ptr, load_slot(slot_ptr, at.c, at.valid), K)
    HOW: tl.constexpr = How(KEEP, FEW, ACT, PARAM, CLAMP, ACC, ALIGN)
    inputs = Inputs(saved_ptr, dz_ptr, also_ptr, residual_ptr, None)
    g, xhat = grad_and_xhat(inputs, tile, at, norm, kept, sizes, SHAPE, HOW, "")
    s1 = channel_sum(g, STAT, ROWS)
    s2 = channel_sum(g * xhat, STAT, ROWS)
    store_dparams(dweight_ptr, dbias_ptr, s1, s2, u, at.valid)
    m = tl.cast(sizes.N, ACC) * sizes.S * D
    # They are loaded here, the weight again, because fewer registers are in use at this point.
    w = load_channel(weight_ptr, at.c, at.valid, 1.0, ACC)
    rstd = load_channel(rstd_ptr, u // D, at.valid, 0.0, ACC)
    if STAT == "group":
        s1 = group_sum(s1 * w)
        s2 = group_sum(s2 * w)
    s1 /= m
    s2 /= m
    store_grads(dx_ptr, dresidual_ptr, tile, grad_of_input(g, xhat, s1, s2, w, rstd, STAT), g, "")


@triton.jit(do_not_specialize_on_alignment=["rows"])
def norm_over_samples_kernel(sums_ptr, dweight_ptr, dbias_ptr, rows, C, BLOCK_R: tl.constexpr,
                             BLOCK_C: tl.constexpr):  # fmt: skip
    """dbias and dweight, (C,), from the sums of g and g * xhat, (2, rows, C), added in a fixed order."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    r = tl.arange(0, BLOCK_R)[:, None]
    s1 = tl.zeros((1, BLOCK_C), sums_ptr.dtype.element_ty)
    s2 = tl.zeros((1, BLOCK_C), sums_ptr.dtype.element_ty)
    for first in range(0, rows, BLOCK_R):
        at = sums_ptr + (first + r) * C + c
        mask = (first + r < rows) & (c < C)
        s1 += tl.sum(tl.load(at, mask=mask, other=0.0), axis=0, keep_dims=True)
        s2 += tl.sum(tl.load(at + rows * C, mask=mask, other=0.0), axis=0, keep_dims=True)
    store_dparams(dweight_ptr, dbias_ptr, s1, s2, c, c < C)


@plan
def over_samples_plan(rows, C):
    # One tile for all numbers of rows, so that one kernel is compiled.
    constants = {"BLOCK_R": 64, "BLOCK_C": 16, "num_warps": 2}
    return Launcher(norm_over_samples_kernel, (triton.cdiv(C, 16),), (rows, C), constants)


def over_samples(sums, layout, dtype):
    """dweight and dbias, from the sums of g and g * xhat, (2, parts, I C), in one launch; None if ``dtype`` is None."""
    if dtype is None:
        return None, None
    dweight, dbias = (torch.empty(layout.C, dtype=dtype, device=sums.device) for _ in range(2))
    over_samples_plan(sums.numel() // (2 * layout.C), layout.C)((sums, dweight, dbias))
    return dweight, dbias


def constants_of(keep, dtype, layout, act, K):
    name, param = act
    # This is the middle of the values that round to -1.  Its distance from -1 is a quarter of the spacing of numbers in
    # [0.5, 1).
    clamp = torch.finfo(dtype).eps / 8
    shape = {"D": layout.D, "ACT": name, "PARAM": param, "CLAMP": clamp, "ACC": acc_dtype(dtype)}
    few = K if layout.rows and K <= MAX_COLUMNS else 0
    return shape | {"KEEP": keep, "FEW": few}


@plan
def onchip_plan(keep, dtype, layout, act, K):
    """The launcher that reads whole statistics groups; None if a slab is too large."""
    blocks = onchip_blocks(layout, dtype, ONCHIP_BWD)
    if blocks is None:
        return None
    sizes = (layout.I, layout.N, layout.C, layout.S, K)
    constants = constants_of(keep, dtype, layout, act, K) | blocks.meta
    return Launcher(norm_act_bwd_onchip_kernel, (blocks.groups,), sizes, constants)


@plan
def reduce_plan(keep, dtype, layout, device, act, K, P):
    """The launcher that leaves sums, and the number of their parts.  P is ``pitch_of_third``."""
    three = P is not None
    blocks = split_blocks(layout, dtype, device, reduces=True, backward=True, three=three)
    sizes = (layout.I, layout.N, layout.C, layout.S, K, P or layout.C, blocks.tiles_per_split, blocks.splits)
    constants = constants_of(keep, dtype, layout, act, K) | blocks.meta
    # Planes of a kept input need fewer registers by themselves.  With a limit the compiler loads one vector of x and dz
    # after the other.
    if layout.rows or keep == "output" or vector_of(layout, dtype) == 1:
        constants |= most_registers(layout, dtype, K, backward=True, three=three)
    if layout.rows and K > MAX_COLUMNS:
        # The loads of many kept channels give the tile another order of threads, in which the folded rows lie in other
        # warps.  Triton 3.6 adds such rows wrongly (triton-lang/triton#9219 mends it).
        constants["FOLD"] = 1
    return Launcher(norm_act_bwd_reduce_kernel, (blocks.groups, blocks.splits), sizes, constants), blocks.splits


@plan
def apply_plan(keep, dtype, layout, device, act, K, P, partials):
    """The launcher that applies sums in ``partials`` parts.  P is ``pitch_of_third``."""
    three = P is not None
    blocks = split_blocks(layout, dtype, device, backward=True, three=three)
    sizes = (layout.I, layout.N, layout.C, layout.S, K, P or layout.C, blocks.tiles_per_split, partials)
    constants = constants_of(keep, dtype, layout, act, K) | blocks.meta
    constants |= most_registers(layout, dtype, K, backward=True, three=three)
    constants["BLOCK_P"] = parts_tile(partials)
    return Launcher(norm_act_bwd_apply_kernel, (blocks.groups, blocks.splits), sizes, constants)


def pitch_of_third(pitch, residual, layout):
    """The pitch of a third large tensor that backward reads, which is a second gradient or a residual, or None."""
    return layout.C if pitch is None and residual is not None else pitch


def norm_act_bwd_sums(dz, saved, layout, weight, bias, rstd, xhat_kept, kept, act, mean=None, residual=None,
                      dx=None, dresidual=None, also=None, pitch=None):  # fmt: skip
    """The sums of g and g * xhat per channel, (2, parts, I C).  The arguments are those of ``norm_act_bwd``.

    If ``dx`` is given, it is written, with the formula for running statistics.  ``dresidual`` is written if given.
    """
    slots, K = kept if kept is not None else (None, 0)
    keep = "output" if mean is None else "input"
    P = pitch_of_third(pitch, residual, layout)
    launch, splits = reduce_plan(keep, saved.dtype, layout, dz.device, act, K, P)
    partial = torch.empty(2, splits, layout.I * layout.C, dtype=rstd.dtype, device=dz.device)
    launch((saved, dz, also, residual, dx, dresidual, partial, weight, bias, mean, rstd, xhat_kept, slots))
    return few(partial, layout.C)


def norm_act_bwd(dz, saved, layout, weight, bias, rstd, xhat_kept, kept, training, act, dparam_dtype, dx=None,
                 mean=None, residual=None, dresidual=None, sums=None, also=None, pitch=None):  # fmt: skip
    """Returns dx, and dweight and dbias in ``dparam_dtype``; the last two are None if ``dparam_dtype`` is None.

    ``saved`` is the input if ``mean`` is given, and otherwise the output.  ``dz``, ``residual``, ``dx`` and
    ``dresidual`` have its strides.  ``dx`` and ``dresidual`` are written if they are given; ``dx`` may be ``saved``.
    The forward launcher has returned ``xhat_kept`` and taken ``kept``.  ``sums`` is the result of
    ``norm_act_bwd_sums`` if it is known already.  The gradient of z is dz + ``also`` if that is given, with ``pitch``.
    It has the strides of dz and the pitch C, and may be ``dresidual``; or it is rows that are ``pitch`` apart.
    """
    affine = dparam_dtype is not None
    of_samples = affine and layout.I * layout.D > 1
    dx = torch.empty_like(dz) if dx is None else dx
    if not training:
        sums = norm_act_bwd_sums(dz, saved, layout, weight, bias, rstd, xhat_kept, kept, act, mean, residual, dx,
                                 dresidual, also, pitch)  # fmt: skip
        return dx, *over_samples(sums, layout, dparam_dtype)
    slots, K = (None, 0) if kept is None else kept
    keep = "output" if mean is None else "input"
    dweight = dbias = None
    if affine and not of_samples:
        # These are two allocations, because outputs of an op must not share memory.  rstd has C values here.  PyTorch
        # takes less time for a call without a dtype.
        same = rstd.dtype == dparam_dtype
        dweight = torch.empty_like(rstd) if same else torch.empty_like(rstd, dtype=dparam_dtype)
        dbias = torch.empty_like(dweight)
    tensors = saved, dz, also, residual, dx, dresidual
    whole = sums is None and pitch in (None, layout.C)
    onchip = onchip_plan(keep, saved.dtype, layout, act, K) if whole else None
    if onchip is not None:
        if of_samples:
            wide = torch.promote_types(saved.dtype, torch.float32)
            sums = torch.empty(2, layout.I * layout.C, dtype=wide, device=dz.device)
            dbias, dweight = sums
        onchip((*tensors, weight, bias, mean, rstd, dweight, dbias, xhat_kept, slots))
    else:
        if sums is None:
            args = dz, saved, layout, weight, bias, rstd, xhat_kept, kept, act, mean, residual
            if mean is not None and dresidual is not None:
                # The first launch writes g, and the second reads it instead of dz and the residual, which saves a pass.
                sums = norm_act_bwd_sums(*args, dresidual=dresidual, also=also, pitch=pitch)
                tensors = saved, dresidual, None, None, dx, None
                act = ("identity", 0.0)
            else:
                sums = norm_act_bwd_sums(*args, also=also, pitch=pitch)
        partial = merged(sums, layout, weight)
        # Both launches cut the tensors into the same runs.
        P = pitch_of_third(pitch, residual, layout)
        apply = apply_plan(keep, saved.dtype, layout, dz.device, act, K, P, partial.shape[1])
        apply((*tensors, partial, weight, bias, mean, rstd, dweight, dbias, xhat_kept, slots))
    if of_samples:
        dweight, dbias = over_samples(sums, layout, dparam_dtype)
    return dx, dweight, dbias


def norm_act_bwd_of_all_processes(dz, saved, layout, weight, bias, rstd, xhat_kept, kept, act, dparam_dtype, exchange,
                                  dx=None, mean=None, residual=None, dresidual=None):  # fmt: skip
    """``norm_act_bwd`` for a norm of the batch in training whose statistics are those of several processes.

    ``exchange`` is called with this process's sums of g and g * xhat, (C,) each, and returns the sums of all processes,
    from which dx is computed.  dweight and dbias are the sums of this process only.
    """
    tensors, also = (dz, saved, layout, weight, bias, rstd, xhat_kept, kept), {"mean": mean, "residual": residual}
    dbias, dweight = norm_act_bwd_sums(*tensors, act, **also).sum(1)
    sums = torch.stack(exchange(dbias, dweight)).unsqueeze(1)
    dx, *_ = norm_act_bwd(*tensors, True, act, None, dx, sums=sums, dresidual=dresidual, **also)
    if dparam_dtype is None:
        return dx, None, None
    return dx, dweight.to(dparam_dtype), dbias.to(dparam_dtype)
