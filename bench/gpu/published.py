"""The vector addition of Triton's tutorials: its times on an A100 are public, and test the model of ``predict.py``.

The figures are the table of the page "Vector Addition" of Triton's documentation (release 3.x), quoted from memory:
compare them with the page before you rely on them.  The bandwidth of the largest size is the model's bandwidth of an
A100, and the time of the smallest size is the time that the page's benchmark itself takes.  All other sizes are held
out.  Softmax and layer normalisation of the tutorials, and Liger's kernels, are left out: we have no figures of them
that we are certain of.
"""

import torch
import triton
import triton.language as tl

# Elements of fp32 -> GB/s, of two reads and one write.
PUBLISHED = {
    4096: 8.0,
    131072: 219.43,
    262144: 384.0,
    524288: 614.4,
    1048576: 819.2,
    2097152: 1023.9999,
    4194304: 1228.8,
    8388608: 1424.7,
    16777216: 1560.4,
    33554432: 1624.9,
    67108864: 1669.7,
    134217728: 1684.0,
}
FITTED = 4096, 134217728
BLOCK = 1024


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask) + tl.load(y_ptr + offs, mask=mask), mask=mask)


def print_table() -> None:
    from fusedseg.kernels.dry_run import dry_run

    from .predict import DEVICES, START, predict

    overhead = 12 * FITTED[0] / (PUBLISHED[FITTED[0]] * 1e9)
    errors = []
    print("| elements | published, us | predicted, us | error |")
    print("|---|---|---|---|")
    for n, speed in PUBLISHED.items():
        x = torch.empty(n)
        with dry_run("sm_80") as launches:
            add_kernel[(triton.cdiv(n, BLOCK),)](x, x, x, n, BLOCK=BLOCK)
        published = 12 * n / (speed * 1e9)
        predicted = predict(launches[0], DEVICES["A100"]).seconds - START + overhead
        error = predicted / published - 1
        if n not in FITTED:
            errors.append(abs(error))
        held_out = "" if n not in FITTED else " (fitted)"
        print(f"| {n}{held_out} | {1e6 * published:.1f} | {1e6 * predicted:.1f} | {100 * error:+.0f} % |")
    print(f"\nheld out: mean error {100 * sum(errors) / len(errors):.0f} %, largest {100 * max(errors):.0f} %")
