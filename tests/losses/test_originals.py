"""The losses equal those of MONAI, nnU-Net and segmentation_models_pytorch, where these packages are installed.

All are compared in float64, over products of options.  nnU-Net sums in float32 whatever the dtype, so its ``float32``
is replaced.  The packages are not needed anywhere else; ``pip install --no-deps`` of them is enough.
"""

import copy
import importlib.util
import itertools
import sys
import types
import warnings

import pytest
import torch

from fusedseg import losses
from tests.losses.compare import check_same

N, K = 2, 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)
SHAPES = pytest.mark.parametrize("spatial", [(6, 7), (3, 4, 5)], ids=str)


@pytest.fixture
def monai():
    return pytest.importorskip("monai.losses")


@pytest.fixture
def nnunet(monkeypatch):
    compound = pytest.importorskip("nnunetv2.training.loss.compound_losses")
    dice = pytest.importorskip("nnunetv2.training.loss.dice")

    class Wide:
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(dice, "torch", Wide())
    # DC_and_BCE_loss casts its target by this method.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return compound, dice


@pytest.fixture
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


def compare(original, x, target, /, *arguments, tolerance=1e-12, **options):
    """The original class and ours, with the same arguments, are the same function of the logits ``x``."""
    prefix = "SMP" if original.__module__.startswith("segmentation_models_pytorch") else ""
    # The constructors may change their arguments.
    ours, stock = (
        kind(*copy.deepcopy(arguments), **options) for kind in (getattr(losses, prefix + original.__name__), original)
    )
    check_same((ours, target), (stock, target), x, tolerance)


def data(spatial):
    return torch.randn(N, K, *spatial, dtype=torch.float64), torch.randint(K, (N, 1, *spatial))


def products(**options):
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


@SHAPES
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "neither"])
def test_monai_dice_ce(monai, kind, spatial):
    x, labels = data(spatial)
    x = x.sigmoid() if kind == "neither" else x
    y = torch.zeros_like(x).scatter_(1, labels, 1)
    for options in products(
        include_background=(True, False), squared_pred=(True, False), jaccard=(True, False), reduction=("mean", "sum"),
        batch=(True, False), weight=(None, WEIGHT), label_smoothing=(0.0, 0.1),
    ):  # fmt: skip
        options |= {"lambda_dice": 0.7, "lambda_ce": 1.3, "smooth_nr": 1e-4, "smooth_dr": 1e-3}
        if kind != "neither":
            options[kind] = True
        # MONAI's one-hot tensor is float32, so that its square is rounded to float32.
        tolerance = 1e-6 if options["squared_pred"] else 1e-12
        compare(monai.DiceCELoss, x, labels, to_onehot_y=True, **options, tolerance=tolerance)
        compare(monai.DiceCELoss, x, y, **options)
        if kind == "sigmoid" and options["include_background"]:
            options["weight"] = None if options["weight"] is None else WEIGHT[2]
            compare(monai.DiceCELoss, x[:, :1], y[:, :1], **options)


@SHAPES
def test_monai_dice(monai, spatial):
    x, labels = data(spatial)
    soft = torch.rand_like(x)
    for options in products(
        include_background=(True, False), jaccard=(True, False), reduction=("mean", "none"), batch=(True, False),
        soft_label=(True, False), weight=(None, 2.0), sigmoid=(True, False),
    ):  # fmt: skip
        options["softmax"] = not options["sigmoid"]
        compare(monai.DiceLoss, x, soft, **options)
        compare(monai.DiceLoss, x, labels, to_onehot_y=True, **options)
    for ignore, options in itertools.product(
        (255, 3, -1), products(include_background=(True, False), batch=(True, False))
    ):
        t = labels.clone()
        t[1, 0, :2] = ignore
        compare(monai.DiceLoss, x, t, softmax=True, to_onehot_y=True, ignore_index=ignore, **options)
        y = torch.zeros_like(x).scatter_(1, labels, 1)
        y[1, :, :2] = 0
        given = {"softmax": True, "ignore_index": ignore} | options
        compare(monai.DiceLoss, x, y, **given)


@SHAPES
def test_monai_tversky(monai, spatial):
    x, labels = data(spatial)
    for options in products(
        include_background=(True, False), alpha=(0.3, 0.5), beta=(0.7,), reduction=("mean", "sum", "none"),
        batch=(True, False), ignore_index=(None, 2),
    ):  # fmt: skip
        compare(monai.TverskyLoss, x, labels, softmax=True, to_onehot_y=True, **options)


