"""The losses of MONAI, nnU-Net and segmentation_models_pytorch as plain formulas, for comparison.

Each function forms one-hot targets and probabilities in the dtype of the logits, and returns the value.
"""

import torch
from torch.nn import functional as F


def one_hot(labels, K, dtype):
    """(N, 1, ...) to (N, K, ...); a label that is no class has no one."""
    classes = torch.arange(K).view(1, K, *(1,) * (labels.dim() - 2))
    return (labels == classes).to(dtype)


def monai_dice(x, y, mask, kind, options):
    """``kind`` is the function of the input: softmax, sigmoid or identity."""
    p = {"softmax": lambda: x.softmax(1), "sigmoid": x.sigmoid, "identity": lambda: x}[kind]()
    p, y = p * mask, y * mask
    if not options.get("include_background", True) and x.shape[1] > 1:
        p, y = p[:, 1:], y[:, 1:]
    axes = [*([0] if options.get("batch") else []), *range(2, x.dim())]
    if options.get("squared_pred"):
        P, G = (p**2).sum(axes), (y**2).sum(axes)
        tp = (P + G - ((p - y) ** 2).sum(axes)) / 2
    elif options.get("soft_label"):
        P, G = p.sum(axes), y.sum(axes)
        tp = (P + G - (p - y).abs().sum(axes)) / 2
    else:
        P, G, tp = p.sum(axes), y.sum(axes), (p * y).sum(axes)
    factor = 1.0 if options.get("jaccard") else 0.5
    alpha, beta = options.get("alpha", factor), options.get("beta", factor)
    nr, dr = options.get("smooth_nr", 1e-5), options.get("smooth_dr", 1e-5)
    if "alpha" in options:
        return reduce(1 - (tp + nr) / (tp + alpha * (P - tp) + beta * (G - tp) + dr), options)
    f = 1 - (2 * tp + nr) / (2 * (tp + alpha * (P - tp) + beta * (G - tp)) + dr)
    if options.get("weight") is not None and f.shape[-1] != 1:
        f = f * torch.as_tensor(options["weight"])
    if options.get("reduction") == "none":
        return f.view(*f.shape[:2], *(1,) * (x.dim() - 2))
    return reduce(f, options)


def reduce(f, options):
    reduction = options.get("reduction", "mean")
    return f.mean() if reduction == "mean" else f.sum() if reduction == "sum" else f


def monai_dice_ce(x, y, labels, kind, options):
    """``y`` is one-hot or soft; ``labels`` are (N, ...) for the cross-entropy, or None."""
    weight = options.get("weight")
    background = options.get("include_background", True)
    of_dice = options | {"weight": weight if weight is None or background else weight[1:]}
    dice = monai_dice(x, y, torch.ones_like(x[:, :1]), kind, of_dice)
    reduction = options.get("reduction", "mean")
    if x.shape[1] == 1:
        ce = F.binary_cross_entropy_with_logits(x, y, pos_weight=weight, reduction=reduction)
    else:
        smoothing = options.get("label_smoothing", 0.0)
        target = y if labels is None else labels.long()
        ce = F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)
    return options.get("lambda_dice", 1.0) * dice + options.get("lambda_ce", 1.0) * ce


def monai_focal(x, y, mask, options):
    """``y`` has a channel for each class; ``mask`` is (N, 1, ...), or None."""
    if not options.get("include_background", True) and x.shape[1] > 1:
        x, y = x[:, 1:], y[:, 1:]
    K, gamma, alpha = x.shape[1], options.get("gamma", 2.0), options.get("alpha")
    per_class = (1, -1, *(1,) * (x.dim() - 2))
    one = isinstance(alpha, float)
    if options.get("use_softmax"):
        log_p = x.log_softmax(1)
        loss = -((1 - log_p.exp()) ** gamma) * log_p * y
        if one:
            alpha = None if not options.get("include_background", True) else [1 - alpha] + [alpha] * (K - 1)
        if alpha is not None:
            loss = loss * torch.as_tensor(alpha, dtype=x.dtype).view(per_class)
    else:
        p = x.sigmoid()
        loss = (x * (1 - 2 * y)).sigmoid() ** gamma * -(y * p.log() + (1 - y) * (1 - p).log())
        if one:
            loss = loss * (y * alpha + (1 - y) * (1 - alpha))
        elif alpha is not None:
            loss = loss * torch.where(y == 1, torch.as_tensor(alpha, dtype=x.dtype).view(per_class), 1)
    if options.get("weight") is not None:
        weight = torch.as_tensor(options["weight"])
        loss = loss * (weight.view(per_class) if weight.dim() else weight)
    axes = tuple(range(2, x.dim()))
    if mask is None:
        return loss.mean() if options.get("reduction", "mean") == "mean" else loss.mean(axes).sum()
    loss, least = loss * mask, torch.finfo(torch.float32).eps
    if options.get("reduction", "mean") == "mean":
        return loss.sum() / mask.sum().clip(least)
    return (loss.sum(axes) / mask.sum(axes).clip(least)).sum()


