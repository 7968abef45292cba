"""Plans, from the flows of a model's forward, which modules can be replaced, and why other modules cannot."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from .._module_hooks import has_hooks, is_observed
from ..activation import TABLE
from .convs import LEAN, joins, lean, shrinks
from .flow import BATCH_NORMS, INSTANCE_NORMS, NORMS, UPSAMPLINGS, Call, Flow, listed, paths_of
from .report import Row
from .twins import POOLS, ActivationArguments, Refused, activation_of, check_forward, check_hooks, twin_of

T = TypeVar("T")
CATS = ("cat", "concat")
ENLARGES = ("interpolate", "upsample")


@dataclass
class Fusion:
    """A norm and the activation modules after it."""

    norm: nn.Module
    acts: list[nn.Module]
    activation: ActivationArguments
    inplace: bool
    twin: nn.Module
    # The convolution that may also do the work of the norm and the activation, or None.
    conv: nn.Module | None = None
    # The convolutions whose output the norm writes over.
    over: tuple[nn.Module, ...] = ()
    # The modules whose hooks would see another tensor than in the stock model.
    seen_by: tuple[nn.Module, ...] = ()
    # Whether the norm must mark its output, because an activation is also called elsewhere.
    marks: bool = False


@dataclass
class Changes:
    """The changes that ``convert`` will make.  ``paths`` has one path of every module of the model."""

    paths: dict[nn.Module, str]
    fusions: list[Fusion] = field(default_factory=list)
    pools: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    # Convolutions that read a concatenation, or whose norm is fused, and their twins.
    convs: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    # Activation modules that are called only after fused norms, and those that are also called elsewhere.
    applied: list[nn.Module] = field(default_factory=list)
    shared: list[nn.Module] = field(default_factory=list)
    replaced: list[Row] = field(default_factory=list)
    recomputed: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)


class Planner:
    """Makes the ``Changes`` for a model.

    Args:
        root: the model.
        flows: its flows in training and eval mode; a module is replaced only if all of them allow it.
        marks_anything: whether a norm may mark its output for any activation module that is called elsewhere too;
            otherwise only for an activation that may be applied twice.
        inplace: whether a norm may write over the output of the convolution before it.
    """

    def __init__(self, root: nn.Module, flows: list[Flow], *, marks_anything: bool, inplace: bool) -> None:
        self._flows, self._marks_anything, self._inplace = flows, marks_anything, inplace
        self._paths = paths_of(root)
        self._refused: dict[nn.Module, str] = {}
        self._joined: dict[nn.Module, str] = {}

    def changes(self) -> Changes:
        changes = Changes({module: paths[0] for module, paths in self._paths.items()})
        fusions = dict(self._each(NORMS, self._fusion))
        while dropped := [norm for norm, fusion in fusions.items() if not self._sharing_allowed(fusion, fusions)]:
            for norm in dropped:
                del fusions[norm]
                self._refused[norm] = "its activation module is also called elsewhere"
        changes.fusions = list(fusions.values())
        for act in dict.fromkeys(act for fusion in changes.fusions for act in fusion.acts):
            (changes.shared if self._is_shared(act, fusions) else changes.applied).append(act)
        for fusion in changes.fusions:
            fusion.marks = any(act in changes.shared for act in fusion.acts)
        changes.pools = list(self._each(POOLS, self._pool))
        norms = {fusion.conv: fusion.norm for fusion in changes.fusions if fusion.conv is not None}
        # For each convolution whose backward needs only the sources of its input: how that input is made.
        self._joined = {conv: what for conv in self._paths if (what := self._source_of(conv))}
        convs = [conv for conv in self._paths if conv in norms or conv in self._joined]
        changes.convs = [(conv, lean(conv, norms.get(conv))) for conv in convs]
        self._rows(changes)
        return changes

    def _each(self, classes: Iterable[type], consider: Callable[[nn.Module], T]) -> Iterator[tuple[nn.Module, T]]:
        for module in self._paths:
            if type(module) in classes:
                try:
                    yield module, consider(module)
                except Refused as refused:
                    self._refused[module] = str(refused)

    def _calls(self, module: nn.Module) -> list[tuple[Flow, Call]]:
        return [(flow, call) for flow in self._flows for call in flow.of(module)]

    def _not_called(self) -> str:
        return "it is not called" if self._flows else "no call was observed: pass example_inputs to have it replaced"

    def _fusion(self, norm: nn.Module) -> Fusion:
        calls = self._calls(norm)
        if not calls:
            raise Refused(self._not_called())
        check_hooks(norm)
        acts = list(dict.fromkeys(self._activation_after(flow, call) for flow, call in calls))
        activations = list(dict.fromkeys(activation_of(act) for act in acts))
        if len(activations) > 1:
            raise Refused(f"it is called several times, followed by {listed(map(str, activations))}")
        for module in _seen_by(calls, inplace=False):
            check_hooks(module)
        for module in (norm, *acts):
            check_forward(module)
        if isinstance(norm, INSTANCE_NORMS) and any(
            call.shape is not None and len(call.shape) == norm._get_no_batch_dim() for _, call in calls
        ):
            raise Refused("it is called without a batch dimension")
        inplace = self._inplace and activations[0].invertible and all(self._may_overwrite(*call) for call in calls)
        conv = self._conv_before(calls) if inplace and isinstance(norm, BATCH_NORMS) else None
        makers = [flow.maker(call.reads[0]) for flow, call in calls] if inplace else []
        over = tuple(dict.fromkeys(maker.module for maker in makers if maker and maker.module))
        twin = twin_of(norm, activations[0], inplace, conv is not None)
        return Fusion(norm, acts, activations[0], inplace, twin, conv, over, _seen_by(calls, inplace))

    def _activation_after(self, flow: Flow, call: Call) -> nn.Module:
        value = call.makes[0]
        readers = flow.readers(value)
        if value in flow.returned:
            raise Refused("its output leaves the model, or is held by someone")
        if len(readers) != 1:
            what = f"is read by {listed(r.title for r in readers)}" if readers else "is not used"
            raise Refused(f"its output {what}" + (", more than once" if len({r.title for r in readers}) == 1 else ""))
        if readers[0].kind != "activation":
            raise Refused(f"followed by {readers[0].title}")
        if readers[0].module is None:
            raise Refused(f"followed by {readers[0].title}, a function called in the forward code")
        return readers[0].module

    def _may_overwrite(self, flow: Flow, call: Call) -> bool:
        maker = flow.maker(call.reads[0])
        if maker is None or maker.kind != "conv" or flow.only_reader(call.reads[0]) is not call:
            return False
        # A norm in place needs its output in backward, so the model must not change that output: y += x, for example.
        activation = flow.only_reader(call.makes[0])
        if activation is None or not flow.overwritten.isdisjoint(activation.makes):
            return False
        if maker.module is not None and is_observed(maker.module):
            return False
        return not any(map(has_hooks, flow.seen_by[call.reads[0]]))

    def _conv_before(self, calls: list[tuple[Flow, Call]]) -> nn.Module | None:
        """The convolution that the norm always follows, and that only this norm reads; None if there is none."""
        (conv, *others) = dict.fromkeys(flow.maker(call.reads[0]).module for flow, call in calls)  # type: ignore[union-attr]
        if others or conv is None or type(conv) not in LEAN:
            return None
        readers = (flow.only_reader(call.makes[0]) for flow, call in self._calls(conv))
        return conv if all(reader is not None and reader.module is calls[0][1].module for reader in readers) else None

    def _source_of(self, conv: nn.Module) -> str:
        """The title of the concatenation or enlargement whose sources ``conv`` can keep; "" if there is none."""
        if not joins(conv):
            return ""
        makers = [flow.maker(call.reads[0]) for flow, call in self._calls(conv)]
        if makers and all(maker is not None and maker.name in CATS for maker in makers):
            return "cat()"
        return "interpolate()" if makers and shrinks(conv) and all(map(_enlarges, makers)) else ""

    def _is_shared(self, act: nn.Module, fusions: dict[nn.Module, Fusion]) -> bool:
        makers = (flow.maker(call.reads[0]) for flow, call in self._calls(act))
        return not all(maker is not None and maker.module in fusions for maker in makers)

    def _sharing_allowed(self, fusion: Fusion, fusions: dict[nn.Module, Fusion]) -> bool:
        if TABLE[fusion.activation.name].idempotent or not any(self._is_shared(act, fusions) for act in fusion.acts):
            return True
        # The mark is on the output tensor itself, so no other call may lie between the norm and its activation.
        direct = all(call.makes[0] not in flow.passed for flow, call in self._calls(fusion.norm))
        return self._marks_anything and direct

    def _pool(self, pool: nn.Module) -> nn.Module:
        if not self._calls(pool):
            raise Refused(self._not_called())
        if pool.return_indices:
            raise Refused("it returns indices")
        try:
            return POOLS[type(pool)](pool.kernel_size, pool.stride, pool.padding, pool.dilation)
        except (TypeError, ValueError) as error:
            raise Refused(str(error)) from None

    def _rows(self, changes: Changes) -> None:
        """Adds a row for each module, and each function that a module calls, in the order of the calls in training."""
        flow = self._flows[0] if self._flows else Flow("")
        fusions = {fusion.norm: fusion for fusion in changes.fusions}
        convs = {fusion.conv for fusion in changes.fusions}
        pools = {pool for pool, _ in changes.pools}
        told: set[object] = set()
        left: dict[object, list[Call]] = {}
        for call in flow.calls:
            of = (call.where, call.name, self._is_joined(flow, call)) if call.module is None else call.module
            maker = flow.maker(call.reads[0]) if call.reads else None
            after_fused = call.kind == "activation" and maker is not None and maker.module in fusions
            if of in told or after_fused:
                continue
            if call.module in fusions:
                changes.replaced.append(self._fused_row(flow, fusions[call.module]))
            elif call.module in pools:
                changes.replaced.append(self._pool_row(flow, call.module))
            elif call.module in self._joined and call.module not in convs:
                conv, to = type(call.module).__name__, f"Join{type(call.module).__name__}"
                changes.replaced.append(
                    Row(self._paths[call.module], f"{self._joined[call.module]} + {conv}", to, "", None)
                )
            elif call.kind == "join" and not any(flow.readers(value) for value in call.makes):
                # The model returns this value, so no call keeps it.
                continue
            elif call.kind in ("norm", "activation", "pool", "join"):
                left.setdefault(of, []).append(call)
                continue
            else:
                continue
            told.add(of)
        changes.recomputed += [self._left_row(flow, calls) for calls in left.values()]
        told.update(left)
        # The row of a function stands for the norm module whose forward calls it.
        told_as_functions = {call.where for call in flow.calls if call.kind == "norm" and call.module is None}
        for module, paths in self._paths.items():
            why = self._refused.get(module) or _not_understood(module)
            if why and module not in told and told_as_functions.isdisjoint(paths):
                changes.skipped.append(Row(paths, type(module).__name__, "", why, None))

    def _fused_row(self, flow: Flow, fusion: Fusion) -> Row:
        conv = [] if fusion.conv is None else [fusion.conv]
        before = [path for module in (*conv, fusion.norm) for path in self._paths[module]]
        acts = [path for act in fusion.acts for path in self._paths[act][:1]]
        source = [self._joined[fusion.conv]] if fusion.conv in self._joined else []
        what = [*source, *(type(module).__name__ for module in (*conv, fusion.norm))]
        what.append(listed(type(act).__name__ for act in fusion.acts))
        to = (
            type(fusion.twin).__name__ if fusion.conv is None else type(fusion.conv).__name__.replace("Conv", "ConvABN")
        )
        nbytes = _total(call.nbytes for call in flow.of(fusion.norm))
        return Row((*before, *acts), " + ".join(what), f"{to}({fusion.activation})", "", nbytes)

    def _pool_row(self, flow: Flow, pool: nn.Module) -> Row:
        # One byte for each element replaces an int64 index, which saves 7 bytes.
        nbytes = _total(None if call.shape is None else math.prod(call.shape) * 7 for call in flow.of(pool))
        return Row(self._paths[pool], type(pool).__name__, type(pool).__name__, "", nbytes)

    def _is_joined(self, flow: Flow, call: Call) -> bool:
        """Whether only convolutions that keep the sources read a concatenation or an enlarged tensor."""
        readers = flow.readers(call.makes[0]) if (call.name in CATS or _enlarges(call)) and call.makes else []
        return bool(readers) and all(reader.module in self._joined for reader in readers)

    def _left_row(self, flow: Flow, calls: list[Call]) -> Row:
        call = calls[0]
        paths = (call.where,) if call.module is None else self._paths[call.module]
        why = "" if call.module is None else self._refused.get(call.module, "")
        if call.kind == "activation":
            makers = [flow.maker(call.reads[0]) if call.reads else None for call in calls]
            why = f"after {listed(maker.title if maker else 'an input' for maker in makers)}"
        elif self._is_joined(flow, call):
            why = "formed for the convolution that reads it, which keeps its parts"
        what = call.title if call.module is not None or len(calls) == 1 else f"{call.title}, {len(calls)} calls"
        nbytes = _total(call.nbytes for call in calls) if call.kind in ("activation", "join") else None
        return Row(paths, what, "", why, nbytes)


def _seen_by(calls: list[tuple[Flow, Call]], inplace: bool) -> tuple[nn.Module, ...]:
    """The modules that see a tensor which these calls of a norm, when fused, would not return or would overwrite."""
    values = [(flow, call.makes[0]) for flow, call in calls]
    if inplace:
        values += [(flow, call.reads[0]) for flow, call in calls]
    return tuple(dict.fromkeys(module for flow, value in values for module in flow.seen_by[value]))


def _enlarges(call: Call | None) -> bool:
    return call is not None and (call.name in ENLARGES or type(call.module) in UPSAMPLINGS)


def is_lazy(module: nn.Module) -> bool:
    """Whether the first call of the module will make its parameters."""
    return isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params()


def _not_understood(module: nn.Module) -> str:
    """Why a module that looks like a norm cannot be replaced; "" for other modules."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted: convert the model before torch.jit.script"
    if is_lazy(module):
        return "it is lazy and has no parameters yet: run the model once, then convert it"
    if type(module) is nn.SyncBatchNorm:
        return "its statistics are shared by several processes: convert BatchNorms, then call fusedseg.convert_sync"
    if isinstance(module, NORMS) and type(module) not in NORMS:
        return f"its class {type(module).__name__} is a subclass of {_base(module)}, and only {_base(module)} is known"
    return ""


def _base(module: nn.Module) -> str:
    return next(cls.__name__ for cls in NORMS if isinstance(module, cls))


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
