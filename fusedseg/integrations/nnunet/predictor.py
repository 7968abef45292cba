"""``FusedPredictor``: nnU-Net's predictor without logits of the whole image.

``python -m fusedseg.integrations.nnunet.predictor`` takes the arguments of ``nnUNetv2_predict``.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nnunetv2.configuration import default_num_processes
from nnunetv2.inference import predict_from_raw_data
from nnunetv2.inference.data_iterators import PreprocessAdapter, PreprocessAdapterFromNpy
from nnunetv2.inference.export_prediction import insert_crop_into_image
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.inference.sliding_window_prediction import compute_gaussian, compute_steps_for_sliding_window
from nnunetv2.utilities.helpers import dummy_context, empty_cache
from nnunetv2.utilities.label_handling.label_handling import LabelManager
from torch import Tensor, nn

from ... import _torch
from ...inference.windows import Slices, Sums, Windows, part
from ...progress import Progress
from .resampling import SlabLabels, axes_of

OP = "fusedseg.integrations.nnunet.FusedPredictor"


class FusedPredictor(nnUNetPredictor):
    """nnU-Net's predictor, which gives each slab its labels after the last window on it, and frees its logits.

    Equals ``nnUNetPredictor`` voxel by voxel, in its use and its arguments: folds, mirroring, the cascade, regions, 2D
    and 3D configurations, the resampling to the original spacing, and the files.  Windows, weights, dtypes, and the
    order of additions are those of nnU-Net; the resampling computes the same products and sums
    (``resampling.SlabLabels``), on the device of the logits.

    For each fold it holds, in half precision, the logits of the planes that a row of windows shares with the next row;
    for one fold at a time it holds the logits of a whole row.  nnU-Net holds the logits of the image, and for the
    resampling a second time in float64.  Nothing is sent to background processes: labels are resampled between windows.

    Refused with a ValueError, because nnU-Net's own code needs all logits at once: ``save_probabilities``, resampling
    functions other than nnU-Net's default, and label managers of another class.  A NaN raises a RuntimeError, as an
    infinite value does in nnU-Net too.
    """

    network: nn.Module

    def predict_segmentation_from_preprocessed_data(self, data: Tensor, properties: dict) -> np.ndarray:
        """The labels in the shape and orientation of the image that was read.

        Args:
            data: (C, X, Y, Z), as nnU-Net's preprocessing returns it, in a cascade with the one-hot labels of the
                previous stage.
            properties: of the case, as nnU-Net's preprocessing returns them.
        """
        labels = None
        threads = torch.get_num_threads()
        torch.set_num_threads(min(default_num_processes, threads))
        try:
            if self.perform_everything_on_device:
                with contextlib.suppress(torch.OutOfMemoryError):
                    labels = self._labels(data, properties, self.device)
            if labels is None:
                labels = self._labels(data, properties, torch.device("cpu"))
        finally:
            torch.set_num_threads(threads)
        dtype = np.uint8 if len(self.label_manager.foreground_labels) < 255 else np.uint16
        whole = np.zeros(properties["shape_before_cropping"], dtype=dtype)
        whole = insert_crop_into_image(whole, labels.cpu().numpy(), properties["bbox_used_for_cropping"])
        return whole.transpose(self.plans_manager.transpose_backward)

    @torch.inference_mode()
    def _labels(self, data: Tensor, properties: dict, results: torch.device) -> Tensor:
        """The labels of the image before nnU-Net reverts cropping and transposition, with sums on ``results``."""
        empty_cache(self.device)
        self.network = self.network.to(self.device)
        self.network.eval()
        autocast = torch.autocast(self.device.type, enabled=True) if self.device.type == "cuda" else dummy_context()
        size, flat = tuple(self.configuration_manager.patch_size), len(self.configuration_manager.patch_size) == 2
        with autocast, Progress("fusedseg: nnU-Net") as shown:
            padded, crop = predict_from_raw_data.pad_nd_image(data, size, "constant", {"value": 0}, True, None)
            padded = padded.to(results)
            windows = self._windows(tuple(padded.shape[1:]), size)
            folds = self.list_of_parameters or [None]
            slabs = _Slabs(crop[1:], len(folds), self._slab_labels(data, properties, results))
            # Beside the predictions, also where their sums are on the host.
            weights = self._weights(size, self.device).view(windows.roi)
            sums = [Sums(windows, weights, results, partial(slabs.add, fold)) for fold in range(len(folds))]
            for row, of_row in groupby(windows.indices, key=lambda window: window[0]):
                row_windows = list(of_row)
                for fold, parameters in enumerate(folds):
                    if parameters is not None and (row == 0 or len(folds) > 1):
                        _torch.uncompiled(self.network).load_state_dict(parameters)
                    for window in row_windows:
                        if self.allow_tqdm:
                            shown.update(f"row {row + 1} of {len(windows.starts[0])}, fold {fold + 1} of {len(folds)}")
                        x = part(padded, windows.where(window)).clone()[None].to(self.device)
                        prediction = self._internal_maybe_mirror_and_predict(x[:, :, 0] if flat else x)[0]
                        sums[fold].add(window, prediction[:, None] if flat else prediction)
                        # No variable holds predictions while the network runs again.
                        del prediction
        return slabs.labels.labels

    def _windows(self, image: tuple[int, ...], size: tuple[int, ...]) -> Windows:
        """nnU-Net's windows, with cells that are cut along the first axis alone.  A window of 2D is one plane."""
        steps = compute_steps_for_sliding_window(image[-len(size) :], size, self.tile_step_size)
        if len(size) < len(image):
            steps, size = [list(range(image[0])), *steps], (1, *size)
        planes = sorted({p for start in steps[0] for p in (start, start + size[0])})
        return Windows(image, size, tuple(map(tuple, steps)), (tuple(planes), *((0, n) for n in image[1:])))

    def _weights(self, size: tuple[int, ...], device: torch.device) -> Tensor:
        if not self.use_gaussian:
            return torch.ones(size, dtype=torch.half, device=device)
        return compute_gaussian(size, sigma_scale=1.0 / 8, value_scaling_factor=10, device=device)

    def _slab_labels(self, data: Tensor, properties: dict, device: torch.device) -> SlabLabels:
        manager, labels = self.configuration_manager, self.label_manager
        nonlin = labels.inference_nonlin
        if type(labels) is not LabelManager or (labels.has_regions and nonlin is not torch.sigmoid):
            raise ValueError(
                f"{OP}: labels must be those of nnU-Net's LabelManager, with a sigmoid for regions, got "
                f"{type(labels).__name__} with {nonlin}; predict with nnUNetv2_predict"
            )
        new = [properties["spacing"][i] for i in self.plans_manager.transpose_forward]
        shape = tuple(data.shape[1:])
        current = manager.spacing if len(manager.spacing) == len(shape) else [new[0], *manager.spacing]
        axes = axes_of(manager.resampling_fn_probabilities, shape, properties, (current, new))
        regions = [int(label) for label in labels.regions_class_order] if labels.has_regions else None
        return SlabLabels(axes, labels.num_segmentation_heads, device, regions=regions)

    def predict_from_data_iterator(
        self,
        data_iterator: Iterable[dict[str, Any]],
        save_probabilities: bool = False,
        num_processes_segmentation_export: int = 0,
    ) -> list[np.ndarray | None]:
        """As in nnU-Net; each case is finished and written before the next one begins."""
        if save_probabilities:
            raise ValueError(
                f"{OP}: save_probabilities must be False, because the probabilities of all classes for the whole image "
                "are what this predictor never holds; predict with nnUNetv2_predict"
            )
        found: list[np.ndarray | None] = []
        for item in data_iterator:
            data, properties, file = item["data"], item["data_properties"], item["ofile"]
            if isinstance(data, str):
                path = Path(data)
                data = torch.from_numpy(np.load(path))
                path.unlink()
            print(f"\nPredicting {file or f'image of shape {tuple(data.shape)}'}")
            labels = self.predict_segmentation_from_preprocessed_data(data, properties)
            if file is None:
                found.append(labels)
                continue
            writer = self.plans_manager.image_reader_writer_class()
            writer.write_seg(labels, file + self.dataset_json["file_ending"], properties)
            found.append(None)
        compute_gaussian.cache_clear()
        empty_cache(self.device)
        return found

    def predict_single_npy_array(
        self,
        input_image: np.ndarray,
        image_properties: dict,
        segmentation_previous_stage: np.ndarray | None = None,
        output_file_truncated: str | None = None,
        save_or_return_probabilities: bool = False,
    ) -> np.ndarray | None:
        """As in nnU-Net."""
        lists = ([input_image], [segmentation_previous_stage], [image_properties], [output_file_truncated])
        managers = (self.plans_manager, self.dataset_json, self.configuration_manager)
        item = next(PreprocessAdapterFromNpy(*lists, *managers, num_threads_in_multithreaded=1, verbose=self.verbose))
        return self.predict_from_data_iterator([item], save_or_return_probabilities)[0]

    def predict_from_files_sequential(self, *args: object, **kwargs: object) -> list[np.ndarray | None] | None:
        """As in nnU-Net: everything runs in this process."""
        return self.predict_from_files(*args, **kwargs, num_processes_preprocessing=0)

    def _internal_get_data_iterator_from_lists_of_filenames(
        self, inputs: list[list[str]], previous: Sequence[str | None], outputs: list[str] | None, num_processes: int
    ) -> Iterator[dict]:
        if num_processes:
            return super()._internal_get_data_iterator_from_lists_of_filenames(inputs, previous, outputs, num_processes)
        preprocessor = self.configuration_manager.preprocessor_class(verbose=self.verbose_preprocessing)
        managers = (self.plans_manager, self.dataset_json, self.configuration_manager)
        return PreprocessAdapter(inputs, previous, preprocessor, outputs, *managers)


