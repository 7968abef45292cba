"""z = phi(y), y = weight * xhat + bias, xhat = (x - mean) * rstd: BatchNorm and its activation, written over x.

Kept for backward: z, rstd, weight, bias, and xhat of the kept channels.  With y = phi^-1(z), xhat = (y - bias) /
weight, g = dz * phi'(y) and m = N S values per channel:

    s1 = dbias = sum(g)        s2 = dweight = sum(g * xhat)
    dx = weight * rstd * (g - s1 / m - xhat * s2 / m)          statistics of the batch
    dx = weight * rstd * g                                     running statistics

Large tensors: one launch reduces, several programs (`splits`) a channel group, each leaving its partial result; a
second launch merges the partials in a fixed order, every program for itself, and applies them, walking backwards
through memory to meet in L2 what the first one left there.  More partials than that pays for are merged by a small
launch in between.  Where a channel's slab fits in one tile, a single launch reads it once.
"""

import torch
import triton
import triton.language as tl

from .activation import act_fwd, act_grad, act_inverse
from .launch import MAX_PARTIALS, MAX_SPLITS, ONCHIP_BWD, ONCHIP_FWD, Layout, acc_dtype, onchip_blocks, split_blocks
from .tile import (
    chan_merge,
    channel_index,
    channel_sum,
    kept_offsets,
    load_partials,
    tail_period,
    tile_count,
    tile_offsets,
)


@triton.jit
def load_affine(weight_ptr, bias_ptr, c, C, ACC: tl.constexpr):
    """Weight and bias of the channels c; 1 and 0 where there are none."""
    w = tl.full(c.shape, 1.0, ACC)
    b = tl.zeros(c.shape, ACC)
    if weight_ptr is not None:
        w = tl.load(weight_ptr + c, mask=c < C, other=1.0).to(ACC)
    if bias_ptr is not None:
        b = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(ACC)
    return w, b


