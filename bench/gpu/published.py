"""Kernels that are not ours, beside their published times on a GPU: they test the model of ``predict.py``.

The kernels compute what the published ones compute, in the same order and with the same launch constants; they are
compiled by the Triton that is installed, which is newer than the published one.  Sources:

    add, softmax, layer norm backward   github.com/triton-lang/triton, branch gh-pages (commit 001d977d), the output of
        main/_sources/getting-started/tutorials/{01-vector-add,02-fused-softmax,05-layer-norm}.rst.txt; an A100
    layer norm, RMS norm                github.com/linkedin/Liger-Kernel (commit ead96b61), column y_value_50 of
        benchmark/data/all_benchmark_data.csv; "NVIDIA A100-SXM4-80GB" (0.2.1) and "NVIDIA H100 80GB HBM3" (0.6.0)

Two numbers are fitted to the vector addition: the A100's bandwidth to its largest size, and the time that a benchmark
itself takes to its smallest size.  All else is held out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fusedseg.kernels.dry_run import dry_run

from .predict import DEVICES, REGISTERS, SHARED, START, code_of, predict


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask) + tl.load(y_ptr + offs, mask=mask), mask=mask)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, rows, N, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * N + lane, mask=lane < N, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * N + lane, e / tl.sum(e, axis=0), mask=lane < N)


@triton.jit
def layer_norm_kernel(x_ptr, out_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + lane, mask=lane < N, other=0.0)
    w = tl.load(weight_ptr + lane, mask=lane < N, other=0.0)
    b = tl.load(bias_ptr + lane, mask=lane < N, other=0.0)
    mean = tl.sum(x, axis=0) / N
    d = x - mean
    rstd = tl.rsqrt(tl.sum(d * d, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * N + lane, d * rstd * w + b, mask=lane < N)


@triton.jit
def rms_norm_kernel(x_ptr, out_ptr, weight_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    loaded = tl.load(x_ptr + row * N + lane, mask=lane < N, other=0.0)
    w = tl.load(weight_ptr + lane, mask=lane < N, other=0.0)
    x = loaded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * N + lane, (x * rstd).to(loaded.dtype) * w, mask=lane < N)


@triton.jit
def layer_norm_bwd_kernel(dx_ptr, dz_ptr, saved_ptr, weight_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, lock_ptr,
                          N, GROUPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    mask = lane < N
    x = tl.load(saved_ptr + row * N + lane, mask=mask, other=0.0).to(tl.float32)
    dz = tl.load(dz_ptr + row * N + lane, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight_ptr + lane, mask=mask).to(tl.float32)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    xhat = tl.where(mask, (x - mean) * rstd, 0.0)
    g = tl.where(mask, w * dz, 0.0)
    s2, s1 = tl.sum(xhat * g, axis=0) / N, tl.sum(g, axis=0) / N
    tl.store(dx_ptr + row * N + lane, (g - xhat * s2 - s1) * rstd, mask=mask)
    # One program at a time adds to a row of the partial sums.
    group = row % GROUPS
    lock = lock_ptr + group
    dw, db = dz * xhat, dz
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    at = group * N + lane
    if tl.load(lock + GROUPS) == 0:
        tl.atomic_xchg(lock + GROUPS, 1)
    else:
        dw += tl.load(dweight_ptr + at, mask=mask)
        db += tl.load(dbias_ptr + at, mask=mask)
    tl.store(dweight_ptr + at, dw, mask=mask)
    tl.store(dbias_ptr + at, db, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def launched(gpu: str, kernel: Any, rows: int, *given: Any, **constants: Any) -> Any:
    with dry_run(DEVICES[gpu].arch) as launches:
        kernel[(rows,)](*given, **constants)
    return launches[0]


def add(gpu: str, n: int) -> tuple[Any, float]:
    x = torch.empty(n)
    return launched(gpu, add_kernel, triton.cdiv(n, 1024), x, x, x, n, BLOCK=1024), 1.0


def softmax(gpu: str, N: int) -> tuple[Any, float]:
    """As many programs as registers and shared memory allow at once, each of several rows."""
    x, device, block = torch.empty(4096, N), DEVICES[gpu], triton.next_power_of_2(N)
    launch = launched(gpu, softmax_kernel, 1, x, x, 4096, N, BLOCK=block, STAGES=2, num_warps=8)
    registers, shared = code_of(launch.compiled, device.arch).registers, launch.compiled.metadata.shared
    resident = min(REGISTERS // (registers * 32 * 8), (SHARED[device.arch] - 1024) // max(1, shared))
    programs = min(4096, device.multiprocessors * resident)
    return launch._replace(grid=(programs,)), 4096 / programs


def ligers_warps(block: int) -> int:
    return 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4


def layer_norm(gpu: str, N: int) -> tuple[Any, float]:
    x, w = torch.empty(4096, N), torch.empty(N)
    return launched(gpu, layer_norm_kernel, 4096, x, x, w, w, w, w, N, 1e-6, BLOCK=N, num_warps=ligers_warps(N)), 1.0


def rms_norm(gpu: str, N: int) -> tuple[Any, float]:
    x, w = torch.empty(2048, N, dtype=torch.bfloat16), torch.empty(N)
    return launched(gpu, rms_norm_kernel, 2048, x, x, w, w, N, 1e-6, BLOCK=N, num_warps=ligers_warps(N)), 1.0


def layer_norm_bwd(gpu: str, N: int) -> tuple[Any, float]:
    x, block = torch.empty(4096, N, dtype=torch.float16), triton.next_power_of_2(N)
    groups = 96 if N <= 8192 else 64
    part, wide = torch.empty(groups, N, dtype=torch.float16), torch.empty(4096)
    lock = torch.empty(2 * groups, dtype=torch.int32)
    launch = launched(
        gpu, layer_norm_bwd_kernel, 4096, x, x, x, x[0], wide, wide, part, part, lock, N, GROUPS=groups, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    return launch, 1.0


class Published(NamedTuple):
    """``seconds``: of each size; ``others``: small launches in the published time, as those that fill with zeros."""

    name: str
    gpu: str
    launch: Callable[[str, int], tuple[Any, float]]
    seconds: dict[int, float]
    others: int = 0


def at_speed(gigabytes_per_second: dict[int, float], bytes_of_one: int) -> dict[int, float]:
    return {n: n * bytes_of_one / (speed * 1e9) for n, speed in gigabytes_per_second.items()}


def milliseconds(found: dict[int, float]) -> dict[int, float]:
    return {n: of / 1e3 for n, of in found.items()}


ADDS = at_speed(
    {
        4096: 8.000000, 8192: 15.999999, 16384: 31.999999, 32768: 63.999998, 65536: 127.999995, 131072: 219.428568,
        262144: 384.000001, 524288: 614.400016, 1048576: 819.200021, 2097152: 1023.999964, 4194304: 1260.307736,
        8388608: 1424.695621, 16777216: 1560.380965, 33554432: 1624.859540, 67108864: 1669.706983,
        134217728: 1685.813499,
    },
    bytes_of_one=3 * 4,
)  # fmt: skip
FITTED = 4096, 134217728
SOFTMAX = at_speed(
    {256: 471.407655, 512: 804.064680, 1024: 1073.085913, 2048: 1273.707256, 3072: 1325.847822, 4096: 1385.946487,
     6144: 1409.532275, 8192: 1432.230205, 8320: 1384.786380, 12288: 1422.224086, 12672: 1436.952354},
    bytes_of_one=4096 * 2 * 4,
)  # fmt: skip
# Smaller sizes wait for the host: from 1,024 to 6,656 columns all times lie between 175 and 207 us.
BACKWARD = at_speed(
    {7168: 781.963630, 8192: 889.628980, 9216: 739.745803, 12288: 869.946926, 15360: 965.026182, 15872: 949.945143},
    bytes_of_one=4096 * 3 * 2,
)
LIGER_A100 = {1024: 0.030272, 2048: 0.049920, 4096: 0.088160, 8192: 0.165216, 16384: 0.322304}
LIGER_H100 = {1024: 0.018848, 2048: 0.029152, 4096: 0.051040, 8192: 0.094752, 16384: 0.184768}
LIGER_RMS = {1024: 0.013600, 2048: 0.020000, 4096: 0.031072, 8192: 0.051744, 16384: 0.095264, 32768: 0.182240}
PUBLISHED = (
    Published("vector addition, elements", "A100", add, ADDS),
    Published("softmax, columns of 4096 rows, fp32", "A100", softmax, SOFTMAX),
    Published("layer norm backward, columns of 4096 rows, fp16", "A100", layer_norm_bwd, BACKWARD, others=4),
    Published("Liger layer norm, columns of 4096 rows, fp32", "A100", layer_norm, milliseconds(LIGER_A100)),
    Published("Liger layer norm, columns of 4096 rows, fp32", "H100", layer_norm, milliseconds(LIGER_H100)),
    Published("Liger RMS norm, columns of 2048 rows, bf16", "A100", rms_norm, milliseconds(LIGER_RMS)),
)


def predicted(of: Published, n: int) -> float:
    launch, tiles = of.launch(of.gpu, n)
    return predict(launch, DEVICES[of.gpu], tiles=tiles).seconds + of.others * START


def print_table() -> None:
    overhead = ADDS[FITTED[0]] - predicted(PUBLISHED[0], FITTED[0])
    print("| kernel | GPU | size | published, us | predicted, us | error |")
    print("|---|---|---|---|---|---|")
    summary = []
    for of in PUBLISHED:
        errors = {n: (predicted(of, n) + overhead) / seconds - 1 for n, seconds in of.seconds.items()}
        for n, error in errors.items():
            seconds, fitted = of.seconds[n], of.launch is add and n in FITTED
            times = f"{1e6 * seconds:.1f} | {1e6 * seconds * (1 + error):.1f}"
            print(f"| {of.name} | {of.gpu} | {n}{' (fitted)' * fitted} | {times} | {100 * error:+.0f} % |")
        held_out = [abs(error) for n, error in errors.items() if of.launch is not add or n not in FITTED]
        mean = 100 * sum(held_out) / len(held_out)
        summary.append(f"| {of.name} | {of.gpu} | {len(held_out)} | {mean:.0f} % | {100 * max(held_out):.0f} % |")
    print("\n| held out | GPU | sizes | mean error | largest |\n|---|---|---|---|---|", *summary, sep="\n")
