"""The part of the kernels' tests that CI runs as compiled code; docs/methods.md names the command for all of them.

They run in one other process, because this one may have imported the kernels for the interpreter.  Compiling takes most
of the time, so few cases compile the same kernel in nearly the same way.
"""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fusedseg.doctor.report import untested_versions
from tests.tools import warm

ROOT = Path(__file__).parents[2]


def cases(test: str, *names: str) -> list[str]:
    return [f"tests/kernels/{test}[{name}]" for name in names]


# All tensors of the tests "at an odd address" begin one element after a multiple of 16 bytes.
ODD = "test_compiled.py::test_addresses_and_dtypes"
ORDER = "test_compiled.py::test_the_order_of_warps_does_not_matter"
# Together: every kernel, both layouts, four dtypes, each kind of statistics, residuals, kept channels, odd addresses,
# sizes over and under a block, orders of warps, and each number of warps of the convolution.
PART = [
    # Norms of slabs that fit on a chip, and pools.
    *cases(ODD, "onchip-batch-planes", "onchip-batch-rows", "onchip-instance-planes", "onchip-instance-rows"),
    *cases("test_sanitize.py::test_on_chip", "batch-rows", "group-planes"),
    *cases("test_norm_act.py::test_training", "many-small-planes", "channels-over-the-block"),
    *cases("test_max_pool.py::test_values_and_gradients", "odd-rows", "3d-overlapping-rows"),
    *cases("test_max_pool.py::test_dtypes", "torch.float64-planes"),
    *cases("test_compiled.py::test_max_pool_at_an_odd_address", "torch.float16-planes", "torch.bfloat16-rows"),
    # Concatenations.
    *cases("test_concat.py::test_values", "two-8", "odd-channels-3", "more-than-a-launch-0"),
    *cases("test_compiled.py::test_concat_at_an_odd_address", "torch.float16", "torch.float32"),
    # Linear upsampling.
    *cases("test_sanitize.py::test_upsample", "image-rows", "volume-planes"),
    # Norms in several launches.
    *cases(ODD, "split-batch-planes", "split-instance-planes", "split-group-rows"),
    *cases("test_sanitize.py::test_running_statistics", "True-True", "False-False"),
    *cases("test_norm_act.py::test_training", "one-over-the-block", "channels-over-the-block-split"),
    *cases("test_sanitize.py::test_kept_channels_split", "planes"),
    *cases("test_norm_act.py::test_many_kept_channels_of_rows", "16-torch.float32"),
    *cases(ORDER, "batch-rows"),
    *cases("test_norm_sums.py::test_values", "batch-far", "instance-near"),
    # Convolutions.
    *cases("test_conv3d.py::test_values", "48-to-16"),
    *cases("test_sanitize.py::test_convolution", "taps"),
    *cases("test_compiled.py::test_convolution_at_an_odd_address", "torch.bfloat16-False-rows"),
    *cases("test_compiled.py::test_tf32_loses_what_is_cut_off_and_nothing_else", "rows"),
    # 4 and 8 warps.
    *cases("test_conv_abn_blocks.py::test_configuration", "fp16-64-20-to-7", "fp16-128-128-to-120"),
    # Sums of losses.
    *cases("test_segmentation_sums.py::test_values_and_gradients", "dice-ce-planes", "regions-rows"),
    *cases("test_segmentation_sums.py::test_classes_in_several_tiles_of_fp32", "planes", "rows"),
    # Packed copies.
    *cases("test_low_bit.py::test_the_bits_of_aten_with_a_kink", "channel-planes-torch.float16"),
    *cases("test_low_bit.py::test_kinks_in_one_launch", "group-torch.float16"),
]


def test_a_part_of_the_tests_as_compiled_code_for_sm_80():
    """A new PyTorch turned the README's ``pytest`` red, where only this machine was behind."""
    newer = [name for name, _, side in untested_versions() if side == "newer" and name != "python"]
    if newer and not os.environ.get("FUSEDSEG_TESTS_STRICT"):
        pytest.skip(f"the PTX machine may not know the code of this {' and '.join(newer)}")
    kernels = {
        name
        for file in (ROOT / "kernels").glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
    }
    assert kernels
    # The options of this run are removed, because they may divide the tests among processes.  The plugins that are left
    # out cost seconds.
    options = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    done = warm.run("pytest", *options, "-q", "-rs", "--tb=short", "--ptx", "sm_80", *PART)
    assert done.returncode == 0, done.stdout + done.stderr
    # The last lines name the kernels that were launched.
    assert not [kernel for kernel in kernels if f"'{kernel}'" not in done.stdout]