@SHAPES
def test_monai_focal(monai, monkeypatch, spatial):
    # MONAI casts logits and target by this method.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    x, labels = data(spatial)
    soft = torch.rand_like(x)
    for options in products(
        include_background=(True, False), gamma=(0.0, 1.5, 2.0), alpha=(None, 0.25, [0.25, 0.875, 0.375, 0.5]),
        weight=(None, 2.0, WEIGHT), reduction=("mean", "sum"), use_softmax=(True, False), ignore_index=(None, 255, 2),
    ):  # fmt: skip
        if not options["include_background"]:
            if options["use_softmax"]:
                continue
            for name in ("alpha", "weight"):
                if isinstance(options[name], (list, torch.Tensor)):
                    options[name] = options[name][1:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = losses.FocalLoss(to_onehot_y=True, **options)
            stock = monai.FocalLoss(to_onehot_y=True, **options)
            t = labels.clone()
            if options["ignore_index"] == 255:
                t[1, 0, :2] = 255
            check_same((ours, t), (stock, t), x)
            y = torch.zeros_like(x).scatter_(1, labels, 1)
            compare(monai.FocalLoss, x, y, **options)
            if options["ignore_index"] is None:
                compare(monai.FocalLoss, x, soft, **options)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_truth_values(monai, nnunet):
    """The originals take a mask of truth values as labels of two classes."""
    x, labels = torch.randn(N, 2, 6, 7, dtype=torch.float64), torch.rand(N, 1, 6, 7) < 0.5
    for name in ("DiceLoss", "DiceCELoss", "TverskyLoss", "DiceFocalLoss"):
        compare(getattr(monai, name), x, labels, softmax=True, to_onehot_y=True)
    compare(monai.FocalLoss, x, labels, to_onehot_y=True)
    compound, dice = nnunet
    compare(compound.DC_and_CE_loss, x, labels, {"ddp": False}, {}, dice_class=dice.MemoryEfficientSoftDiceLoss)
    compare(compound.DC_and_topk_loss, x, labels, {"ddp": False}, {"k": 50})
    compare(compound.TopKLoss, x, labels, k=50)


@SHAPES
def test_monai_dice_focal(monai, monkeypatch, spatial):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    x, labels = data(spatial)
    for options in products(
        include_background=(True, False), softmax=(True, False), jaccard=(True, False), reduction=("mean", "sum"),
        batch=(True, False), gamma=(2.0, 0.5), weight=(None, WEIGHT), alpha=(None, 0.25),
    ):  # fmt: skip
        if options["weight"] is not None and not options["include_background"]:
            options["weight"] = WEIGHT[1:]
        options |= {"sigmoid": not options["softmax"], "lambda_dice": 0.7, "lambda_focal": 1.3, "to_onehot_y": True}
        compare(monai.DiceFocalLoss, x, labels, **options)


# nnU-Net's class passes arguments that PyTorch has given up.
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@SHAPES
def test_nnunet_top_k(nnunet, spatial):
    compound, _ = nnunet
    x, labels = data(spatial)
    for k, weight, smoothing, ignore in itertools.product((10, 55), (None, WEIGHT), (0.0, 0.1), (None, 1, 255)):
        t = labels.clone()
        if ignore is not None:
            t[1, 0, :2] = ignore
        of_ce = {"k": k, "weight": weight, "label_smoothing": smoothing}
        compare(compound.TopKLoss, x, t, **of_ce, ignore_index=-100 if ignore is None else ignore)
        for batch_dice in (True, False):
            of_dice = {"batch_dice": batch_dice, "ddp": False, "smooth": 1e-5}
            compare(compound.DC_and_topk_loss, x, t, of_dice, of_ce, 1.2, 0.8, ignore)
    compare(compound.DC_and_topk_loss, x, torch.full_like(labels, 255), {"ddp": False}, {}, ignore_label=255)


@SHAPES
def test_nnunet_dc_and_ce(nnunet, spatial):
    compound, dice = nnunet
    x, labels = data(spatial)
    for options in products(batch_dice=(True, False), do_bg=(True, False), smooth=(1e-5, 1.0)):
        for clip, ignore, weight, smoothing in itertools.product(
            (None, 2.0), (None, 255, 1), (None, WEIGHT), (0.0, 0.1)
        ):
            t = labels.clone()
            if ignore is not None:
                t[1, 0, :2] = ignore
            of_dice = options | {"ddp": False} | ({} if clip is None else {"clip_tp": clip})
            of_ce = {"weight": weight, "label_smoothing": smoothing}
            dice_class = dice.MemoryEfficientSoftDiceLoss if clip is None else dice.SoftDiceLoss
            compare(compound.DC_and_CE_loss, x, t.short(), of_dice, of_ce, 1.2, 0.8, ignore, dice_class)
    compare(compound.DC_and_CE_loss, x, torch.full_like(labels, 255), {"ddp": False}, {}, ignore_label=255)


@SHAPES
def test_nnunet_dc_and_bce(nnunet, spatial):
    compound, _ = nnunet
    x, _ = data(spatial)
    regions = torch.rand(N, K + 1, *spatial) < 0.4
    for options, ignore in itertools.product(
        products(batch_dice=(True, False), do_bg=(True, False), smooth=(1e-5, 1.0)), (True, False)
    ):
        for t in (regions, regions.double()):
            t = t if ignore else t[:, :K]
            compare(compound.DC_and_BCE_loss, x, t, {}, options | {"ddp": False}, 1.2, 0.8, ignore)


@SHAPES
def test_smp(smp, spatial):
    x, labels = data(spatial)
    labels[labels == 3] = 0
    for options in products(
        classes=(None, [1, 2]), log_loss=(False, True), smooth=(0.0, 1.0), ignore_index=(None, 255),
        class_weights=(None, WEIGHT.tolist()),
    ):  # fmt: skip
        for mode in ("multiclass", "multilabel", "binary"):
            given = options
            if mode == "binary":
                given = {key: value for key, value in options.items() if key not in ("classes", "class_weights")}
            logits = x[:, :1] if mode == "binary" else x
            t = labels.clone() if mode != "multilabel" else torch.zeros_like(x).scatter_(1, labels, 1)
            t = (t > 0).long() if mode == "binary" else t
            if options["ignore_index"] is not None:
                t[1, 0, :2] = 255
            compare(smp.DiceLoss, logits, t, mode, **given)
            more = {"alpha": 0.3, "beta": 0.7, "gamma": 1.5}
            compare(smp.TverskyLoss, logits, t, mode, **given, **more)


def of_nothing(ignore):
    """Labels: all ignored, those of one sample ignored, and all of one class; then labels of no sample."""
    labels = torch.zeros(N, 1, 3, 5, dtype=torch.long)
    one = torch.cat([torch.full_like(labels[:1], ignore), labels[1:]])
    return torch.full_like(labels, ignore), one, labels, labels[:0]


def logits_of(labels):
    return torch.randn(len(labels), K, *labels.shape[2:], dtype=torch.float64)


@pytest.mark.parametrize("smooth", [1e-5, 0.0])
@pytest.mark.parametrize("ignore", [255, 1])
def test_monai_where_nothing_counts(monai, monkeypatch, ignore, smooth):
    """With smooth=0, MONAI divides 0 by 0, also at positions that are ignored."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    options = {"to_onehot_y": True, "ignore_index": ignore}
    dice = options | {"softmax": True, "smooth_nr": smooth, "smooth_dr": smooth}
    for labels, reduction in itertools.product(of_nothing(ignore), ("mean", "sum")):
        x = logits_of(labels)
        for name, given in itertools.product(
            ("DiceLoss", "TverskyLoss"), ({"batch": True}, {"include_background": False})
        ):
            compare(getattr(monai, name), x, labels, **dice, **given, reduction=reduction)
        for given in ({"weight": 0.0}, {"use_softmax": True}, {"alpha": 0.25}):
            compare(monai.FocalLoss, x, labels, **options, **given, reduction=reduction)
        labels = labels.clamp(max=K - 1)
        for weight, smoothing in itertools.product((None, WEIGHT * 0, torch.arange(4.0).double()), (0.0, 0.1)):
            given = {"softmax": True, "to_onehot_y": True, "weight": weight, "label_smoothing": smoothing}
            compare(monai.DiceCELoss, x, labels, **given, reduction=reduction)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("ignore", [255, 1])
def test_nnunet_where_nothing_counts(nnunet, ignore):
    compound, dice = nnunet
    for labels, weight, smoothing in itertools.product(of_nothing(ignore), (None, WEIGHT * 0), (0.0, 0.1)):
        x, ce = logits_of(labels), {"weight": weight, "label_smoothing": smoothing}
        for smooth, label in itertools.product((1e-5, 0.0), (ignore, None)):
            of_dice, of_ce = {"ddp": False, "smooth": smooth}, ce if label else ce | {"ignore_index": ignore}
            t = labels if label else labels.clamp(max=1)
            compare(compound.DC_and_CE_loss, x, t, of_dice, of_ce, 1.2, 0.8, label, dice.MemoryEfficientSoftDiceLoss)
            compare(compound.DC_and_topk_loss, x, t, of_dice, of_ce, 1.2, 0.8, label)
    for ignored in (0.0, 1.0):
        x, regions = torch.randn(N, K, 6, dtype=torch.float64), torch.zeros(N, K + 1, 6)
        regions[:, -1] = ignored
        compare(compound.DC_and_BCE_loss, x, regions, {}, {"ddp": False}, 1, 1, True)


@pytest.mark.parametrize("ignore", [255, 1])
def test_smp_where_nothing_counts(smp, ignore):
    """The original cannot reshape labels of no sample."""
    for labels, weights, smooth in itertools.product(of_nothing(ignore)[:3], (None, [0.0] * K), (0.0, 1.0)):
        options = {"ignore_index": ignore, "class_weights": weights, "smooth": smooth}
        for log_loss in (False, True):
            compare(smp.DiceLoss, logits_of(labels), labels, "multiclass", log_loss=log_loss, **options)
