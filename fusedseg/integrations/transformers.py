"""Callbacks for the ``Trainer`` of Hugging Face, which convert or compile a segmentation model before training."""

import logging
from typing import Any, Protocol

import torch
from torch import nn

from ..compiler import Report
from ..conversion import ConversionReport
from ..nn import convert_sync
from .common import compile_in_place, converted_once, kept_by_backend, needed

OP = "fusedseg.integrations.transformers"
_transformers: Any = needed("transformers", "transformers", "transformers")
logger = logging.getLogger(__name__)


class _State(Protocol):
    """What is read of the state of a ``Trainer``."""

    is_world_process_zero: bool


class Convert(_transformers.TrainerCallback):
    """Converts the model of a ``Trainer`` by ``fusedseg.convert``, before its optimizer is made.

    ``Trainer(..., callbacks=[Convert()])`` is the only change to a program.  A callback that is added after the trainer
    was made converts when training starts.  A model that is converted already stays as it is, and a message says so.
    ``save_model`` writes a stock checkpoint.

    Args:
        example_inputs: as in ``fusedseg.convert``.  By default two images of 64x64 zeros, with the number of channels
            in the model's configuration, as ``pixel_values``; the report then counts the bytes of such a batch.
        sync: whether BatchNorms get the statistics of all processes, by ``fusedseg.convert_sync``.
        options: more arguments of ``fusedseg.convert``, such as ``mode`` and ``inplace``.

    Attributes:
        report: the ``ConversionReport``, or None as long as nothing was converted.

    Raises:
        ValueError: the model does not take images, and ``example_inputs`` is not given; or as in ``fusedseg.convert``.
        TypeError: as in ``fusedseg.convert``.

    The message is logged with level WARNING, because Python shows no other level unless it is asked to.
    """

    def __init__(self, *, example_inputs: object = None, sync: bool = False, **options: object) -> None:
        self.example_inputs, self.sync, self.options = example_inputs, sync, options
        self.report: ConversionReport | None = None
        self._done = False

    def on_init_end(
        self, args: object, state: _State, control: object, model: nn.Module | None = None, **others: object
    ) -> None:
        if model is not None:
            self._convert(model, state)

    def on_train_begin(self, args: object, state: _State, control: object, model: nn.Module, **others: object) -> None:
        if not self._done:
            self._convert(model, state)

    def _convert(self, model: nn.Module, state: _State) -> None:
        example = _images(model) if self.example_inputs is None else self.example_inputs
        self.report, message = converted_once(model, example, self.options)
        self._done = True
        if self.sync:
            convert_sync(model)
        if state.is_world_process_zero:
            logger.warning(message)


class Compile(_transformers.TrainerCallback):
    """Compiles the model of a ``Trainer`` by ``torch.compile(backend="fusedseg")``, and logs what it keeps.

    ``Trainer(..., callbacks=[Compile()])`` is the only change to a program; ``torch_compile_backend`` takes the names
    of Hugging Face's own list alone.  The model stays stock, and keeps its class, its names and its checkpoints.  It
    is compiled in place when training starts, and stays compiled.

    Args:
        options: those of the backend, such as ``budget`` and ``bits``.

    Attributes:
        report: ``fusedseg.compiler.report`` of the model after the first step; None before, and if the model runs
            graphs that were compiled for an earlier one of its class.

    Raises:
        ValueError: an option is wrong.

    The message is logged with level WARNING, as that of ``Convert``.
    """

    def __init__(self, **options: object) -> None:
        self.options = options
        self.report: Report | None = None
        self._said = False

    def on_train_begin(self, args: object, state: _State, control: object, model: nn.Module, **others: object) -> None:
        self._said = False
        compile_in_place(f"{OP}.Compile", model, self.options)

    def on_step_end(self, args: object, state: _State, control: object, model: nn.Module, **others: object) -> None:
        if not self._said:
            self._said = True
            self.report, text = kept_by_backend(model)
            if state.is_world_process_zero:
                logger.warning(text)


def _images(model: Any) -> dict[str, torch.Tensor]:
    """Images for the model, without values that matter."""
    name = getattr(model, "main_input_name", None)
    if name != "pixel_values":
        raise ValueError(
            f"{OP}.Convert: example_inputs must be given for {type(model).__name__}, whose input is {name!r}"
        )
    config = model.config
    channels = next(
        (
            found
            for part in (config, getattr(config, "backbone_config", None))
            if (found := getattr(part, "num_channels", None)) is not None
        ),
        3,
    )
    return {name: torch.zeros(2, channels, 64, 64, dtype=model.dtype)}
