"""The faster interpreter computes the same bits as Triton's unchanged interpreter.

The kernels of norms stand for all kernels, whose own tests compare with float64.
"""

import contextlib

import pytest
import torch

pytest.importorskip("triton")


from tests.kernels import test_norm_act as norms
from tests.tools.tensors import slots_of

pytestmark = pytest.mark.usefixtures("only_in_the_interpreter")


def both(run):
    """Returns the results of ``run`` in the unchanged and in the faster interpreter."""
    from tests.tools.interpreter_speed import as_it_is

    found = []
    for interpreter in (as_it_is, contextlib.nullcontext):
        torch.manual_seed(0)
        with interpreter():
            found.append(run())
    return found


def assert_same_bits(found):
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a.nan_to_num(7), b.nan_to_num(7))


NORMS = [(None, torch.float16), (None, torch.float64), (6, torch.float32), (2, torch.bfloat16)]


@pytest.mark.parametrize(("groups", "dtype"), NORMS, ids=str)
def test_norms(dtype, groups, device):
    def run():
        found = []
        for rows, keep in ((False, "output"), (True, "input")):
            given = norms.inputs((3, 6, 7, 9), rows, dtype, device)
            kept = slots_of([0, 2], 6, device) if keep == "output" else None
            found += norms.launch(*given, groups, keep=keep, kept=kept).values()
        return found

    assert_same_bits(both(run))
