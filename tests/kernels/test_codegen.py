"""What compilers make of the kernels, for GPUs that are not there: no spills, 16-byte loads and stores."""

import functools
import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import compile_launches

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# arguments as large as the activation tensor
ACTIVATIONS = {"x_ptr", "out_ptr", "z_ptr", "dz_ptr", "dx_ptr"}


@functools.cache
def compilations() -> dict[str, Future]:
    """One process a target, as many at a time as there are cores."""
    pool = ThreadPoolExecutor(os.cpu_count())
    return {target: pool.submit(compile_launches, target, "tests.kernels.inplace_abn_launches") for target in TARGETS}


def launches(target):
    return compilations()[target].result()


@pytest.mark.parametrize("target", TARGETS)
def test_no_spills(target, record_property):
    registers = {f"{of['case']} {of['kernel']}": of["registers"] for of in launches(target)}
    record_property("registers", registers)
    print(f"\nregisters a thread, {target}")
    for name, count in registers.items():
        print(f"{count:5d}  {name}")
    assert {f"{of['case']} {of['kernel']}": of["spilled"] for of in launches(target) if of["spilled"]} == {}


@pytest.mark.parametrize("target", TARGETS)
def test_16_byte_loads_and_stores(target):
    narrow, seen = [], Counter()
    for of in launches(target):
        for argument in ACTIVATIONS & of["accesses"].keys():
            for kind, widths in of["accesses"][argument].items():
                seen[argument, kind] += sum(widths.values())
                if set(widths) - {"16"}:
                    narrow.append(f"{of['case']} {of['kernel']} {argument}: {kind} of {widths} bytes")
    assert not narrow
    # that these were found at all
    expected = {("x_ptr", "load"), ("out_ptr", "store"), ("z_ptr", "load"), ("dz_ptr", "load"), ("dx_ptr", "store")}
    assert {access for access, count in seen.items() if count} == expected


@pytest.mark.parametrize("target", TARGETS)
def test_every_path_was_compiled(target):
    kernels = {of["kernel"].removeprefix("inplace_abn_").removesuffix("_kernel") for of in launches(target)}
    assert kernels == {
        *("fwd_stats", "fwd_merge", "fwd_apply", "fwd_onchip"),
        *("bwd_reduce", "bwd_merge", "bwd_apply", "bwd_onchip"),
    }
