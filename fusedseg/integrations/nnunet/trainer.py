"""``Fused``: the first base class of a trainer of nnU-Net v2 that trains in fewer bytes."""

import functools
import os
from typing import Any, ClassVar

import torch
from torch import autocast, nn

from ...compiler import backend, report
from ...compiler.settings import parse
from ...convert import conversion, convert
from ...functional import tp_fp_fn
from ...ops.layout import FORMATS
from .loss import UnknownLoss, fused_loss

OP = "fusedseg.integrations.nnunet"
# The devices whose networks are compiled.
COMPILED = ("cuda", "cpu")
# The environment variable of nnU-Net that says whether to compile, and what it takes for yes.
VARIABLE = "nnUNet_compile"
YES = ("true", "1", "t")

# The trainer that follows in the order of base classes has the attributes that ``Fused`` reads.
_Trainer: Any = object


class Fused(_Trainer):
    """The first base class of a trainer, such as ``class MyTrainer(Fused, nnUNetTrainer_250epochs): pass``.

    * The network stays stock, and ``network.compile(backend="fusedseg")`` decides what is kept.  On a GPU the network
      and its images lie in channels_last_3d (2D: channels_last), and if there is one process, the kernels of a step are
      recorded as CUDA graphs.  After the first training step the log has ``fusedseg.compiler.report``.
    * With ``nnUNet_compile=f``, and on devices other than a GPU or a CPU, the network is converted instead when the
      trainer builds it for training, and the log says what ``fusedseg.convert`` serves.
    * The loss becomes the loss of this package that equals it, with deep supervision, regions and ignore label.  A loss
      without an equal stays, and the log says so.
    * ``validation_step`` counts hard Dice in one pass, where the stock step forms one-hot tensors that peak at 14 times
      the bytes of the logits.
    * Checkpoints name the stock trainer that comes after this class, so that ``nnUNetv2_predict`` loads them without
      fusedseg.  If the trainer builds another network than that class, they name the trainer itself.

    CUDA graphs refuse gradients that are accumulated over several backward passes, which nnU-Net's trainers do not do.

    Attributes:
        compile_options: options of the backend, such as ``{"budget": "peak 22GiB"}``.  They come before those that the
            trainer chooses: ``{"cudagraphs": False, "memory_format": "keep"}`` switches both off.
    """

    compile_options: ClassVar[dict[str, Any]] = {}
    build_network_architecture: object
    # Whether the log still lacks what the backend keeps.
    _unreported = False

    def initialize(self) -> None:
        # The method of the most derived class, which may stand before this one.
        build: Any = self.build_network_architecture

        # nnU-Net reads the signature of this method to find out how to call it.
        @functools.wraps(build)
        def prepared(*args: object, **kwargs: object) -> nn.Module:
            network = build(*args, **kwargs)
            if self.device.type in COMPILED and os.environ.get(VARIABLE, "t").lower() in YES:
                self._compile(network)
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

    def _backend_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.device.type == "cuda":
            options["memory_format"] = FORMATS[2 + len(self.configuration_manager.patch_size)]
            # Nobody has tried to record the steps of several processes, or steps where nnU-Net does not compile.
            options["cudagraphs"] = super()._do_i_compile() and not self.is_ddp
        return {**options, **self.compile_options}

    # Any, because the types of ``nn.Module.to`` have no memory format.
    def _compile(self, network: Any) -> None:
        """Compiles the calls of the network; its class and the names of its parameters stay."""
        options = self._backend_options()
        # Raises for a wrong option before nnU-Net reads data.
        settings = parse(options)
        # A subclass of ``nn.Sequential`` without a forward of its own is not compiled either.
        if type(network).forward.__module__.startswith("torch.nn."):
            raise ValueError(
                f"{OP}: {type(network).__name__}.compile() of PyTorch has no effect on classes of torch.nn; make a "
                "class of your own of the network"
            )
        if isinstance(settings.memory_format, torch.memory_format):
            network.to(memory_format=settings.memory_format)
        network.compile(backend=backend, options=options)
        self._unreported = True
        call = f'network.compile(backend="fusedseg", options={options})'
        self.print_to_log_file(f"fusedseg: the network stays stock, for {call}")

    def _convert(self, network: nn.Module) -> None:
        convert(network)
        text = f"fusedseg.convert, because the network is not compiled:\n{conversion(network)}"
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
            self.print_to_log_file(self._kept(), add_timestamp=False)
        return found

    def _kept(self) -> str:
        try:
            kept = report(self.network)
        except ValueError:
            return "fusedseg: the backend has compiled no graph of the network"
        return f"fusedseg.compiler.report, of the graphs so far:\n{kept}"

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

    def perform_actual_validation(self, save_probabilities: bool = False) -> None:
        """Runs the network as it is, without compiled code, in the memory that training has released.

        nnU-Net adds the predictions of mirrored windows: it holds one while the network runs again, and then a replay
        of CUDA graphs would write over it.
        """
        # The gradients of the last step lie in the memory of the CUDA graphs, which can go when no tensor lies in it.
        self.network.zero_grad(set_to_none=True)
        torch.compiler.reset()
        with torch.compiler.set_stance("force_eager"):
            super().perform_actual_validation(save_probabilities)

    def save_checkpoint(self, filename: str) -> None:
        super().save_checkpoint(filename)
        if self.local_rank != 0 or self.disable_checkpointing:
            return
        stock: Any = next(cls for cls in type(self).__mro__ if not issubclass(cls, Fused))
        if type(self).build_network_architecture is not stock.build_network_architecture:
            # Prediction builds the network by the class that the checkpoint names.
            return
        saved = torch.load(filename, map_location="cpu", weights_only=False)
        saved["trainer_name"] = stock.__name__
        # The checkpoint of an earlier epoch stays whole if the process ends while it writes.
        torch.save(saved, f"{filename}.part")
        os.replace(f"{filename}.part", filename)
