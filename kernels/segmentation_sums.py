"""Sums per sample and class of logits and target, and the gradient of the logits.

With p the probability of a class, y its target, m the weight of a position (0 if ignored) and l = log(softmax(x)):

    OVERLAP     sum of m p y, or m min(p, y)       NLL         sum of -m y l
    PREDICTION  sum of m p, or m p**2              OTHER_NLL   sum of -m l
    TARGET      sum of m y, or m y**2

For counts, p is 1 for the first class with the largest logit ("argmax"), or for each class with a logit above 0
("positive"), and there is no gradient.  For the likelihood "sigmoid", NLL sums -m y log(sigmoid(x)), and OTHER_NLL sums
-m (1 - y) log(1 - sigmoid(x)).  The gradients of p and of -l are

    u = m (dPREDICTION (2 p if squared) + dOVERLAP y)        v = m (dNLL y + dOTHER_NLL)

and the gradient of x is

    softmax      p (u - sum of p u over the classes) + p (sum of v) - v
    sigmoid      u p (1 - p) + m (dNLL y (sigmoid(x) - 1) + dOTHER_NLL (1 - y) sigmoid(x))
    identity     u

With a GAMMA above 0, the terms of NLL have the factor (1 - p) ** GAMMA of a focal loss, and dNLL in v the gradient of
(1 - p) ** GAMMA l in l; with a sigmoid, the terms of NLL and OTHER_NLL have the factor sigmoid(x (1 - 2 y)) ** GAMMA.

Kept for backward: x and the target.  A tile is (classes, positions), with all classes of a position in one tile up to
MAX_BLOCK_K classes, so that each pass reads x once.  With more classes, the softmax of a position is computed online
from several tiles: in forward a launch of its own leaves lse = log(sum of exp(x)) of each position, and x is read
twice; in backward one program reads the classes of its positions three times, mostly from the cache.  Every program
leaves its sums in a buffer of its own, and the buffer is summed in a fixed order in float64: there are no atomics, and
no single fp32 number for a class.
"""

import math

import torch
import triton
import triton.language as tl

from .launch import acc_dtype, multiprocessors, warps_of
from .launcher import Launcher, plan
from .segmentation_tile import (
    focal,
    focal_of_sigmoid,
    grad_of_sigmoid_nll,
    load_logits,
    load_target,
    minus_log_sigmoid,
    offsets,
    online_argmax,
    online_lse,
    program_of,
    sigmoid,
    softmax,
    u_of,
    v_of,
)

# The rows of the tensors of sums, and of their gradients, in the order above.
ROWS = 5
MAX_BLOCK_K = 256
# Classes of a tile where they do not fit into one, in forward and in backward, with MIN_BLOCK_S positions.  Backward
# loops over the tiles three times, and spills what it holds across the loops with larger tiles.
SPLIT_FWD, SPLIT_BWD = 128, 64
# Logits of a tile, and of a thread.
TILE, PER_THREAD = 2048, 8
# The fewest positions of a tile: 16 bytes of adjacent positions in half precision for each of two threads.
MIN_BLOCK_S = 16
PROGRAMS_PER_SM = 4


