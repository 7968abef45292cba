"""The decision about a joint graph, which is labelled so that PyTorch's partitioner keeps what the decision says.

Without options the rules decide (``plan/keep.py``), with a budget a search (``plan/choose.py``), and with bits what is
kept is packed (``low_bit/packing.py``), unless the step would keep more, or peak higher, than without bits.
"""

from torch import fx

from .. import _backend
from .graph import Joint, is_tensor, twin_of, value_of
from .low_bit import choose_bits, packing
from .plan import choose, keep, recompute, schedule
from .plan.eager_mode import EagerMode
from .report import note_unpacked
from .rewrite import late_bias, split_convolutions
from .settings import Settings, say_once


def decide(module: fx.GraphModule, eager: EagerMode, settings: Settings) -> keep.Decision:
    """Decides, and labels and rewrites the graph of ``module``."""
    asks = settings.bits is not None or settings.limits is not None
    if asks and any(keep.LABEL in node.meta for node in module.graph.nodes):
        say_once(
            ": the options bits and budget change nothing in the parts of the model that are inside of a checkpoint"
        )
    decided = (_exact if settings.bits is None else _rounded)(module, eager, settings)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return decided


def _exact(module: fx.GraphModule, eager: EagerMode, settings: Settings) -> keep.Decision:
    choices, limits = _exact_choices(module.graph, eager, settings), settings.limits
    decided = keep.decide(choices.joint) if limits is None else choose.met_or_nearest(choices, limits).decision
    keep.apply(choices.joint, decided)
    return decided


def _exact_choices(graph: fx.Graph, eager: EagerMode, settings: Settings) -> choose.Choices:
    """The choices without bits, of a graph whose convolutions are split and whose biases are added late."""
    if _splits(graph, settings):
        # The last bits may differ from those of the graph as it is.
        split_convolutions.rewrite(graph)
    if not settings.fused_code:
        late_bias.rewrite(graph)
    graph.eliminate_dead_code()
    # Bits are used where a step peaks no higher with them than it could without them.
    goal = None if settings.bits is None else schedule.LOWEST
    return choose.Choices(Joint(graph, eager.outputs), eager.kept, settings.fused_code, goal)


def _splits(graph: fx.Graph, settings: Settings) -> bool:
    """Whether backward of a convolution of a concatenation is computed source by source.

    The peak is lower then.  But on a GPU the parts take longer than the concatenation does, which is formed again, so
    there a limit of the peak must ask for it.
    """
    limits, given = settings.limits, filter(is_tensor, graph.find_nodes(op="placeholder"))
    if any(_backend.on_gpu(value_of(node)) for node in given):
        return limits is not None and limits.peak is not None
    return settings.fused_code or limits is not None


def _rounded(module: fx.GraphModule, eager: EagerMode, settings: Settings) -> keep.Decision:
    assert settings.bits is not None
    graph = module.graph
    limits = settings.limits
    exact_graph, _ = twin_of(graph)
    exact_choices = _exact_choices(exact_graph, eager, settings)
    exact, exact_met = choose.nearest(exact_choices, limits)
    split_convolutions.rewrite(graph)
    if not settings.fused_code:
        late_bias.rewrite(graph)
    recompute.round_inputs(graph)
    graph.eliminate_dead_code()
    of = Joint(graph, eager.outputs)
    choices: choose.Choices = packing.RoundedChoices(of, eager.kept, settings.fused_code, settings.bits, exact.cost)
    wanted, met = None, True
    if limits is not None:
        choice, met = choose.nearest(choices, limits, exact.cost)
        wanted = choice.decision
    of, decided, found = choose_bits.settled(graph, eager.outputs, settings.bits, wanted)
    cost = packing.packed(of, decided, found, settings.seed, settings.fused_code, exact.cost)
    if not (found.bits or found.integers) or not cost.is_within(exact.cost):
        module.graph, decided, choices, cost, met = exact_graph, exact.decision, exact_choices, exact.cost, exact_met
        keep.apply(exact_choices.joint, decided)
        note_unpacked()
    if limits is not None and not met:
        choose.warn_of(cost, limits, choices)
    return decided
