"""``FusedPredictor`` beside nnU-Net's own predictor, with plans of nnU-Net's own planner and random weights."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.integrations.real import framework

framework("nnunetv2.inference.predict_from_raw_data")

import SimpleITK  # noqa: E402
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor  # noqa: E402

from fusedseg.integrations.nnunet import resampling  # noqa: E402
from fusedseg.integrations.nnunet.predictor import FusedPredictor  # noqa: E402
from tests.integrations.nnunet_plans import NAME, dataset_json, image, planned, predictor  # noqa: E402

FIVE = dataset_json(5)
REGIONS = dataset_json({"background": 0, "whole": [1, 2, 3], "core": [2, 3], "inner": 3}, regions_class_order=[1, 2, 3])
CUBE = ((40, 44, 48), (1.0, 1.0, 1.0))
SMALL = ((31, 33, 37), (1.3, 1.3, 1.3))
# The median spacing makes nnU-Net resample the last axis of the image apart, and transpose it to the front.
THICK = ((48, 44, 14), (1.0, 1.0, 5.0))


def both(plans, described, configuration, given, **options):
    """The labels of nnU-Net's predictor and of ours, for (shape, spacing) or also labels of a previous stage."""
    values, properties = image(*given[:2])
    for kind in (nnUNetPredictor, FusedPredictor):
        made = predictor(kind, plans, described, configuration, **options)
        yield made.predict_single_npy_array(values, dict(properties), *given[2:])


@pytest.mark.parametrize(
    ("described", "planned_for", "given", "configuration", "options"),
    [
        pytest.param(FIVE, CUBE, SMALL, "3d_fullres", {"folds": 2, "mirror": (2,)}, id="folds, mirrors"),
        pytest.param(FIVE, CUBE, ((45, 20, 60), (0.7, 1.6, 0.9)), "3d_fullres", {}, id="finer and coarser"),
        pytest.param(FIVE, THICK, ((37, 40, 11), (1.3, 1.3, 7.0)), "3d_fullres", {"mirror": (1,)}, id="separate z"),
        pytest.param(FIVE, THICK, ((50, 40, 14), (0.8, 1.3, 5.0)), "3d_fullres", {"folds": 3}, id="separate z, same z"),
        pytest.param(FIVE, CUBE, CUBE, "3d_fullres", {}, id="no resampling"),
        pytest.param(FIVE, CUBE, ((9, 50, 12), (1.2, 1.0, 1.0)), "3d_fullres", {}, id="smaller than a window"),
        pytest.param(FIVE, THICK, ((37, 60, 6), (1.3, 0.9, 7.0)), "2d", {"folds": 2, "mirror": (0, 1)}, id="2d"),
        pytest.param(REGIONS, CUBE, SMALL, "3d_fullres", {}, id="regions"),
        pytest.param(FIVE, CUBE, SMALL, "3d_fullres", {"use_gaussian": False}, id="equal weights"),
    ],
)
def test_labels_are_those_of_nnunet(tmp_path, monkeypatch, described, planned_for, given, configuration, options):
    plans = planned(tmp_path, monkeypatch, described, *planned_for)
    # Tiles of few planes, so that a slab takes several.
    monkeypatch.setattr(resampling.SlabLabels, "BLOCK", 5000)
    stock, ours = both(plans, described, configuration, given, **options)
    assert len(np.unique(stock)) > 2
    assert stock.dtype == ours.dtype
    assert (stock != ours).sum() == 0


def test_a_cascade_reads_labels_of_the_stage_before(tmp_path, monkeypatch):
    plans = planned(tmp_path, monkeypatch, FIVE, *CUBE)
    plans["configurations"]["3d_lowres"] = {"inherits_from": "3d_fullres", "next_stage": "3d_cascade_fullres"}
    plans["configurations"]["3d_cascade_fullres"] = {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"}
    before = np.random.default_rng(1).integers(0, 5, (1, *SMALL[0])).astype(np.int8)
    stock, ours = both(plans, FIVE, "3d_cascade_fullres", (*SMALL, before))
    assert len(np.unique(stock)) > 2
    assert (stock != ours).sum() == 0
    nothing, _ = both(plans, FIVE, "3d_cascade_fullres", (*SMALL, 0 * before))
    assert (stock != nothing).any()


def test_refused(tmp_path, monkeypatch):
    plans = planned(tmp_path, monkeypatch, FIVE, *CUBE)
    made = predictor(FusedPredictor, plans, FIVE, "3d_fullres")
    given = image(*SMALL)
    with pytest.raises(ValueError, match="save_probabilities must be False"):
        made.predict_single_npy_array(*given, save_or_return_probabilities=True)
    for weight in made.list_of_parameters[0].values():
        weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="values that are not finite"):
        made.predict_single_npy_array(*given)
    plans["configurations"]["3d_fullres"]["resampling_fn_probabilities"] = "resample_torch_fornnunet"
    made = predictor(FusedPredictor, plans, FIVE, "3d_fullres")
    with pytest.raises(ValueError, match=r"got resample_torch_fornnunet with .*; predict with nnUNetv2_predict"):
        made.predict_single_npy_array(*given)


