"""Checks the compiled variants of the norm kernels: no spills, and each variant changes a launch."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import compile_launches


def signature(launch):
    """The properties of a launch that a variant may change."""
    return launch["kernel"], tuple(launch["grid"]), launch["warps"], launch["code"]


@pytest.mark.slow
def test_variants_compile_without_spills_and_differ():
    from bench.gpu.norm_variants import CASES, VARIANTS

    launches: dict[str, list] = {}
    for launch in compile_launches(["sm_90"], "bench.gpu.norm_variants", "LAUNCHES")["sm_90"]:
        launches.setdefault(launch["case"], []).append(launch)
    spilled = {case: of["spilled"] for case, all_of in launches.items() for of in all_of if of["spilled"]}
    # Four loads per thread need their registers: in rows, under Triton 3.9, two registers spill to memory.
    allowed = {f"{case} 16-KiB": 8 for case in CASES["split"] if case.channels_last}
    assert {case: nbytes for case, nbytes in spilled.items() if nbytes > allowed.get(case, 0)} == {}
    for kind, variants in VARIANTS.items():
        for variant in variants:
            pairs = [(launches[f"{case} default"], launches[f"{case} {variant.name}"]) for case in CASES[kind]]
            assert any([*map(signature, a)] != [*map(signature, b)] for a, b in pairs), variant.name
