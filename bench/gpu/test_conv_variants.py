"""Times the convolution kernel on a GPU under other launch constants, beside the vendor's convolution.

pytest bench/gpu/test_conv_variants.py -m variants --device cuda
"""

from functools import partial

import pytest

pytest.importorskip("triton")

from ..harness import Copy
from ..test_conv_abn import make_data, tolerance
from .conv_kernels import KERNELS, VENDOR, VENDOR_STATS, TritonJob
from .conv_variants import CASES, VARIANTS, work
from .test_conv_kernels import expected_of_kernels
from .variants import VariantSection, compete_variants, compile_ahead

SECONDS = 1.5
pytestmark = pytest.mark.variants


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in CASES for case in CASES[kind]], ids=str)
def test_variants(kind, case, device, report):
    compile_ahead(device, "bench.gpu.conv_variants:LAUNCHES")
    data = make_data(case, device)
    x, w = data["x"].detach(), data["conv_weight"]
    output, gradient = tolerance(case, device)
    results = compete_variants(
        VARIANTS[kind],
        partial(TritonJob, x, w, case.geometry),
        partial(expected_of_kernels, case, data),
        # Statistics are sums, so the tolerance of gradients applies.
        {"y": output, "mean": gradient, "var": gradient},
        device,
        SECONDS,
        others={name: partial(KERNELS[name], x, w, case.geometry) for name in (VENDOR, VENDOR_STATS)},
        probes={"copy": Copy(x)},
    )
    section = report.section(
        "conv_variants",
        VariantSection("Convolution with statistics under other constants", parts=("forward",), counts=()),
    )
    section.add(str(case), VARIANTS[kind], results, {"forward": work(case)}, x.nbytes)
    assert not section.wrong(str(case)), section.wrong(str(case))
