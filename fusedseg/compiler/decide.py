"""The decision about a joint graph: what forward keeps, what backward recomputes, and what is packed.

``plan/choose.py`` chooses.  With bits what is kept is packed (``low_bit/packing.py``), unless the step would keep more,
or peak higher, than without bits.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from ..memory.step_bytes import StepBytes
from . import passes
from .graph import POLICY, Joint, Outputs, twin_of
from .low_bit import choose_bits, packing
from .notes import current
from .passes import Stage
from .plan import choose, schedule, write
from .plan.decision import Decision
from .settings import Settings, say_once


class Candidate(NamedTuple):
    """A decision about a graph.

    choices: those of which it is one.
    cost: what it costs; None where there is nothing to compare it with.
    met: whether it meets the budget.
    """

    graph: fx.Graph
    choices: choose.Choices
    decision: Decision
    cost: StepBytes | None = None
    met: bool = True


def decide(module: fx.GraphModule, outputs: Outputs, settings: Settings, known: choose.Known | None = None) -> Decision:
    """Decides, and writes the decision into the graph of ``module``, but for its policies.

    ``known`` has what was found of other copies of the graph.
    """
    asks = settings.bits is not None or settings.limits is not None
    if asks and any(POLICY in node.meta for node in module.graph.nodes):
        say_once(
            ": the options bits and budget change nothing in the parts of the model that are inside of a checkpoint"
        )
    if settings.bits is None:
        found = _exact(module.graph, outputs, settings, known)
    else:
        found = _exact(twin_of(module.graph)[0], outputs, settings, known)
        rounded = _rounded(module.graph, outputs, settings, found)
        if rounded is None:
            current().unpacked = True
        found = rounded or found
    if not found.decision.policies:
        write.apply(found.choices.joint, found.decision)
    if found.graph is not module.graph:
        module.graph = found.graph
    if not found.met:
        choose.warn_of(found.cost, settings.limits, found.choices)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return found.decision


def _exact(graph: fx.Graph, outputs: Outputs, settings: Settings, known: choose.Known | None) -> Candidate:
    """What is best without bits."""
    passes.run(Stage.CANDIDATE, passes.JOINT, graph, replace(settings, bits=None))
    graph.eliminate_dead_code()
    # Bits are used where a step peaks no higher with them than it could without them.
    peak_target = None if settings.bits is None else schedule.LOWEST
    choices = choose.Choices(Joint(graph, outputs), settings.by_inductor, peak_target)
    if settings.bits is None and settings.limits is None:
        return Candidate(graph, choices, choices.first())
    choice, met = choose.nearest(choices, settings.limits, known=known)
    return Candidate(graph, choices, choice.decision, choice.cost, met)


def _rounded(graph: fx.Graph, outputs: Outputs, settings: Settings, exact: Candidate) -> Candidate | None:
    """What is best with bits; None if nothing may be packed, or if ``exact`` is better."""
    assert settings.bits is not None
    assert exact.cost is not None
    passes.run(Stage.CANDIDATE, passes.JOINT, graph, settings)
    graph.eliminate_dead_code()
    choices = packing.RoundedChoices(Joint(graph, outputs), settings.by_inductor, settings.bits, exact.cost)
    chosen, met = choices.first(), True
    if settings.limits is not None:
        choice, met = choose.nearest(choices, settings.limits, exact.cost)
        chosen = choice.decision
    settled = choose_bits.settled(graph, outputs, settings.bits, chosen)
    if not settled.packed:
        return None
    # From here on the graph packs and unpacks; ``choices`` knows the one before.
    packed = packing.packed(settled, settings.seed, settings.by_inductor, exact.cost)
    is_better = packed.cost.is_within(exact.cost)
    if settings.limits is not None:
        # The lower peak, so that a smaller budget has no higher one.
        is_better |= (not met, packed.cost.peak) < (not exact.met, exact.cost.peak)
    if not is_better:
        return None
    current().packed = Counter(map(str, settled.packed.values()))
    return Candidate(graph, choices, packed.decision, packed.cost, met)
