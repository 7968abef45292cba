"""Plans of nnU-Net's own planner for a small dataset that need not exist, and its predictor for random weights."""

import copy
import json
from pathlib import Path

import numpy as np
import torch
from nnunetv2.experiment_planning.experiment_planners import default_experiment_planner
from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

NAME = "Dataset902_small"


def dataset_json(labels: int | dict, **more) -> dict:
    """The description of a dataset with one channel."""
    named = {"background": 0, **{f"class {k}": k for k in range(1, labels)}} if isinstance(labels, int) else labels
    return {"channel_names": {"0": "T1"}, "labels": named, "numTraining": 1, "file_ending": ".nii.gz", **more}


def fingerprint(folder: Path, monkeypatch, described: dict, shape, spacing) -> None:
    """Writes what a planner of nnU-Net reads of a dataset whose images have one shape and spacing."""
    for name in ("raw", "preprocessed"):
        (folder / name / NAME).mkdir(parents=True)
        monkeypatch.setattr(default_experiment_planner, f"nnUNet_{name}", str(folder / name))
    monkeypatch.setattr(default_experiment_planner, "maybe_convert_to_dataset_name", lambda name: name)
    described = {**described, "dataset": {"a": {"images": ["a.nii.gz"], "label": "b.nii.gz"}}}
    described["overwrite_image_reader_writer"] = "SimpleITKIO"
    (folder / "raw" / NAME / "dataset.json").write_text(json.dumps(described))
    statistics = {"mean": 0.0, "std": 1.0, "percentile_00_5": -3.0, "percentile_99_5": 3.0, "min": -5.0, "max": 5.0}
    found = {"spacings": [spacing], "shapes_after_crop": [shape], "median_relative_size_after_cropping": 1.0}
    found["foreground_intensity_properties_per_channel"] = {"0": statistics}
    (folder / "preprocessed" / NAME / "dataset_fingerprint.json").write_text(json.dumps(found))


def planned(folder: Path, monkeypatch, described: dict, shape, spacing, shrink: float = 4e-4) -> dict:
    """The plans for images of one shape and spacing, with patches that ``shrink`` makes small, and few features."""
    fingerprint(folder, monkeypatch, described, shape, spacing)
    planner = ExperimentPlanner(NAME)
    planner.UNet_base_num_features = 4
    planner.UNet_reference_val_3d *= shrink
    planner.UNet_reference_val_2d *= shrink
    return planner.plan_experiment()


def predictor(kind: type, plans: dict, described: dict, configuration: str, *, folds: int = 1, mirror=None, **options):
    """A predictor on the CPU with random weights for each fold."""
    manager = PlansManager(plans)
    chosen = manager.get_configuration(configuration)
    inputs = determine_num_input_channels(manager, chosen, described)
    heads = manager.get_label_manager(described).num_segmentation_heads
    networks = []
    for fold in range(folds):
        torch.manual_seed(fold)
        networks.append(nnUNetTrainer.build_network_architecture(manager, chosen, inputs, heads, False))
    made = kind(device=torch.device("cpu"), allow_tqdm=False, use_mirroring=mirror is not None, **options)
    # Copies, because the weights of all folds are loaded into the first network.
    parameters = [copy.deepcopy(network.state_dict()) for network in networks]
    made.manual_initialization(networks[0], manager, chosen, parameters, described, "nnUNetTrainer", mirror)
    return made


def image(shape, spacing) -> tuple[np.ndarray, dict]:
    """Noise whose first plane is 0, so that nnU-Net crops it, and its properties."""
    values = np.random.default_rng(0).standard_normal((1, *shape)).astype(np.float32)
    values[:, 0] = 0
    return values, {"spacing": list(spacing)}
