"""Networks for the bench of the compiler's backend: four of bench/test_unet.py, ResNets, and six of other packages.

Widths and sizes are reduced, so that a CPU computes a step in a tenth of a second to a second.  A 3D network gets two
volumes, because torch convolves one small volume on a CPU in a slow loop.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedseg.unet import unet3d_large
from tests.resnet import ResNet18, ResNet50

from .test_unet import MORE as UNETS
from .test_unet import Case


class Field(nn.Module):
    """A network that is called with further arguments, and of whose output the tensor ``field`` is used."""

    def __init__(self, net: nn.Module, field: str, *args: Any) -> None:
        super().__init__()
        self.net, self.field, self.args = net, field, args

    def forward(self, x: Tensor) -> Tensor:
        # The outputs are dataclasses of the packages.
        return getattr(self.net(x, *self.args), self.field)


def nnunet(
    kind: str, features: tuple[int, ...], num_classes: int = 3, deep_supervision: bool = False, **blocks: Any
) -> nn.Module:
    """A 3D network of nnU-Net with so many channels in each stage."""
    from dynamic_network_architectures.architectures import unet

    return getattr(unet, kind)(
        input_channels=1,
        n_stages=len(features),
        features_per_stage=features,
        conv_op=nn.Conv3d,
        kernel_sizes=3,
        strides=(1, *[2] * (len(features) - 1)),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        num_classes=num_classes,
        deep_supervision=deep_supervision,
        **blocks,
    )


def plain_unet(features: tuple[int, ...], **options: Any) -> nn.Module:
    """Two convolutions in each stage."""
    blocks = {"n_conv_per_stage": (2,) * len(features), "n_conv_per_stage_decoder": (2,) * (len(features) - 1)}
    return nnunet("PlainConvUNet", features, **blocks, **options)


def residual_unet(features: tuple[int, ...], blocks: tuple[int, ...], **options: Any) -> nn.Module:
    """``blocks`` residual blocks in each stage of the encoder, and one convolution in each of the decoder."""
    of_stages = {"n_blocks_per_stage": blocks, "n_conv_per_stage_decoder": (1,) * (len(features) - 1)}
    return nnunet("ResidualEncoderUNet", features, **of_stages, **options)


def swin_unetr(width: int = 12) -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels=1, out_channels=3, feature_size=width)


def unetr(size: int) -> nn.Module:
    from monai.networks.nets import UNETR

    return UNETR(1, 3, (size,) * 3, feature_size=8, hidden_size=96, mlp_dim=192, num_heads=4)


def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "decoder_hidden_size": 64}
    net = SegformerForSemanticSegmentation(SegformerConfig(num_labels=4, drop_path_rate=0.0, **no_dropout, **sizes))
    # In its first call the package installs hooks under a lock, at which PyTorch's compiler would end the graph.
    with torch.no_grad():
        net.eval()(torch.zeros(1, 3, 64, 64))
    return Field(net.train(), "logits")


def diffusion() -> nn.Module:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    timestep = 10
    return Field(net, "sample", timestep)


def vae_decoder() -> nn.Module:
    from diffusers import AutoencoderKL

    widths = (16, 32)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    net = AutoencoderKL(block_out_channels=widths, latent_channels=4, norm_num_groups=8, layers_per_block=1, **blocks)
    return net.decoder


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1], num_labels=4, drop_path_rate=0.0)
    return Field(ConvNextForImageClassification(config), "logits")


def of_monai(name: str, *args: Any, **options: Any) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, name)(*args, **options)


class Network(NamedTuple):
    """How to build a network of stock modules, the shape of its input, and the package that it needs, if any."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    package: str = ""

    def is_here(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None


FOUR = {
    case.title: Network(partial(case.network, "eager"), (case.batch, sum(case.channels), *case.size))
    for case in UNETS["cpu"]
}
NNUNET, VOLUME = "dynamic_network_architectures", (2, 1, 32, 32, 32)
FEATURES, WIDE_FEATURES, BLOCKS = (8, 16, 32, 64), (16, 32, 64, 128), (1, 2, 2, 2)
NETWORKS = {
    **FOUR,
    "ResNet-18": Network(partial(ResNet18, width=32), (4, 3, 128, 128)),
    "ResNet-50": Network(partial(ResNet50, width=16), (4, 3, 64, 64)),
    "PlainConvUNet": Network(partial(plain_unet, FEATURES), VOLUME, NNUNET),
    "ResidualEncoderUNet": Network(partial(residual_unet, FEATURES, BLOCKS), VOLUME, NNUNET),
    "SegFormer": Network(segformer, (2, 3, 128, 128), "transformers"),
    "diffusion U-Net": Network(diffusion, (4, 3, 32, 32), "diffusers"),
    "UNETR": Network(partial(unetr, 32), VOLUME, "monai"),
    # Its last stage has a 32nd of the size, and an instance norm needs two positions.
    "SwinUNETR": Network(swin_unetr, (2, 1, 64, 32, 32), "monai"),
}
LARGE_OF_16 = Case(
    "3D large, 16 channels", (1,), (32, 32, 32), 2,
    {"widths": (16, 32, 64, 128, 128), "up_widths": (64, 32, 16, 16)}, make=unet3d_large,
)  # fmt: skip
# For times alone: a CPU computes 8 channels of a volume as slowly as 16.
WIDE = {
    "3D large, 16 channels": Network(partial(LARGE_OF_16.network, "eager"), VOLUME),
    "PlainConvUNet, 16 channels": Network(partial(plain_unet, WIDE_FEATURES), VOLUME, NNUNET),
    "ResidualEncoderUNet, 16 channels": Network(partial(residual_unet, WIDE_FEATURES, BLOCKS), VOLUME, NNUNET),
}
# Networks of the page "Supported models" alone.
MORE = {
    "SegResNet": Network(partial(of_monai, "SegResNet", 3, 8, 1, 3), VOLUME, "monai"),
    "VNet": Network(
        partial(of_monai, "VNet", 3, 1, 3, dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0)), VOLUME, "monai"
    ),
    "MedNeXt": Network(partial(of_monai, "MedNeXt", 3, 8, 1, 3, kernel_size=5), VOLUME, "monai"),
    "ConvNeXt": Network(convnext, (4, 3, 64, 64), "transformers"),
    "VAE decoder": Network(vae_decoder, (4, 4, 32, 32), "diffusers"),
}


def title_of(name: str) -> str:
    return f"{name}, {'×'.join(map(str, {**NETWORKS, **WIDE}[name].shape))}"


@torch.no_grad()
def batch_of(net: nn.Module, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """An input, and a class for each sample or position of the output."""
    x = torch.randn(shape, device=device)
    out = net(x)
    return x, torch.randint(out.shape[1], (out.shape[0], *out.shape[2:]), device=device)
