"""``fusedseg.convert`` makes a stock model lean, in place."""

from collections import Counter
from typing import Literal, get_args

import torch
from torch import nn

from .._moved import refuse
from ..activation import parse_invertible
from ..memory import Footprint
from ..memory.meter import measure
from ..nn.stock_norm import Aside
from ..ops.layout import check_format
from . import scope
from .applied import applied, mark_applied
from .flow import Flow, listed
from .formats import lay_out
from .observe import observe, on_fake_tensors, parse_inputs, set_training
from .plan import Changes, Planner, is_lazy
from .report import ConversionReport, Row, guarantee_of
from .revert import revert
from .twins import become
from .unchanged import all_or_nothing
from .wiring import Fused, Wiring

Mode = Literal["exact", "leaky"]
MODES = get_args(Mode)
OP = "fusedseg.convert"


def convert(
    model: nn.Module,
    *unnamed: object,
    example_inputs: object = None,
    mode: Mode = "exact",
    slope: float = 0.01,
    inplace: bool = True,
    memory_format: torch.memory_format | None = None,
    bits: None = None,
    budget: None = None,
    extra_flops: None = None,
) -> ConversionReport:
    """Makes a model keep fewer bytes for backward, in place, and reports each change.

    * A norm and the activation module after it become one fused module.  It is an in-place module such as
      ``InPlaceABN``, which keeps its output, if the activation can be inverted, only the norm reads the output of the
      convolution before it, and ``inplace`` is true.  Otherwise it is an exact module such as ``BatchNormAct``, which
      keeps its input.  The activation module then returns its input.  Max-pooling keeps one byte per element.
    * ``ConvABN2d`` or ``ConvABN3d`` in the report stands for a convolution with such a BatchNorm.  On a GPU, and for
      one small fp32 volume on a CPU, the call of the convolution does the work of all three, because one op is faster
      there.  Elsewhere the norm is an ``InPlaceABN``, which keeps the same bytes.
    * ``JoinConv2d`` or ``JoinConv3d`` stands for a convolution of a concatenation (``torch.cat``).  It keeps the
      tensors that were concatenated, and for an interpolated tensor the tensor before interpolation.  The scope alone
      would keep the same bytes.  But a ``JoinConv`` forms neither a large concatenation, nor the interpolated tensor,
      nor a gradient of that size in backward, which lowers the peak.
    * All other modules and functions run unchanged under the recompute scope, which the model's forward enters.  The
      scope keeps one tensor per convolution.  In backward it rebuilds the tensors that follow from it, such as
      activations called as functions, sums and concatenations.

    Modules stay the same objects under all their names and change only their class.  So parameters, buffers,
    ``state_dict``, hooks, modes and devices stay the same, and optimizers go on working.  A second call of ``convert``
    reverts the model and converts it again.  If ``convert`` raises, the model stays as it was.

    To find out which calls follow each other, ``convert`` runs the model on the example once in training and once in
    eval mode, on tensors without values if the model allows it.  Without an example, or if a lazy module has not run
    yet, the model gets only the scope.

    The flow may change later, for example when a flag is set.  Part of the flow must stay as it was on the example;
    otherwise the model returns wrong numbers without an error:

    * Nothing but the norm may read the output of a convolution before an in-place module, which writes over it.  With
      ``inplace=False`` other code may read it: a norm becomes an exact module even if its activation can be inverted.
      About as many bytes are kept, because the scope rebuilds the outputs of exact modules.
    * The activation of a fused norm must be called on the output of this norm, and nothing else may read that output,
      because the norm applies the activation.  This holds with ``inplace=False`` too.  A stock model that runs inside
      ``with fusedseg.recompute():`` relies on no flow at all.

    The report says what must stay.  ``torch.compile`` of the stock model with ``backend="fusedseg"`` relies on no flow
    either: it compiles again where the flow changes.

    Args:
        model: any module.  It may be on any device, or fake.
        example_inputs: a tensor, a sequence of arguments, or a mapping of keywords; the model is called with it.
        mode: "exact" changes the function by rounding only.  "leaky" first turns ReLU modules that follow a norm into
            LeakyReLU, for models that are then trained with it; ``revert`` does not turn them back into ReLU.
        slope: the negative slope in mode "leaky", > 0.
        inplace: whether norms may become in-place modules, which write over their input.
        memory_format: ``torch.channels_last`` or ``torch.channels_last_3d`` lays out parameters and buffers with the
            dimensions of an image, and in each call of the model the inputs.  Convolutions pass the format on.  None
            leaves every tensor as it is.  In both cases instance norms and average pools of volumes, and group norms on
            a GPU, keep the format of their input, where PyTorch's copy it to contiguous planes.
        bits, budget, extra_flops: must be None.  The compiler backend has them, and the error has the line to write.

    Raises:
        TypeError: ``model`` is no module, or a ``torch.fx.GraphModule``; the example has another type, or is not given
            by keyword; ``inplace`` is no bool; ``bits``, ``budget`` or ``extra_flops`` is given.
        ValueError: the mode is unknown; the slope is not positive; the model cannot be called with the example;
            ``memory_format`` is another format.
        RuntimeError: a training step of the converted model fails on the example, on tensors without values, and that
            of the stock model does not.

    Fused norms and their activations stay instances of the stock classes that they replace, such as ``nn.BatchNorm2d``
    and ``nn.ReLU``, so that code that looks for these classes by ``isinstance`` finds them.

    Changes to a converted model: the model's next forward raises a RuntimeError that names the module if the parameter
    of a fused activation was set (``negative_slope``, ``alpha``, ``approximate``), or if a fused norm, its activation
    or the convolution before it was replaced, moved or removed.  Call ``revert`` before such a change, or ``convert``
    again after it.  A convolution may be exchanged for another convolution.  A module that has no part in a fused norm
    may be changed freely.

    Hooks of a converted model: all fused norms step aside in each forward in which a hook would see another tensor than
    in the stock model, and the stock norms and activations run.  This holds for hooks of the norm, its activation, the
    convolution before a norm in place and the modules between them, for global module hooks, and for a ``forward`` that
    was replaced.  Statistics move once, in a checkpoint too.

    Known limits: an activation module whose work a norm does returns its input.  Called by itself it does nothing, and
    a slice of a model that ends between a norm and its activation returns the activated tensor.  Where the convolution
    does the work of all three, a call of the convolution alone returns the activated tensor too.  Code that calls
    submodules without the model's own forward has no scope, unless it enters ``fusedseg.recompute()`` itself, and such
    calls are checked neither for changes nor for hooks.  ``torch.jit.script`` needs ``revert`` first.
    ``torch.export``, ``torch.jit.trace`` and ``torch.onnx.export`` write a converted model in stock operations.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be an nn.Module, got {type(model).__name__}")
    if unnamed:
        raise TypeError(
            f"{OP}: every argument after the model is given by its name, such as fusedseg.convert(model, "
            f"example_inputs=torch.randn(1, 3, 64, 64)); got {listed(type(value).__name__ for value in unnamed)} "
            "without a name"
        )
    if mode not in MODES:
        raise ValueError(f"{OP}: mode must be one of {', '.join(MODES)}, got {mode!r}")
    if not isinstance(inplace, bool):
        raise TypeError(f"{OP}: inplace must be True or False, got {inplace!r}")
    parse_invertible(OP, "leaky_relu", slope)
    refuse(OP, bits=bits, budget=budget, extra_flops=extra_flops)
    check_format(f"{OP}: memory_format", memory_format)
    inputs = None if example_inputs is None else parse_inputs(OP, example_inputs)
    if isinstance(model, torch.fx.GraphModule):
        raise TypeError(
            f"{OP}: model must not be a torch.fx.GraphModule; convert the module that it was traced from, or call "
            'torch.compile(model, backend="fusedseg")'
        )
    if any(is_lazy(module) for module in model.modules()):
        # A forward would create the parameters of lazy modules permanently.
        inputs = None
    if isinstance(model, torch.jit.ScriptModule):
        why = "it is scripted: convert the model before torch.jit.script"
        return ConversionReport(
            model, mode, "nothing was done", [], [], [Row(("",), type(model).__name__, "", why, None)]
        )
    with all_or_nothing(model):
        revert(model)
        flows, how = _flows(model, inputs)
        before, uncounted = (None, "") if inputs is None else _stock_footprint(model, inputs)
        if mode == "leaky":
            _make_leaky(flows, float(slope))
        changes = Planner(model, flows, marks_anything=mode == "leaky", inplace=inplace).changes()
        aside = Aside()
        _apply(changes, aside)
        fused = [Fused(fusion.norm, tuple(fusion.acts), fusion.over, fusion.seen_by) for fusion in changes.fusions]
        wiring = Wiring(model, fused, changes.paths, aside)
        scope.install(model, wiring)
        after = None if before is None else _converted_footprint(model, inputs)
        # Nothing raises an error from here on: what is laid out would stay so.
        if memory_format is not None:
            wiring.memory_format = memory_format
            lay_out(model, memory_format)
    count = Counter(fusion.inplace for fusion in changes.fusions)
    guarantee = guarantee_of(inplace=count[True], exact=count[False])
    return ConversionReport(
        model,
        mode,
        how,
        changes.replaced,
        changes.recomputed,
        changes.skipped,
        before=before,
        after=after,
        uncounted=uncounted,
        guarantee=guarantee,
    )


def _flows(model: nn.Module, inputs: tuple[tuple, dict] | None) -> tuple[list[Flow], str]:
    """The flows in training and eval mode, and how they were found; an empty list and the reason if they were not."""
    if inputs is None:
        return [], "not observed, so the model gets only the scope; pass example_inputs to have modules replaced"
    flows, errors = [], []
    for training in (True, False):
        try:
            flows.append(observe(model, inputs, training))
        # A model may raise any error; the ValueError below shows it.
        except Exception as error:
            errors.append(error)
    if not flows:
        raise ValueError(
            f"{OP}: the model cannot be called with the example: {type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]
    # The result is, for example, "observed in training and eval mode".
    hows = [flow.how for flow in flows]
    return flows, hows[0] if len(hows) == 1 else f"{hows[0].removesuffix(' mode')} and eval mode"


def _make_leaky(flows: list[Flow], slope: float) -> None:
    """Turns ReLU modules that follow a norm into LeakyReLU; ``revert`` does not undo this."""
    for flow in flows:
        for call in flow.calls:
            maker = flow.maker(call.reads[0]) if call.reads else None
            if type(call.module) is nn.ReLU and maker is not None and maker.kind == "norm":
                call.module.__class__ = nn.LeakyReLU  # type: ignore[assignment]
                call.module.__dict__["negative_slope"] = slope


def _apply(changes: Changes, aside: Aside) -> None:
    for fusion in changes.fusions:
        fusion.twin.__dict__.update(_aside=aside, _marked=mark_applied if fusion.marks else None)
        become(fusion.norm, fusion.twin)
    for act in (*changes.applied, *changes.shared):
        become(act, applied(act, changes.paths[act], aside, once=act in changes.shared))
    for module, twin in (*changes.pools, *changes.convs):
        become(module, twin)


def _footprint(model: nn.Module, inputs: object) -> Footprint:
    """The footprint of a training step on tensors without values."""
    with on_fake_tensors(model, inputs) as (args, kwargs), torch.enable_grad():
        set_training(model, True)
        owned = [*model.parameters(), *model.buffers()]
        return measure(lambda: model(*args, **kwargs), owned=owned)


def _stock_footprint(model: nn.Module, inputs: object) -> tuple[Footprint | None, str]:
    """The footprint, or None and the reason: the model reads values, or cannot be trained on the example."""
    try:
        return _footprint(model, inputs), ""
    # A model may raise any error; the report shows it.
    except Exception as error:
        return None, _first_line(error)


def _converted_footprint(model: nn.Module, inputs: object) -> Footprint:
    """The footprint of a model whose stock form runs on tensors without values."""
    try:
        return _footprint(model, inputs)
    except Exception as error:
        raise RuntimeError(
            f"{OP}: a training step of the converted model failed on the example, and that of the stock model did not "
            f"({_first_line(error)}); the model is left unconverted.  Please report this as a bug of fusedseg"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
