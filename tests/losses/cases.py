"""Calls of the losses that stand for those of MONAI, nnU-Net and segmentation_models_pytorch, with random options.

``test_values.py`` compares each with its formula, and with the original where it is installed.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.losses import formulas
from tests.losses.formulas import one_hot
from tests.tools.tensors import channels_last

N, K = 2, 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)
SPATIAL, FORMATS = [(6, 7), (3, 4, 5)], [torch.clone, channels_last]
DTYPES = [torch.long, torch.int16, torch.float32]
# Draws everything but values; ``drawn`` seeds it.
PICK = random.Random()
BOTH, REDUCTIONS = (True, False), ("mean", "sum")
# Which labels are ignored: some of the last sample, this sample, all; or there is no sample, or no position.
IGNORED = ("some", "some", "some", "a sample", "all", "no sample", "no position")


class Case(NamedTuple):
    """A loss and a call of it.

    Attributes:
        loss: the name of the class in ``fusedseg.losses``.
        x: the logits.
        target: labels, or a tensor of the shape of the logits.
        formula: the value as a function of the logits.
        arguments, options: those of the class.
        tolerance: of the original, which rounds to float32 in some cases.
    """

    loss: str
    x: Tensor
    target: Tensor
    formula: Callable[[Tensor], Tensor]
    options: dict[str, Any]
    arguments: tuple = ()
    tolerance: float = 1e-12


def logits(channels: int = K) -> Tensor:
    return PICK.choice(FORMATS)(torch.randn(N, channels, *PICK.choice(SPATIAL), dtype=torch.float64))


def ignored_places(ignored: str) -> tuple | slice:
    return {"some": (slice(-1, None), slice(None), slice(2)), "a sample": slice(-1, None)}.get(ignored, slice(None))


def ignoring(ignore: int | None, ignored: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels, and a mask of those that count."""
    x = {"no sample": lambda x: x[:0], "no position": lambda x: x[..., :0]}.get(ignored, lambda x: x)(logits())
    labels = labels_of(x)
    if ignore is not None:
        labels[ignored_places(ignored)] = ignore
    counts = torch.ones_like(labels) if ignore is None else labels != ignore
    return x, labels, counts.double()


def labels_of(x: Tensor, classes: int = K) -> Tensor:
    return torch.randint(classes, (len(x), 1, *x.shape[2:]))


def dice_ce(form: str, kind: str, lambdas: tuple[float, float], **options: Any) -> Case | None:
    """A target of labels or of channels, and the function of the input."""
    if form == "one class" and (kind != "sigmoid" or not options["include_background"]):
        return None
    x = logits(1 if form == "one class" else K)
    x = x.sigmoid() if kind == "identity" else x
    labels = labels_of(x, classes=2 if form == "one class" else K)
    y = labels.double() if form == "one class" else one_hot(labels, K, x.dtype)
    if form == "one class" and options["weight"] is not None:
        options["weight"] = WEIGHT[2]
    options |= {"lambda_dice": lambdas[0], "lambda_ce": lambdas[1], "smooth_nr": 1e-4, "smooth_dr": 1e-3}
    classes = labels[:, 0] if form == "labels" else None
    # MONAI's one-hot tensor is float32, so that its square is rounded.
    tolerance = 1e-6 if options["squared_pred"] and form == "labels" else 1e-12
    return Case(
        "DiceCELoss", x, labels.to(PICK.choice(DTYPES)) if form == "labels" else y,
        lambda x: formulas.monai_dice_ce(x, y, classes, kind, options),
        options | {"to_onehot_y": form == "labels"} | ({} if kind == "identity" else {kind: True}),
        tolerance=tolerance,
    )  # fmt: skip


