"""Checks the compiled kernels without a GPU: spills, widths of accesses and tensor cores."""

import pytest

pytest.importorskip("triton")

from tests.tools.codegen import OLDER, OTHERS, SHARED, TARGETS, VENDORS, Access, check_spills, check_widths

# A suite is a module, the name of a dict in it, and targets.  Every run compiles a few launches for one GPU of each
# vendor, convolutions with their kinds of products for GPUs whose tensor cores have other instructions, and for a GPU
# with little shared memory the launch that needs the most.  Suites that are not QUICK take minutes, and have the mark
# `slow`; they hold the launches that a target leaves out here.
SUITES = {
    "norm_act": ("tests.kernels.norm_act_launches", "FEW", ("sm_90",)),
    "norm_act-amd": ("tests.kernels.norm_act_launches", "FEWER", ("gfx942",)),
    "norm_act-others": ("tests.kernels.norm_act_launches", "FEW", ("sm_80", "sm_100", *OTHERS)),
    "odd-norm_act": ("tests.kernels.norm_act_launches", "ODD", ("sm_90",)),
    "norm_act-all": ("tests.kernels.norm_act_launches", "CASES", VENDORS),
    "conv_abn": ("tests.kernels.conv_abn_launches", "FEW", VENDORS),
    "conv_abn-products": ("tests.kernels.conv_abn_launches", "FEWER", ("sm_80", "sm_100")),
    "conv_abn-most": ("tests.kernels.conv_abn_launches", "MOST", ("sm_120",)),
    "conv_abn-others": ("tests.kernels.conv_abn_launches", "FEW", [of for of in OTHERS if of.startswith("sm_")]),
    # gfx950 copies to shared memory by an instruction that tests/tools/codegen.py cannot read.
    "conv_abn-others-amd": ("tests.kernels.conv_abn_launches", "WITHOUT_TF32", ("gfx90a",)),
    "conv_abn-more": ("tests.kernels.conv_abn_launches", "MORE", VENDORS),
    "older-conv_abn": ("tests.kernels.conv_abn_launches", "FEW", OLDER),
    "older-norm_act": ("tests.kernels.norm_act_launches", "FEW", OLDER),
}
QUICK = ("norm_act", "norm_act-amd", "conv_abn", "conv_abn-products", "conv_abn-most")


def suites(*kernels):
    """The suites whose names begin with a prefix, each with its targets."""
    return pytest.mark.parametrize(
        ("suite", "target"),
        [
            pytest.param(name, target, id=f"{name}-{target}", marks=[] if name in QUICK else [pytest.mark.slow])
            for name, (*_, targets) in SUITES.items()
            for target in targets
            if name.startswith(kernels)
        ],
    )


# What is compiled for one NVIDIA GPU must fit on the supported GPUs with the least shared memory, too.
LEAST_SHARED = min(SHARED[target] for target in (*TARGETS, *OTHERS) if target.startswith("sm_"))
MATRIX = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_120"), "mma.sync"),
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), "v_mfma"),
}
# Bytes per thread that are known to spill.
SPILLS = {
    # Backward of a slab of 32 KiB, the largest, in one tile: a thread holds 32 values of g and of xhat.  32 warps with
    # 64 registers spill 176 bytes (48 on sm_100); two launches would read the slab twice.
    ("sm_80", "gelu_tanh-onchip-fp16-rows"): 72,
    ("sm_90", "gelu_tanh-onchip-fp16-rows"): 8,
    ("sm_100", "gelu_tanh-onchip-fp16-rows"): 112,
    ("sm_86", "gelu_tanh-onchip-fp16-rows"): 16,
    ("sm_89", "gelu_tanh-onchip-fp16-rows"): 16,
    ("sm_120", "gelu_tanh-onchip-fp16-rows"): 8,
    # ``most_registers`` asks for as many resident programs as are started.  What a thread spills are parameters of its
    # channels, which every tile loads again from L1.
    **{
        ("sm_90", f"{of}-fp16-rows"): most
        for of, most in (("elu", 8), ("eval", 24), ("silu-split", 56), ("hardswish-split", 24), ("kept", 24))
    },
    ("sm_90", "mish-split-fp16-planes"): 8,
    # A slab of 32 values a thread.  Another order of the same operations spills nothing here, but it makes backward of
    # large rows load one vector after the other.
    ("sm_90", "selu-fp16-rows"): 8,
    ("sm_100", "instance-split-output-fp16-rows"): 8,
    # sm_120 with a scale and a shift in the epilogue.
    ("sm_120", "3x3-64-64-fp16-norm"): 8,
    # Without tensor cores, the backend "auto" takes the vendor's convolution.
    **{("sm_90", f"{of}-fp32-stats"): 32 for of in ("3x3-3-64", "3x3-5-64")},
    # Taps of planes with offsets of 64 bits; "auto" takes the vendor's convolution for them too.
    ("gfx942", "3x3x3-64-64-fp16-planes-huge"): 176,
}
# These arguments are as large as the activation tensor.
ACTIVATIONS = {"x_ptr", "out_ptr", "saved_ptr", "dz_ptr", "dx_ptr", "residual_ptr", "dresidual_ptr"}


