"""Checks the compiled kernels of segmentation losses: no spills, and wide loads and stores."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import check_spills, suites

MODULE = "tests.kernels.segmentation_sums_launches"


def check_no_spills(launches, target, record_property):
    kernels = check_spills(launches, {}, record_property)
    assert kernels >= {"segmentation_sums_fwd_kernel", "segmentation_sums_bwd_kernel"}


def check_wide_loads_and_stores(launches):
    """Logits and gradient move 16 bytes at a time, in planes and in rows of a multiple of 8 classes."""
    narrow, seen = [], set()
    for of in launches:
        for argument, kind in (("x_ptr", "load"), ("dx_ptr", "store")):
            widths = of["accesses"].get(argument, {kind: {}})[kind]
            seen |= {(argument, kind)} if widths else set()
            if set(widths) - {"16"}:
                narrow.append(f"{of['case']} {of['kernel']} {argument}: {kind} of {widths} bytes")
    assert not narrow
    assert seen == {("x_ptr", "load"), ("dx_ptr", "store")}


@suites
def test_compiled_code(launches, target, record_property):
    check_no_spills(launches, target, record_property)
    check_wide_loads_and_stores(launches)


@pytest.mark.slow
def test_rows_of_other_numbers_of_classes_are_narrow(compiled):
    """This is a limit, stated in the documentation: the classes of a position begin at any address."""
    for of in compiled(MODULE, "NARROW", "sm_90"):
        assert of["spilled"] == 0
        assert set(of["accesses"]["x_ptr"]["load"]) <= {"2", "4"}
