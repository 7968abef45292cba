"""Small networks with the structures of published libraries."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

LEAKY = functools.partial(nn.LeakyReLU, 0.1)


def double_conv(cin: int, cout: int, act: nn.Module | None = None) -> nn.Sequential:
    """The block of milesial's U-Net, of lightning-bolts, and of smp's Conv2dReLU."""
    act = nn.ReLU(inplace=True) if act is None else act
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), act)


class UNet(nn.Module):
    """A U-Net of two levels with concatenated skips and bilinear upsampling."""

    def __init__(self, act=nn.ReLU) -> None:
        super().__init__()
        self.inc = nn.Sequential(double_conv(3, 8, act()), double_conv(8, 8, act()))
        self.pool = nn.MaxPool2d(2)
        self.down = nn.Sequential(double_conv(8, 16, act()), double_conv(16, 16, act()))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.dec = nn.Sequential(double_conv(24, 8, act()), double_conv(8, 8, act()))
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = self.inc(x)
        y = self.up(self.down(self.pool(skip)))
        y = F.pad(y, [0, skip.shape[3] - y.shape[3], 0, skip.shape[2] - y.shape[2]])
        return self.out(self.dec(torch.cat([skip, y], dim=1)))


class ADN(nn.Sequential):
    """Norm, dropout and activation in the order of MONAI."""

    def __init__(self, c: int, p: float = 0.0) -> None:
        super().__init__()
        self.add_module("N", nn.InstanceNorm2d(c))
        self.add_module("D", nn.Dropout(p))
        self.add_module("A", nn.LeakyReLU(0.1))


class BasicBlock(nn.Module):
    """ResNet's block: one ReLU module is called after a norm and after a sum."""

    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """The stem and the first four of the eight blocks of a ResNet-18, with few channels."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks = []
        for i in range(2):
            cin = width * 2 ** max(i - 1, 0)
            blocks += [BasicBlock(cin, width * 2**i, 2 if i else 1), BasicBlock(width * 2**i, width * 2**i)]
        self.layers = nn.Sequential(*blocks)
        self.fc = nn.Linear(width * 2, 5)

    def forward(self, x):
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class DynUNetBlock(nn.Module):
    """MONAI's block: one LeakyReLU, registered before the norms, is called after both of them."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(c, c, 3, padding=1)
        self.conv2 = nn.Conv3d(c, c, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.01, inplace=True)
        self.norm1 = nn.InstanceNorm3d(c, affine=True)
        self.norm2 = nn.InstanceNorm3d(c, affine=True)

    def forward(self, x):
        return self.lrelu(self.norm2(self.conv2(self.lrelu(self.norm1(self.conv1(x))))))


class ConvDropoutNormReLU(nn.Module):
    """nnU-Net's block: every module has two names."""

    def __init__(self, cin: int, cout: int, nonlin_first: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm = nn.InstanceNorm2d(cout, affine=True)
        self.nonlin = nn.LeakyReLU(inplace=True)
        order = [self.conv, self.nonlin, self.norm] if nonlin_first else [self.conv, self.norm, self.nonlin]
        self.all_modules = nn.Sequential(*order)

    def forward(self, x):
        return self.all_modules(x)


class NNUNet(nn.Module):
    """The encoder is registered in the decoder as well, so that each norm has four names."""

    def __init__(self, nonlin_first: bool = False) -> None:
        super().__init__()
        blocks = [ConvDropoutNormReLU(3, 8, nonlin_first), ConvDropoutNormReLU(8, 8, nonlin_first)]
        self.encoder = nn.Sequential(*blocks)
        self.decoder = nn.Module()
        self.decoder.encoder = self.encoder
        self.decoder.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.decoder.out(self.encoder(x))


class Functional(nn.Module):
    """googlenet's block: the activation is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class PreActivation(nn.Module):
    """Norm, activation, convolution: the norm's input is also the residual."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn, self.act, self.conv = nn.BatchNorm2d(8), act, nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        return x + self.conv(self.act(self.bn(x)))


class DenseNet(nn.Module):
    """Every layer normalises the concatenation of all earlier outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + 4 * i), nn.ReLU(inplace=True), nn.Conv2d(4 + 4 * i, 4, 3, padding=1))
            for i in range(3)
        )

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's module: it calls the norm as a function and holds the activation."""

    def __init__(self, c: int) -> None:
        super().__init__(c)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class Twice(nn.Module):
    """A norm whose output is read twice."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act or nn.ReLU()

    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.act(y) + y


class InputTwice(Twice):
    """A norm whose input is read twice."""

    def forward(self, x):
        y = self.conv(x)
        return self.act(self.bn(y)) * y


class Flagged(nn.Module):
    """Reads the convolution's output once the flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = False
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), LEAKY()

    def forward(self, x):
        y = self.conv(x)
        z = self.act(self.bn(y))
        if self.flag:
            return z + y
        return z


NETWORKS = {"unet": UNet, "leaky unet": lambda: UNet(nn.LeakyReLU), "resnet": ResNet, "nnunet": NNUNet}