def nnunet_top_k(x, target, k, options):
    values = F.cross_entropy(x, target[:, 0].long(), reduction="none", **options).flatten()
    return values.topk(int(len(values) * k / 100)).values.mean()


def nnunet_dice(p, y, mask, options):
    axes = list(range(2, p.dim()))
    if options.get("batch_dice"):
        axes = [0, *axes]
    tp, fp, fn = ((v * mask).sum(axes) for v in (p * y, p * (1 - y), (1 - p) * y))
    if options.get("clip_tp") is not None:
        tp = tp.clip(min=options["clip_tp"])
    smooth = options.get("smooth", 1.0)
    dice = (2 * tp + smooth) / (2 * tp + fp + fn + smooth).clip(1e-8)
    return -(dice if options.get("do_bg", True) else dice[..., 1:]).mean()


def nnunet_dc_and_ce(x, target, dice_options, ce_options, weight_ce=1, weight_dice=1, ignore_label=None):
    """With ``k`` among the options of the cross-entropy, only the worst positions count in it."""
    mask = torch.ones_like(target, dtype=x.dtype) if ignore_label is None else (target != ignore_label).to(x.dtype)
    y = one_hot(target, x.shape[1], x.dtype)
    if ignore_label is not None:
        ce_options = ce_options | {"ignore_index": ignore_label}
    loss, k = 0, ce_options.get("k")
    if weight_ce and (ignore_label is None or mask.sum() > 0):
        rest = {name: value for name, value in ce_options.items() if name != "k"}
        loss = nnunet_top_k(x, target, k, rest) if k else F.cross_entropy(x, target[:, 0].long(), **rest)
    dice = weight_dice and weight_dice * nnunet_dice(x.softmax(1), y, mask, dice_options)
    return weight_ce * loss + dice


def nnunet_dc_and_bce(x, regions, dice_options, bce_options, weight_ce=1, weight_dice=1, ignored=None):
    y = regions.to(x.dtype)
    if ignored is None:
        mask, ce = torch.ones_like(x[:, :1]), F.binary_cross_entropy_with_logits(x, y, **bce_options)
    else:
        mask = 1 - ignored.to(x.dtype)
        ce = F.binary_cross_entropy_with_logits(x, y, reduction="none", **bce_options)
        ce = (ce * mask).sum() / mask.sum().clip(min=1e-8)
    return weight_ce * ce + weight_dice * nnunet_dice(x.sigmoid(), y, mask, dice_options)


def smp_dice(x, target, mode, options):
    """Tversky if the options have alpha and beta."""
    K = x.shape[1]
    ignore = options.get("ignore_index")
    t = target.reshape(x.shape[0], 1 if mode == "multiclass" else K, -1)
    p = (x.softmax(1) if mode == "multiclass" else x.sigmoid()) if options.get("from_logits", True) else x
    p, mask = p.flatten(2), torch.ones_like(t, dtype=x.dtype) if ignore is None else (t != ignore).to(x.dtype)
    y = one_hot(t, K, x.dtype) if mode == "multiclass" else t.to(x.dtype)
    p, y = p * mask, y * mask
    P, G = p.sum((0, 2)), y.sum((0, 2))
    tp = (P + G - (p - y).abs().sum((0, 2))) / 2
    alpha, beta, smooth = options.get("alpha", 0.5), options.get("beta", 0.5), options.get("smooth", 0.0)
    eps = options.get("eps", 1e-7)
    score = (tp + smooth) / (tp + alpha * (P - tp) + beta * (G - tp) + smooth).clamp_min(eps)
    loss = (-score.clamp_min(eps).log() if options.get("log_loss") else 1 - score) * (G > 0)
    weights = torch.ones(K) if options.get("class_weights") is None else torch.tensor(options["class_weights"])
    if options.get("classes") is not None:
        loss, weights = loss[options["classes"]], weights[options["classes"]]
    return ((loss * weights).sum() / weights.sum()) ** options.get("gamma", 1.0)
