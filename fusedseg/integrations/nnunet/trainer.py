"""``Fused`` and ``Leaky``: the first base class of a trainer of nnU-Net v2 that trains in fewer bytes."""

import copy
import functools
import os
import pydoc
from typing import Any, ClassVar

import torch
from torch import autocast, nn

from ...convert import conversion, convert
from ...functional import tp_fp_fn
from ...ops.layout import FORMATS
from ..common import compile_in_place, kept_by_backend
from .loss import UnknownLoss, fused_loss

# The trainer that follows in the order of base classes has the attributes that ``Fused`` reads.
_Trainer: Any = object


class Fused(_Trainer):
    """The first base class of a trainer, such as ``class MyTrainer(Fused, nnUNetTrainer_250epochs): pass``.

    * Where nnU-Net would compile, which it does on a GPU by default, the network stays stock, and
      ``network.compile(backend="fusedseg")`` decides what is kept, with ``compile_options``.  After the first training
      step the log has ``fusedseg.compiler.report``.
    * Elsewhere (on a CPU, on Windows, with ``nnUNet_compile=f``) a trainer with ``compile_options``, such as a budget,
      compiles its network by this backend too, with ``codegen="aten"``, which needs no C++ compiler.
    * Elsewhere without ``compile_options`` the network is converted when the trainer builds it for training, and the
      log says what ``fusedseg.convert`` serves.  Networks that are built for prediction stay stock.
    * The loss becomes the loss of this package that equals it, with deep supervision, regions and ignore label.  A loss
      without an equal stays, and the log says so.
    * ``validation_step`` counts hard Dice in one pass, where the stock step forms one-hot tensors that peak at 14 times
      the bytes of the logits.
    * Checkpoints name the stock trainer that comes after this class, so that ``nnUNetv2_predict`` loads them without
      fusedseg.

    Attributes:
        compile_options: the options of the backend, such as ``{"budget": "peak 22GiB"}``.
        channels_last: whether the network and its images lie in channels_last; the backend compiles it then.
    """

    compile_options: ClassVar[dict[str, Any]] = {}
    channels_last: ClassVar[bool] = False
    build_network_architecture: object
    # Whether the log still lacks what the backend keeps.
    _unreported = False

    def initialize(self) -> None:
        by_nnunet = super()._do_i_compile()
        options = self.compile_options if by_nnunet else {"codegen": "aten", **self.compile_options}
        memory_format = FORMATS[2 + len(self.configuration_manager.patch_size)] if self.channels_last else None
        if memory_format is not None:
            options = {"memory_format": memory_format, **options}
        by_backend = self._unreported = by_nnunet or self.channels_last or bool(self.compile_options)
        # The method of the most derived class, which may stand before this one.
        build: Any = self.build_network_architecture

        # nnU-Net reads the signature of this method to find out how to call it.
        @functools.wraps(build)
        def prepared(*args: object, **kwargs: object) -> nn.Module:
            network = build(*args, **kwargs)
            if memory_format is not None:
                network.to(memory_format=memory_format)
            if by_backend:
                compile_in_place("fusedseg.integrations.nnunet", network, options)
                call = f'network.compile(backend="fusedseg", options={options})'
                self.print_to_log_file(f"fusedseg: the network stays stock, for {call}")
            else:
                self._convert(network)
            return network

        # A name of the object hides the static method, which prediction calls too.
        self.build_network_architecture = prepared
        try:
            super().initialize()
        finally:
            del self.build_network_architecture

    def _do_i_compile(self) -> bool:
        """nnU-Net compiles nothing itself: ``initialize`` compiles the calls of the network, and the loss is fused."""
        return False

    def _convert(self, network: nn.Module) -> None:
        convert(network)
        text = f"fusedseg.convert, because nnU-Net does not compile:\n{conversion(network)}"
        self.print_to_log_file(text, add_timestamp=False)

    def _build_loss(self) -> nn.Module:
        stock = super()._build_loss()
        try:
            return fused_loss(stock)
        except UnknownLoss as why:
            self.print_to_log_file(f"fusedseg: the loss stays as it is, because fusedseg has no equal of {why}")
            return stock

    def train_step(self, batch: dict) -> dict:
        found = super().train_step(batch)
        if self._unreported:
            self._unreported = False
            self.print_to_log_file(kept_by_backend(self.network)[1], add_timestamp=False)
        return found

    def validation_step(self, batch: dict) -> dict:
        data, target = batch["data"].to(self.device, non_blocking=True), batch["target"]
        targets = [t.to(self.device, non_blocking=True) for t in (target if isinstance(target, list) else [target])]
        with autocast(self.device.type, enabled=self.device.type == "cuda"):
            output = self.network(data)
            del data
            loss = self.loss(output, targets if isinstance(target, list) else targets[0])
        labels = self.label_manager
        logits, truth = (output[0], targets[0]) if self.enable_deep_supervision else (output, targets[0])
        mask = None
        if labels.has_ignore_label and labels.has_regions:
            # The last channel of a target of regions says which positions are ignored.
            ignored = truth[:, -1:]
            mask, truth = (~ignored if ignored.dtype == torch.bool else ignored == 0), truth[:, :-1]
        ignore = labels.ignore_label if labels.has_ignore_label and not labels.has_regions else None
        counts = tp_fp_fn(logits, truth, mask, ignore_index=ignore, regions=labels.has_regions)
        # Without regions the first class is the background, which nnU-Net's online Dice leaves out.
        first = 0 if labels.has_regions else 1
        tp, fp, fn = (count.sum(0)[first:].cpu().numpy() for count in counts)
        return {"loss": loss.detach().cpu().numpy(), "tp_hard": tp, "fp_hard": fp, "fn_hard": fn}

    def save_checkpoint(self, filename: str) -> None:
        super().save_checkpoint(filename)
        if self.local_rank != 0 or self.disable_checkpointing:
            return
        saved = torch.load(filename, map_location="cpu", weights_only=False)
        stock = next(cls for cls in type(self).__mro__ if not issubclass(cls, Fused))
        saved["trainer_name"] = stock.__name__
        # The checkpoint of an earlier epoch stays whole if the process ends while it writes.
        torch.save(saved, f"{filename}.part")
        os.replace(f"{filename}.part", filename)