def test_halves_are_rounded_once():
    """fp32 in between would round 1 + 2^-11 + 2^-40 to a midpoint of halves, and then down to 1."""
    values = [1 + 2**-11 + 2**-40, 1 + 2**-11, 1 + 3 * 2**-11 - 2**-40, 6e-8, 65503.0, -1.0, 0.0]
    exact = np.concatenate([values, np.random.default_rng(0).standard_normal(1000)])
    found = resampling._rounded(torch.from_numpy(exact)).numpy()
    assert (found == exact.astype(np.float16)).all()
    assert found[0] > 1


def test_files_have_the_labels_of_arrays(tmp_path, monkeypatch):
    plans = planned(tmp_path, monkeypatch, FIVE, *CUBE)
    values, properties = image(*SMALL)
    pixels = SimpleITK.GetImageFromArray(values[0])
    pixels.SetSpacing((1.3, 1.3, 1.3))
    SimpleITK.WriteImage(pixels, tmp_path / "case_0000.nii.gz")
    made = predictor(FusedPredictor, plans, FIVE, "3d_fullres")
    made.predict_from_files_sequential([[str(tmp_path / "case_0000.nii.gz")]], str(tmp_path / "out"))
    found = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(tmp_path / "out" / "case.nii.gz"))
    assert (found == made.predict_single_npy_array(values, properties)).all()


# five processes import nnU-Net
@pytest.mark.slow
def test_command_and_processes(tmp_path, monkeypatch):
    """Two cases, preprocessed by another process, from the command line and from Python."""
    plans = planned(tmp_path, monkeypatch, FIVE, *CUBE)
    model = tmp_path / "results" / NAME / f"nnUNetTrainer__{plans['plans_name']}__3d_fullres"
    (model / "fold_0").mkdir(parents=True)
    (model / "plans.json").write_text(json.dumps(plans))
    (model / "dataset.json").write_text(json.dumps(FIVE))
    made = predictor(FusedPredictor, plans, FIVE, "3d_fullres")
    saved = {"network_weights": made.network.state_dict(), "trainer_name": "nnUNetTrainer"}
    saved |= {"init_args": {"configuration": "3d_fullres"}, "inference_allowed_mirroring_axes": None}
    torch.save(saved, model / "fold_0" / "checkpoint_final.pth")
    values, _ = image(*SMALL)
    (tmp_path / "images").mkdir()
    for case in ("a", "b"):
        pixels = SimpleITK.GetImageFromArray(values[0] * (1 if case == "a" else -1))
        pixels.SetSpacing((1.3, 1.3, 1.3))
        SimpleITK.WriteImage(pixels, tmp_path / "images" / f"{case}_0000.nii.gz")
    processes = {"num_processes_preprocessing": 2, "num_processes_segmentation_export": 2}
    made.predict_from_files(str(tmp_path / "images"), str(tmp_path / "python"), **processes)
    folders = {f"nnUNet_{kind}": str(tmp_path / kind) for kind in ("raw", "preprocessed", "results")}
    call = [sys.executable, "-m", "fusedseg.integrations.nnunet.predictor", "-d", NAME, "-c", "3d_fullres", "-f", "0"]
    call += ["-i", tmp_path / "images", "-o", tmp_path / "command", "-device", "cpu", "-npp", "1", "-nps", "1"]
    subprocess.run(call, env={**os.environ, **folders}, check=True, timeout=300)
    for case in ("a", "b"):
        found, same = (
            SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(tmp_path / way / f"{case}.nii.gz"))
            for way in ("python", "command")
        )
        assert len(np.unique(found)) > 2
        assert (found == same).all()
