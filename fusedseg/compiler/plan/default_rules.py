"""The decision without a budget: which values forward saves for backward, by rules.

Results of compute-intensive ops and of random ops are saved, but for those of which a second run is nearly free
(``nearly_free.py``).  Everything cheap is recomputed from them, with these exceptions: a value that is much smaller
than its inputs, a value for which a much larger one would have to be computed first, the end of a long chain of cheap
calls, and what forward returns, because it lives anyway.  A norm and a dropout are recomputed in another way, the norm
from its statistics, whatever the column ``cheap`` says of them (``recompute.py``).
"""

import operator
from collections.abc import Callable, Collection

import torch
from torch import fx

from ...ops.low_bit.spec import FEWEST_VALUES
from ..graph import Joint, call_of, nbytes_of, size_of, tensors_of
from . import nearly_free, recompute
from .decision import (
    LARGER,
    SMALL,
    Decision,
    call_node,
    entries,
    is_available,
    is_view,
    note_readers,
    readers_of_forward,
    sources_of,
)
from .schedule import inputs_first

# The largest number of calls in a chain, of which backward runs each once.
LONGEST = 64
# Returns which of the saved compute-intensive ops run again.
Repeats = Callable[[set[fx.Node], Joint], set[fx.Node]]


def by_rules(joint: Joint, repeats: Repeats = nearly_free.repeated) -> Decision:
    """Decides by the rules; ``repeats`` names kept compute-intensive ops that run again."""
    first = _decided(joint, set())
    twice_run = repeats(first.saved, joint)
    # A compute-intensive op that runs again may need an input that backward would not keep otherwise.
    choices = [_decided(joint, twice_run), first] if twice_run else [first]
    for choice in choices:
        _keep_later(choice, joint)
        _take_along(choice)
    return min(choices, key=lambda choice: sum(map(nbytes_of, choice.saved)))


def _decided(joint: Joint, intensive: Collection[fx.Node]) -> Decision:
    """What backward reads by the rules if these compute-intensive ops run again."""
    found = Decision(backward=readers_of_forward(joint))
    # The calls that must run before a value is there; none for one that is kept.
    calls: dict[fx.Node, frozenset[str]] = {}

    def inputs(node: fx.Node) -> list[fx.Node]:
        return [source for source in sources_of(node, joint, intensive) or () if not is_available(source)]

    for reader, entry in entries(joint, found.backward):
        found.readers.setdefault(entry, set()).add(reader)
        for node in inputs_first(entry, inputs, calls):
            sources = sources_of(node, joint, intensive)
            before = frozenset[str]().union(*(calls.get(source, ()) for source in sources or ()))
            needed = before | {call_of(call_node(node))}
            if sources is None or _is_worth_keeping(node, sources, calls, needed):
                found.saved.add(node)
                calls[node] = frozenset()
            else:
                found.recomputed[node] = sources
                calls[node] = before if is_view(node) else needed
        # Only what the entry needs is read.
        note_readers(entry, found)
    return found


def _is_worth_keeping(
    node: fx.Node, sources: list[fx.Node], calls: dict[fx.Node, frozenset[str]], needed: frozenset[str]
) -> bool:
    if is_view(node):
        # Keeping a view would keep all of its memory.
        return False
    size = size_of(node)
    if isinstance(recompute.recomputation_of(node), recompute.MaxPool):
        # A result that is too small to be rounded is kept, so that it has no noise.
        return size < FEWEST_VALUES
    rebuilt = [source for source in sources if calls.get(source)]
    if any(not is_available(s) for s in sources) and size * SMALL <= max(map(size_of, sources)):
        return True
    positions = any(t.dtype == torch.int64 for t in tensors_of(node))
    return len(needed) > LONGEST or (not positions and any(size_of(s) >= LARGER * size for s in rebuilt))


def _keep_later(found: Decision, joint: Joint) -> None:
    """Keeps a value in place of the one before it, if nothing else reads that one: relu(conv(x)), not conv(x)."""
    waiting = [node for node in joint.graph.nodes if node in found.saved and node not in joint.free_to_save]
    while waiting:
        node = waiting.pop()
        if node not in found.saved:
            continue
        reader = _only_reader(node, found)
        while reader is not None and is_view(reader):
            reader = _only_reader(reader, found)
        if reader is None or nbytes_of(reader) > nbytes_of(node):
            continue
        sources = found.recomputed.pop(reader)
        found.saved.add(reader)
        waiting.append(reader)
        _drop_reader(reader, sources, found)


def _only_reader(node: fx.Node, found: Decision) -> fx.Node | None:
    readers = found.readers.get(node, set())
    reader = next(iter(readers), None)
    return reader if len(readers) == 1 and reader in found.recomputed else None


def _drop_reader(reader: fx.Node, sources: list[fx.Node], found: Decision) -> None:
    """``reader`` reads these sources no longer; what nobody reads is neither kept nor recomputed."""
    for source in sources:
        readers = found.readers.get(source)
        if readers is None:
            continue
        readers.discard(reader)
        if not readers:
            del found.readers[source]
            found.saved.discard(source)
            if source in found.recomputed:
                _drop_reader(source, found.recomputed.pop(source), found)


def _take_along(found: Decision) -> None:
    """Results that come with a call which runs again anyway are not saved, such as the statistics of a layer norm."""
    for node in [node for node in found.saved if node.target is operator.getitem]:
        others = (user for user in call_node(node).users if user in found.recomputed)
        other = next((user for user in others if recompute.recomputation_of(user) is None), None)
        if other is not None:
            found.saved.remove(node)
            found.recomputed[node] = found.recomputed[other]
            note_readers(node, found)
