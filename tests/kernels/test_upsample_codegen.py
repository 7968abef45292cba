"""Checks the compiled upsampling kernels: no spills, registers, and wide loads and stores."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import check_spills, suites

MODULE = "tests.kernels.upsample_launches"


def check_no_spills(launches, target, record_property):
    assert check_spills(launches, {}, record_property) == {"upsample_fwd_kernel", "upsample_bwd_kernel"}
    if target == "sm_90":
        # Four programs of 128 threads are resident at least.
        assert max(of["registers"] for of in launches) <= 128


def check_wide_loads_and_stores(launches, target):
    """Rows move 16 bytes at a time.  Planes store 16 bytes in forward and 8 in backward, and read single values."""
    narrow = []
    for of in launches:
        rows = of["case"].endswith("rows")
        forward = "fwd" in of["kernel"]
        read, written = ("x_ptr", "y_ptr") if forward else ("dy_ptr", "dx_ptr")
        widths = {written: ("store", {"16"} if rows or forward else {"8"})}
        if rows:
            widths[read] = ("load", {"16"})
        for argument, (kind, wanted) in widths.items():
            found = set(of["accesses"][argument][kind])
            if found != wanted:
                narrow.append(f"{of['case']} {argument}: {kind} of {found} bytes")
    assert not narrow


@suites
def test_compiled_code(launches, target, record_property):
    check_no_spills(launches, target, record_property)
    check_wide_loads_and_stores(launches, target)
