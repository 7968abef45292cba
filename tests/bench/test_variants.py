"""Variants of launch constants are applied and undone, or refused if they are wrong; their table is printed."""

import json
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu.norm_variants import LAUNCH, VARIANTS, KernelJob, nbytes, work
from bench.gpu.variants import Variant, VariantSection, applied, compete_variants
from bench.harness import Copy, Result, disagreement, relative_error
from bench.norm_layers import NormCase, expected, make_data
from fusedseg.ops.layout import Layout

CPU = torch.device("cpu")
CASE = NormCase("batch", (2, 6, 5, 7), "fp32")
TOLERANCE = {"z": 4e-6, **dict.fromkeys(("dx", "dweight", "dbias"), 1e-5)}


@pytest.fixture(autouse=True)
def only_in_the_interpreter(device):
    if device.type != "cpu":
        pytest.skip("runs in the interpreter")


def compete(case, *variants, job=KernelJob):
    data = make_data(case, CPU)
    results = compete_variants(
        variants,
        partial(job, case, data),
        partial(expected, case, data, 0.01),
        TOLERANCE,
        CPU,
        seconds=0.0,
        probes={"copy": Copy(data["x"])},
    )
    section = VariantSection("title")
    section.add("case", variants, results, work(case, "slab"), nbytes(case))
    return results, section


def test_constants_are_put_back_and_nothing_remembers_them():
    from fusedseg.kernels import launch

    args = Layout(False, 8, 64, 512 * 512), torch.float16, CPU
    before = launch.split_blocks(*args)
    with applied({LAUNCH: {"PROGRAMS_PER_SM": 8}}):
        assert launch.split_blocks(*args).splits == 2 * before.splits
    assert launch.split_blocks(*args) == before
    with pytest.raises(AttributeError, match="PROGRAMS"), applied({LAUNCH: {"PROGRAMS": 8}}):
        pass
    with pytest.raises(KeyError), applied({LAUNCH: {"TILE_BYTES": 1}}):
        raise KeyError
    assert launch.split_blocks(*args) == before


def test_wrong_variants_are_refused_and_failing_ones_named():
    from fusedseg.kernels import launch

    class Judged(KernelJob):
        """Gives a wrong result that depends on the constants in force."""

        def forward(self, prepared):
            if launch.PROGRAMS_PER_SM == 2:
                raise RuntimeError("out of resource: shared memory\nand more")
            return super().forward(prepared).mul_(launch.PROGRAMS_PER_SM / 4)

    variants = [Variant(f"{n}-programs", f"{n} of them", {LAUNCH: {"PROGRAMS_PER_SM": n}}) for n in (5, 2)]
    results, section = compete(CASE, *variants, job=Judged)
    assert results["default"].refused == results["default"].missing == ""
    assert results["5-programs"].refused.startswith("z off by ")
    assert results["2-programs"].missing == "RuntimeError: out of resource: shared memory"
    assert len(results["default"].forward) == len(results["copy"].forward) == 5
    assert section.wrong("case").keys() == {"5-programs", "2-programs"}
    lines = "\n".join(section.lines())
    assert "failed: 2-programs: RuntimeError" in lines
    assert "refused: 5-programs, case: z off by" in lines
    content = json.loads(json.dumps(section.to_json()))
    assert content["case"]["predictions"] == {"5-programs": "5 of them", "2-programs": "2 of them"}
    assert {"p80_ms", "GB/s"} <= content["case"]["contenders"]["default"]["backward"].keys()


def test_table():
    """The table of a case of 1.68 MB counts two passes for forward, three for backward, and two for a copy."""
    case = CASE._replace(shape=(2, 6, 5, 7000))
    section = VariantSection("title")
    results = {
        "default": Result([8e-6] * 5, [24e-6] * 5, [32e-6] * 5),
        "b": Result([4e-6] * 5, [12e-6] * 5, [16e-6] * 5),
        "copy": Result([4e-6] * 5, [0.0] * 5, [4e-6] * 5),
    }
    for name in ("case", "another"):
        section.add(name, (Variant("b", "half the time", {}),), results, work(case, "slab"), 1_680_000)
    lines = section.lines()
    assert lines[2] == "case: a copy takes 0.0040 ms, 840 GB/s"
    rows = [line.split() for line in lines[4:6]]
    assert rows[0] == ["default", *["0.0080"] * 3, "420", "0.50", "1.000", *["0.0240"] * 3, "210", "0.25", "1.000"]
    assert rows[1] == ["b", *["0.0040"] * 3, "840", "1.00", "0.500", *["0.0120"] * 3, "420", "0.50", "0.500"]
    # The message is printed once for both.
    assert lines.count("b: half the time") == 1
    assert lines[-1] == "b: half the time"
    assert section.wrong("case") == {}


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (2, 5, 20, 20)], ids=str)
@pytest.mark.parametrize(("norm", "channels_last"), [("batch", False), ("batch", True), ("instance", False)])
def test_norms_are_right_under_every_variant(norm, channels_last, shape):
    case = NormCase(norm, shape, "fp32", channels_last)
    data = make_data(case, CPU)
    reference = expected(case, data, 0.01)
    for variant in (variant for kind in VARIANTS.values() for variant in kind):
        job = KernelJob(case, data)
        with applied(variant.overrides):
            out = job.forward(job.prepare())
            got = job.results(out, job.backward(out))
        errors = {name: relative_error(value, reference[name]) for name, value in got.items()}
        assert disagreement(errors, {}, TOLERANCE) == "", variant.name
