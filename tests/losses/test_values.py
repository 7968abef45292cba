"""Losses with random options are their formulas, and those of MONAI, nnU-Net and smp where these are installed.

All are compared in float64, in value and gradient.  nnU-Net and MONAI sum in float32 whatever the dtype, so this dtype
is replaced in them.  ``pip install --no-deps`` of the packages is enough.
"""

import copy
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

from fusedseg import losses
from fusedseg.integrations.nnunet import fused_loss
from fusedseg.ops.segmentation import tiles
from tests.losses.cases import FAMILIES, drawn
from tests.losses.compare import check_same

# Calls of each loss; the interpreter takes a second for three.
DRAWS = {"aten": 30, "triton": 3}


@pytest.mark.parametrize("name", FAMILIES)
def test_formulas(name, backend, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 40)
    for case in drawn(name, DRAWS[backend]):
        loss = getattr(losses, case.loss)(*case.arguments, **case.options)
        check_same((loss, case.target), (case.formula,), case.x)


class Wide:
    """PyTorch with float64 in place of float32."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def smp():
    """The losses alone; the package itself imports its encoders, which need torchvision."""
    name = "segmentation_models_pytorch"
    if name not in sys.modules:
        found = importlib.util.find_spec(name)
        if found is None:
            pytest.skip(f"{name} is not installed")
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = list(found.submodule_search_locations)
    return pytest.importorskip(f"{name}.losses")


def original(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """The original class, and options with which it gives the same."""
    if name.startswith("SMP"):
        return getattr(smp(), name.removeprefix("SMP")), {}
    # MONAI and nnU-Net cast tensors by this method.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    if not getattr(losses, name).__module__.endswith("nnunet"):
        return getattr(pytest.importorskip("monai.losses"), name), {}
    compound = pytest.importorskip("nnunetv2.training.loss.compound_losses")
    dice = pytest.importorskip("nnunetv2.training.loss.dice")
    monkeypatch.setattr(dice, "torch", Wide())
    more = {"dice_class": dice.MemoryEfficientSoftDiceLoss} if name == "DC_and_CE_loss" else {}
    return getattr(compound, name), more


# nnU-Net's class passes arguments that PyTorch has given up, and MONAI warns of options without effect.
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated", "ignore:.*ignored")
@pytest.mark.parametrize("name", FAMILIES)
def test_originals(name, monkeypatch):
    kind, more = original(name, monkeypatch)
    for number, case in enumerate(drawn(name, 150)):
        options = case.options | (more if more and number % 2 and "clip_tp" not in case.arguments[0] else {})
        # The constructors may change their arguments.
        ours, stock = (of(*copy.deepcopy(case.arguments), **options) for of in (getattr(losses, case.loss), kind))
        of_nnunet = [fused_loss(stock)] if kind.__module__.startswith("nnunetv2") else []
        for one in (ours, *of_nnunet):
            check_same((one, case.target), (stock, case.target), case.x, case.tolerance)


def test_refused_by_smp():
    with pytest.raises(ValueError, match="mode must be one of binary, multiclass, multilabel, got 'both'"):
        losses.SMPDiceLoss("both")
    with pytest.raises(ValueError, match="classes and class_weights must be None for mode binary"):
        losses.SMPTverskyLoss("binary", class_weights=[1.0])