def dice(form: str, kind: str, ignore: int | None, ignored: str, smooth: float, **options: Any) -> Case:
    """Also Tversky, if there is an alpha."""
    x, labels, mask = ignoring(ignore, ignored)
    y = torch.rand_like(x) if form == "soft" and ignore is None else one_hot(labels, K, x.dtype)
    options |= {"smooth_nr": smooth, "smooth_dr": smooth}
    given = options | {kind: True, "ignore_index": ignore, "to_onehot_y": form == "labels"}
    target = labels.to(PICK.choice(DTYPES)) if form == "labels" else y
    if "alpha" in options:
        return Case("TverskyLoss", x, target, lambda x: formulas.monai_dice(x, y, mask, kind, options), given)
    # MONAI's one-hot tensor is float32, so that its square is rounded.
    tolerance = 1e-6 if options["squared_pred"] and form == "labels" else 1e-12
    if options["weight"] is not None and not options["include_background"]:
        options["weight"] = given["weight"] = WEIGHT[1:].tolist()
    of_weight = options if isinstance(options["weight"], list) else options | {"weight": None}
    factor = 1 if of_weight is options or options["weight"] is None else options["weight"]
    return Case(
        "DiceLoss", x, target, lambda x: factor * formulas.monai_dice(x, y, mask, kind, of_weight), given,
        tolerance=tolerance,
    )  # fmt: skip


def of_counted_classes(options: dict[str, Any]) -> None:
    """Without the background, lists have no value of the first class."""
    for name in ("alpha", "weight"):
        if not options["include_background"] and isinstance(options[name], (list, Tensor)):
            options[name] = options[name][1:]


def focal(form: str, ignore: int | None, ignored: str, **options: Any) -> Case | None:
    if options["use_softmax"] and not options["include_background"]:
        return None
    x, labels, mask = ignoring(ignore, ignored)
    of_counted_classes(options)
    y = one_hot(labels, K, x.dtype)
    if form == "soft":
        if ignore == 255:
            return None
        # Some positions are hard, and MONAI takes no soft value of a class that is ignored.
        soft = torch.where(labels < 2, y, torch.rand_like(x))
        if ignore is not None:
            soft[:, ignore] = y[:, ignore]
        y = soft
    of_mask = None if ignore is None else mask
    return Case(
        "FocalLoss", x, labels.to(PICK.choice(DTYPES)) if form == "labels" else y,
        lambda x: formulas.monai_focal(x, y, of_mask, options),
        options | {"to_onehot_y": form == "labels", "ignore_index": ignore},
    )  # fmt: skip


def dice_focal(form: str, kind: str, lambdas: tuple[float, float], **options: Any) -> Case:
    x = logits()
    labels = labels_of(x)
    of_counted_classes(options)
    y = one_hot(labels, K, x.dtype)
    y = y if form == "labels" else torch.where(labels < 2, y, torch.rand_like(x))
    mask = torch.ones_like(x[:, :1])

    of_dice = {name: value for name, value in options.items() if name != "alpha"}

    def formula(x: Tensor) -> Tensor:
        dice = formulas.monai_dice(x, y, mask, kind, of_dice)
        return lambdas[0] * dice + lambdas[1] * formulas.monai_focal(x, y, None, options)

    given = {"lambda_dice": lambdas[0], "lambda_focal": lambdas[1], kind: True, "to_onehot_y": form == "labels"}
    return Case("DiceFocalLoss", x, labels.to(PICK.choice(DTYPES)) if form == "labels" else y, formula, options | given)


def dc_and_ce(ignore: int | None, ignored: str, weights: tuple[float, float], ce: dict, **options: Any) -> Case | None:
    """The Dice loss of nnU-Net and a cross-entropy, or that of the worst positions."""
    x, labels, mask = ignoring(ignore, ignored)
    if weights[1] == 0 and ignore is not None and not mask.any():
        # nnU-Net returns the integer 0.
        return None
    k, clip = options.pop("k", None), options.pop("clip_tp", None)
    of_dice = options | ({} if clip is None else {"clip_tp": clip})
    if k is not None:
        ce = ce | {"k": k}
    return Case(
        "DC_and_CE_loss" if k is None else "DC_and_topk_loss", x, labels.to(PICK.choice(DTYPES)),
        lambda x: formulas.nnunet_dc_and_ce(x, labels, of_dice, ce, *weights, ignore),
        {"weight_ce": weights[0], "weight_dice": weights[1], "ignore_label": ignore},
        (of_dice | {"ddp": False}, ce),
    )  # fmt: skip