@triton.jit
def segmentation_positions_kernel(x_ptr, out_ptr, K, S, tiles_per_program, blocks_k, ARGMAX: tl.constexpr,
                                  LAST: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr,
                                  BLOCK_S: tl.constexpr):  # fmt: skip
    """Leaves one value of each position, (N, S): lse, or with ARGMAX the first class with the largest logit."""
    if LAST:
        K = K // ALIGN * ALIGN
    else:
        S = S // ALIGN * ALIGN
    n, first, last = program_of(S, tiles_per_program, BLOCK_S)
    for j in range(first, last):
        s = tl.cast(j, tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
        if ARGMAX:
            value = online_argmax(x_ptr, n, s, K, S, blocks_k, LAST, ACC, BLOCK_K, BLOCK_S)
        else:
            value = online_lse(x_ptr, n, s, K, S, blocks_k, LAST, ACC, BLOCK_K, BLOCK_S)
        tl.store(out_ptr + n * S + s, value.to(out_ptr.dtype.element_ty), mask=s < S)


@triton.jit
def segmentation_sums_fwd_kernel(x_ptr, y_ptr, mask_ptr, position_ptr, out_ptr, N, K, S, stride_n, tiles_per_program,
                                 PROBABILITY: tl.constexpr, NLL: tl.constexpr, OTHER: tl.constexpr,
                                 SQUARED: tl.constexpr, MINIMUM: tl.constexpr, IGNORE: tl.constexpr,
                                 DENSE: tl.constexpr, GAMMA: tl.constexpr, Y_LAST: tl.constexpr, LAST: tl.constexpr,
                                 ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr,
                                 BLOCK_S: tl.constexpr):  # fmt: skip
    """Leaves the sums of a program's tiles in its row of (ROWS, N * programs, K).

    ``position_ptr`` has lse or the argmax of each position; it is None if a tile has all classes of its positions.
    """
    if LAST:
        K = K // ALIGN * ALIGN
    else:
        S = S // ALIGN * ALIGN
    n, first, last = program_of(S, tiles_per_program, BLOCK_S)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    overlap = tl.zeros((BLOCK_K, 1), ACC)
    prediction = tl.zeros((BLOCK_K, 1), ACC)
    target = tl.zeros((BLOCK_K, 1), ACC)
    nll = tl.zeros((BLOCK_K, 1), ACC)
    other_nll = tl.zeros((BLOCK_K, 1), ACC)
    for j in range(first, last):
        s = tl.cast(j, tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
        x = load_logits(x_ptr, n, k, s, K, S, LAST, ACC)
        y, m = load_target(y_ptr, mask_ptr, n, k, s, K, S, stride_n, IGNORE, DENSE, Y_LAST, ACC)
        p = x
        lse = m
        if PROBABILITY == "softmax" or NLL == "softmax":
            if position_ptr is None:
                p, lse = softmax(x)
            else:
                lse = tl.load(position_ptr + n * S + s, mask=s < S, other=0.0)
                p = tl.exp(x - lse)
        factor = m
        if GAMMA != 0.0 and NLL == "softmax":
            factor = focal(p, GAMMA)
        if PROBABILITY == "argmax":
            if position_ptr is None:
                p = (k == tl.argmax(x, 0, keep_dims=True)).to(ACC)
            else:
                p = (k == tl.load(position_ptr + n * S + s, mask=s < S, other=0)).to(ACC)
        if PROBABILITY == "positive":
            p = (x > 0.0).to(ACC)
        if PROBABILITY == "sigmoid":
            p = sigmoid(x)
        if PROBABILITY == "identity":
            p = x
        # m y, with which the sums of labels begin: less is alive at once than if y and m were multiplied in each sum.
        at_target = y * m
        if NLL == "softmax":
            minus_l = lse - x
            if OTHER:
                other_nll += tl.sum(tl.where(m == 0.0, 0.0, minus_l * m), 1, keep_dims=True)
            if GAMMA != 0.0:
                minus_l *= factor
            # A logit of -inf has no part in the sum at other labels, nor at ignored ones.
            at_label = minus_l if DENSE else tl.where(at_target != 0.0, minus_l, 0.0)
            nll += tl.sum(at_label * at_target, 1, keep_dims=True)
        if PROBABILITY != "none":
            prediction += tl.sum((p * p if SQUARED else p) * m, 1, keep_dims=True)
            overlap += tl.sum(tl.minimum(p, y) * m if MINIMUM else p * at_target, 1, keep_dims=True)
        # It is the last of the sums that read m y, while the fewest values are alive.
        target += tl.sum(y * at_target if SQUARED else at_target, 1, keep_dims=True)
        if NLL == "sigmoid":
            if GAMMA != 0.0:
                factor *= focal_of_sigmoid(x, y, GAMMA)
            nll += tl.sum(minus_log_sigmoid(x) * y * factor, 1, keep_dims=True)
            other_nll += tl.sum(minus_log_sigmoid(-x) * (1.0 - y) * factor, 1, keep_dims=True)
    programs = tl.num_programs(0).to(tl.int64)
    at = out_ptr + tl.program_id(0).to(tl.int64) * K + k
    tl.store(at, overlap, mask=k < K)
    tl.store(at + programs * K, prediction, mask=k < K)
    tl.store(at + 2 * programs * K, target, mask=k < K)
    tl.store(at + 3 * programs * K, nll, mask=k < K)
    tl.store(at + 4 * programs * K, other_nll, mask=k < K)


@triton.jit
def load_gradients(d_ptr, n, k, N, K, OTHER: tl.constexpr):
    """The gradients of the sums of sample n, each (BLOCK_K, 1), without that of TARGET."""
    at = d_ptr + n * K + k
    rows = tl.cast(N, tl.int64) * K
    overlap = tl.load(at, mask=k < K, other=0.0)
    prediction = tl.load(at + rows, mask=k < K, other=0.0)
    nll = tl.load(at + 3 * rows, mask=k < K, other=0.0)
    other = tl.zeros_like(nll)
    if OTHER:
        other = tl.load(at + 4 * rows, mask=k < K, other=0.0)
    return overlap, prediction, nll, other


@triton.jit
def segmentation_sums_bwd_kernel(x_ptr, y_ptr, mask_ptr, d_ptr, dx_ptr, N, K, S, stride_n, tiles_per_program, blocks_k,
                                 PROBABILITY: tl.constexpr, NLL: tl.constexpr, OTHER: tl.constexpr,
                                 SQUARED: tl.constexpr, MINIMUM: tl.constexpr, IGNORE: tl.constexpr,
                                 DENSE: tl.constexpr, GAMMA: tl.constexpr, Y_LAST: tl.constexpr, LAST: tl.constexpr,
                                 WHOLE: tl.constexpr, ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr,
                                 BLOCK_S: tl.constexpr):  # fmt: skip
    """Writes dx, which may be x.  WHOLE says that a tile has all classes of its positions."""
    if LAST:
        K = K // ALIGN * ALIGN
    else:
        S = S // ALIGN * ALIGN
    SOFTMAX: tl.constexpr = PROBABILITY == "softmax" or NLL == "softmax"
    n, first, last = program_of(S, tiles_per_program, BLOCK_S)
    k = tl.arange(0, BLOCK_K)[:, None]
    d_overlap, d_prediction, d_nll, d_other = load_gradients(d_ptr, n, k, N, K, OTHER)
    for i in range(first, last):
        s = tl.cast(i, tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
        # r = sum of v - sum of p u, over the classes
        r = tl.zeros((1, BLOCK_S), ACC)
        lse = tl.zeros((1, BLOCK_S), ACC)
        if SOFTMAX and not WHOLE:
            lse = online_lse(x_ptr, n, s, K, S, blocks_k, LAST, ACC, BLOCK_K, BLOCK_S)
            for j in range(blocks_k):
                k = j * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
                d_overlap, d_prediction, d_nll, d_other = load_gradients(d_ptr, n, k, N, K, OTHER)
                y, m = load_target(y_ptr, mask_ptr, n, k, s, K, S, stride_n, IGNORE, DENSE, Y_LAST, ACC)
                p = y
                if PROBABILITY == "softmax" or GAMMA != 0.0:
                    p = tl.exp(load_logits(x_ptr, n, k, s, K, S, LAST, ACC) - lse)
                if PROBABILITY == "softmax":
                    r -= tl.sum(p * u_of(p, y, m, d_overlap, d_prediction, SQUARED, MINIMUM), 0, keep_dims=True)
                if NLL == "softmax":
                    r += tl.sum(v_of(p, y, m, d_nll, d_other, GAMMA), 0, keep_dims=True)
        for j in range(blocks_k):
            if not WHOLE:
                k = j * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
                d_overlap, d_prediction, d_nll, d_other = load_gradients(d_ptr, n, k, N, K, OTHER)
            x = load_logits(x_ptr, n, k, s, K, S, LAST, ACC)
            y, m = load_target(y_ptr, mask_ptr, n, k, s, K, S, stride_n, IGNORE, DENSE, Y_LAST, ACC)
            dx = tl.zeros((BLOCK_K, BLOCK_S), ACC)
            # The part with the most values at once comes first, while there is no other part.
            sigmoid_part = dx
            if NLL == "sigmoid":
                sigmoid_part += grad_of_sigmoid_nll(x, y, m, d_nll, d_other, GAMMA)
            if SOFTMAX:
                if WHOLE:
                    p, _ = softmax(x)
                else:
                    p = tl.exp(x - lse)
                # What p is multiplied by, without r.
                u = dx
                v = dx
                if PROBABILITY == "softmax":
                    u += u_of(p, y, m, d_overlap, d_prediction, SQUARED, MINIMUM)
                if NLL == "softmax":
                    v += v_of(p, y, m, d_nll, d_other, GAMMA)
                if WHOLE:
                    r = tl.sum(v - p * u, 0, keep_dims=True)
                dx = p * (u + r) - v
            if PROBABILITY == "sigmoid":
                p = sigmoid(x)
                dx += u_of(p, y, m, d_overlap, d_prediction, SQUARED, MINIMUM) * p * (1.0 - p)
            if PROBABILITY == "identity":
                dx += u_of(x, y, m, d_overlap, d_prediction, SQUARED, MINIMUM)
            if NLL == "sigmoid":
                dx += sigmoid_part
            at = dx_ptr + n * K * S + offsets(k, s, K, S, LAST)
            tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=(k < K) & (s < S))


def blocks(sizes, dtype, device, split):
    """(tiles per program, programs of a sample, tiles of classes, constants) of a launch."""
    N, K, S, last = sizes
    whole = K <= MAX_BLOCK_K
    block_k = triton.next_power_of_2(K) if whole else split
    block_s = min(triton.next_power_of_2(S), max(MIN_BLOCK_S, TILE // block_k) if whole else MIN_BLOCK_S)
    tiles = triton.cdiv(S, block_s)
    # Programs with smaller tiles have fewer threads, so there are more programs.
    per_sm = PROGRAMS_PER_SM * (1 if whole else TILE // (split * MIN_BLOCK_S))
    wanted = min(tiles, max(1, per_sm * multiprocessors(device) // N))
    per_program = triton.cdiv(tiles, wanted)
    constants = {"LAST": last, "ALIGN": math.gcd(K if last else S, 16), "ACC": acc_dtype(dtype), "BLOCK_K": block_k,
                 "BLOCK_S": block_s, "num_warps": warps_of(block_k * block_s, PER_THREAD)}  # fmt: skip
    return per_program, triton.cdiv(tiles, per_program), triton.cdiv(K, block_k), constants


def meaning(spec, y_last):
    """The constants of what is computed."""
    return {"PROBABILITY": spec.probability, "NLL": spec.nll, "OTHER": spec.other, "SQUARED": spec.squared,
            "MINIMUM": spec.minimum, "IGNORE": spec.ignore, "DENSE": spec.dense, "GAMMA": spec.gamma,
            "Y_LAST": y_last}  # fmt: skip


def laid(target, mask, sizes, dense):
    """Target and mask as the kernels read them, whether classes are adjacent in the target, and its stride of samples.

    Truth values become bytes.  A tensor is copied only if its strides are unusual.
    """
    N, K, S, _ = sizes
    target, mask = (t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t for t in (target, mask))
    mask = None if mask is None else mask.reshape(N, S).contiguous()
    target = target.reshape(N, K if dense else 1, S)
    last = not target[0].is_contiguous()
    if last and not target[0].t().is_contiguous():
        target, last = target.contiguous(), False
    return target, mask, last, target.stride(0)


@plan
def positions_plan(sizes, dtype, device, argmax):
    N, K, S, _ = sizes
    per_program, programs, blocks_k, constants = blocks(sizes, dtype, device, SPLIT_FWD)
    named = constants | {"ARGMAX": argmax}
    return Launcher(segmentation_positions_kernel, (N * programs,), (K, S, per_program, blocks_k), named)


def segmentation_argmax(x, labels, sizes):
    """Writes the first class with the largest logit of each position into ``labels``, (N, S)."""
    positions_plan(sizes, x.dtype, x.device, True)((x, labels))


@plan
def fwd_plan(sizes, dtype, device, spec, y_last, stride_n):
    """The launcher for the values of positions (None if none are needed), that of the sums, and the programs."""
    N, K, S, _ = sizes
    per_program, programs, blocks_k, constants = blocks(sizes, dtype, device, SPLIT_FWD)
    positions = None
    if blocks_k > 1 and (spec.probability in ("softmax", "argmax") or spec.nll == "softmax"):
        positions = positions_plan(sizes, dtype, device, spec.probability == "argmax")
    named = meaning(spec, y_last) | constants
    numbers = (N, K, S, stride_n, per_program)
    return positions, Launcher(segmentation_sums_fwd_kernel, (N * programs, blocks_k), numbers, named), programs


def segmentation_sums_fwd(x, target, mask, sizes, spec):
    """The sums, (ROWS, N, K), in fp32, or in fp64 for fp64 logits and counts.  ``x`` is contiguous or channels_last."""
    target, mask, y_last, stride_n = laid(target, mask, sizes, spec.dense)
    launch_positions, launch, programs = fwd_plan(sizes, x.dtype, x.device, spec, y_last, stride_n)
    wide = torch.promote_types(x.dtype, torch.float32)
    positions = None
    if launch_positions is not None:
        dtype = torch.int32 if spec.probability == "argmax" else wide
        positions = torch.empty(sizes.N, sizes.S, dtype=dtype, device=x.device)
        launch_positions((x, positions))
    out = torch.empty(ROWS, sizes.N, programs, sizes.K, dtype=wide, device=x.device)
    launch((x, target, mask, positions, out))
    sums = out.sum(2, dtype=torch.float64)
    return sums if spec.hard else sums.to(wide)


@plan
def bwd_plan(sizes, dtype, device, spec, y_last, stride_n):
    N, K, S, _ = sizes
    per_program, programs, blocks_k, constants = blocks(sizes, dtype, device, SPLIT_BWD)
    named = meaning(spec, y_last) | constants | {"WHOLE": blocks_k == 1}
    return Launcher(segmentation_sums_bwd_kernel, (N * programs,), (N, K, S, stride_n, per_program, blocks_k), named)


def segmentation_sums_bwd(dsums, x, target, mask, dx, sizes, spec):
    """Writes the gradient of x into ``dx``, which may be x.  ``dsums`` has the gradients of the sums."""
    target, mask, y_last, stride_n = laid(target, mask, sizes, spec.dense)
    bwd_plan(sizes, x.dtype, x.device, spec, y_last, stride_n)((x, target, mask, dsums, dx))
