"""The partitioner: passes over the joint graph, the decision what to keep, and the compiler's own cut along it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import fx

from .. import _backend, _torch
from .graph import Joint, Outputs, is_tensor, outputs_of, twin_of, value_of
from .low_bit import choose_bits, packing
from .plan import choose, eager_mode, keep, recompute, schedule
from .report import note_after, note_unpacked
from .rewrite import simplify, split_convolutions
from .settings import Settings, say_once

_parts = _torch.compiler_parts()
# Inductor's caches forget what another version of this package has made.  The files of the backend decide it, and the
# table of cheap ops, and the ops that graphs call.
FILES = tuple(map(str, sorted(Path(__file__).parents[1].rglob("*.py"))))


class Partition(_parts.CustomPartitionerFn):  # type: ignore[name-defined]
    """Divides a joint graph into forward and backward.  It can be pickled, so that Inductor's caches work."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES, repr(self.settings))

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **options: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        decision = prepare(module, num_fwd_outputs, self.settings)
        # Equal nodes are one already, and the partitioner does not know which must stay apart.
        with (
            _parts.config.patch(activation_memory_budget=1.0, cse=False),
            codes_returned(module.graph, num_fwd_outputs) as all_outputs,
        ):
            forward, backward = _parts.stock_partition(module, joint_inputs, num_fwd_outputs=all_outputs, **options)
        forget_outputs(forward, num_fwd_outputs, all_outputs)
        fused_code = self.settings.codegen == "inductor"
        schedule.rewrite(backward, decision.goal, fused_code)
        note_after(decision, (forward, backward), num_fwd_outputs, fused_code)
        return forward, backward


@contextmanager
def codes_returned(graph: fx.Graph, outputs: int) -> Iterator[int]:
    """Forward returns what it packs, behind its own ``outputs``; gives the number of all.

    The partitioner regards a label of forward only where a result of forward needs the node.  Else it keeps what is
    packed, and packs in backward, wherever codes and their ranges are not smaller.
    """
    of = Joint(graph, Outputs(outputs))
    others = (node for node in graph.nodes if node not in of.forward and is_tensor(node))
    kept = [node for node in others if node.meta.get(keep.LABEL) == keep.KEEP]
    args, says = of.end.args, of.end.meta.get("desc")
    returned = outputs_of(graph)
    of.end.args = ([*returned[:outputs], *kept, *returned[outputs:]],)
    if says is not None:
        of.end.meta["desc"] = [*says[:outputs], *([None] * len(kept)), *says[outputs:]]
    yield outputs + len(kept)
    of.end.args = args
    if says is not None:
        of.end.meta["desc"] = says


def forget_outputs(forward: fx.GraphModule, first: int, last: int) -> None:
    """Forward does not return its outputs from ``first`` to ``last``."""
    end = forward.graph.output_node()
    returned = outputs_of(forward.graph)
    end.args = ((*returned[:first], *returned[last:]),)
    if "desc" in end.meta:
        end.meta["desc"] = [*end.meta["desc"][:first], *end.meta["desc"][last:]]
    forward.graph.eliminate_dead_code()
    forward.recompile()


# The note of Inductor on the output of a graph: the places of the results whose strides the user sees.
PLACES = "user_visible_output_idxs"


class WeightsAsTheyAre(_parts.CustomGraphPass):  # type: ignore[name-defined]
    """A pass of Inductor over the graph of forward, which then keeps weights without a copy.  It can be pickled too.

    Inductor's layout optimization gives each convolution a weight in channels_last.  A weight that backward reads is
    returned by forward, and of what forward returns Inductor chooses the strides.  So backward would get the copy,
    which lives from forward to backward beside the parameter.  Here forward returns arguments in the strides that they
    have.
    """

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES)

    def __call__(self, graph: fx.Graph) -> None:
        end = graph.output_node()
        if PLACES in end.meta:
            results = enumerate(outputs_of(graph))
            given = {place for place, node in results if isinstance(node, fx.Node) and node.op == "placeholder"}
            end.meta[PLACES] = sorted({*end.meta[PLACES], *given})