def top_k(k: float, ignore: int | None, ignored: str, **options: Any) -> Case:
    x, labels, _ = ignoring(ignore, ignored)
    options["ignore_index"] = -100 if ignore is None else ignore
    return Case(
        "TopKLoss", x, labels.to(PICK.choice(DTYPES)), lambda x: formulas.nnunet_top_k(x, labels, k, options),
        options | {"k": k},
    )  # fmt: skip


def dc_and_bce(dtype: torch.dtype, ignored: str, bce: dict, weights: tuple[float, float], **options: Any) -> Case:
    """Regions, which may overlap, and which of them count in a last channel."""
    x = logits()
    regions = torch.rand(N, K + 1, *x.shape[2:]) < 0.4
    regions[:, -1] = {"all": True, "none": False}.get(ignored, regions[:, -1])
    last = None if ignored == "" else regions[:, -1:]
    bce = {name: value.view(K, *[1] * (x.dim() - 2)) for name, value in bce.items()}
    return Case(
        "DC_and_BCE_loss", x, (regions if ignored else regions[:, :K]).to(dtype),
        lambda x: formulas.nnunet_dc_and_bce(x, regions[:, :K], options, bce, *weights, last),
        {"weight_ce": weights[0], "weight_dice": weights[1], "use_ignore_label": bool(ignored)},
        (bce, options | {"ddp": False}),
    )  # fmt: skip


def smp(mode: str, form: str, ignored: str, **options: Any) -> Case | None:
    """Also Tversky, if there is an alpha.  One class is absent: its loss is 0.  The original refuses empty tensors."""
    if mode == "binary":
        options = {name: of for name, of in options.items() if name not in ("classes", "class_weights")}
    if ignored.startswith("no ") or (form == "soft" and (mode != "multilabel" or options["ignore_index"])):
        return None
    x, ignore = logits(1 if mode == "binary" else K), options["ignore_index"]
    labels = labels_of(x, classes=K - 1)
    target = {"multiclass": labels, "binary": (labels > 0).long(), "multilabel": one_hot(labels, K, torch.long)}[mode]
    target = torch.rand_like(x) if form == "soft" else target
    if ignore is not None:
        target[ignored_places(ignored)] = ignore
    if options.get("alpha") is None:
        options = {name: of for name, of in options.items() if name not in ("alpha", "gamma")}
    else:
        options |= {"beta": 0.7}
    x = x if options["from_logits"] else x.sigmoid()
    name = "SMPDiceLoss" if options.get("alpha") is None else "SMPTverskyLoss"
    return Case(name, x, target, lambda x: formulas.smp_dice(x, target, mode, options), options, (mode,))


