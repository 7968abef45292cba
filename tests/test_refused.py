"""Wrong arguments: for each error, the call that raises it.  Its text names the op, the argument, and what it got.

A check that ops share has its rows with one of them.
"""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg import BatchNormAct, ConvABN2d, ConvABN3d, InPlaceABN, InPlaceGroupNormAct, InPlaceInstanceNormAct, losses
from fusedseg.activation import INVERTIBLE
from fusedseg.functional import (
    ConvLogits,
    Interpolated,
    argmax_labels,
    conv_abn,
    inplace_abn,
    inplace_group_norm_act,
    inplace_instance_norm_act,
    join_conv,
    max_pool,
    norm_act,
    segmentation_sums,
    upsample,
)
from fusedseg.memory.fake import bytes_before, eager_step, fake_inputs, fake_mode, fake_model
from fusedseg.ops.conv import conv_abn as conv_op
from fusedseg.unet import ConvNormAct, DoubleConv, Down, MultiEncoderUNet, UNet, Up

ones, rand, from_modules = torch.ones, torch.randn, ConvABN2d.from_modules


def act(x=None, training=True, running=(None, None), **options):
    return norm_act(rand(2, 64, 3, 3) if x is None else x, *running, training=training, **options)


def abn(x=None, training=True, **options):
    given = {"running_mean": None, "running_var": None, "weight": None, "bias": None} | options
    return inplace_abn(rand(2, 64, 3, 3) if x is None else x, training=training, **given)


def by_instance(*shape, **options):
    return inplace_instance_norm_act(rand(*shape), **options)


def by_group(*shape, groups=2, **options):
    return inplace_group_norm_act(rand(*shape), groups, **options)


def with_itself():
    x = rand(2, 4, 3)
    return inplace_group_norm_act(x, 2, residual=x.view(2, 4, 3))


def pool(*window, x=(1, 1, 4, 4)):
    return max_pool(rand(x) if isinstance(x, tuple) else x, *window)


def sums(x=(2, 3, 4, 5), target=(2, 4, 5), *mask, **options):
    x, target = (rand(t) if isinstance(t, tuple) else t for t in (x, target))
    return segmentation_sums(x, target, *mask, **options)


def logits(features=(2, 6, 5, 4), weight=(4, 6), bias=(4,), *size):
    return ConvLogits(*(rand(t) if isinstance(t, tuple) else t for t in (features, weight, bias)), *size)


def conv(x=(2, 6, 5, 5), w=(4, 6, 3, 3), bias=None, dtype=torch.float32, **options):
    """Nothing runs before the error, and no statistic moves."""
    x, w = (rand(t, dtype=dtype) if isinstance(t, tuple) and isinstance(t[0], int) else t for t in (x, w))
    running = torch.zeros(4, dtype=dtype), ones(4, dtype=dtype)
    mean, var = options.pop("running", running)
    with mock.patch.object(conv_op, "_forward_with", side_effect=AssertionError("a convolution was launched")):
        try:
            return conv_abn(x, w, bias, mean, var, **{"training": True} | options)
        finally:
            assert not running[0].any()
            assert torch.equal(running[1], torch.ones_like(running[1]))


def windows(**change):
    given = {"model": lambda x: torch.cat([x, x, x[:, :1]], 1), "image": rand(1, 2, 9, 9), "roi": 4} | change
    return fusedseg.sliding_window_labels(**given)


def without_values(model, *shapes):
    with fake_mode():
        return eager_step(fake_model(model, torch.float32), fake_inputs(shapes, torch.float32))


def hooked(module):
    module.register_forward_hook(lambda *args: None)
    return module


