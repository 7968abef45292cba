"""Checks the compiled max-pool kernels: no spills, and wide loads and stores."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import check_spills, suites

MODULE = "tests.kernels.max_pool_launches"


def check_no_spills(launches, record_property):
    assert check_spills(launches, {}, record_property) == {"max_pool_fwd_kernel", "max_pool_bwd_kernel"}


def check_wide_loads_and_stores(launches):
    """x, z, dz and dx move 16 bytes at a time in rows, and in planes for windows of two columns.

    Codes are half or a quarter as wide.  Other windows in planes read every second element of x, and elements beyond a
    vector of dz, so only stores are wide.
    """
    narrow = []
    seen = set()
    for of in launches:
        pool, _, fmt = of["case"].rsplit("-", 2)
        wide = {("z_ptr", "store"), ("dx_ptr", "store")}
        if fmt == "rows" or pool in ("unet", "volume"):
            wide |= {("x_ptr", "load"), ("dz_ptr", "load")}
        if pool == "volume-overlapping" or (pool == "volume" and fmt == "rows"):
            # A thread loads half a vector of dz, the smallest tensor; a whole one would need too many positions of dx.
            wide -= {("dz_ptr", "load")}
        for argument, kind in wide:
            widths = of["accesses"].get(argument, {kind: {}})[kind]
            seen |= {(argument, kind)} if widths else set()
            if set(widths) - {"16"}:
                narrow.append(f"{of['case']} {argument}: {kind} of {widths} bytes")
    assert not narrow
    assert seen == {("z_ptr", "store"), ("dx_ptr", "store"), ("x_ptr", "load"), ("dz_ptr", "load")}


@suites
def test_compiled_code(launches, target, record_property):
    check_no_spills(launches, record_property)
    check_wide_loads_and_stores(launches)
