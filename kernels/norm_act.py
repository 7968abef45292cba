"""z = phi(y), y = weight * xhat + bias [+ residual], xhat = (x - mean) * rstd: a normalisation and its activation.

Statistics belong to a channel over the batch, to a channel of each sample, or to a group of channels of each sample
(see STAT in ``kernels/tile.py``).  z may be written over x.  Backward is in ``kernels/norm_act_bwd.py``.

Large tensors take two launches.  The first one (``kernels/norm_stats.py``) reduces: several programs (``splits``) share
a channel group, and each leaves a partial result.  In the second one every program merges the partial results for
itself in a fixed order, and applies them.  It walks backwards through memory, so that it finds in L2 the values that
the first launch read last.  If whole statistics groups fit in one tile, a single launch reads x once.  If mean and rstd
are given, one launch rebuilds z.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from .activation import act_fwd
from .launch import ONCHIP_BWD, ONCHIP_FWD, acc_dtype, most_registers, onchip_blocks, registers_for, split_blocks
from .launcher import Launcher, plan
from .norm_stats import COUNTS, Parts, load_moments, merged, norm_stats, parts_tile
from .tile import (
    Kept,
    Shape,
    aligned_sizes,
    channel_sum,
    channels_of,
    group_sum,
    kept_offsets,
    slab_offsets,
    tile_count,
    tile_offsets,
)

# What a norm knows of the channels of a program.
Norm = namedtuple("Norm", "mean rstd weight bias")


@triton.jit
def load_channel(ptr, c, valid, default, ACC: tl.constexpr):
    """A parameter of the channels c; ``default`` if the norm has no such parameter."""
    v = tl.full(c.shape, default, ACC)
    if ptr is not None:
        v = tl.load(ptr + c, mask=valid, other=default).to(ACC)
    return v


@triton.jit
def load_affine(weight_ptr, bias_ptr, c, valid, ACC: tl.constexpr):
    """Weight and bias of the channels c; 1 and 0 if the norm has none."""
    return load_channel(weight_ptr, c, valid, 1.0, ACC), load_channel(bias_ptr, c, valid, 0.0, ACC)


@triton.jit
def load_slot(slot_ptr, c, valid):
    """The places of the channels in the side buffer of kept channels; -1 for channels that are not kept."""
    slot = c
    if slot_ptr is not None:
        # Planes need a block too, because it is combined with their masks.
        slot = tl.load(slot_ptr + c, mask=valid, other=-1) + tl.zeros((1, 1), tl.int32)
    return slot


@triton.jit
def update_running(running_ptr, running, value, momentum, c, valid):
    """Computes running += momentum * (value - running), rounded once to the buffer's dtype."""
    value = running + momentum * (value - running)
    tl.store(running_ptr + c, value.to(running_ptr.dtype.element_ty), mask=valid)


@triton.jit
def count_batch(batches_ptr):
    """Adds 1 to the number of batches; one program calls it."""
    if batches_ptr is not None:
        tl.store(batches_ptr, tl.load(batches_ptr) + 1)


