"""``fusedseg.convert``: a stock model becomes lean in place."""

from typing import Any

import torch
from torch import nn

from ..activation import parse_invertible
from ..memory import Footprint, measure
from . import scope
from .applied import applied, mark_applied
from .flow import Flow, listed
from .inputs import parse_inputs
from .observe import observe, on_fake_tensors, set_training
from .plan import Plan, Planner, is_lazy
from .report import ConversionReport, Row
from .revert import revert
from .trace import trace
from .twins import become
from .unchanged import all_or_nothing
from .wiring import Fused, Wiring

MODES = ("exact", "leaky")
OP = "fusedseg.convert"


def convert(
    model: nn.Module, *unnamed: Any, example_inputs: Any = None, mode: str = "exact", slope: float = 0.01
) -> ConversionReport:
    """Makes a model keep less for backward, in place, and says what it did.

    * Norms followed by an activation module become one fused module: ``InPlaceABN`` and its like, which keep their
      output, where the activation can be inverted and only the norm reads the convolution before it;
      ``BatchNormAct`` and its like, which keep their input, elsewhere.  The activation module then passes on what it
      gets.  Max-pooling keeps one byte per element.
    * ``ConvABN2d`` or ``ConvABN3d`` in the report is a convolution with such a BatchNorm: the call of the convolution
      does the work of all three where one op pays, on a GPU and for one small fp32 volume on a CPU; elsewhere the norm
      is an ``InPlaceABN``, which keeps the same bytes.
    * ``JoinConv2d`` or ``JoinConv3d`` is a convolution of a concatenation (``torch.cat``): it keeps the sources, and of
      what was interpolated the small tensor.  The scope keeps no more; but in backward a large concatenation, what was
      enlarged for it, and a gradient of that size are not formed, which lowers the peak.
    * All else runs unchanged under the recompute scope, which the model's forward enters: it keeps one tensor per
      convolution and rebuilds what follows from it, such as activations called as functions, sums and concatenations.

    Modules stay the same objects under all their names and change their class: parameters, buffers, ``state_dict``,
    hooks, modes and devices are what they were, and optimizers go on working.  To convert a model once more converts
    it anew.  An exception leaves it as it was.

    Which calls follow each other is observed in one forward on the example, in training and in eval mode, on tensors
    without values where the model allows it; without an example, or with lazy modules that have not run yet, it is
    traced by ``torch.fx``.  A model that ``fx`` cannot trace gets the scope alone, and the report says why.

    Args:
        model: any module.  It may be on any device, or fake.
        example_inputs: a tensor, a sequence of arguments, or a mapping of keywords, that the model can be called with.
        mode: "exact" never changes the function, but for rounding.  "leaky" first turns ReLU modules that follow a norm
            into LeakyReLU, for models that are trained with it: ``revert`` gives LeakyReLU modules back.
        slope: of mode "leaky", > 0.

    Raises:
        TypeError: ``model`` is no module; the example is none of these, or is not given by its name.
        ValueError: another mode; a slope that is not positive; an example that the model cannot be called with.

    Fused norms and their activations stay instances of the stock classes that they replace, such as ``nn.BatchNorm2d``
    and ``nn.ReLU``, so that code which looks for these classes by ``isinstance`` finds them.

    Changes to a converted model: where an activation's parameter is set (``negative_slope``, ``alpha``,
    ``approximate``), or a fused norm, its activation or the convolution before it is replaced, moved or removed, the
    model's next forward raises a RuntimeError that names the module.  Call ``revert`` before such a change, or
    ``convert`` once more after it.  A convolution may be exchanged for another one; whatever has no part in a fused
    norm may be changed freely.

    Known limits: an activation module whose work a norm does returns its input: called by itself it does nothing, and a
    slice of a model that ends between a norm and its activation returns the activated tensor.  Where one op pays, a
    convolution that is called without the norm after it returns what the norm would.  Hooks that are added to a fused
    norm later see the activated tensor; those of a convolution see the convolution's output.  Code that calls
    submodules without the model's own forward has no scope, unless it enters ``fusedseg.recompute()`` itself, and such
    calls are not checked for changes.  ``torch.jit.script`` needs ``revert``; ``torch.export``, ``torch.jit.trace`` and
    ``torch.onnx.export`` write a converted model down in stock operations.
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
    parse_invertible(OP, "leaky_relu", slope)
    inputs = None if example_inputs is None else parse_inputs(OP, example_inputs)
    if any(is_lazy(module) for module in model.modules()):
        # to run it would make its parameters for good
        inputs = None
    if isinstance(model, torch.jit.ScriptModule):
        why = "it is scripted: convert the model before torch.jit.script"
        return ConversionReport(
            model, mode, "nothing was done", [], [], [Row(("",), type(model).__name__, "", why, None)]
        )
    with all_or_nothing(model):
        revert(model)
        flows, how = _flows(model, inputs)
        before = None if inputs is None else _footprint(model, inputs)
        if mode == "leaky":
            _make_leaky(flows, float(slope))
        plan = Planner(model, flows, mode == "leaky").plan()
        _apply(plan)
        fused = [Fused(fusion.norm, tuple(fusion.acts), fusion.over) for fusion in plan.fusions]
        scope.install(model, Wiring(model, fused, plan.paths))
        after = None if inputs is None else _footprint(model, inputs)
    return ConversionReport(model, mode, how, plan.replaced, plan.recomputed, plan.skipped, before, after)


def _flows(model: nn.Module, inputs: tuple[tuple, dict] | None) -> tuple[list[Flow], str]:
    """The flows in training and eval mode, none where they cannot be found, and how they were."""
    flows, errors = [], []
    for training in (True, False):
        try:
            flows.append(trace(model, training) if inputs is None else observe(model, inputs, training))
        # whatever a stranger's model raises: it is said below, or in the report
        except Exception as error:
            errors.append(error)
    if inputs is not None and not flows:
        raise ValueError(
            f"{OP}: the model cannot be called with the example: {type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]
    if inputs is None and errors:
        reason = f"{type(errors[0]).__name__}: {errors[0]}".splitlines()[0]
        return [], f"torch.fx cannot trace it ({reason}); pass example_inputs to have modules replaced"
    # "observed in training and eval mode"
    hows = [flow.how for flow in flows]
    return flows, hows[0] if len(hows) == 1 else f"{hows[0].removesuffix(' mode')} and eval mode"


def _make_leaky(flows: list[Flow], slope: float) -> None:
    """Turns ReLU modules that follow a norm into LeakyReLU, for good."""
    for flow in flows:
        for call in flow.calls:
            maker = flow.maker(call.reads[0]) if call.reads else None
            if type(call.module) is nn.ReLU and maker is not None and maker.kind == "norm":
                call.module.__class__ = nn.LeakyReLU  # type: ignore[assignment]
                call.module.__dict__["negative_slope"] = slope


def _apply(plan: Plan) -> None:
    for fusion in plan.fusions:
        become(fusion.norm, fusion.twin)
        if fusion.marks:
            fusion.norm.register_forward_hook(mark_applied)
    for act in (*plan.applied, *plan.shared):
        become(act, applied(act, plan.paths[act], once=act in plan.shared))
    for module, twin in (*plan.pools, *plan.convs):
        become(module, twin)


def _footprint(model: nn.Module, inputs: tuple[tuple, dict]) -> Footprint | None:
    """Of a training step, on fake tensors; None for a model that does not run on them."""
    try:
        with on_fake_tensors(model, inputs) as (args, kwargs), torch.enable_grad():
            set_training(model, True)
            owned = [*model.parameters(), *model.buffers()]
            return measure(lambda: model(*args, **kwargs), owned=owned)
    # a model that needs values has been seen to run on real ones
    except Exception:
        return None
