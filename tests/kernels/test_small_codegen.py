"""Checks the compiled kernels of upsampling, concatenation, pools, packing, losses and volumes, without a GPU.

No value spills, and loads and stores of large tensors are wide.  ``test_codegen.py`` has norms and convolutions.
"""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.tools import warm
from tests.tools.codegen import VENDORS, check_spills, check_widths

# The families whose launches say what is expected of their kernels.
FAMILIES = [
    path.stem for path in sorted(Path(__file__).parent.glob("*_launches.py")) if "KERNELS = " in path.read_text()
]
# Every run compiles the launches FEW of a family for one GPU.
SUITES = [("FEW", "sm_90"), *(pytest.param(of, target, marks=pytest.mark.slow)
          for of, target in (("FEW", "gfx942"), *(("CASES", target) for target in VENDORS)))]  # fmt: skip


@pytest.mark.parametrize(("cases", "target"), SUITES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_spills_and_wide_accesses(family, cases, target, compiled, record_property):
    module = f"tests.kernels.{family}"
    launches, of_family = compiled(module, cases, target), importlib.import_module(module).KERNELS
    assert check_spills(launches, {}, record_property) >= of_family.names
    assert target != "sm_90" or max(of["registers"] for of in launches) <= of_family.most_registers
    assert check_widths(launches, of_family.accesses)


@pytest.mark.slow
def test_rows_of_other_numbers_of_classes_are_narrow(compiled):
    """This is a limit, stated in the documentation: the classes of a position begin at any address."""
    for of in compiled("tests.kernels.segmentation_sums_launches", "NARROW", "sm_90"):
        assert of["spilled"] == 0
        assert set(of["accesses"]["x_ptr"]["load"]) <= {"2", "4"}


def test_memory_limits_the_kernels_of_packing():
    """They issued 80 to 232 instructions a value for rows, where a copy's time has room for 25 to 30.

    On an H100 they took 8.5 ms of a step, and a copy of the same bytes would have taken 2.
    """
    issued = warm.json_of("bench.gpu.instructions", "--json", "--dtypes", "fp16")
    # Planes are slower than a copy, because each value has a hash of its own: Triton 3.9 issues 34, Triton 3.8 35.4.
    slow = [of for of in issued if of["instructions"] > of["most"] * (1 if of["rows"] else 1.45)]
    assert slow == []


def test_the_convolution_of_volumes_fits_on_hopper(compiled, record_property):
    """512 threads of 128 registers fit in a multiprocessor, few values spill, and all accesses are wide."""
    launches = compiled("tests.kernels.conv3d_launches", "CASES", "sm_90")
    assert {of["kernel"] for of in launches} == {"conv3d_kernel", "conv3d_weight_kernel"}
    for of in (of for of in launches if of["kernel"] == "conv3d_kernel"):
        record_property(of["case"], f"{of['registers']} registers, {of['spilled']} bytes spilled")
        assert of["registers"] == 128
        assert of["spilled"] <= 128
        assert of["matrix"] == ["wgmma.mma_async"]
        for argument, kind in (("x_ptr", "load"), ("w_ptr", "load"), ("y_ptr", "store")):
            assert set(of["accesses"][argument][kind]) == {"16"}
