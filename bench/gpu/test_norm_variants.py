"""Times the normalisation kernels on a GPU under other launch constants.

pytest bench/gpu/test_norm_variants.py -m variants --device cuda
"""

from functools import partial

import pytest

from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE

from ..contenders import SLOPE
from ..data import DTYPES
from ..harness import Copy
from ..norm_layers import expected, make_data
from .norm_variants import CASES, VARIANTS, KernelJob, nbytes, work
from .variants import VariantSection, compete_variants, compile_ahead

SECONDS = 2.0
pytestmark = pytest.mark.variants


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in CASES for case in CASES[kind]], ids=str)
def test_variants(kind, case, device, report):
    compile_ahead(device, "bench.gpu.norm_variants:LAUNCHES")
    data, dtype = make_data(case, device), DTYPES[case.dtype]
    results = compete_variants(
        VARIANTS[kind],
        partial(KernelJob, case, data),
        partial(expected, case, data, SLOPE),
        {"z": FORWARD_TOLERANCE[dtype], **dict.fromkeys(("dx", "dweight", "dbias"), GRADIENT_TOLERANCE[dtype])},
        device,
        SECONDS,
        probes={"copy": Copy(data["x"])},
    )
    section = report.section("norm_variants", VariantSection("Norm and activation under other constants"))
    section.add(str(case), VARIANTS[kind], results, work(case, kind), nbytes(case))
    assert not section.wrong(str(case)), section.wrong(str(case))