@pytest.fixture
def launches(compiled, suite, target):
    return compiled(*SUITES[suite][:2], target)


def check_spills_of(launches, target, record_property):
    check_spills(launches, {case: most for (of, case), most in SPILLS.items() if of == target}, record_property)


def whole_activations(of) -> dict[Access, str]:
    """The kernels of norms access activations 16 bytes at a time."""
    return {
        (argument, kind): "16"
        for argument in ACTIVATIONS & of["accesses"].keys()
        for kind, widths in of["accesses"][argument].items()
        if widths
    }


@suites("odd")
def test_planes_at_any_address_are_read_by_vectors(launches):
    """The statistics read them two bytes at a time, as kernels that write do."""
    (stats,) = (of for of in launches if of["kernel"] == "norm_stats_kernel")
    assert set(stats["accesses"]["x_ptr"]["load"]) == {"16"}


@suites("norm_act")
def test_norms(launches, target, record_property):
    check_spills_of(launches, target, record_property)
    assert check_widths(launches, whole_activations) == {
        *(("x_ptr", "load"), ("out_ptr", "store"), ("saved_ptr", "load"), ("dz_ptr", "load"), ("dx_ptr", "store")),
        *(("residual_ptr", "load"), ("dresidual_ptr", "store")),
    }
    check_shared_memory(launches, target)
    kernels = {of["kernel"].removeprefix("norm_").removesuffix("_kernel") for of in launches}
    assert kernels == {
        *("stats", "merge", "act_fwd_apply", "act_fwd_onchip"),
        *("act_bwd_reduce", "act_bwd_apply", "act_bwd_onchip", "over_samples"),
    }


def whole_vectors(case, target) -> set[Access]:
    """The arguments that a convolution accesses 16 bytes at a time, by the case's name: taps-C-K-dtype-layout."""
    taps, C, K, dtype, *options = case.split("-")
    planes, amd = "planes" in options, target.startswith("gfx")
    vectors = set()
    # Taps of planes begin at any address.
    if "3" not in taps if planes else int(C) % 8 == 0:
        vectors.add(("x_ptr", "load"))
    # Some tiles of w have fewer than 16 bytes for each thread: 16 rows in fp32 for 8 warps, and tiles for AMD's
    # wavefronts of 64 threads.
    small = int(K) <= 16 and (amd or dtype in ("fp32", "tf32"))
    small = small or (amd and dtype == "fp32")
    if int(C) % 8 == 0 and not small:
        vectors.add(("w_ptr", "load"))
    # On AMD's GPUs a thread holds 4 adjacent channels of the product: it stores 8 bytes in half precision, and single
    # elements in planes.
    if (planes or int(K) % 8 == 0) if not amd else (not planes and int(K) % 8 == 0 and dtype == "fp32"):
        vectors.add(("out_ptr", "store"))
    return vectors


@suites("conv_abn")
def test_convolutions(launches, target, record_property):
    """Convolutions run on tensor cores, except fp32 without TF32 on NVIDIA; AMD has matrix instructions for fp32."""
    check_spills_of(launches, target, record_property)
    check_widths(launches, lambda of: dict.fromkeys(whole_vectors(of["case"], target), "16"))
    check_shared_memory(launches, target)
    for of in launches:
        without = "fp32" in of["case"] and target.startswith("sm_")
        assert of["matrix"] == ([] if without else [MATRIX[target]]), of["case"]


def check_shared_memory(launches, target):
    most = max(launches, key=lambda of: of["shared"])
    limit = min(SHARED[target], LEAST_SHARED) if target.startswith("sm_") else SHARED[target]
    assert most["shared"] <= limit, most["case"]


@suites("older-norm_act")
def test_norms_on_older_gpus(launches, target):
    check_shared_memory(launches, target)


@suites("older-conv_abn")
def test_why_older_gpus_are_left_to_aten(launches, target):
    """Triton uses no tensor cores there, and the convolution keeps its product in memory."""
    check_shared_memory(launches, target)
    of = {launch["case"]: launch for launch in launches}
    assert not any(launch["matrix"] for launch in launches)
    assert of["3x3-64-64-fp16"]["spilled"] > 1024
