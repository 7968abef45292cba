"""Checks the compiled concatenation kernel: no spills, and wide loads and stores."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import check_spills, suites

MODULE = "tests.kernels.concat_launches"


def check_no_spills(launches, record_property):
    assert check_spills(launches, {}, record_property) == {"concat_kernel"}


def check_wide_loads_and_stores(launches):
    narrow = []
    for of in launches:
        accesses = of["accesses"]
        assert set(accesses["y_ptr"]["store"]) == {"16"}
        for argument in (f"x{k}_ptr" for k in range(4) if f"x{k}_ptr" in accesses):
            if set(accesses[argument]["load"]) - {"16"}:
                narrow.append(f"{of['case']} {argument}: {accesses[argument]}")
    assert not narrow


@suites
def test_compiled_code(launches, target, record_property):
    check_no_spills(launches, record_property)
    check_wide_loads_and_stores(launches)
