"""nnU-Net's own trainer with ``Fused`` in one or two processes on a CPU; see ``jobs.py``.

nnU-Net runs DDP on GPUs alone, so that two names of its module get stand-ins that take a CPU.
"""

import functools
import json
import os
from pathlib import Path
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.jobs import STEPS, end
from tests.integrations.real import framework

BATCH, PATCH = 4, (8, 8, 8)
DATASET = {
    "channel_names": {"0": "CT"}, "labels": {"background": 0, "one": 1, "two": 2}, "numTraining": 1,
    "file_ending": ".nii.gz",
}  # fmt: skip


def plans(norm, nonlin="torch.nn.LeakyReLU"):
    """A plan as nnU-Net writes it, of three stages; ``norm`` is a class of ``torch.nn``."""
    return {
        "dataset_name": "Dataset902_None", "plans_name": "nnUNetPlans", "continue_training": False,
        "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2], "image_reader_writer": "SimpleITKIO",
        "original_median_spacing_after_transp": [1.0, 1.0, 1.0], "original_median_shape_after_transp": [8, 8, 8],
        "label_manager": "LabelManager", "foreground_intensity_properties_per_channel": {},
        "configurations": {
            "3d_fullres": {
                "data_identifier": "data", "preprocessor_name": "DefaultPreprocessor", "batch_size": BATCH,
                "patch_size": list(PATCH), "spacing": [1.0, 1.0, 1.0], "normalization_schemes": ["ZScoreNormalization"],
                "use_mask_for_norm": [False], "batch_dice": True, "median_image_size_in_voxels": list(PATCH),
                "architecture": {
                    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
                    "arch_kwargs": {
                        "n_stages": 3, "features_per_stage": [4, 8, 8], "conv_op": "torch.nn.Conv3d",
                        "kernel_sizes": [[3, 3, 3]] * 3, "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
                        "n_conv_per_stage": [1, 2, 1], "n_conv_per_stage_decoder": [2, 1], "conv_bias": True,
                        "norm_op": f"torch.nn.{norm}", "norm_op_kwargs": {"eps": 1e-5, "affine": True},
                        "dropout_op": None, "dropout_op_kwargs": None,
                        "nonlin": nonlin, "nonlin_kwargs": {"inplace": True},
                    },
                    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
                },
            }
        },
    }  # fmt: skip


def folders(home):
    """Folders of nnU-Net with a data set of one empty file; its variables must be set before its import."""
    data = Path(home) / "preprocessed" / "Dataset902_None" / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "case.npz").touch()
    (data.parent / "dataset.json").write_text(json.dumps(DATASET))
    os.environ |= {f"nnUNet_{name}": str(Path(home) / name) for name in ("raw", "preprocessed", "results")}


def trainer_class(name):
    """A trainer of nnU-Net's or ours by its name, found as nnU-Net finds it, on a CPU."""
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    from fusedseg.integrations.nnunet import TRAINERS

    os.environ |= {"nnUNet_extTrainer": str(TRAINERS)}
    base = recursive_find_trainer_class_by_name(name)

    class OnCpu(base):
        def __init__(self, plans, configuration, fold, dataset_json, device):
            super().__init__(plans, configuration, fold, dataset_json, device)
            self.device, self.grad_scaler, self.initial_lr = torch.device("cpu"), None, 0.02

    OnCpu.__name__ = name
    return OnCpu


def initialized(name, norm, nonlin="torch.nn.LeakyReLU"):
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as module

    torch.manual_seed(0)
    trainer = trainer_class(name)(plans(norm, nonlin), "3d_fullres", 0, dict(DATASET), torch.device("cpu"))
    build = module.nnUNetTrainer.build_network_architecture
    in_float64 = staticmethod(functools.wraps(build)(lambda *args, **kwargs: build(*args, **kwargs).double()))
    with (
        mock.patch.object(module, "DDP", lambda network, device_ids: DistributedDataParallel(network)),
        mock.patch.object(module.nnUNetTrainer, "build_network_architecture", in_float64),
    ):
        trainer.initialize()
    # nnU-Net's weights of the scales differ between one and several processes.
    setattr(trainer.loss, "weight_factors" if name == "nnUNetTrainer" else "weights", (0.75, 0.25))
    return trainer


def batch():
    """Images and labels of two scales; the halves of the batch differ in mean and in their labels."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(BATCH, 1, *PATCH, generator=generator, dtype=torch.float64)
    y = (x > 0).long() + (x > 0.8).long()
    return x + torch.arange(float(BATCH)).view(-1, 1, 1, 1, 1), [y, y[..., ::2, ::2, ::2]]


def train(rank, world, home, name, norm, nonlin="torch.nn.LeakyReLU"):
    """Losses of training and of a validation, counts of the validation, and the end of the network."""
    folders(home)
    framework("nnunetv2.training.nnUNetTrainer.nnUNetTrainer")
    trainer = initialized(name, norm, nonlin)
    trainer.network.train()
    x, targets = batch()
    share = {"data": x.chunk(world)[rank], "target": [y.chunk(world)[rank] for y in targets]}
    losses = [float(trainer.train_step(share)["loss"]) for _ in range(STEPS)]
    trainer.network.eval()
    with torch.no_grad():
        checked = trainer.validation_step(share)
    found = end(trainer.network)
    found["counts"] = {key: torch.as_tensor(checked[f"{key}_hard"]) for key in ("tp", "fp", "fn")}
    return losses, found