class _Slabs:
    """The mean logits of all folds, slab by slab, without the planes that padding has added."""

    def __init__(self, crop: Slices, folds: int, labels: SlabLabels) -> None:
        self.crop, self.folds, self.labels = crop, folds, labels
        # The sums over folds, by the first plane.
        self.open: dict[int, Tensor] = {}

    def add(self, fold: int, where: Slices, logits: Tensor) -> None:
        # Not isfinite of the logits, which would take their bytes another one and a half times.
        if not torch.isfinite(torch.stack(logits.aminmax())).all():
            raise RuntimeError(
                f"{OP}: the logits hold values that are not finite; reduce value_scaling_factor in compute_gaussian"
            )
        at = where[0]
        total = self.open[at.start] = self.open[at.start].add_(logits) if fold else logits
        if fold + 1 < self.folds:
            return
        del self.open[at.start]
        if self.folds > 1:
            # A tensor, because PyTorch multiplies with the reciprocal of a number on a GPU.
            total /= torch.full((), self.folds, dtype=total.dtype, device=total.device)
        inner = self.crop[0]
        planes = slice(max(inner.start - at.start, 0), min(inner.stop, at.stop) - at.start)
        if planes.start < planes.stop:
            self.labels.add(part(total, (planes, *self.crop[1:])))


def main() -> None:
    """nnU-Net's own command ``nnUNetv2_predict`` with ``FusedPredictor``."""
    stock = predict_from_raw_data.nnUNetPredictor
    predict_from_raw_data.nnUNetPredictor = FusedPredictor
    try:
        predict_from_raw_data.predict_entry_point()
    finally:
        predict_from_raw_data.nnUNetPredictor = stock


if __name__ == "__main__":
    main()
