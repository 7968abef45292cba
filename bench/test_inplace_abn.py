"""Times BatchNorm and its activation alone, on tensors from the stages of real U-Nets."""

import pytest
import torch

from .contenders import CONTENDERS, SLOPE
from .harness import Result, once
from .norm_layers import NormCase, compete_norms, contenders_of, layer_of, parametrize_norms, report_norm
from .replay import CLOCK

SECONDS = {"cpu": 1.0, "cuda": 1.0}
CASES = {
    "cpu": [
        NormCase("batch", (2, 64, 256, 256), "fp32"),
        NormCase("batch", (2, 128, 128, 128), "fp32"),
        NormCase("batch", (4, 256, 64, 64), "fp32", True),
        NormCase("batch", (4, 256, 64, 64), "fp16"),
        NormCase("batch", (8, 512, 16, 16), "fp32"),
        NormCase("batch", (1, 64, 32, 48, 48), "fp32"),
    ],
    "cuda": [
        # Large tensors, and tensors that fit in L2 or in the registers of a multiprocessor.
        NormCase("batch", (8, 64, 512, 512), "bf16"),
        NormCase("batch", (8, 64, 512, 512), "bf16", True),
        NormCase("batch", (8, 64, 512, 512), "fp16"),
        NormCase("batch", (8, 64, 512, 512), "fp16", True),
        NormCase("batch", (8, 512, 32, 32), "bf16"),
        NormCase("batch", (8, 512, 32, 32), "bf16", True),
        NormCase("batch", (8, 256, 16, 16), "bf16"),
        NormCase("batch", (8, 256, 16, 16), "bf16", True),
    ],
}
MORE = {
    "cpu": [
        NormCase("batch", (2, 64, 256, 256), "fp32", True),
        NormCase("batch", (2, 64, 256, 256), "bf16"),
        NormCase("batch", (2, 128, 128, 128), "bf16", True),
        NormCase("batch", (8, 512, 16, 16), "bf16", True),
        NormCase("batch", (1, 64, 32, 48, 48), "bf16", True),
    ],
    "cuda": [
        *(
            NormCase("batch", (8, channels, size, size), dtype, channels_last)
            for channels, size in ((128, 256), (256, 128), (512, 64), (1024, 32))
            for dtype, channels_last in (("bf16", False), ("bf16", True), ("fp32", False))
        ),
        NormCase("batch", (8, 64, 512, 512), "fp32"),
        NormCase("batch", (8, 64, 512, 512), "fp32", True),
        # The first convolution of a ResNet-18 at batch 128, and both ends of the large 3D U-Net.
        NormCase("batch", (128, 64, 112, 112), "fp16", True),
        NormCase("batch", (2, 64, 320, 150, 26), "fp16"),
        NormCase("batch", (2, 64, 320, 150, 26), "fp16", True),
        NormCase("batch", (2, 512, 40, 18, 3), "fp16"),
    ],
}
# The cases in which the compilers compete: all on a GPU; on a CPU the slow ones and one more.
COMPILED = [*CASES["cuda"], *MORE["cuda"], *MORE["cpu"], CASES["cpu"][1]]


@once
def run(case: NormCase, device: torch.device) -> dict[str, Result]:
    names = contenders_of(case, CONTENDERS, COMPILED, device.type)
    layers = {name: (layer_of(CONTENDERS[name][0]), CONTENDERS[name][1]) for name in names}
    return compete_norms(case, device, layers, SLOPE, SECONDS[device.type])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_norms(metafunc, CONTENDERS, CASES, MORE, COMPILED)


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    title = "BatchNorm and activation, forward + backward of the layer alone"
    report_norm(report, benchmark, "inplace_abn", title, case, run(case, device), contender)
