"""z = phi(weight * xhat + bias), xhat = (y - mean) * rstd, y = conv(x, w): a convolution that ends in BatchNorm.

It is an implicit matrix product with M = N OD OH OW rows (output positions) and K columns (output channels), reduced
over the taps of the kernel and the input's channels.  The epilogue works on the fp32 accumulator:

    "stats"   stores y, and leaves (count, mean, M2) of the stored values for each program.  ``norm_act`` merges them
              in a fixed order, then normalises and activates in one more pass.  A program keeps (count, mean, M2) for
              each lane (pair of rows) and merges lanes once at its end, so a tile needs no exchange between threads
    "norm"    uses running statistics: scale = weight rstd, shift = bias + (conv_bias - mean) scale.  It stores only
              z = phi(scale y + shift)
    "none"    stores y + conv_bias

Kept for backward: x, w, z, rstd, weight, bias, and xhat of the kept channels.  Backward first runs ``norm_act_bwd``,
which computes dy, and then the vendor's convolution backward.

Tensors are (N, C, D, H, W) with any strides; D = 1 in two dimensions.  channels_last tensors are loaded and stored as
rows of channels.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .activation import act_fwd
from .conv import constants_of, conv_blocks, three
from .launcher import Launcher, plan
from .norm_act import load_affine, norm_act_fwd
from .tile import chan_merge


@triton.jit
def taps_inside(d0, h0, w0, D, H, W, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, DD: tl.constexpr,
                DH: tl.constexpr, DW: tl.constexpr):  # fmt: skip
    """A mask for each row: bit t says whether tap t, of at most 32 taps, reads a value of x and not padding."""
    # As an unsigned number, a position before the first one is large.
    d0, h0, w0 = d0.to(tl.uint32), h0.to(tl.uint32), w0.to(tl.uint32)
    along_w = tl.zeros_like(w0)
    for kw in tl.static_range(KW):
        along_w |= (w0 + kw * DW < W).to(tl.uint32) << kw
    inside = tl.zeros_like(w0)
    for kd in tl.static_range(KD):
        for kh in tl.static_range(KH):
            in_dh = (d0 + kd * DD < D) & (h0 + kh * DH < H)
            inside |= tl.where(in_dh, along_w, 0) << ((kd * KH + kh) * KW)
    return inside


@triton.jit
def halves(v, BLOCK_M: tl.constexpr, LANES: tl.constexpr):
    """Splits (BLOCK_M, LANES) into two blocks of half as many rows.

    Paired rows are 8 apart, because after a product on tensor cores one thread holds both rows of such a pair.
    """
    v = tl.permute(tl.reshape(v, (BLOCK_M // 16, 2, 8, LANES)), (0, 2, 3, 1))
    a, b = tl.split(v)
    return tl.reshape(a, (BLOCK_M // 2, LANES)), tl.reshape(b, (BLOCK_M // 2, LANES))


@triton.jit
def conv_abn_fwd_kernel(x_ptr, w_ptr, out_ptr, partial_ptr, conv_bias_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr,
                        rstd_ptr, M, D, H, W, OD, OH, OW, stride_xn, stride_xc, stride_xd, stride_xh, stride_xw,
                        stride_on, stride_ok, stride_os, steps, tiles_per_split, splits, C: tl.constexpr,
                        K: tl.constexpr, GROUPS: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                        SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr,
                        PW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
                        INDEX: tl.constexpr, ALIGNED: tl.constexpr, X_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr,
                        EPILOGUE: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, PARAM: tl.constexpr,
                        PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                        BLOCK_C: tl.constexpr):  # fmt: skip
    """The convolution that the module's docstring describes.

    C and K count the channels of one group.  INDEX is int64 if positions, or offsets in one sample, exceed 2**31.
    ALIGNED says that 16 adjacent positions are in one sample and adjacent in memory, in x and in out.  X_ROWS and
    OUT_ROWS say that x and out hold rows of channels, so that positions of all samples are evenly spaced.
    """
    # Neighbours in the grid read the same rows of x, and compute different output channels.
    column = tl.program_id(0)
    split = tl.program_id(1)
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    group = column // tiles_k
    k = (column % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_k = k < K
    channel = group * K + k
    c = tl.arange(0, BLOCK_C)
    # w has the layout (K of all groups, taps, C).
    w_row = channel * (KD * KH * KW * C)

    if EPILOGUE == "norm":
        weight, bias = load_affine(weight_ptr, bias_ptr, channel, in_k, tl.float32)
        mean = tl.load(mean_ptr + channel, mask=in_k, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.load(var_ptr + channel, mask=in_k, other=1.0).to(tl.float32) + EPS)
        if split == 0:
            tl.store(rstd_ptr + channel, rstd, mask=in_k)
        scale = weight * rstd
        if conv_bias_ptr is not None:
            mean -= tl.load(conv_bias_ptr + channel, mask=in_k, other=0.0).to(tl.float32)
        shift_k = bias - mean * scale
    n_run = tl.zeros((BLOCK_M // 2, 1), tl.float32)
    mean_run = tl.zeros((BLOCK_M // 2, BLOCK_K), tl.float32)
    m2_run = tl.zeros((BLOCK_M // 2, BLOCK_K), tl.float32)

    taps: tl.constexpr = KD * KH * KW
    padded: tl.constexpr = PD + PH + PW > 0
    blocks_c: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    b_ptrs = w_ptr + (w_row[:, None] + c[None, :])
    if taps * blocks_c == 1:
        # There is only one step, so its weights are loaded once.
        b = tl.load(b_ptrs, mask=in_k[:, None] & (c < C)[None, :], other=0.0)
    first = split * tiles_per_split
    for tile in range(first, tl.minimum(first + tiles_per_split, (M - 1) // BLOCK_M + 1)):
        m = tl.cast(tile, INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
        in_m = m < M
        plane = tl.cast(OH, INDEX) * OW
        n = (m // (OD * plane)).to(tl.int64)
        s = m % (OD * plane)
        if ALIGNED:
            s = tl.max_contiguous(tl.multiple_of(s, 16), 16)
        if taps == 1 and SD * SH * SW == 1 and not padded:
            # Positions of the input equal positions of the output, and are evenly spaced in memory.
            if X_ROWS:
                x_row = m.to(tl.int64) * stride_xw
            else:
                x_row = n * stride_xn + s.to(tl.int64) * stride_xw
        else:
            d0 = (s // plane) * SD - PD
            h0 = (s // OW % OH) * SH - PH
            w0 = (s % OW) * SW - PW
            x_row = n * stride_xn + d0.to(tl.int64) * stride_xd + h0.to(tl.int64) * stride_xh
            x_row += w0.to(tl.int64) * stride_xw
        x_row += (group * C).to(tl.int64) * stride_xc
        offs_c = (c.to(INDEX) * stride_xc)[None, :]
        if X_ROWS:
            a_ptrs = x_ptr + (x_row[:, None] + offs_c)
        if padded and taps <= 32:
            inside = tl.where(in_m, taps_inside(d0, h0, w0, D, H, W, KD, KH, KW, DD, DH, DW), 0)

        acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        # One loop runs over taps and channels, because a nested loop would drain its pipeline of loads at every tap.
        # The compiler does not know its length; otherwise it would unroll nine taps and run out of registers.
        for i in range(steps):
            tap = i // blocks_c
            first_c = (i % blocks_c) * BLOCK_C
            kd = tl.cast(tap // (KH * KW) * DD, INDEX)
            kh = tl.cast(tap // KW % KH * DH, INDEX)
            kw = tl.cast(tap % KW * DW, INDEX)
            shift = kd * stride_xd + kh * stride_xh + kw * stride_xw + tl.cast(first_c, INDEX) * stride_xc
            if padded and taps <= 32:
                mask = (inside >> tap) & 1 != 0
            elif padded:
                mask = in_m & (d0 + kd >= 0) & (d0 + kd < D) & (h0 + kh >= 0) & (h0 + kh < H)
                mask = mask & (w0 + kw >= 0) & (w0 + kw < W)
            else:
                mask = in_m
            mask_a, mask_b = mask[:, None], in_k[:, None]
            if C % BLOCK_C != 0:
                in_c = (first_c + c < C)[None, :]
                mask_a, mask_b = mask_a & in_c, mask_b & in_c
            if X_ROWS:
                a = tl.load(a_ptrs + shift, mask=mask_a, other=0.0)
            else:
                # Every value needs its own address here, and there are too many addresses to keep in registers.
                a = tl.load(x_ptr + ((x_row + shift)[:, None] + offs_c), mask=mask_a, other=0.0)
            if taps * blocks_c > 1:
                b = tl.load(b_ptrs + (tap * C + first_c), mask=mask_b, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)

        if OUT_ROWS:
            out_row = m.to(tl.int64) * stride_os
        else:
            out_row = n * stride_on + s.to(tl.int64) * stride_os
        offs = out_row[:, None] + (channel.to(tl.int64) * stride_ok)[None, :]
        mask_out = in_m[:, None] & in_k[None, :]
        if EPILOGUE == "norm":
            acc = act_fwd(acc * scale[None, :] + shift_k[None, :], ACT, PARAM)
        elif EPILOGUE == "none" and conv_bias_ptr is not None:
            acc += tl.load(conv_bias_ptr + channel, mask=in_k, other=0.0).to(tl.float32)[None, :]
        y = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs, y, mask=mask_out)
        if EPILOGUE == "stats":
            # Statistics are computed from the stored values.  Rows beyond the last row count 0.
            y0, y1 = halves(y.to(tl.float32), BLOCK_M, BLOCK_K)
            in0, in1 = halves(in_m.to(tl.float32)[:, None], BLOCK_M, 1)
            # Chan's formula merges the statistics so far with the statistics of a pair of rows.
            n_pair = in0 + in1
            n_both = n_run + n_pair
            share = n_pair / tl.maximum(n_both, 1.0)
            delta = (y0 + y1) * (1.0 / tl.maximum(n_pair, 1.0)) - mean_run
            apart = y0 - y1
            mean_run += delta * share
            m2_run += apart * apart * (0.5 * in0 * in1) + delta * delta * (n_run * share)
            n_run = n_both
    if EPILOGUE == "stats":
        n, mean, m2 = chan_merge(n_run, mean_run, m2_run, True)
        all_k: tl.constexpr = GROUPS * K
        partial_ptrs = partial_ptr + split * all_k + channel[None, :]
        tl.store(partial_ptrs, n + tl.zeros((1, BLOCK_K), tl.float32), mask=in_k[None, :])
        tl.store(partial_ptrs + splits * all_k, mean, mask=in_k[None, :])
        tl.store(partial_ptrs + 2 * splits * all_k, m2, mask=in_k[None, :])


def strides(layout, size: tuple[int, int, int]) -> tuple[int, ...]:
    """The strides of N, C, D, H and W of a dense tensor.  Its own stride of a size of 1 may have any value."""
    D, H, W = size
    along = layout.C if layout.rows else 1
    return layout.C * D * H * W, 1 if layout.rows else D * H * W, H * W * along, W * along, along


@plan
def conv_plan(shape, w_shape, out_shape, x_layout, layout, geometry, epilogue, tf32, dtype, device, eps, act):
    """The launcher, and the number of parts of statistics that it leaves."""
    (stride, padding, dilation, groups), kernel, C = geometry, w_shape[2:], w_shape[1]
    N, K = out_shape[:2]
    M = math.prod(out_shape) // K
    size, out_size = three(shape[2:], 1), three(out_shape[2:], 1)
    x_strides = strides(x_layout, size)
    reach = (d * (k - 1) * s for d, k, s in zip(dilation, kernel, x_strides[-len(kernel) :], strict=True))
    index = tl.int64 if max(M, C * x_strides[1] + sum(reach)) >= 2**31 else tl.int32
    stride_on, stride_ok, *_, stride_os = strides(layout, out_size)
    tensor_cores = tf32 or dtype != torch.float32
    blocks = conv_blocks(M, w_shape, groups, dtype, tensor_cores, device, epilogue == "norm", x_layout.rows)
    constants: dict[str, Any] = constants_of(kernel, stride, padding, dilation)
    # With one tap, positions of the input are those of the output.
    pointwise = set(kernel) == set(stride) == {1} and set(padding) == {0}
    constants |= {
        "C": C, "K": K // groups, "GROUPS": groups, "INDEX": index,
        "ALIGNED": pointwise and (M // N) % 16 == 0, "X_ROWS": x_layout.rows, "OUT_ROWS": layout.rows,
        "EPILOGUE": epilogue, "EPS": eps, "ACT": act[0], "PARAM": act[1], "PRECISION": "tf32" if tf32 else "ieee",
        **blocks.meta,
    }  # fmt: skip
    steps = triton.cdiv(C, blocks.meta["BLOCK_C"]) * math.prod(kernel)
    sizes = (M, *size, *out_size, *x_strides, stride_on, stride_ok, stride_os, steps, blocks.tiles_per_split,
             blocks.splits)  # fmt: skip
    return Launcher(conv_abn_fwd_kernel, (blocks.groups, blocks.splits), sizes, constants), blocks.splits


def launch_conv(x, w, out, x_layout, layout, geometry, epilogue, tf32, conv_bias=None, norm=(None,) * 5, eps=0.0,
                act=("identity", 0.0)):  # fmt: skip
    """Writes ``out``, and returns partial statistics or None.

    ``norm`` holds weight, bias, mean, var and the tensor that rstd is written to.
    """
    launch, splits = conv_plan(tuple(x.shape), tuple(w.shape), tuple(out.shape), x_layout, layout, geometry, epilogue,
                               tf32, x.dtype, x.device, eps, act)  # fmt: skip
    partial = None
    if epilogue == "stats":
        partial = torch.empty(3, splits, out.shape[1], dtype=torch.float32, device=x.device)
    # The kernel takes the weight as (K, taps, C).  It is not copied if it is channels_last or has one tap.
    launch((x, w.movedim(1, -1).contiguous(), out, partial, conv_bias, *norm))
    return partial


def conv_abn_fwd(x, w, out, x_layout, layout, geometry, conv_bias, weight, bias, running_mean, running_var, training,
                 momentum, eps, act, kept, tf32):  # fmt: skip
    """Writes z into ``out``.  ``x`` and ``out`` are dense; ``w`` is (K, C / groups, *kernel).

    In training ``conv_bias`` is left out of the convolution, because the norm subtracts the mean, which contains it.
    All other arguments and the results have the same meaning as in ``norm_act_fwd``.
    """
    norm = (weight, bias, running_mean, running_var)
    if not training and kept is None:
        rstd = torch.empty(out.shape[1], dtype=torch.float32, device=x.device)
        launch_conv(x, w, out, x_layout, layout, geometry, "norm", tf32, conv_bias, (*norm, rstd), eps, act)
        return running_mean, rstd, None
    partial = launch_conv(
        x, w, out, x_layout, layout, geometry, "stats" if training else "none", tf32, None if training else conv_bias
    )
    return norm_act_fwd(out, out, layout, *norm, training, momentum, eps, act, kept, partial)
