"""ResNet-18 and ResNet-50, written out: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016."""

from itertools import pairwise

from torch import Tensor, nn

# With fewer channels oneDNN writes beside its memory in backward of a shortcut in channels_last (its issue 6035).
LEAST_WIDTH_IN_ROWS = 16


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            conv = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet18(nn.Module):
    """(N, 3, H, W) to (N, num_classes); the first ``stages`` of four have two blocks each."""

    def __init__(self, num_classes: int = 1000, width: int = 64, stages: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width][: stages + 1]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(before, after, 1 if before == after else 2), BasicBlock(after, after, 1))
                for before, after in pairwise(widths)
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layers(self.stem(x))).flatten(1))


class Bottleneck(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != 4 * channels:
            conv = nn.Conv2d(in_channels, 4 * channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet50(ResNet18):
    """(N, 3, H, W) to (N, num_classes): the stem and head of ``ResNet18`` around bottleneck blocks."""

    def __init__(self, num_classes: int = 1000, width: int = 64) -> None:
        super().__init__(num_classes, width)
        layers, in_channels = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            channels = width * 2**stage
            for block in range(count):
                layers.append(Bottleneck(in_channels, channels, 2 if stage and not block else 1))
                in_channels = 4 * channels
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(in_channels, num_classes)