CONV, BN = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
X, W = rand(2, 3, 8, 8), rand(4, 5, 3, 3)
LOGITS, LABELS = rand(2, 4, 5, 6), torch.randint(4, (2, 1, 5, 6))
UNET, TWO_ENCODERS = UNet(1, 2, widths=(4, 8, 8)), MultiEncoderUNet((1, 2), 2, widths=(4, 8))
WINDOWS = {
    r"image must have shape \(N, C, \*spatial\) with one to three": lambda: windows(image=ones(9, 9)),
    r"at least one value, got \(0, 2, 9, 9\)": lambda: windows(image=ones(0, 2, 9, 9)),
    r"roi must be one integer, or 2 integers, one for each axis, got \(4,\)": lambda: windows(roi=(4,)),
    r"image must .* got \(2, 9, 9\), which has no batch dimension \(pass image\[None\]\) or":
        lambda: windows(image=ones(2, 9, 9), roi=(4, 4)),
    "image must .* has no batch dimension": lambda: windows(image=ones(2, 9, 9, 9), roi=[4, 4, None]),
    "no batch and channel dimensions .pass": lambda: windows(image=ones(9, 9, 9), roi=(4, 4, 4)),
    "roi must be one integer, or 1 integers": lambda: windows(image=ones(1, 2, 9), roi=(4, 4, 4, 4)),
    "roi must be one integer, or 2 integers, one for each axis, got 4.5": lambda: windows(roi=4.5),
    "overlap must be one number at least 0 and below 1, or 2 of them, got 1.0": lambda: windows(overlap=1.0),
    r"for image \(N, C, \*spatial\) = \(2, 9, 9\)": lambda: windows(image=ones(2, 9, 9), overlap=(0.5, 0.5)),
    r"got .* for image .* = \(2, 9, 9\)": lambda: windows(image=ones(2, 9, 9), mirror=(0, 1)),
    r"or 2 of them, got \(0.5,\)": lambda: windows(overlap=(0.5,)),
    "sigma_scale must be one number above 0, or 2 of them, got 0": lambda: windows(sigma_scale=0),
    "sw_batch_size must be an integer >= 1, got 0": lambda: windows(sw_batch_size=0),
    "mode must be one of constant, gaussian, got 'box'": lambda: windows(mode="box"),
    "padding_mode must be one of constant, reflect, replicate, circular": lambda: windows(padding_mode="zeros"),
    "cval must be 0 for padding_mode 'reflect', got 1": lambda: windows(padding_mode="reflect", cval=1),
    r"mirror must have different axes from 0 to 1, got \(0, 0\)": lambda: windows(mirror=(0, 0)),
    "mirror must have different axes from 0 to 1, got 0 for image": lambda: windows(mirror=0),
    "regions must be True, False, or labels of at least 0, got None": lambda: windows(regions=None),
    "roi must be one integer, or 2 integers, one for each axis, got True": lambda: windows(roi=True),
    "sigma_scale must be one number above 0, or 2 of them, got None": lambda: windows(sigma_scale=None),
    "overlap must be one number at least 0 and below 1, or 2 of them, got 'half'": lambda: windows(overlap="half"),
    r"mirror must have different axes from 0 to 1, got \(2,\)": lambda: windows(mirror=(2,)),
    r"regions must be True, False, or labels of at least 0, got \(1, -1\)": lambda: windows(regions=(1, -1)),
    "regions must have 5 labels, one for each class, got 2": lambda: windows(regions=(1, 2)),
    r"is \(1, 2, 4, 4\), got \(1, 2, 4, 2\)": lambda: windows(model=lambda x: x[..., ::2]),
    r"for windows \(1, 2, 4, 4\) is .*, got \(2, 4, 4\)": lambda: windows(model=lambda x: x[0]),
    "for every window, got 3 after 2":
        lambda: windows(model=mock.Mock(side_effect=[ones(1, 2, 4, 4), ones(1, 3, 4, 4)])),
}  # fmt: skip
VALUES = {
    "fusedseg.backend must be one of auto, triton, aten, got 'cuda'": lambda: setattr(fusedseg, "backend", "cuda"),
    "norm_act: norm must be one of batch, instance, group, got 'layer'": lambda: act(norm="layer"),
    "norm_act: num_groups must be given for norm 'group' and for no other": lambda: act(norm="group"),
    "num_groups must be given for norm 'group' and for no other, got .*2": lambda: act(num_groups=2),
    "norm_act: norm 'group' has no running statistics":
        lambda: act(running=(ones(64), ones(64)), norm="group", num_groups=2),
    r"norm_act: expected more than 1 spatial element when training, got input size \(2, 64\)":
        lambda: act(rand(2, 64), norm="instance"),
    "norm_act: running_mean and running_var are needed when training is False":
        lambda: act(norm="instance", training=False),
    "norm_act: slope must be given for activation 'prelu' and for no other, got activation 'prelu'":
        lambda: act(activation="prelu"),
    "and for no other, got activation 'relu'": lambda: act(activation="relu", slope=ones(1)),
    r"norm_act: slope must have shape \(64,\), one value per channel of x, got \(2,\)":
        lambda: act(activation="prelu", slope=ones(2)),
    "norm_act: activation must be one of leaky_relu, elu, .*got 'swish'": lambda: act(activation="swish"),
    "norm_act: activation 'relu' has no parameter; leave activation_param out, got 0.1":
        lambda: act(activation="relu", activation_param=0.1),
    "norm_act: activation_param of gelu must be 'none' or 'tanh', its approximation, got 'erf'":
        lambda: act(activation="gelu", activation_param="erf"),
    r"inplace_abn: weight must have shape \(64,\), one value per channel of x, got \(32,\)":
        lambda: abn(weight=ones(32)),
    r"inplace_abn: bias must have shape \(64,\), one value per channel of x, got \(64, 1\)":
        lambda: abn(bias=ones(64, 1)),
    "inplace_abn: running_mean must be on cpu, the device of x, got meta":
        lambda: abn(running_mean=ones(64, device="meta"), running_var=ones(64, device="meta")),
    "inplace_abn: running_mean and running_var must be given together, got one of them":
        lambda: abn(running_mean=ones(64)),
    "inplace_abn: running_mean and running_var are needed when training is False, got None":
        lambda: abn(training=False),
    r"inplace_abn: expected more than 1 value per channel when training, got input size \(1, 64, 1, 1\)":
        lambda: abn(rand(1, 64, 1, 1)),
    "inplace_abn: x is a leaf that requires grad and would be overwritten":
        lambda: abn(rand(2, 64, requires_grad=True)),
    r"inplace_abn: x must not overlap itself, since it is overwritten, got shape \(2, 64, 3\)":
        lambda: abn(rand(2, 64, 1).expand(2, 64, 3)),
    "inplace_abn: x is one of several views made by one call":
        lambda: abn((rand(4, 64, requires_grad=True) * 1).chunk(2)[0]),
    r"inplace_abn: x must have shape \(N, C\) or \(N, C, \*spatial\), got \(64,\)": lambda: abn(ones(64)),
    "inplace_abn: activation 'relu' cannot be inverted; use fusedseg.BatchNormAct, which is exact for it":
        lambda: abn(activation="relu"),
    r"inplace_abn: leaky_relu with slope 0.0 cannot be inverted \(the slope must be > 0\); use fusedseg.BatchNormAct":
        lambda: abn(activation_param=0.0),
    f"inplace_abn: activation must be one of {', '.join(INVERTIBLE)}, got 'leaky_relu_0.01'":
        lambda: abn(activation="leaky_relu_0.01"),
    "inplace_instance_norm_act: activation 'relu' cannot be inverted; use fusedseg.InstanceNormAct":
        lambda: by_instance(2, 4, 3, 3, activation="relu"),
    r"leaky_relu with slope 0.0 cannot be inverted \(the slope must be > 0\); use fusedseg.GroupNormAct":
        lambda: by_group(2, 4, 3, 3, activation_param=0.0),
    "inplace_group_norm_act: num_groups must divide the number of channels, 4, got 3":
        lambda: by_group(2, 4, 3, 3, groups=3),
    "num_groups must divide .* got 0": lambda: by_group(2, 4, 3, groups=0),
    r"inplace_instance_norm_act: expected more than 1 spatial element when training, got input size \(2, 4, 1, 1\)":
        lambda: by_instance(2, 4, 1, 1),
    r"expected more than 1 value per group when training, got input size \(1, 4\)": lambda: by_group(1, 4, groups=4),
    r"fusedseg.inplace_abn: residual must have the shape of x, \(2, 4, 3\), got \(2, 4, 1\)":
        lambda: abn(rand(2, 4, 3), residual=rand(2, 4, 1)),
    "residual must be on cpu, the device of x, got meta":
        lambda: by_instance(2, 4, 3, residual=rand(2, 4, 3, device="meta")),
    "inplace_group_norm_act: residual shares memory with x, which is overwritten": with_itself,
    "fusedseg.InPlaceABN: activation 'relu' cannot be": lambda: InPlaceABN(3, activation="relu"),
    r"must have shape \(N, 3\) .* got \(2, 4, 5\)": lambda: InPlaceABN(3)(rand(2, 4, 5)),
    "dims must be 1, 2 or 3, got 4": lambda: InPlaceABN(3).to_norm(4),
    "fusedseg.InPlaceInstanceNormAct: activation 'relu' cannot be inverted; use fusedseg.InstanceNormAct":
        lambda: InPlaceInstanceNormAct(3, activation="relu"),
    "must be divisible by num_groups": lambda: InPlaceGroupNormAct(4, 6),
    r"x must have shape \(N, 3\) with one to three spatial dimensions after it, got \(2, 4, 5\)":
        lambda: InPlaceInstanceNormAct(3, affine=True)(rand(2, 4, 5)),
    r"x must have shape \(N, 3\) with one to three spatial dimensions after it, got \(2, 3\)":
        lambda: fusedseg.InstanceNormAct(3)(rand(2, 3)),
    r"fusedseg.InPlaceGroupNormAct: x must have shape \(N, 4\) .* got \(2, 6, 5\)":
        lambda: InPlaceGroupNormAct(2, 4)(rand(2, 6, 5)),
    "num_slopes must be 1 for activation 'leaky_relu', .* got 3": lambda: fusedseg.InstanceNormAct(3, num_slopes=3),
    "num_slopes must be 1 or .* 3, got 2": lambda: BatchNormAct(3, activation="prelu", num_slopes=2),
    "slope must be given for activation": lambda: BatchNormAct.from_norm(nn.BatchNorm2d(3), "prelu"),
    "bn must have 6 features, one per output channel, got 4": lambda: from_modules(CONV, nn.BatchNorm2d(4)),
    r"2 spatial dimensions .* got \(4, 8, 8\)": lambda: ConvABN2d(4, 6, 3)(rand(4, 8, 8)),
    r"3 spatial dimensions after it, got \(2, 4": lambda: ConvABN3d(4, 6, 3)(rand(2, 4, 8, 8)),
    "fusedseg.ConvABN2d: conv_backend must be one of": lambda: ConvABN2d(4, 6, 3, conv_backend="x"),
    "divisible by groups": lambda: ConvABN2d(4, 6, 3, groups=3),
    r"conv_abn: x must have 6 channels for a weight of shape \(4, 6, 3, 3\) and groups=1, got 5 in \(2, 5, 5, 5\)":
        lambda: conv((2, 5, 5, 5)),
    r"conv_abn: x must have shape \(N, C\) with 2 spatial dimensions after it, got \(6, 5, 5\)":
        lambda: conv((6, 5, 5)),
    r"conv_abn: x must have shape \(N, C, \*spatial\), got \(6,\)": lambda: conv((6,)),
    r"conv_abn: x must have shape \(N, C\) with 2 spatial dimensions after it, got \(6, 1\)":
        lambda: conv((6, 1), (4, 6, 2, 2), padding="same"),
    r"conv_weight must have shape \(K, C / groups, \*kernel\) in two or three dimensions, got \(4, 6, 3\)":
        lambda: conv((2, 6, 5), (4, 6, 3)),
    "conv_abn: conv_weight must be on cpu, the device of x, got meta": lambda: conv(w=ones(4, 6, 3, 3, device="meta")),
    "conv_abn: groups=3 must divide the output channels, got 4": lambda: conv(w=(4, 2, 3, 3), groups=3),
    "conv_abn: groups must be an integer >= 1, got 0": lambda: conv(groups=0),
    r"conv_abn: conv_bias must have shape \(4,\), got \(6,\)": lambda: conv(bias=ones(6)),
    r"the kernel, \(3, 3\) with dilation \(2, 2\), does not fit in x \(2, 6, 4, 5\) with padding \(0, 0\)":
        lambda: conv((2, 6, 4, 5), dilation=2),
    r"conv_abn: expected more than 1 value per channel when training, got input size \(1, 4, 1, 1\)":
        lambda: conv((1, 6, 3, 3)),
    r"conv_abn: weight must have shape \(4,\), one value per channel of the convolution's output, got \(6,\)":
        lambda: conv(weight=ones(6)),
    "conv_abn: running_mean and running_var are needed when training is False, got None":
        lambda: conv(training=False, running=(None, None)),
    "conv_abn: stride must be an integer >= 1, or 2 of them, got 0": lambda: conv(stride=0),
    r"conv_abn: stride must be an integer >= 1, or 2 of them, got \(1, 1, 1\)": lambda: conv(stride=(1, 1, 1)),
    "conv_abn: padding must be an integer >= 0, or 2 of them, got -1": lambda: conv(padding=-1),
    "conv_abn: padding must be integers, 'same' or 'valid', got 'full'": lambda: conv(padding="full"),
    r"conv_abn: padding='same' needs a stride of 1, got \(2, 2\)": lambda: conv(padding="same", stride=2),
    "conv_abn: conv_backend must be one of auto, triton, aten, got 'cudnn'": lambda: conv(conv_backend="cudnn"),
    "conv_abn: activation 'relu' cannot be inverted; use fusedseg.BatchNormAct": lambda: conv(activation="relu"),
    r"join_conv: x must have 5 channels .*, got 6 in \(2, 6, 8, 8\)": lambda: join_conv((X, X), W),
    "join_conv: sources must agree in all but their channels": lambda: join_conv((X, X[:, :2, 1:]), W),
    "join_conv: sources must have one dtype, got .*float16": lambda: join_conv((X, X[:, :2].half()), W),
    "join_conv: groups must be 1 for several sources, got 2": lambda: join_conv((X, X[:, :1]), W[:, :2], groups=2),
    r"join_conv: conv_weight must have shape .*, got \(5, 3, 3\)": lambda: join_conv(X, W[0]),
    "join_conv: stride must be an integer >= 1.*got 0": lambda: join_conv(X, W[:, :3], stride=0),
    "conv_abn: x must be one tensor for conv_backend 'triton'": lambda: conv((X, X[:, :2]), W, conv_backend="triton"),
    "Interpolated: mode must be one of .*'trilinear'": lambda: Interpolated(X, (4, 4), "trilinear"),
    r"size must be 2 positive integers .*got \(4,\)": lambda: Interpolated(X, (4,), "nearest"),
    "align_corners must be None unless mode is one of bilinear, .* got True for":
        lambda: Interpolated(X, (4, 4), "nearest", True),
    r"two or three spatial dimensions, got \(8, 8\)": lambda: Interpolated(X[0, 0], (4, 4), "nearest"),
    r"JoinConv2d: x must have shape .*2 spatial.*got \(1, 3, 4\)":
        lambda: fusedseg.nn.JoinConv2d(3, 2, 1)(rand(1, 3, 4)),
    r"max_pool: padding must be at most half of kernel_size \(2, 2\), got \(2, 2\)": lambda: pool(2, 2, 2),
    "max_pool: stride must be an integer >= 1, or 2 of them, got 0": lambda: pool(2, 0),
    "kernel_size must be an integer >= 1, or 2 of them, got 0": lambda: pool(0),
    "dilation must be an integer >= 1": lambda: pool(2, 2, 0, 0),
    r"kernel_size \(9, 9\) with dilation \(1, 1\) does not fit in x \(1, 1, 4, 4\)": lambda: pool(9),
    r"at most 256 positions.* got \(17, 16\); use torch.nn.MaxPool2d": lambda: pool((17, 16)),
    r"x must not be empty beyond its batch, got \(2, 0, 4, 4\)": lambda: pool(2, x=(2, 0, 4, 4)),
    r"max_pool: x must have shape \(N, C, \*spatial\) or .* got \(4, 4\)": lambda: pool(2, x=(4, 4)),
    "MaxPool2d: return_indices must be False, got True; use torch.nn.MaxPool2d":
        lambda: fusedseg.MaxPool2d(2, return_indices=True),
    "MaxPool3d: return_indices must be False, got True; use torch.nn.MaxPool3d":
        lambda: fusedseg.MaxPool3d(2, return_indices=True),
    r"upsample: .*1 to 3 spatial dimensions, got \(2, 2\)": lambda: upsample(ones(2, 2), size=2),
    "upsample: one of size and scale_factor must be given, got None and None": lambda: upsample(ones(1, 1, 2)),
    r"upsample: size must be positive, one number or 2, got \(3,\)": lambda: upsample(ones(1, 1, 2, 2), size=(3,)),
    "upsample: scale_factor must be positive.* got -1.0": lambda: upsample(ones(1, 1, 2), scale_factor=-1.0),
    r"sums: target must have shape \(2, 4, 5\) or \(2, 1, 4, 5\), .* got \(2, 5, 4\)": lambda: sums(target=(2, 5, 4)),
    r"mask must have shape .* got \(2, 3, 4, 5\)": lambda: sums((2, 3, 4, 5), (2, 4, 5), ones(2, 3, 4, 5) > 0),
    "probability must be one of softmax, .* positive, none, got 'relu'": lambda: sums(probability="relu"),
    "likelihood must be one of softmax, smoothed, sigmoid, none, got 'ce'": lambda: sums(likelihood="ce"),
    "likelihood must be none for probability 'argmax', got 'softmax'": lambda: sums(probability="argmax"),
    "gamma must be 0, or above 0 with likelihood softmax or sigmoid, got -1": lambda: sums(gamma=-1.0),
    "gamma must be 0, or above 0 with likelihood softmax or sigmoid, got 2":
        lambda: sums(gamma=2.0, likelihood="smoothed"),
    "target must be on cpu, the device of logits, got meta": lambda: sums(target=ones(2, 4, 5, device="meta")),
    r"argmax_labels: logits must have at least one class, got \(2, 0, 3, 4\)": lambda: argmax_labels(rand(2, 0, 3, 4)),
    r"features must have shape .* with up to three .* got \(6,\)": lambda: logits((6,)),
    r"with up to three spatial dimensions, got \(2, 6, 1, 1, 5, 4\)": lambda: logits((2, 6, 1, 1, 5, 4)),
    r"weight must have shape \(K, 6\) or \(K, 6, 1, ...\), .* got \(4, 5\)": lambda: logits(weight=(4, 5)),
    r"weight must have shape .* got \(4, 6, 3, 3\)": lambda: logits(weight=(4, 6, 3, 3)),
    "weight must be on cpu, the device of features, got meta": lambda: logits(weight=ones(4, 6, device="meta")),
    r"bias must have shape \(4,\), one value per channel of .* got \(3,\)": lambda: logits(bias=(3,)),
    r"size must be 2 positive integers for features .* got \(7,\)": lambda: logits((2, 6, 5, 4), (4, 6), (4,), (7,)),
    r"target must have shape \(2, 7, 7\) or .* got \(2, 5, 4\)":
        lambda: segmentation_sums(logits((2, 6, 5, 4), (4, 6), (4,), (7, 7)), torch.zeros(2, 5, 4)),
    "ConvHead2d: scale_factor must be an integer >= 1, got 1.5": lambda: fusedseg.ConvHead2d(3, 2, scale_factor=1.5),
    r"ConvHead3d: features must have shape \(N, 3\) with 3 spatial .* got \(1, 3, 4, 4\)":
        lambda: fusedseg.ConvHead3d(3, 2)(rand(1, 3, 4, 4)),
    r"fusedseg\.unet\.UNet: dims must be 2 or 3, got 1": lambda: UNet(1, 2, dims=1),
    r"fusedseg\.unet\.UNet: widths must be two or more positive .*, got \(8,\)": lambda: UNet(1, 2, widths=(8,)),
    r"fusedseg\.unet\.UNet: widths must be .*, got \(8, 0\)": lambda: UNet(1, 2, widths=(8, 0)),
    r"UNet: up_widths must be 1 positive .*, got \(4, 4\)": lambda: UNet(1, 2, widths=(8, 8), up_widths=(4, 4)),
    "Up: fit must be one of resize, pad, got 'crop'": lambda: UNet(1, 2, fit="crop"),
    "norm_act must be one of batch, instance, group, got 'layer'": lambda: UNet(1, 2, norm_act="layer"),
    "MultiEncoderUNet: in_channels must name at least one image, got none": lambda: MultiEncoderUNet((), 2),
    r"fusedseg\.unet\.UNet: in_channels must be an integer >= 1, got 0": lambda: UNet(0, 2),
    r"fusedseg\.unet\.UNet: num_classes must be an integer >= 1, got 2\.0": lambda: UNet(1, 2.0),
    r"fusedseg\.unet\.Up: mode must be one of linear, transposed, got 'cubic'": lambda: UNet(1, 2, mode="cubic"),
    r"fusedseg\.unet\.ConvNormAct: dims must be 2 or 3, got 4": lambda: ConvNormAct(1, 2, dims=4),
    r"fusedseg\.unet\.DoubleConv: dims must be 2 or 3, got 4": lambda: DoubleConv(1, 2, dims=4),
    r"fusedseg\.unet\.Down: dims must be 2 or 3, got 4": lambda: Down(1, 2, dims=4),
    r"fusedseg\.unet\.Up: dims must be 2 or 3, got 4": lambda: Up(2, 1, 2, dims=4),
    r"fusedseg\.unet\.UNet: input must have shape \(N, 1\) with 2 spatial .*, got \(1, 2, 8, 8\)":
        lambda: UNET(rand(1, 2, 8, 8)),
    r"fusedseg\.unet\.UNet: input must have shape .*, got \(1, 1, 8, 8, 8\)": lambda: UNET(rand(1, 1, 8, 8, 8)),
    r"every spatial size must be at least 4 to be halved 2 times, got \(1, 1, 8, 3\)": lambda: UNET(rand(1, 1, 8, 3)),
    "MultiEncoderUNet: expected 2 images, got 1": lambda: TWO_ENCODERS(rand(1, 1, 8, 8)),
    r"images must have one batch and spatial size, got \[\(1, 1, 8, 8\), \(1, 2, 8, 9\)\]":
        lambda: TWO_ENCODERS(rand(1, 1, 8, 8), rand(1, 2, 8, 9)),
    r"x of size \(4, 4\) cannot reach the skip of size \(8, 10\)":
        lambda: Up(4, 4, 4, mode="transposed")(rand(1, 4, 4, 4), rand(1, 4, 8, 10)),
    r"x of size \(4, 4\), enlarged by 2, is larger than the skip of size \(8, 7\)":
        lambda: Up(4, 4, 4, fit="pad")(rand(1, 4, 4, 4), rand(1, 4, 8, 7)),
    **{
        rf"fusedseg\.unet\.Up: skips must have one spatial size, got \[\(1, 2, 8, 8\), \(1, 2, 8, {n}\)\]":
            lambda n=n, plain=plain: Up(4, 4, 4, plain=plain)(rand(1, 4, 4, 4), [rand(1, 2, 8, 8), rand(1, 2, 8, n)])
        for n, plain in ((9, False), (10, True))
    },
    "fusedseg.DiceCELoss: other_act must be None, .* use monai.losses.DiceCELoss":
        lambda: fusedseg.DiceCELoss(other_act=torch.tanh),
    "DiceLoss: sigmoid and softmax must not both be True": lambda: fusedseg.DiceLoss(sigmoid=True, softmax=True),
    # These three named DiceLoss.
    "DiceCELoss: weight must not be negative": lambda: fusedseg.DiceCELoss(weight=torch.tensor([-1.0, 1.0])),
    "DiceCELoss: sigmoid and softmax must not both": lambda: fusedseg.DiceCELoss(sigmoid=True, softmax=True),
    "DiceFocalLoss: sigmoid and softmax must not both": lambda: losses.DiceFocalLoss(sigmoid=True, softmax=True),
    "DiceLoss: reduction must be one of mean, sum, none, got 'max'": lambda: fusedseg.DiceLoss(reduction="max"),
    "DiceCELoss: reduction must be one of mean, sum, got 'none'": lambda: fusedseg.DiceCELoss(reduction="none"),
    "lambda_ce must be at least 0, got -1": lambda: fusedseg.DiceCELoss(lambda_ce=-1),
    "DiceLoss: weight must not be negative": lambda: fusedseg.DiceLoss(weight=[-1.0, 1.0]),
    r"target must have the shape of input \(2, 4, 5, 6\) without to_onehot_y, got \(2, 1, 5, 6\)":
        lambda: fusedseg.DiceLoss(softmax=True)(LOGITS, LABELS),
    r"target must have shape \(2, 1, 5, 6\) with to_onehot_y=True, got \(2, 4, 5, 6\)":
        lambda: fusedseg.DiceCELoss(softmax=True, to_onehot_y=True)(LOGITS, LOGITS),
    "DiceLoss: weight must have 4 values, one for each class, got":
        lambda: fusedseg.DiceLoss(weight=[1.0, 2.0])(LOGITS, LOGITS),
    "fusedseg.CrossEntropyLoss: reduction must be mean or sum, got 'none'; use torch.nn.CrossEntropyLoss":
        lambda: fusedseg.CrossEntropyLoss(reduction="none"),
    "size_average and reduce must be None": lambda: fusedseg.CrossEntropyLoss(size_average=True),
    "ignore_index must be < 0 for a target of probabilities, got 1":
        lambda: fusedseg.CrossEntropyLoss(ignore_index=1)(LOGITS, LOGITS.sigmoid()),
    "label_smoothing must be from 0 to 1, got -0.1":
        lambda: fusedseg.CrossEntropyLoss(label_smoothing=-0.1)(LOGITS, LABELS[:, 0]),
    "label_smoothing must be from 0 to 1, got 1.5":
        lambda: fusedseg.CrossEntropyLoss(label_smoothing=1.5)(LOGITS, LABELS[:, 0]),
    "FocalLoss: reduction must be one of mean, sum, got 'none'": lambda: losses.FocalLoss(reduction="none"),
    "FocalLoss: gamma must be at least 0, got -1": lambda: losses.FocalLoss(gamma=-1),
    "FocalLoss: weight must not be negative": lambda: losses.FocalLoss(weight=[-1.0, 1.0]),
    "FocalLoss: weight must be one number, or have one value for each of several classes that count, got":
        lambda: losses.FocalLoss(to_onehot_y=True, weight=[1.0, 1.0])(LOGITS, LABELS),
    "FocalLoss: alpha must have 4 values, one for each class, got":
        lambda: losses.FocalLoss(to_onehot_y=True, alpha=[1.0, 1.0])(LOGITS, LABELS),
    r"FocalLoss: target must have shape \(2, 1, 5, 6\)":
        lambda: losses.FocalLoss(to_onehot_y=True)(LOGITS, LABELS[:, 0]),
    "DiceFocalLoss: lambda_focal must be at least 0": lambda: losses.DiceFocalLoss(lambda_focal=-1),
    "DiceFocalLoss: other_act must be None": lambda: losses.DiceFocalLoss(other_act=torch.tanh),
    "FocalLoss: include_background must be True with use_softmax=True; use monai.losses.FocalLoss":
        lambda: losses.FocalLoss(use_softmax=True, include_background=False),
    "TopKLoss: k must be above 0 and at most 100 per cent, got 0": lambda: losses.TopKLoss(k=0),
    "TopKLoss: k must be above 0 and at most 100 per cent, got 101": lambda: losses.TopKLoss(k=101),
    "TopKLoss: k must leave at least one of 60 positions, got 1": lambda: losses.TopKLoss(k=1)(LOGITS, LABELS),
    r"dice_class must be one of SoftDiceLoss, .* got 'Tensor'":
        lambda: losses.DC_and_CE_loss({}, {}, dice_class=torch.Tensor),
    "DC_and_CE_loss: reduction must be mean or sum, got 'none'":
        lambda: losses.DC_and_CE_loss({}, {"reduction": "none"}),
    r"pos_weight must have one value, or shape \(4, 1, 1\) .* got \(4,\)":
        lambda: losses.DC_and_BCE_loss({"pos_weight": ones(4)}, {})(LOGITS, LOGITS > 0),
    **{f"sliding_window_labels: .*{text}": call for text, call in WINDOWS.items()},
    "no parameter of ReLU requires a gradient, so the optimizer has nothing to train":
        lambda: bytes_before(nn.ReLU(), [], optimizer=torch.optim.SGD),
    "fusedseg.plan: reserve must be at least 0 and below 1, got 1.0":
        lambda: fusedseg.plan(CONV, (4, 9, 9), "1GiB", reserve=1.0),
    "fusedseg.plan: batch must be at least 1, got 0": lambda: fusedseg.plan(CONV, (4, 9, 9), "1GiB", batch=0),
    "options must be among codegen, .* got 'bit'": lambda: fusedseg.profile(CONV, (4, 4, 9, 9), options={"bit": 4}),
    "option bits must be 8, 4 or None, got 5": lambda: fusedseg.profile(CONV, (4, 4, 9, 9), options={"bits": 5}),
    **{
        rf"from_conv: conv must have kernel size 1, .* got Conv2d\(4, 2.*{of}":
            lambda options=options: fusedseg.ConvHead2d.from_conv(nn.Conv2d(4, 2, **({"kernel_size": 1} | options)))
        for of, options in {
            "kernel_size=.3, 3": {"kernel_size": 3}, "stride=.2, 2": {"stride": 2}, "padding=.1, 1": {"padding": 1},
            "groups=2": {"groups": 2},
        }.items()
    },
}  # fmt: skip
TYPES = {
    "norm_act: slope must be a tensor, got float": lambda: act(activation="prelu", slope=0.25),
    "norm_act: activation must be a string": lambda: act(activation=F.relu),
    "must be a finite number, the alpha of elu, got True": lambda: act(activation="elu", activation_param=True),
    "must be a finite number, .*got nan": lambda: act(activation="elu", activation_param=float("nan")),
    "inplace_abn: weight must be torch.float32 for x of torch.float32, got torch.float16":
        lambda: abn(weight=ones(64, dtype=torch.float16)),
    "inplace_abn: x must be float16, bfloat16, float32 or float64, got torch.int64": lambda: abn(ones(2, 64).long()),
    "inplace_abn: x must be float16, bfloat16, float32 or float64, got torch.complex64":
        lambda: abn(ones(2, 64, dtype=torch.complex64)),
    # It was said to overlap itself.
    r"inplace_abn: x must be dense, with layout torch.strided, got torch.sparse_coo; pass x.to_dense\(\)":
        lambda: abn(ones(2, 64).to_sparse()),
    "inplace_abn: activation_param must be a finite number, the slope of leaky_relu, got True":
        lambda: abn(activation_param=True),
    r"residual must be torch.float32, the dtype of x \(autocast casts it\), got torch.float64":
        lambda: by_instance(2, 4, 3, residual=rand(2, 4, 3).double()),
    "residual must be a tensor or None, got float": lambda: by_instance(2, 4, 3, residual=1.0),
    "InPlaceABN: x must be float16, .* got torch.int32": lambda: InPlaceABN(3)(ones(2, 3, dtype=torch.int32)),
    "InPlaceABN: dtype must be float16, .* got torch.complex64": lambda: InPlaceABN(3, dtype=torch.complex64),
    "nn.BatchNorm3d, got GroupNorm": lambda: BatchNormAct(3).from_norm(nn.GroupNorm(1, 3)),
    "conv must be an nn.Conv2d, got Linear": lambda: from_modules(nn.Linear(4, 6), BN),
    "conv must be an nn.Conv2d, got LazyConv2d": lambda: from_modules(nn.LazyConv2d(6, 3), BN),
    "conv must have no hooks": lambda: from_modules(hooked(nn.Conv2d(4, 6, 3)), BN),
    "conv must have no hook": lambda: from_modules(nn.utils.spectral_norm(nn.Conv2d(4, 6, 3)), BN),
    "bn must have no hooks": lambda: from_modules(CONV, hooked(nn.BatchNorm2d(6))),
    "norm must be one of .*, got GroupNorm": lambda: from_modules(CONV, nn.GroupNorm(2, 6)),
    "norm must be one of .*, got SyncBatchNorm": lambda: from_modules(CONV, nn.SyncBatchNorm(6)),
    "conv_weight must be torch.float16": lambda: ConvABN2d(4, 6, 3)(ones(2, 4, 8, 8).half()),
    r"conv_abn: x must be a tensor, .* got \['str'\]": lambda: conv("x"),
    "conv_abn: x must be float16, .* got torch.int32": lambda: conv(ones(2, 6, 5, 5, dtype=torch.int32)),
    "conv_abn: conv_weight must be torch.float32, the dtype of x, got torch.float16":
        lambda: conv(w=ones(4, 6, 3, 3).half()),
    "conv_abn: conv_bias must be torch.float32, the dtype of x, got torch.float64": lambda: conv(bias=ones(4).double()),
    "join_conv: x must be a tensor, an Interpolated, or a sequence": lambda: join_conv((X, None), W),
    "join_conv: x must be a tensor, .*": lambda: join_conv((), W),
    "Interpolated: x must be a tensor, got list": lambda: Interpolated([1], (4, 4), "nearest"),
    "DC_and_topk_loss: .* may have weight, ignore_index, k, label_smoothing, got reduction":
        lambda: losses.DC_and_topk_loss({}, {"reduction": "sum"}),
    r"DC_and_topk_loss: soft_dice_kwargs may have batch_dice, .*, got wrong":
        lambda: losses.DC_and_topk_loss({"wrong": 1}, {}),
    r"DC_and_CE_loss: soft_dice_kwargs may have batch_dice, .* got apply_nonlin":
        lambda: losses.DC_and_CE_loss({"apply_nonlin": None}, {}),
    "bce_kwargs may have pos_weight, reduction, got weight":
        lambda: losses.DC_and_BCE_loss({"weight": None}, {}),
    "sliding_window_labels: .*image must be a tensor, got list": lambda: windows(image=[1.0]),
    "sliding_window_labels: .*image must be float16, bfloat16, float32 or":
        lambda: windows(image=ones(1, 2, 9, 9, dtype=torch.uint8)),
    "sliding_window_labels: .*model must return one tensor, got tuple; wrap a model of several":
        lambda: windows(model=lambda x: (x, x)),
    "sliding_window_labels: .*model must return floating-point logits, got torch.int64":
        lambda: windows(model=lambda x: x.argmax(1)),
    "model must be a module or a function that builds one, got str": lambda: without_values("resnet", (2, 4)),
    "model must be a module or build one, and built an object of class int": lambda: without_values(lambda: 3, (2, 4)),
    r"a shape must be a sequence of integers, got \(2, -4\)": lambda: without_values(nn.ReLU(), (2, -4)),
    "optimizer must be called with the parameters, as torch.optim.SGD or a function is":
        lambda: bytes_before(BN, [], optimizer=torch.optim.SGD(BN.parameters())),
    "fusedseg.memory: model must be a module or a function that builds one, got str$":
        lambda: fusedseg.profile("net", (4, 3, 32, 32)),
    r"fusedseg\.convert: model must be an nn\.Module, got int": lambda: fusedseg.convert(1),
    "max_pool: x must be a tensor, got list": lambda: pool(2, x=[[1.0]]),
    "max_pool: x must be float16, .* got torch.int64": lambda: pool(2, x=ones(1, 1, 4, 4).long()),
    "upsample: x must be a tensor, got list": lambda: upsample([1.0], size=2),
    "upsample: x must be float16, .* got torch.int64": lambda: upsample(ones(1, 1, 2, 2).long(), size=2),
    "ignore_index must be an integer or None, got 1.5": lambda: sums(ignore_index=1.5),
    "segmentation_sums: x must be float16, .* got torch.int64": lambda: sums(ones(2, 3, 4, 5).long()),
    "target must be a tensor, got list": lambda: sums(target=[1]),
    "target must be bool, integer or floating point, got torch.complex64": lambda: sums(target=ones(2, 4, 5).cfloat()),
    "ConvLogits: features must be a tensor, got list": lambda: logits([1]),
    "features must be float16, .* got torch.int64": lambda: logits(ones(2, 6, 5, 4).long()),
    "weight must be torch.float32, the dtype of features, got torch.float16": lambda: logits(weight=ones(4, 6).half()),
    "align_corners must be True or False, got None": lambda: logits((2, 6, 5, 4), (4, 6), (4,), (7, 7), None),
    "weight must be torch.float16, the dtype of features, got torch.float32":
        lambda: fusedseg.ConvHead2d(3, 2)(rand(1, 3, 4, 4).half()),
    "ConvHead3d.from_conv: conv must be an nn.Conv3d, got Conv2d":
        lambda: fusedseg.ConvHead3d.from_conv(nn.Conv2d(3, 2, 1)),
    "conv must be an nn.Conv2d, got ConvHead2d": lambda: fusedseg.ConvHead2d.from_conv(fusedseg.ConvHead2d(3, 2)),
}  # fmt: skip
CASES = [
    (error, text, call) for error, rows in ((ValueError, VALUES), (TypeError, TYPES)) for text, call in rows.items()
]


