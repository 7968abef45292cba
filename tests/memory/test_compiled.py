"""What compiled models keep, counted on their graphs."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg import memory
from fusedseg.memory.compiled import by_budget, divided
from tests.nnunet import PlainConvUNet

SHAPE = (2, 1, 16, 16, 16)


def keeps(model, *budgets):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return divided(model(), [torch.empty(SHAPE)], [partial(by_budget, budget) for budget in budgets])


def small():
    return PlainConvUNet(widths=(8, 16))


def converted():
    model = small()
    fusedseg.convert(model, example_inputs=torch.empty(SHAPE))
    return model


def test_a_model_that_cannot_be_one_graph_is_refused():
    class Breaks(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    with FakeTensorMode(), pytest.raises(RuntimeError, match="partitions: the compiler refuses the model: Unsupported"):
        divided(Breaks(2, 2), [torch.empty(1, 2)], [partial(by_budget, 1.0)])


def test_a_compiled_model_keeps_what_eager_mode_keeps():
    (compiled,) = keeps(converted, 1.0)
    assert compiled.kept <= 1.02 * memory.estimate(converted, SHAPE).saved
    assert compiled.repeated == 0


def test_the_compilers_own_budgets():
    eager = memory.estimate(small, SHAPE)
    whole, fifth = keeps(small, 1.0, 0.2)
    assert whole.repeated == 0.0
    assert 0.9 * eager.saved < whole.kept <= eager.saved
    assert fifth.kept < 0.3 * eager.saved
    assert 0.05 < fifth.repeated < 0.5
    assert all(found.kept < found.peak <= eager.peak for found in (whole, fifth))