IGNORES = {"ignore": (None, 255, 2), "ignored": IGNORED}
OF_DICE = {"include_background": BOTH, "batch": BOTH, "kind": ("softmax", "sigmoid")}
ENTROPIES = [
    {"weight": weight, "label_smoothing": of} for weight in (None, WEIGHT, WEIGHT * 0) for of in (0.0, 0.1)
]  # fmt: skip
OF_NNUNET = {
    "batch_dice": BOTH, "do_bg": BOTH, "smooth": (1e-5, 1.0, 0.0), "weights": ((1.2, 0.8), (1, 0), (0, 1)),
}  # fmt: skip
# Each function above, and the values that its arguments may have.
FAMILIES: dict[str, tuple[Callable[..., Case | None], dict[str, Any]]] = {
    "DiceCELoss": (dice_ce, OF_DICE | {
        "form": ("labels", "channels", "one class"), "kind": ("softmax", "sigmoid", "identity"),
        "squared_pred": BOTH, "jaccard": BOTH, "reduction": REDUCTIONS, "weight": (None, WEIGHT),
        "label_smoothing": (0.0, 0.1), "lambdas": ((0.7, 1.3), (0.0, 1.0), (1.0, 0.0))}),
    "DiceLoss": (dice, OF_DICE | IGNORES | {
        "form": ("labels", "channels", "soft"), "ignore": (None, 255, 2, -1), "jaccard": BOTH, "soft_label": BOTH,
        "squared_pred": BOTH, "reduction": (*REDUCTIONS, "none"), "weight": (None, 2.0, WEIGHT.tolist()),
        "smooth": (1e-5, 0.0)}),
    "TverskyLoss": (dice, OF_DICE | IGNORES | {
        "form": ("labels", "channels", "soft"), "alpha": (0.3, 0.5), "beta": (0.7,), "soft_label": BOTH,
        "reduction": (*REDUCTIONS, "none"), "smooth": (1e-5, 0.0)}),
    "FocalLoss": (focal, IGNORES | {
        "form": ("labels", "channels", "soft"), "include_background": BOTH, "gamma": (0.0, 1.5, 2.0),
        "alpha": (None, 0.25, [0.25, 0.875, 0.375, 0.5]), "weight": (None, 2.0, WEIGHT, 0.0), "reduction": REDUCTIONS,
        "use_softmax": BOTH}),
    "DiceFocalLoss": (dice_focal, OF_DICE | {
        "form": ("labels", "soft"), "jaccard": BOTH, "reduction": REDUCTIONS, "gamma": (2.0, 0.5),
        "weight": (None, WEIGHT), "alpha": (None, 0.25), "lambdas": ((0.7, 1.3), (0.0, 1.0), (1.0, 0.0))}),
    "DC_and_CE_loss": (dc_and_ce, OF_NNUNET | IGNORES | {
        "ce": [*ENTROPIES, {"reduction": "sum"}, {"ignore_index": 1}], "clip_tp": (None, 2.0)}),
    "DC_and_topk_loss": (dc_and_ce, OF_NNUNET | IGNORES | {"ce": ENTROPIES, "k": (10, 55)}),
    "TopKLoss": (top_k, IGNORES | {
        "k": (10, 55, 100), "weight": (None, WEIGHT), "label_smoothing": (0.0, 0.1)}),
    "DC_and_BCE_loss": (dc_and_bce, OF_NNUNET | {
        "dtype": (torch.bool, torch.uint8, torch.float64), "ignored": ("", "some", "all", "none"),
        "bce": ({}, {"pos_weight": WEIGHT})}),
    "SMPDiceLoss": (smp, {
        "mode": ("multiclass", "multilabel", "binary"), "form": ("labels", "labels", "soft"), "ignored": IGNORED,
        "classes": (None, [1, 2]), "log_loss": BOTH, "smooth": (0.0, 1.0), "ignore_index": (None, 255),
        "class_weights": (None, WEIGHT.tolist(), [0.0] * K), "from_logits": BOTH}),
    "SMPTverskyLoss": (smp, {
        "mode": ("multiclass", "multilabel", "binary"), "form": ("labels", "labels", "soft"), "ignored": IGNORED,
        "classes": (None, [1, 2]), "smooth": (0.0, 1.0), "ignore_index": (None, 255), "from_logits": BOTH,
        "class_weights": (None, WEIGHT.tolist()), "alpha": (0.3,), "gamma": (1.0, 1.5)}),
}  # fmt: skip


def drawn(name: str, count: int) -> Iterator[Case]:
    """Random calls of a loss."""
    build, options = FAMILIES[name]
    PICK.seed(name)
    while count:
        case = build(**{option: PICK.choice(values) for option, values in options.items()})
        if case is not None:
            yield case
            count -= 1
