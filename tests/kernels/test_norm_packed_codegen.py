"""Checks the compiled norm kernels that write and read packed copies: no spills, and wide loads and stores."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import TARGETS, check_spills

MODULE = "tests.kernels.norm_packed_launches"
SUITES = [("FEW", "sm_90")]
SUITES += [pytest.param("CASES", target, marks=pytest.mark.slow) for target in TARGETS]
suites = pytest.mark.parametrize(("cases", "target"), SUITES)

# Bytes a thread that are known to spill.  ``most_registers`` asks for four resident programs of backward, where 74 to
# 95 registers let two or three be resident.  On an H200 that saves a third of the predicted time.
SPILLS = {
    ("sm_80", "split-fp32-planes-4-output"): 8,
    **{
        ("sm_90", of): 8
        for of in (
            "split-fp16-planes-4-output",
            "split-fp32-planes-4-output",
            "instance-split-planes-output",
            "group-split-planes-output",
        )
    },
    # A kernel with 255 registers, in rows.
    **{(of, f"onchip-{dtype}-rows-8-input"): 8 for of in ("sm_90", "sm_100") for dtype in ("fp16", "bf16")},
    **{("sm_100", f"split-{of}"): 8 for of in ("fp16-planes-8-output", "fp32-planes-4-input")},
    ("sm_100", "split-fp32-planes-4-output"): 24,
    **{("sm_100", f"{of}-split-planes-output"): 16 for of in ("instance", "group")},
}


@pytest.fixture
def launches(compiled, cases, target):
    found = compiled(MODULE, cases, ("sm_90",) if cases == "FEW" else TARGETS)[target]
    return [of for of in found if of["kernel"].startswith("norm_act")]


@suites
def test_no_spills(launches, target, record_property):
    known = {case: most for (of, case), most in SPILLS.items() if of == target}
    assert check_spills(launches, known, record_property) == {
        f"norm_act_{name}_kernel" for name in ("fwd_apply", "fwd_onchip", "bwd_reduce", "bwd_apply", "bwd_onchip")
    }


@suites
def test_16_byte_stores(launches):
    """z and dx.  Codes are a half to a quarter as wide; a group's range is two numbers."""
    narrow = []
    for of in launches:
        for name in ("out_ptr", "dx_ptr"):
            widths = set(of["accesses"].get(name, {}).get("store", {}))
            if widths - {"16"}:
                narrow.append(f"{of['case']} {of['kernel']}: {name} {widths}")
    assert not narrow


@suites
def test_wide_codes(launches):
    """A thread moves the codes of its 8 values at once: 4 bytes at 4 bits."""
    for of in launches:
        # A kernel of forward writes codes, or reads them to rebuild z.
        stored, loaded = (of["accesses"]["codes_ptr"][kind] for kind in ("store", "load"))
        assert bool(stored) != bool(loaded)
        widths = stored or loaded
        assert loaded or "fwd" in of["kernel"]
        assert min(map(int, widths)) >= 2, (of["case"], of["kernel"], widths)
