"""Which backend serves which device: compute capability and architecture are asked before Triton is chosen."""

import pytest
import torch

import fusedseg
from fusedseg import _backend
from fusedseg._backend import explain, unsupported
from tests.tools.codegen import OTHERS, TARGETS
from tests.tools.stand_in import stand_in as stand_in

SUPPORTED = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx90a", "gfx942",
             "gfx950")  # fmt: skip
REFUSED = {
    "sm_61": "sm_61 is older than sm_80, the oldest that Triton and the kernels support",
    "sm_70": "sm_70 is older than sm_80",
    "sm_75": "sm_75 is older than sm_80",
    "sm_110": "sm_110 is unknown to the kernels, which are tested for sm_8x, sm_9x, sm_10x, sm_12x",
    "sm_130": "sm_130 is unknown to the kernels",
    "gfx1100": "gfx1100 has wavefronts of 32 threads, and the kernels are tested for gfx90a, gfx942, gfx950",
    "gfx1030": "gfx1030 has wavefronts of 32 threads",
    "gfx1201": "gfx1201 has wavefronts of 32 threads",
    "gfx906": "gfx906 is unknown to the kernels, which are tested for gfx90a, gfx942, gfx950",
    "gfx1310": "gfx1310 is unknown to the kernels",
}
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Makes the first GPU one of an architecture."""
    pytest.importorskip("triton")
    monkeypatch.setattr(_backend, "_name", "auto")

    def become(arch):
        class Properties:
            name = "Card"
            gcnArchName = f"{arch}:sramecc+:xnack-"
            major, minor = (int(arch[3:-1]), int(arch[-1])) if arch.startswith("sm_") else (0, 0)

        monkeypatch.setattr(torch.version, "hip", "6.4" if arch.startswith("gfx") else None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)

    return become


@pytest.mark.parametrize("arch", SUPPORTED)
def test_supported_architectures_take_triton(gpu, arch):
    gpu(arch)
    assert explain(GPU) == ("triton", f"a GPU ({arch}), and triton is installed")
    # On gfx90a and gfx950 the convolution of fp32 tensors did not compile if PyTorch's settings allow TF32.
    assert _backend.has_tf32(GPU) == (arch.startswith("sm_") or arch == "gfx942")


@pytest.mark.parametrize("arch", REFUSED)
def test_other_architectures_take_aten_unless_triton_is_asked_for(gpu, monkeypatch, arch):
    gpu(arch)
    backend, reason = explain(GPU)
    assert backend == "aten"
    assert reason.startswith(REFUSED[arch])
    assert reason.endswith("; FUSEDSEG_BACKEND=triton takes Triton nevertheless")
    monkeypatch.setattr(fusedseg, "backend", "triton")
    assert explain(GPU)[0] == "triton"


def test_code_generation_is_tested_for_every_supported_generation():
    tested = {arch for arch in (*TARGETS, *OTHERS) if not unsupported(arch)}
    assert {arch.removeprefix("sm_")[:-1] for arch in tested if arch.startswith("sm_")} == set(
        map(str, _backend.NVIDIA)
    )
    assert {arch for arch in tested if arch.startswith("gfx")} == set(_backend.AMD)


def test_choices_are_made_again_for_another_backend(stand_in, monkeypatch):
    monkeypatch.setattr(_backend, "_first_use", lambda *args: "it fails")
    x = torch.empty(1)
    assert not _backend.use_triton(x, "norm")
    assert _backend.why_not(x, "norm") == "it fails"
    monkeypatch.setattr(fusedseg, "backend", "triton")
    with pytest.raises(RuntimeError, match=r"backend is 'triton', but a tensor on cpu cannot be served: it fails"):
        _backend.use_triton(x, "norm")
    monkeypatch.setattr(_backend, "_first_use", lambda *args: "")
    monkeypatch.setattr(fusedseg, "backend", "auto")
    assert _backend.use_triton(x, "norm")


def test_a_device_alone_is_not_tested(stand_in, monkeypatch):
    def tested(*args):
        raise AssertionError("tested")

    monkeypatch.setattr(_backend, "_first_use", tested)
    assert _backend.use_triton(torch.empty(1))
