"""The part of the kernels' tests that CI runs as compiled code; docs/compiled.md names the command for all of them.

Each run is a process of its own, because this one may have imported the kernels for the interpreter.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# Every kernel, both layouts, three dtypes, on chip and split, kept channels, residuals, odd addresses, and orders.
SMALL = ("tests/kernels/test_sanitize.py", "tests/kernels/test_compiled.py")
# One element over a block; more channels than a block; statistics that several launches merge.
SIZES = "tests/kernels/test_norm_act.py::test_training"
SIZES_CHOSEN = "one-over-the-block or channels-over-the-block-split or long-n-by-c"
# 4 and 8 warps, both tiles of positions, and each kind of product.
WARPS = "tests/kernels/test_conv_abn_blocks.py::test_configuration"
WARPS_CHOSEN = "train and (" + " or ".join(
    ("fp32-128-16-to-60", "fp32-64-3-to-7", "tf32-128-64-to-120", "tf32-64-36-to-32", "fp16-128-128-to-120",
     "fp16-64-20-to-7", "bf16-128-20-to-60", "bf16-64-72-to-32")
) + ")"  # fmt: skip


def run(arch: str, *arguments: str) -> None:
    # The options of this run are removed, because they may divide the tests among processes.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=--import-mode=importlib",
        "-q",
        "--tb=short",
        "--ptx",
        arch,
    ]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_small_cases_of_every_kernel_for_sm_80():
    run("sm_80", *SMALL)


@pytest.mark.slow
def test_small_cases_of_what_differs_for_sm_90():
    """On sm_90 the convolution has other instructions; norms and pools compile to nearly the same code as on sm_80."""
    run("sm_90", *SMALL, "-k", "convolution or tf32 or addresses_and_dtypes")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sizes_over_a_block_and_every_number_of_warps(arch):
    run(arch, SIZES, WARPS, "-k", f"{SIZES_CHOSEN} or {WARPS_CHOSEN}")
