"""Checks the compiled concatenation kernel: no spills, and wide loads and stores."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import TARGETS, VENDORS, check_spills

SUITES = [pytest.param("FEW", target, marks=[] if target == "sm_90" else [pytest.mark.slow]) for target in VENDORS]
SUITES += [pytest.param("CASES", target, marks=pytest.mark.slow) for target in TARGETS]
suites = pytest.mark.parametrize(("cases", "target"), SUITES)


@pytest.fixture
def launches(compiled, cases, target):
    return compiled("tests.kernels.concat_launches", cases, (target,) if cases == "FEW" else TARGETS)[target]


@suites
def test_no_spills(launches, record_property):
    assert check_spills(launches, {}, record_property) == {"concat_kernel"}


@suites
def test_16_byte_loads_and_stores(launches):
    narrow = []
    for of in launches:
        accesses = of["accesses"]
        assert set(accesses["y_ptr"]["store"]) == {"16"}
        for argument in (f"x{k}_ptr" for k in range(4) if f"x{k}_ptr" in accesses):
            if set(accesses[argument]["load"]) - {"16"}:
                narrow.append(f"{of['case']} {argument}: {accesses[argument]}")
    assert not narrow