@pytest.mark.parametrize(("error", "text", "call"), CASES, ids=[f"{error.__name__}-{text}" for error, text, _ in CASES])
def test_refused(error, text, call):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("name", "dtype", "text"),
    [
        ("aten", torch.float32, r"conv_backend is 'triton', but .* fusedseg.backend is 'aten'"),
        ("auto", torch.float32, r"conv_backend is 'triton', but .* 'auto' takes Triton on GPUs only, and this is cpu"),
        ("triton", torch.float64, r"conv_backend is 'triton', but x must be float16, .* got torch.float64"),
    ],
)
def test_a_convolution_by_triton_where_it_cannot_serve(monkeypatch, name, dtype, text):
    if name == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(fusedseg, "backend", name)
    with pytest.raises(RuntimeError, match="fusedseg.conv_abn: " + text):
        conv(conv_backend="triton", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=lambda d: str(d)[6:])
def test_autocast_does_not_turn_other_dtypes_into_numbers(dtype):
    """Stock convolutions refuse such dtypes under autocast too; a cast would drop imaginary parts."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"x must be float16, .* got torch"):
        conv(ones(2, 6, 5, 5, dtype=dtype))


def test_a_head_is_not_scripted():
    with pytest.raises(RuntimeError, match=r"ConvHead2d: torch.jit.script cannot compile"):
        torch.jit.script(fusedseg.ConvHead2d(3, 2))


def test_a_refused_call_leaves_everything_as_it_was(backend, device):
    module, x = InPlaceABN(3, device=device), rand(1, 3, 1, 1, device=device)
    before = x.clone()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(x)
    assert torch.equal(x, before)
    assert module.num_batches_tracked == 0
