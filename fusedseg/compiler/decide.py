"""The decision about a joint graph: what forward keeps, what backward recomputes, and what is packed.

``plan/choose.py`` chooses.  With bits what is kept is packed (``low_bit/packing.py``), unless the step would keep more,
or peak higher, than without bits.  With a budget a lower peak is enough.
"""

from collections import Counter
from dataclasses import replace

from torch import fx

from . import passes
from .graph import POLICY, Joint, Outputs, twin_of
from .low_bit import choose_bits, packing
from .notes import current
from .passes import Stage
from .plan import choose, schedule, write
from .plan.decision import Decision
from .settings import Settings, say_once


def decide(module: fx.GraphModule, outputs: Outputs, settings: Settings, known: choose.Known | None = None) -> Decision:
    """Decides, and writes the decision into the graph of ``module``, but for its policies.

    ``known`` has what was found of other copies of the graph.
    """
    asks = settings.bits is not None or settings.limits is not None
    if asks and any(POLICY in node.meta for node in module.graph.nodes):
        say_once(
            ": the options bits and budget change nothing in the parts of the model that are inside of a checkpoint"
        )
    graph = module.graph if settings.bits is None else twin_of(module.graph)[0]
    passes.run(Stage.CANDIDATE, passes.JOINT, graph, replace(settings, bits=None))
    graph.eliminate_dead_code()
    # Bits are used where a step peaks no higher with them than it could without them.
    peak_target = None if settings.bits is None else schedule.LOWEST
    choices = choose.Choices(Joint(graph, outputs), settings.by_inductor, peak_target)
    decision = _asked_for(module.graph, choices, settings, known) if asks else choices.first()
    if decision.policies:
        graph = module.graph
    else:
        write.apply(choices.joint, decision)
    graph.eliminate_dead_code()
    module.graph = graph
    graph.lint()
    return decision


def _asked_for(
    graph: fx.Graph, exact_choices: choose.Choices, settings: Settings, known: choose.Known | None
) -> Decision:
    """What is best for a budget and for bits; a decision that packs is written into the graph."""
    found = choose.nearest(exact_choices, settings.limits, known=known)
    if settings.bits is not None:
        rounded = _rounded(graph, exact_choices.joint.outputs, settings, found)
        current().unpacked = rounded is None
        found = rounded or found
    if not found.met:
        choose.warn_of(found.cost, settings.limits, exact_choices)
    return found.decision


def _rounded(graph: fx.Graph, outputs: Outputs, settings: Settings, exact: choose.Choice) -> choose.Choice | None:
    """What is best with bits; None if nothing may be packed, or if ``exact`` is better."""
    assert settings.bits is not None
    passes.run(Stage.CANDIDATE, passes.JOINT, graph, settings)
    graph.eliminate_dead_code()
    choices = packing.RoundedChoices(Joint(graph, outputs), settings.by_inductor, settings.bits, exact.cost)
    chosen, met = choices.first(), True
    if settings.limits is not None:
        chosen, _, met = choose.nearest(choices, settings.limits, exact.cost)
    settled = choose_bits.settled(graph, outputs, settings.bits, chosen)
    if not settled.packed:
        return None
    # From here on the graph packs and unpacks; ``choices`` knows the one before.
    packed = packing.packed(settled, settings.seed, settings.by_inductor, exact.cost)._replace(met=met)
    is_better = packed.cost.is_within(exact.cost)
    if settings.limits is not None:
        # The lower peak, so that a smaller budget has no higher one.
        is_better |= (not met, packed.cost.peak) < (not exact.met, exact.cost.peak)
    if not is_better:
        return None
    current().packed = Counter(map(str, settled.packed.values()))
    return packed