@triton.jit
def update_running(running_ptr, value, momentum, c, C):
    """running += momentum * (value - running), rounded once to the buffer's dtype."""
    running = tl.load(running_ptr + c, mask=c < C)
    value = running + momentum * (value - running)
    tl.store(running_ptr + c, value.to(running_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def store_stats(mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, momentum, n, mean, m2, rstd, c, C):
    """Leaves mean and rstd, and moves the running statistics."""
    tl.store(mean_ptr + c, mean, mask=c < C)
    tl.store(rstd_ptr + c, rstd, mask=c < C)
    if running_mean_ptr is not None:
        update_running(running_mean_ptr, mean, momentum, c, C)
        update_running(running_var_ptr, m2 / tl.maximum(n - 1.0, 1.0), momentum, c, C)


@triton.jit
def normalise_tile(x, mean, rstd, w, b, j, out_ptr, offs, mask, kept_ptr, slot, N, C, S, K,
                   ACT: tl.constexpr, PARAM: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_L: tl.constexpr):  # fmt: skip
    """z of one tile, and xhat of its kept channels."""
    xhat = (x - mean) * rstd
    if kept_ptr is not None:
        side = kept_offsets(j, slot, N, C, S, K, ROWS, BLOCK_N, BLOCK_L)
        tl.store(kept_ptr + side, xhat.to(kept_ptr.dtype.element_ty), mask=mask & (slot >= 0))
    z = act_fwd(xhat * w + b, ACT, PARAM)
    tl.store(out_ptr + offs, z.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def inplace_abn_fwd_stats_kernel(x_ptr, partial_ptr, N, C, S, tiles_per_split, splits,
                                 ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                                 BLOCK_L: tl.constexpr):  # fmt: skip
    """Leaves (count, mean, M2) of one split of a channel group: Welford per lane, lanes merged at the end."""
    group = tl.program_id(0)
    split = tl.program_id(1)
    c = channel_index(group, ROWS, BLOCK_L)
    tiles = tile_count(N, S, ROWS, BLOCK_N, BLOCK_L)
    period = tail_period(N, S, ROWS, BLOCK_N, BLOCK_L)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tiles)

    mean = tl.zeros((BLOCK_N, BLOCK_L), ACC)
    m2 = tl.zeros((BLOCK_N, BLOCK_L), ACC)
    # a lane is valid in every tile of the range, or in all but those cut short: two counts serve all lanes
    _, in_tail = tile_offsets(tiles - 1, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
    n_all = tl.zeros((1, 1), ACC)
    n_full = tl.zeros((1, 1), ACC)
    for j in range(first, last):
        offs, mask = tile_offsets(j, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(ACC)
        n_all += 1.0
        n_full += tl.where((j + 1) % period == 0, 0.0, 1.0)
        d = tl.where(mask, x - mean, 0.0)
        mean += d * tl.where(in_tail, 1.0 / n_all, 1.0 / tl.maximum(n_full, 1.0))
        m2 += d * (x - mean)

    _, whole = tile_offsets(0, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
    # the first tile shows which lanes lie inside the tensor at all, unless it is also the last, cut short
    count = tl.where(in_tail, n_all, tl.where(whole, n_full, 0.0))
    n, mean, m2 = chan_merge(count, mean, m2, ROWS)
    tl.store(partial_ptr + split * C + c, n, mask=c < C)
    tl.store(partial_ptr + (splits + split) * C + c, mean, mask=c < C)
    tl.store(partial_ptr + (2 * splits + split) * C + c, m2, mask=c < C)


@triton.jit
def inplace_abn_fwd_merge_kernel(partial_ptr, merged_ptr, C, splits, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr):
    """(3, splits, C) -> (3, chunks, C) of (count, mean, M2), a chunk being BLOCK_P splits."""
    c = channel_index(tl.program_id(0), True, BLOCK_L)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    first = chunk * BLOCK_P
    n, mean, m2 = chan_merge(
        load_partials(partial_ptr, 0, c, C, first, splits, BLOCK_P),
        load_partials(partial_ptr, 1, c, C, first, splits, BLOCK_P),
        load_partials(partial_ptr, 2, c, C, first, splits, BLOCK_P),
        True,
    )
    tl.store(merged_ptr + chunk * C + c, n, mask=c < C)
    tl.store(merged_ptr + (chunks + chunk) * C + c, mean, mask=c < C)
    tl.store(merged_ptr + (2 * chunks + chunk) * C + c, m2, mask=c < C)


@triton.jit
def inplace_abn_bwd_merge_kernel(partial_ptr, merged_ptr, C, splits, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr):
    """(2, splits, C) -> (2, chunks, C) of (s1, s2)."""
    c = channel_index(tl.program_id(0), True, BLOCK_L)
    chunk = tl.program_id(1)
    first = chunk * BLOCK_P
    s1 = channel_sum(load_partials(partial_ptr, 0, c, C, first, splits, BLOCK_P), True)
    s2 = channel_sum(load_partials(partial_ptr, 1, c, C, first, splits, BLOCK_P), True)
    tl.store(merged_ptr + chunk * C + c, s1, mask=c < C)
    tl.store(merged_ptr + (tl.num_programs(1) + chunk) * C + c, s2, mask=c < C)


@triton.jit
def inplace_abn_fwd_apply_kernel(x_ptr, out_ptr, partial_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,
                                 running_mean_ptr, running_var_ptr, kept_ptr, slot_ptr, momentum: tl.float64,
                                 N, C, S, K, tiles_per_split, partials, EPS: tl.constexpr, ACT: tl.constexpr,
                                 PARAM: tl.constexpr, TRAINING: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
                                 BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.num_programs(1) - 1 - tl.program_id(1)
    c = channel_index(group, ROWS, BLOCK_L)
    w, b = load_affine(weight_ptr, bias_ptr, c, C, ACC)
    if TRAINING:
        n, mean, m2 = chan_merge(
            load_partials(partial_ptr, 0, c, C, 0, partials, BLOCK_P),
            load_partials(partial_ptr, 1, c, C, 0, partials, BLOCK_P),
            load_partials(partial_ptr, 2, c, C, 0, partials, BLOCK_P),
            ROWS,
        )
        rstd = 1.0 / tl.sqrt(m2 / tl.maximum(n, 1.0) + EPS)
        if split == 0:
            store_stats(mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, momentum, n, mean, m2, rstd, c, C)
    else:
        mean = tl.load(running_mean_ptr + c, mask=c < C, other=0.0).to(ACC)
        rstd = 1.0 / tl.sqrt(tl.load(running_var_ptr + c, mask=c < C, other=1.0).to(ACC) + EPS)
        if split == 0:
            tl.store(rstd_ptr + c, rstd, mask=c < C)
    slot = c
    if kept_ptr is not None:
        slot = tl.load(slot_ptr + c, mask=c < C, other=-1)

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tile_count(N, S, ROWS, BLOCK_N, BLOCK_L))
    for i in range(last - first):
        j = last - 1 - i
        offs, mask = tile_offsets(j, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(ACC)
        normalise_tile(x, mean, rstd, w, b, j, out_ptr, offs, mask, kept_ptr, slot, N, C, S, K,
                       ACT, PARAM, ROWS, BLOCK_N, BLOCK_L)  # fmt: skip


@triton.jit
def inplace_abn_fwd_onchip_kernel(x_ptr, out_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, running_mean_ptr,
                                  running_var_ptr, kept_ptr, slot_ptr, momentum: tl.float64, N, C, S, K,
                                  EPS: tl.constexpr, ACT: tl.constexpr, PARAM: tl.constexpr, ACC: tl.constexpr,
                                  ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    """A channel's slab in one tile: read once, two-pass statistics in registers."""
    group = tl.program_id(0)
    c = channel_index(group, ROWS, BLOCK_L)
    w, b = load_affine(weight_ptr, bias_ptr, c, C, ACC)
    offs, mask = tile_offsets(0, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(ACC)
    n = channel_sum(mask.to(ACC), ROWS)
    mean = channel_sum(x, ROWS) / tl.maximum(n, 1.0)
    d = tl.where(mask, x - mean, 0.0)
    m2 = channel_sum(d * d, ROWS)
    rstd = 1.0 / tl.sqrt(m2 / tl.maximum(n, 1.0) + EPS)
    store_stats(mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, momentum, n, mean, m2, rstd, c, C)
    slot = c
    if kept_ptr is not None:
        slot = tl.load(slot_ptr + c, mask=c < C, other=-1)
    normalise_tile(x, mean, rstd, w, b, 0, out_ptr, offs, mask, kept_ptr, slot, N, C, S, K,
                   ACT, PARAM, ROWS, BLOCK_N, BLOCK_L)  # fmt: skip


@triton.jit
def grad_and_xhat(j, z_ptr, dz_ptr, offs, mask, w, b, kept_ptr, slot, N, C, S, K, ACT: tl.constexpr,
                  PARAM: tl.constexpr, CLAMP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    """g and xhat of one tile, rebuilt from the output; both 0 where masked."""
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(ACC)
    dz = tl.load(dz_ptr + offs, mask=mask, other=0.0).to(ACC)
    g = act_grad(dz, z, ACT, PARAM)
    # weight 0 is a kept channel, but for the one step after an optimizer brought it there
    inverse = tl.where(w == 0.0, 0.0, 1.0 / tl.where(w == 0.0, 1.0, w))
    xhat = tl.where(mask, (act_inverse(z, ACT, PARAM, CLAMP) - b) * inverse, 0.0)
    if kept_ptr is not None:
        kept = mask & (slot >= 0)
        side = kept_offsets(j, slot, N, C, S, K, ROWS, BLOCK_N, BLOCK_L)
        xhat = tl.where(kept, tl.load(kept_ptr + side, mask=kept, other=0.0).to(ACC), xhat)
    return g, xhat


@triton.jit
def store_dparam(dparam_ptr, value, c, C):
    if dparam_ptr is not None:
        tl.store(dparam_ptr + c, value.to(dparam_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def inplace_abn_bwd_reduce_kernel(z_ptr, dz_ptr, dx_ptr, partial_ptr, weight_ptr, bias_ptr, rstd_ptr, kept_ptr,
                                  slot_ptr, N, C, S, K, tiles_per_split, splits, ACT: tl.constexpr,
                                  PARAM: tl.constexpr, CLAMP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr,
                                  BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    """Leaves (s1, s2) of one split; with running statistics (dx_ptr given) dx needs neither and is written here."""
    group = tl.program_id(0)
    split = tl.program_id(1)
    c = channel_index(group, ROWS, BLOCK_L)
    w, b = load_affine(weight_ptr, bias_ptr, c, C, ACC)
    slot = c
    if kept_ptr is not None:
        slot = tl.load(slot_ptr + c, mask=c < C, other=-1)
    scale = w
    if dx_ptr is not None:
        scale = w * tl.load(rstd_ptr + c, mask=c < C, other=0.0)

    s1 = tl.zeros((BLOCK_N, BLOCK_L), ACC)
    s2 = tl.zeros((BLOCK_N, BLOCK_L), ACC)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tile_count(N, S, ROWS, BLOCK_N, BLOCK_L))
    for j in range(first, last):
        offs, mask = tile_offsets(j, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
        g, xhat = grad_and_xhat(j, z_ptr, dz_ptr, offs, mask, w, b, kept_ptr, slot, N, C, S, K,
                                ACT, PARAM, CLAMP, ACC, ROWS, BLOCK_N, BLOCK_L)  # fmt: skip
        s1 += g
        s2 += g * xhat
        if dx_ptr is not None:
            tl.store(dx_ptr + offs, (g * scale).to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + split * C + c, channel_sum(s1, ROWS), mask=c < C)
    tl.store(partial_ptr + (splits + split) * C + c, channel_sum(s2, ROWS), mask=c < C)


@triton.jit
def inplace_abn_bwd_apply_kernel(z_ptr, dz_ptr, dx_ptr, partial_ptr, weight_ptr, bias_ptr, rstd_ptr, dweight_ptr,
                                 dbias_ptr, kept_ptr, slot_ptr, N, C, S, K, tiles_per_split, partials,
                                 ACT: tl.constexpr, PARAM: tl.constexpr, CLAMP: tl.constexpr, ACC: tl.constexpr,
                                 ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
                                 BLOCK_P: tl.constexpr):  # fmt: skip
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.num_programs(1) - 1 - tl.program_id(1)
    c = channel_index(group, ROWS, BLOCK_L)
    w, b = load_affine(weight_ptr, bias_ptr, c, C, ACC)
    s1 = channel_sum(load_partials(partial_ptr, 0, c, C, 0, partials, BLOCK_P), ROWS)
    s2 = channel_sum(load_partials(partial_ptr, 1, c, C, 0, partials, BLOCK_P), ROWS)
    if split == 0:
        store_dparam(dbias_ptr, s1, c, C)
        store_dparam(dweight_ptr, s2, c, C)
    slot = c
    if kept_ptr is not None:
        slot = tl.load(slot_ptr + c, mask=c < C, other=-1)
    scale = w * tl.load(rstd_ptr + c, mask=c < C, other=0.0)
    m = tl.cast(N, ACC) * S
    s1 /= m
    s2 /= m

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tile_count(N, S, ROWS, BLOCK_N, BLOCK_L))
    for i in range(last - first):
        j = last - 1 - i
        offs, mask = tile_offsets(j, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
        g, xhat = grad_and_xhat(j, z_ptr, dz_ptr, offs, mask, w, b, kept_ptr, slot, N, C, S, K,
                                ACT, PARAM, CLAMP, ACC, ROWS, BLOCK_N, BLOCK_L)  # fmt: skip
        dx = (g - s1 - xhat * s2) * scale
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def inplace_abn_bwd_onchip_kernel(z_ptr, dz_ptr, dx_ptr, weight_ptr, bias_ptr, rstd_ptr, dweight_ptr, dbias_ptr,
                                  kept_ptr, slot_ptr, N, C, S, K, ACT: tl.constexpr, PARAM: tl.constexpr,
                                  CLAMP: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                                  BLOCK_L: tl.constexpr):  # fmt: skip
    group = tl.program_id(0)
    c = channel_index(group, ROWS, BLOCK_L)
    w, b = load_affine(weight_ptr, bias_ptr, c, C, ACC)
    slot = c
    if kept_ptr is not None:
        slot = tl.load(slot_ptr + c, mask=c < C, other=-1)
    offs, mask = tile_offsets(0, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
    g, xhat = grad_and_xhat(0, z_ptr, dz_ptr, offs, mask, w, b, kept_ptr, slot, N, C, S, K,
                            ACT, PARAM, CLAMP, ACC, ROWS, BLOCK_N, BLOCK_L)  # fmt: skip
    s1 = channel_sum(g, ROWS)
    s2 = channel_sum(g * xhat, ROWS)
    store_dparam(dbias_ptr, s1, c, C)
    store_dparam(dweight_ptr, s2, c, C)
    scale = w * tl.load(rstd_ptr + c, mask=c < C, other=0.0)
    m = tl.cast(N, ACC) * S
    dx = (g - s1 / m - xhat * (s2 / m)) * scale
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def merged(kernel, partial):
    """Partial results (k, splits, C) as the apply kernels take them: few are left for each program to merge, many are
    merged by one more launch, since every program would read them all."""
    while partial.shape[1] > MAX_PARTIALS:
        k, splits, C = partial.shape
        block_p = min(triton.next_power_of_2(splits), MAX_SPLITS)
        chunks = triton.cdiv(splits, block_p)
        into = torch.empty(k, chunks, C, dtype=partial.dtype, device=partial.device)
        block_l = 8
        kernel[(triton.cdiv(C, block_l), chunks)](
            partial, into, C, splits, BLOCK_L=block_l, BLOCK_P=block_p, num_warps=4
        )
        partial = into
    return partial


def inplace_abn_fwd(x, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act, kept,
                    partial=None):  # fmt: skip
    """Writes z into ``out`` (``x`` itself, or as strided as ``x``).

    ``act`` is (name, parameter); ``kept`` is None or (slots, count): int32 slot of each channel, -1 where not kept.
    Training moves the running statistics, where given, by ``momentum``; ``partial`` holds (count, mean, M2) of parts of
    ``x``, (3, parts, C), where a kernel before has left them.  Returns mean (written in training only) and
    rstd in fp32 (fp64), and xhat of the kept channels, flat, or None.
    """
    layout = Layout(*layout)
    _, N, C, S = layout
    acc = acc_dtype(x.dtype)
    mean, rstd = torch.empty(2, C, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    slots, K = kept if kept is not None else (None, 0)
    xhat_kept = torch.empty(N * K * S, dtype=x.dtype, device=x.device) if K else None
    name, param = act
    constants = {"EPS": eps, "ACT": name, "PARAM": param, "ACC": acc}
    blocks = onchip_blocks(layout, x.dtype, ONCHIP_FWD) if training and partial is None else None
    if blocks is not None:
        inplace_abn_fwd_onchip_kernel[(blocks.groups,)](
            x, out, weight, bias, mean, rstd, running_mean, running_var, xhat_kept, slots, momentum, N, C, S, K,
            **constants, **blocks.meta,
        )  # fmt: skip
        return mean, rstd, xhat_kept
    blocks = split_blocks(layout, x.dtype, x.device)
    grid = (blocks.groups, blocks.splits)
    if training and partial is None:
        partial = torch.empty(3, blocks.splits, C, dtype=mean.dtype, device=x.device)
        inplace_abn_fwd_stats_kernel[grid](
            x, partial, N, C, S, blocks.tiles_per_split, blocks.splits, ACC=acc, **blocks.meta
        )
    if partial is not None:
        partial = merged(inplace_abn_fwd_merge_kernel, partial)
    partials = 1 if partial is None else partial.shape[1]
    inplace_abn_fwd_apply_kernel[grid](
        x, out, partial, weight, bias, mean, rstd, running_mean, running_var, xhat_kept, slots, momentum, N, C, S, K,
        blocks.tiles_per_split, partials, TRAINING=training, BLOCK_P=triton.next_power_of_2(partials),
        **constants, **blocks.meta,
    )  # fmt: skip
    return mean, rstd, xhat_kept


def inplace_abn_bwd(dz, z, layout, weight, bias, rstd, xhat_kept, kept, training, act, dparam_dtype, dx=None):
    """Returns dx, and dweight and dbias in ``dparam_dtype`` (None: neither is wanted, both are None).

    ``dz`` lies in memory as ``z`` does, and so does ``dx``, where it is given to be written; it may be ``z``.
    ``xhat_kept`` and ``kept`` are what the forward launcher returned and took.
    """
    layout = Layout(*layout)
    _, N, C, S = layout
    dx = torch.empty_like(z) if dx is None else dx
    dweight = dbias = None
    if dparam_dtype is not None:
        # two allocations: an op's outputs must not share memory
        dweight, dbias = (torch.empty(C, dtype=dparam_dtype, device=z.device) for _ in range(2))
    slots, K = kept if kept is not None else (None, 0)
    name, param = act
    # the middle of what rounds to a distance of 0 from -1: a quarter of the spacing of numbers in [0.5, 1)
    constants = {"ACT": name, "PARAM": param, "CLAMP": torch.finfo(z.dtype).eps / 8, "ACC": acc_dtype(z.dtype)}
    blocks = onchip_blocks(layout, z.dtype, ONCHIP_BWD) if training else None
    if blocks is not None:
        inplace_abn_bwd_onchip_kernel[(blocks.groups,)](
            z, dz, dx, weight, bias, rstd, dweight, dbias, xhat_kept, slots, N, C, S, K, **constants, **blocks.meta
        )
        return dx, dweight, dbias
    blocks = split_blocks(layout, z.dtype, z.device)
    grid = (blocks.groups, blocks.splits)
    partial = torch.empty(2, blocks.splits, C, dtype=rstd.dtype, device=z.device)
    inplace_abn_bwd_reduce_kernel[grid](
        z, dz, None if training else dx, partial, weight, bias, rstd, xhat_kept, slots, N, C, S, K,
        blocks.tiles_per_split, blocks.splits, **constants, **blocks.meta,
    )  # fmt: skip
    if not training:
        if dparam_dtype is not None:
            dbias, dweight = (s.sum(0).to(dparam_dtype) for s in partial)
        return dx, dweight, dbias
    partial = merged(inplace_abn_bwd_merge_kernel, partial)
    partials = partial.shape[1]
    inplace_abn_bwd_apply_kernel[grid](
        z, dz, dx, partial, weight, bias, rstd, dweight, dbias, xhat_kept, slots, N, C, S, K,
        blocks.tiles_per_split, partials, BLOCK_P=triton.next_power_of_2(partials), **constants, **blocks.meta,
    )  # fmt: skip
    return dx, dweight, dbias
