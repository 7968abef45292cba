"""Checks the compiled kernels of upsampling, concatenation, pools, packing, losses and volumes, without a GPU.

No value spills, and loads and stores of large tensors are wide.  ``test_codegen.py`` has norms and convolutions.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

from tests.tools import warm
from tests.tools.codegen import VENDORS, check_spills

Access = tuple[str, str]


class Kernels(NamedTuple):
    """The kernels of a family.

    Attributes:
        names: those that are compiled; for losses there are more.
        accesses: of one compiled launch, the bytes that each thread moves at once by an argument and a kind of access.
        most_registers: of a thread, on sm_90.
    """

    names: set[str]
    accesses: Callable[[dict[str, Any]], dict[Access, str]]
    most_registers: int = 255


def upsampling(of: dict[str, Any]) -> dict[Access, str]:
    """Rows move 16 bytes at a time.  Planes store 16 bytes in forward and 8 in backward, and read single values."""
    rows, forward = of["case"].endswith("rows"), "fwd" in of["kernel"]
    read, written = ("x_ptr", "y_ptr") if forward else ("dy_ptr", "dx_ptr")
    return {(written, "store"): "16" if rows or forward else "8"} | ({(read, "load"): "16"} if rows else {})


def concatenation(of: dict[str, Any]) -> dict[Access, str]:
    sources = {(f"x{k}_ptr", "load"): "16" for k in range(4) if f"x{k}_ptr" in of["accesses"]}
    return {("y_ptr", "store"): "16"} | sources


def packing(of: dict[str, Any]) -> dict[Access, str]:
    """Codes are a half to a sixteenth as wide as values."""
    kinds = {"low_bit_pack_kernel": "load", "low_bit_unpack_kernel": "store"}
    return {("x_ptr", kind): "16" for kernel, kind in kinds.items() if kernel == of["kernel"]}


def pools(of: dict[str, Any]) -> dict[Access, str]:
    """x, z, dz and dx move 16 bytes at a time in rows, and in planes for windows of two columns.

    Codes are half or a quarter as wide.  Other windows in planes read every second element of x, and elements beyond a
    vector of dz, so only stores are wide.
    """
    pool, _, fmt = of["case"].rsplit("-", 2)
    wide = {("z_ptr", "store"), ("dx_ptr", "store")}
    if fmt == "rows" or pool in ("unet", "volume"):
        wide |= {("x_ptr", "load"), ("dz_ptr", "load")}
    if pool == "volume-overlapping" or (pool == "volume" and fmt == "rows"):
        # A thread loads half a vector of dz, the smallest tensor; a whole one would need too many positions of dx.
        wide -= {("dz_ptr", "load")}
    forward = {("x_ptr", "load"), ("z_ptr", "store")}
    return dict.fromkeys(wide & forward if "fwd" in of["kernel"] else wide - forward, "16")


def losses(of: dict[str, Any]) -> dict[Access, str]:
    """In planes and in rows of a multiple of 8 classes."""
    found = of["accesses"].keys() & {"x_ptr", "dx_ptr"}
    return {(name, "load" if name == "x_ptr" else "store"): "16" for name in found}


FAMILIES = {
    # Four programs of 128 threads are resident at least.
    "upsample": Kernels({"upsample_fwd_kernel", "upsample_bwd_kernel"}, upsampling, 128),
    "concat": Kernels({"concat_kernel"}, concatenation),
    "low_bit": Kernels({f"low_bit_{name}_kernel" for name in ("pack", "unpack", "kink")}, packing),
    "max_pool": Kernels({"max_pool_fwd_kernel", "max_pool_bwd_kernel"}, pools),
    "segmentation_sums": Kernels({"segmentation_sums_fwd_kernel", "segmentation_sums_bwd_kernel"}, losses),
}
# Triton 3.8 keeps 24 scalars in lanes of vector registers; Triton 3.9 keeps none.  Neither puts any in memory.
SPILLS = {"gfx942": {"fp16-planes-4-kink": 96}}
# Every run compiles the launches FEW of a family for one GPU.
SUITES = [("FEW", "sm_90"), *(pytest.param(of, target, marks=pytest.mark.slow)
          for of, target in (("FEW", "gfx942"), *(("CASES", target) for target in VENDORS)))]  # fmt: skip


@pytest.mark.parametrize(("cases", "target"), SUITES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_spills_and_wide_accesses(family, cases, target, compiled, record_property):
    launches, of_family = compiled(f"tests.kernels.{family}_launches", cases, target), FAMILIES[family]
    assert check_spills(launches, SPILLS.get(target, {}), record_property) >= of_family.names
    assert target != "sm_90" or max(of["registers"] for of in launches) <= of_family.most_registers
    narrow, seen = [], 0
    for of in launches:
        for (argument, kind), width in of_family.accesses(of).items():
            widths = of["accesses"][argument][kind]
            seen += bool(widths)
            if set(widths) - {width}:
                narrow.append(f"{of['case']} {of['kernel']} {argument}: {kind} of {widths} bytes")
    assert not narrow
    assert seen


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
    run = warm.run("bench.gpu.instructions", "--json", "--dtypes", "fp16")
    assert run.returncode == 0, run.stderr
    # Planes are slower than a copy, because each value has a hash of its own: Triton 3.9 issues 34, Triton 3.8 35.4.
    slow = [of for of in json.loads(run.stdout) if of["instructions"] > of["most"] * (1 if of["rows"] else 1.45)]
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