# The default device of nnU-Net's trainer.
GPU = torch.device("cuda")


class Leaky(Fused):
    """``Fused`` for plans with ReLU: the network is built with LeakyReLU, which norms in place can invert.

    A norm before ReLU keeps its input, because ReLU has no inverse, and one before LeakyReLU keeps its output alone,
    which the next convolution keeps anyway.  The plans of this trainer, which nnU-Net writes beside its checkpoints,
    name LeakyReLU, and so the stock trainer predicts from them.  The plans in the folder of the preprocessed dataset
    stay as they are, and so do plans that name another activation: nnU-Net's own planners choose LeakyReLU.

    Attributes:
        slope: the negative slope, 0.01 as in nnU-Net's own plans.
    """

    slope: ClassVar[float] = 0.01

    # nnU-Net reads these names from the signature, and finds them among the local variables of its own trainer.
    def __init__(
        self, plans: dict, configuration: str, fold: int, dataset_json: dict, device: torch.device = GPU
    ) -> None:
        leaky = with_leaky_relu(plans, self.slope)
        super().__init__(leaky, configuration, fold, dataset_json, device)


def with_leaky_relu(plans: dict, slope: float) -> dict:
    """A copy of plans in which LeakyReLU stands for ReLU in every configuration."""
    plans = copy.deepcopy(plans)
    for configuration in plans["configurations"].values():
        # A configuration that inherits from another has no architecture, and old plans name no activation.
        arguments = configuration.get("architecture", {}).get("arch_kwargs", {})
        if pydoc.locate(str(arguments.get("nonlin"))) is nn.ReLU:
            arguments["nonlin"] = "torch.nn.LeakyReLU"
            arguments["nonlin_kwargs"] = {**(arguments.get("nonlin_kwargs") or {}), "negative_slope": slope}
    return plans
