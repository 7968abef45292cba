"""Callbacks for Lightning.

``Convert`` converts the network before training, ``Compile`` compiles it, and ``MemoryReport`` counts a step's bytes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from ..compiler import Report
from ..conversion import ConversionReport
from ..memory.meter import LiveBytes
from ..nn import convert_sync
from .common import compile_in_place, converted_once, kept_by_backend, needed

OP = "fusedseg.integrations.lightning"
# The package has two names, and its classes are not the same under both.
_pl: Any = needed("lightning", "lightning", "lightning.pytorch", "pytorch_lightning")
# The attribute of a strategy that synchronises the norms, before the strategy wraps the module.
LAYER_SYNC = "_layer_sync"


class _Trainer(Protocol):
    """What is read of a ``Trainer``."""

    is_global_zero: bool
    strategy: object


class _OnDevice(Protocol):
    """What is read of a ``LightningModule`` while it trains."""

    device: torch.device


def _say(trainer: _Trainer, text: str) -> None:
    if trainer.is_global_zero:
        _pl.utilities.rank_zero_info(text)


def _network(op: str, pl_module: nn.Module, name: str | None) -> nn.Module:
    """The module with this name, or the only child that has parameters."""
    if name is not None:
        return pl_module.get_submodule(name)
    names = [name for name, child in pl_module.named_children() if any(True for _ in child.parameters())]
    if len(names) != 1:
        raise ValueError(
            f"{op}: module must name the network, because {type(pl_module).__name__} has "
            f"{len(names)} children with parameters{': ' + ', '.join(names) if names else ''}"
        )
    return pl_module.get_submodule(names[0])


class Convert(_pl.Callback):
    """Converts the network of a ``LightningModule`` before training starts, by ``fusedseg.convert``.

    ``Trainer(callbacks=[Convert()])`` is the only change to a program.  The network is converted in ``setup``, before
    optimizers are made, the strategy wraps it, and a checkpoint is loaded; checkpoints have the stock names.  If the
    network is made later, in the module's own ``setup`` or ``configure_model``, it is converted when training starts.
    A network that is converted already stays as it is, and a message says so.  Validation, test and prediction convert
    nothing.

    Args:
        module: the name of the network in the ``LightningModule``, such as "net".  By default it is the only child that
            has parameters.  "" is the ``LightningModule`` itself, whose ``training_step`` must then call
            ``self(batch)``, because the recompute scope begins where the converted module is called.
        example_inputs: as in ``fusedseg.convert``; by default the module's ``example_input_array``.
        sync: whether the norms get the statistics of all processes, by ``fusedseg.convert_sync``.
            ``Trainer(sync_batchnorm=True)`` does the same in strategies of several processes: the callback puts
            ``SyncNorms`` in the place of Lightning's plug-in, which would replace fused norms by norms without an
            activation.
        options: more arguments of ``fusedseg.convert``, such as ``mode`` and ``inplace``.

    Attributes:
        report: the ``ConversionReport``, or None as long as nothing was converted.

    Raises:
        ValueError: no or several children have parameters, and ``module`` is not given; or as in ``fusedseg.convert``.
        TypeError: as in ``fusedseg.convert``.
        RuntimeError: the network is made in ``configure_model`` and sharded by FSDP; call ``fusedseg.convert`` there.
    """

    def __init__(
        self, module: str | None = None, *, example_inputs: object = None, sync: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.module, self.example_inputs, self.sync, self.options = module, example_inputs, sync, options
        self.report: ConversionReport | None = None
        self._done = False

    def setup(self, trainer: _Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._done = False
        # Only strategies of several processes have this attribute, and a plug-in of the user's own stays.
        if type(getattr(trainer.strategy, LAYER_SYNC, None)).__name__ == "TorchSyncBatchNorm":
            setattr(trainer.strategy, LAYER_SYNC, SyncNorms(lambda: self._convert(trainer, pl_module)))
        later = type(pl_module).configure_model is not _pl.LightningModule.configure_model
        if not later and any(True for _ in pl_module.parameters()):
            self._convert(trainer, pl_module)

    def on_fit_start(self, trainer: _Trainer, pl_module: nn.Module) -> None:
        self._convert(trainer, pl_module)

    def _convert(self, trainer: _Trainer, pl_module: nn.Module) -> None:
        if self._done:
            return
        network = _network(f"{OP}.Convert", pl_module, self.module)
        if any(type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel")) for module in network.modules()):
            raise RuntimeError(
                f"{OP}.Convert: {type(network).__name__} is sharded already; call fusedseg.convert in configure_model, "
                "before fully_shard, and leave this callback out"
            )
        example = pl_module.example_input_array if self.example_inputs is None else self.example_inputs
        report, message = converted_once(network, example, self.options)
        self.report, self._done = report or self.report, True
        if self.sync:
            convert_sync(network)
        _say(trainer, message)


class SyncNorms:
    """What ``Convert`` puts in the place of Lightning's plug-in of ``Trainer(sync_batchnorm=True)``.

    It converts the network if that is still to be done, as after ``configure_model``, and gives fused norms and plain
    BatchNorms the statistics of all processes.  After training every module has its class again.
    """

    def __init__(self, convert: Callable[[], None]) -> None:
        self._convert = convert
        self._classes: list[tuple[nn.Module, type]] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self._convert()
        self._classes = [(module, type(module)) for module in model.modules()]
        return convert_sync(model)

    def revert(self, model: nn.Module) -> nn.Module:
        for module, cls in self._classes:
            module.__class__ = cls
        self._classes = []
        return model


class Compile(_pl.Callback):
    """Compiles the network of a ``LightningModule`` by ``torch.compile(backend="fusedseg")``, and logs what it keeps.

    ``Trainer(callbacks=[Compile()])`` is the only change to a program.  The network stays stock, and keeps its class,
    its names and its checkpoints.  It is compiled in place when training starts, so that it may be made in
    ``configure_model``, and stays compiled.

    Args:
        module: as in ``Convert``.
        options: those of the backend, such as ``budget`` and ``bits``.

    Attributes:
        report: ``fusedseg.compiler.report`` of the network after the first training batch; None before, and if the
            network runs graphs that were compiled for an earlier one of its class.

    Raises:
        ValueError: as in ``Convert`` for ``module``; an option is wrong; or the network is a class of ``torch.nn``.
    """

    def __init__(self, module: str | None = None, **options: object) -> None:
        super().__init__()
        self.module, self.options = module, options
        self.report: Report | None = None
        self._said = False

    def on_fit_start(self, trainer: _Trainer, pl_module: nn.Module) -> None:
        self._said = False
        op = f"{OP}.Compile"
        compile_in_place(op, _network(op, pl_module, self.module), self.options)

    def on_train_batch_end(self, trainer: _Trainer, pl_module: nn.Module, *outputs: object) -> None:
        if not self._said:
            self._said = True
            self.report, text = kept_by_backend(_network(f"{OP}.Compile", pl_module, self.module))
            _say(trainer, text)


class MemoryReport(_pl.Callback):
    """Counts the bytes of one training step, and logs them: those alive before backward, and the most at once.

    On a GPU the caching allocator counts.  Elsewhere ``LiveBytes`` does, which sees no compiled code.  Both count
    beyond the bytes that are alive when the step begins, such as parameters and the states of optimizers.

    Args:
        batch: the training batch to count, beginning with 0.  In the first one, many optimizers make their states.

    Attributes:
        held: bytes alive before backward, outputs and loss included; None before the step.
        peak: the most bytes alive at once during the step, gradients included.
    """

    def __init__(self, batch: int = 1) -> None:
        super().__init__()
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
            raise ValueError(f"{OP}.MemoryReport: batch must be an integer >= 0, got {batch!r}")
        self.batch = batch
        self.held: int | None = None
        self.peak: int | None = None
        self._seen = 0
        self._live: LiveBytes | None = None
        self._before = 0
        self._open = ExitStack()

    def on_train_batch_start(self, trainer: _Trainer, pl_module: _OnDevice, *batch: object) -> None:
        if self._seen == self.batch:
            if pl_module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(pl_module.device)
                self._before = torch.cuda.memory_allocated(pl_module.device)
            else:
                self._live = self._open.enter_context(LiveBytes())
        self._seen += 1

    def on_before_backward(self, trainer: _Trainer, pl_module: _OnDevice, loss: object) -> None:
        if self._seen == self.batch + 1 and self.held is None:
            live = torch.cuda.memory_allocated(pl_module.device) if self._live is None else self._live.current
            self.held = live - self._before

    def on_train_batch_end(self, trainer: _Trainer, pl_module: _OnDevice, *outputs: object) -> None:
        if self._seen != self.batch + 1 or self.peak is not None:
            return
        self._open.close()
        most = torch.cuda.max_memory_allocated(pl_module.device) if self._live is None else self._live.peak
        self.peak, self._live = most - self._before, None
        held = "" if self.held is None else f"{self.held / 2**20:.1f} MiB alive before backward, "
        _say(trainer, f"fusedseg: training batch {self.batch}: {held}{self.peak / 2**20:.1f} MiB at the peak")

    def on_exception(self, trainer: _Trainer, pl_module: object, exception: BaseException) -> None:
        self._open.close()

    def on_fit_end(self, trainer: _Trainer, pl_module: object) -> None:
        if self.peak is None:
            _say(trainer, f"fusedseg: training ended after {self._seen} batches, so batch {self.batch} was not counted")