@triton.jit
def normalise_tile(x, out_ptr, residual_ptr, tile, norm, kept, sizes, SHAPE, ACT, PARAM, EVICT: tl.constexpr):
    """Writes z of one tile, and xhat of its kept channels."""
    xhat = (x - norm.mean) * norm.rstd
    if kept.ptr is not None:
        side = kept_offsets(tile, kept, sizes, SHAPE)
        tl.store(kept.ptr + side, xhat.to(kept.ptr.dtype.element_ty), mask=tile.mask & (kept.slot >= 0))
    y = xhat * norm.weight + norm.bias
    if residual_ptr is not None:
        y += tl.load(residual_ptr + tile.offs, mask=tile.mask, other=0.0).to(x.dtype)
    z = act_fwd(y, ACT, PARAM).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tile.offs, z, mask=tile.mask, eviction_policy=EVICT)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def norm_act_fwd_apply_kernel(x_ptr, out_ptr, residual_ptr, partial_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,
                              running_mean_ptr, running_var_ptr, batches_ptr, kept_ptr, slot_ptr,
                              momentum: tl.float64, I, N, C, S, K, tiles_per_split, partials, SOURCE: tl.constexpr,
                              EPS: tl.constexpr, D: tl.constexpr, ACT: tl.constexpr, PARAM: tl.constexpr,
                              ACC: tl.constexpr, STAT: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
                              BLOCK_N: tl.constexpr,
                              BLOCK_L: tl.constexpr, FOLD: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
                              EVICT: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """Applies statistics from SOURCE: "batch" (parts in ``partial_ptr``), "running", or "saved" (mean and rstd)."""
    sizes = aligned_sizes(N, C, S, ROWS, ALIGN)
    SHAPE: tl.constexpr = Shape(STAT, ROWS, BLOCK_N, BLOCK_L)
    split = tl.num_programs(1) - 1 - tl.program_id(1)
    at = channels_of(tl.num_programs(0) - 1 - tl.program_id(0), sizes, SHAPE)
    # u is the number of the statistics group.
    u = (at.i * sizes.C + at.c) // D
    w, b = load_affine(weight_ptr, bias_ptr, at.c, at.valid, ACC)
    if SOURCE == "batch":
        n, mean, m2 = load_moments(Parts(partial_ptr, partials, I * sizes.C // D, BLOCK_P), u, at.valid, ROWS)
        rstd = 1.0 / tl.sqrt(m2 / tl.maximum(n, 1.0) + EPS)
        if split == 0:
            one_of_group = at.valid & (at.c % D == 0)
            if mean_ptr is not None:
                tl.store(mean_ptr + u, mean, mask=one_of_group)
            tl.store(rstd_ptr + u, rstd, mask=one_of_group)
            if running_mean_ptr is not None:
                # Mean and variance are updated one after the other.  Together they would take registers from the loop.
                running = tl.load(running_mean_ptr + u, mask=one_of_group)
                update_running(running_mean_ptr, running, mean, momentum, u, one_of_group)
                running = tl.load(running_var_ptr + u, mask=one_of_group)
                update_running(running_var_ptr, running, m2 / tl.maximum(n - 1.0, 1.0), momentum, u, one_of_group)
                if tl.program_id(0) == 0:
                    count_batch(batches_ptr)
    elif SOURCE == "running":
        mean = tl.load(running_mean_ptr + at.c, mask=at.valid, other=0.0).to(ACC)
        rstd = 1.0 / tl.sqrt(tl.load(running_var_ptr + at.c, mask=at.valid, other=1.0).to(ACC) + EPS)
        if split == 0:
            tl.store(rstd_ptr + at.c, rstd, mask=at.valid)
    else:
        mean = tl.load(mean_ptr + u, mask=at.valid, other=0.0)
        rstd = tl.load(rstd_ptr + u, mask=at.valid, other=0.0)
    norm = Norm(mean, rstd, w, b)
    kept = Kept(kept_ptr, load_slot(slot_ptr, at.c, at.valid), K)

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tile_count(sizes, SHAPE))
    for k in tl.range(last - first, num_stages=STAGES):
        tile = tile_offsets(last - 1 - k, at, sizes, SHAPE, WHOLE)
        x = tl.load(x_ptr + tile.offs, mask=tile.mask, other=0.0).to(ACC)
        normalise_tile(x, out_ptr, residual_ptr, tile, norm, kept, sizes, SHAPE, ACT, PARAM, EVICT)


@triton.jit
def slab_sum(v, STAT: tl.constexpr, ROWS: tl.constexpr):
    """The sum of a slab for each statistics group."""
    if STAT == "group":
        v = group_sum(v)
    else:
        v = channel_sum(v, STAT, ROWS)
    return v


@triton.jit
def norm_act_fwd_onchip_kernel(x_ptr, out_ptr, residual_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,
                               running_mean_ptr, running_var_ptr, batches_ptr, kept_ptr, slot_ptr,
                               momentum: tl.float64, I, N, C, S, K, SOURCE: tl.constexpr, EPS: tl.constexpr,
                               D: tl.constexpr, ACT: tl.constexpr, PARAM: tl.constexpr, ACC: tl.constexpr,
                               STAT: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                               BLOCK_L: tl.constexpr, AGAIN: tl.constexpr):  # fmt: skip
    """Reads whole statistics groups, as one tile, once.  Unless they are saved, statistics take two passes over it.

    AGAIN loads x for each pass, from L1, instead of holding it: a thread has no registers for 64 values in fp32.
    """
    sizes = aligned_sizes(N, C, S, ROWS, ALIGN)
    SHAPE: tl.constexpr = Shape(STAT, ROWS, BLOCK_N, BLOCK_L)
    program = tl.program_id(0)
    at, tile = slab_offsets(program, I, D, sizes, SHAPE)
    u = (at.i * sizes.C + at.c) // D
    w, b = load_affine(weight_ptr, bias_ptr, at.c, at.valid, ACC)
    x = tl.load(x_ptr + tile.offs, mask=tile.mask, other=0.0).to(ACC)
    if running_mean_ptr is not None:
        # They are loaded here, so that the program waits for them and for x at the same time.
        running_mean = tl.load(running_mean_ptr + u, mask=at.valid)
        running_var = tl.load(running_var_ptr + u, mask=at.valid)
    if SOURCE == "batch":
        n = slab_sum(tile.mask.to(ACC), STAT, ROWS)
        mean = slab_sum(x, STAT, ROWS) / tl.maximum(n, 1.0)
        if AGAIN:
            # Without a barrier the compiler would merge the loads.
            tl.debug_barrier()
            x = tl.load(x_ptr + tile.offs, mask=tile.mask, other=0.0).to(ACC)
        d = tl.where(tile.mask, x - mean, 0.0)
        m2 = slab_sum(d * d, STAT, ROWS)
        if AGAIN:
            tl.debug_barrier()
            x = tl.load(x_ptr + tile.offs, mask=tile.mask, other=0.0).to(ACC)
        rstd = 1.0 / tl.sqrt(m2 / tl.maximum(n, 1.0) + EPS)
        if STAT == "group":
            if mean_ptr is not None:
                tl.store(mean_ptr + program, mean)
            tl.store(rstd_ptr + program, rstd)
        else:
            if mean_ptr is not None:
                tl.store(mean_ptr + u, mean, mask=at.valid)
            tl.store(rstd_ptr + u, rstd, mask=at.valid)
            if running_mean_ptr is not None:
                update_running(running_mean_ptr, running_mean, mean, momentum, u, at.valid)
                update_running(running_var_ptr, running_var, m2 / tl.maximum(n - 1.0, 1.0), momentum, u, at.valid)
                if program == 0:
                    count_batch(batches_ptr)
    else:
        mean = tl.load(mean_ptr + u, mask=at.valid, other=0.0)
        rstd = tl.load(rstd_ptr + u, mask=at.valid, other=0.0)
    norm = Norm(mean, rstd, w, b)
    kept = Kept(kept_ptr, load_slot(slot_ptr, at.c, at.valid), K)
    normalise_tile(x, out_ptr, residual_ptr, tile, norm, kept, sizes, SHAPE, ACT, PARAM, "")


def constants_of(source, dtype, layout, eps, act):
    name, param = act
    return {"SOURCE": source, "EPS": eps, "D": layout.D, "ACT": name, "PARAM": param, "ACC": acc_dtype(dtype)}


@plan
def onchip_plan(source, layout, dtype, eps, act, K):
    """The launcher that reads whole statistics groups; None if a slab is too large."""
    blocks = onchip_blocks(layout, dtype, ONCHIP_FWD)
    if blocks is None:
        return None
    constants = constants_of(source, dtype, layout, eps, act) | blocks.meta
    constants["AGAIN"] = blocks.meta["BLOCK_N"] * blocks.meta["BLOCK_L"] * dtype.itemsize > ONCHIP_BWD
    if constants["AGAIN"]:
        # Two programs are resident.
        constants |= registers_for(2 * 32 * blocks.meta["num_warps"])
    sizes = (layout.I, layout.N, layout.C, layout.S, K)
    return Launcher(norm_act_fwd_onchip_kernel, (blocks.groups,), sizes, constants)


@plan
def apply_plan(source, layout, dtype, device, eps, act, K, partials):
    """The launcher that applies given statistics, either merged or in ``partials`` parts."""
    blocks = split_blocks(layout, dtype, device)
    constants = constants_of(source, dtype, layout, eps, act) | blocks.meta
    constants |= most_registers(layout, dtype, K, backward=False)
    sizes = (layout.I, layout.N, layout.C, layout.S, K, blocks.tiles_per_split, partials)
    constants["BLOCK_P"] = parts_tile(partials)
    return Launcher(norm_act_fwd_apply_kernel, (blocks.groups, blocks.splits), sizes, constants)


@plan
def fwd_plan(source, layout, dtype, eps, act, K):
    """The number and the dtype of the statistics, the length of xhat of the kept channels, and ``onchip_plan``."""
    groups, wide = layout.I * layout.C // layout.D, torch.promote_types(dtype, torch.float32)
    # Given statistics need no slab, but in a slab several small planes of a sample share a tile.
    slab = source == "batch" or (source == "saved" and layout.I * layout.D > 1)
    onchip = onchip_plan(source, layout, dtype, eps, act, K) if slab else None
    return groups, wide, layout.I * layout.N * K * layout.S, onchip


def launch(source, x, out, layout, tensors, momentum, eps, act, partial, K):
    """Launches the kernel, which writes ``out``.

    ``tensors`` are the residual, weight, bias, mean, rstd, running mean and variance, the number of batches, xhat of
    the ``K`` kept channels, and their slots.
    """
    if source == "batch":
        partial = merged(norm_stats(x, layout) if partial is None else partial, layout)
    partials = 1 if partial is None else partial.shape[1]
    apply = apply_plan(source, layout, out.dtype, out.device, eps, act, K, partials)
    apply((x, out, tensors[0], partial, *tensors[1:]), momentum)


def norm_act_fwd(x, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act, kept,
                 partial=None, residual=None, batches=None, keep_mean=True):  # fmt: skip
    """Writes z into ``out``, which is ``x`` itself or has the strides of ``x``.

    ``act`` is (name, parameter).  ``kept`` is None or (slots, count); slots has the int32 slot of each channel, or -1
    if it is not kept.  Training moves the running statistics by ``momentum`` if they are given; only a norm of the
    batch has them.  Then it adds 1 to ``batches``, one int64, if ``batches`` is given.  ``partial`` holds (count, mean,
    M2) of parts of ``x``, (3, parts, I C), if they are known already.  ``residual`` has the strides of ``x``.

    It returns mean (written in training only; None without ``keep_mean``) and rstd, (I C / D,) in fp32 (fp64 for fp64),
    and xhat of the kept channels, flat, or None.
    """
    slots, K = (None, 0) if kept is None else kept
    source = "batch" if training else "running"
    groups, wide, side, onchip = fwd_plan(source, layout, x.dtype, eps, act, K)
    mean = torch.empty(groups, dtype=wide, device=x.device) if keep_mean else None
    rstd = torch.empty(groups, dtype=wide, device=x.device)
    xhat = x.new_empty(side) if K else None
    tensors = residual, weight, bias, mean, rstd, running_mean, running_var, batches, xhat, slots
    if onchip is not None and partial is None:
        onchip((x, out, *tensors), momentum)
    else:
        launch(source, x, out, layout, tensors, momentum, eps, act, partial, K)
    return mean, rstd, xhat


def norm_act_rebuild(x, out, layout, weight, bias, mean, rstd, act, residual=None):
    """Writes z into ``out`` again, from x and the statistics of ``norm_act_fwd``, with one read and one write."""
    *_, onchip = fwd_plan("saved", layout, out.dtype, 0.0, act, 0)
    tensors = residual, weight, bias, mean, rstd, *[None] * 5
    if onchip is not None:
        onchip((x, out, *tensors), 0.0)
    else:
        launch("saved", x, out, layout, tensors, 0.0, 0.0, act, None, 0)