class NoteChangeable(_parts.CustomGraphPass):  # type: ignore[name-defined]
    """The first pass of Inductor over the joint graph.  It can be pickled too."""

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES)

    def __call__(self, graph: fx.Graph) -> None:
        eager_mode.note_changeable(graph)


def prepare(module: fx.GraphModule, forward_outputs: int, settings: Settings) -> keep.Decision:
    """Rewrites and labels a joint graph, so that the compiler's partitioner keeps what the decision says."""
    module.graph.eliminate_dead_code()
    eager_mode.note_changeable(module.graph)
    changeable = module.graph.output_node().meta.pop(eager_mode.CHANGEABLE)
    outputs = Outputs(forward_outputs, frozenset(place for place in changeable if place < forward_outputs))
    limits, stock = settings.limits, 0
    if limits is not None:
        stock = eager_mode.kept_bytes(Joint(module.graph, outputs))
    if _parts.config.cse:
        module.graph = _parts.fx_graph_cse(module.graph)
        simplify.part(module.graph)
    graph = module.graph
    if (settings.bits is not None or limits is not None) and any(keep.LABEL in node.meta for node in graph.nodes):
        say_once(
            ": the options bits and budget change nothing in the parts of the model that are inside of a checkpoint"
        )
    simplify.rewrite(graph)
    simplify.forget_running(graph)
    if settings.bits is None:
        choices = _exact_choices(graph, outputs, settings, stock)
        decided = keep.decide(choices.joint) if limits is None else choose.met_or_nearest(choices, limits).decision
        keep.apply(choices.joint, decided)
    else:
        decided = _rounded(module, outputs, settings, stock)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return decided


def _exact_choices(graph: fx.Graph, outputs: Outputs, settings: Settings, stock: int) -> choose.Choices:
    """The choices without bits."""
    if _splits(graph, settings):
        # The last bits may differ from those of the graph as it is.
        split_convolutions.rewrite(graph)
    graph.eliminate_dead_code()
    # Who asks for bits has too little memory.
    goal = None if settings.bits is None else schedule.LOWEST
    return choose.Choices(Joint(graph, outputs), stock, settings.codegen == "inductor", goal)


def _splits(graph: fx.Graph, settings: Settings) -> bool:
    """Whether backward of a convolution of a concatenation is computed source by source.

    The peak is lower then.  But on a GPU the parts take longer than the concatenation does, which is formed again, so
    there a limit of the peak must ask for it.
    """
    limits, given = settings.limits, filter(is_tensor, graph.find_nodes(op="placeholder"))
    if any(_backend.on_gpu(value_of(node)) for node in given):
        return limits is not None and limits.peak is not None
    return settings.codegen == "inductor" or limits is not None


def _rounded(module: fx.GraphModule, outputs: Outputs, settings: Settings, stock: int) -> keep.Decision:
    """Packs what forward keeps, unless the step would keep more, or peak higher, than without bits."""
    assert settings.bits is not None
    graph, fused_code, limits = module.graph, settings.codegen == "inductor", settings.limits
    exact_graph, _ = twin_of(graph)
    exact_choices = _exact_choices(exact_graph, outputs, settings, stock)
    exact, exact_met = choose.nearest(exact_choices, limits)
    split_convolutions.rewrite(graph)
    recompute.round_inputs(graph)
    graph.eliminate_dead_code()
    of = Joint(graph, outputs)
    choices: choose.Choices = packing.RoundedChoices(of, stock, fused_code, settings.bits)
    wanted, met = None, True
    if limits is not None:
        choice, met = choose.nearest(choices, limits, exact.cost)
        wanted = choice.decision
    of, decided, found = choose_bits.settled(graph, outputs, settings.bits, wanted)
    cost = packing.packed(of, decided, found, settings.seed, fused_code)
    if not cost.is_within(exact.cost):
        module.graph, decided, choices, cost, met = exact_graph, exact.decision, exact_choices, exact.cost, exact_met
        keep.apply(exact_choices.joint, decided)
        note_unpacked()
    if limits is not None and not met:
        choose.warn_of(cost, limits, choices)
    return decided
