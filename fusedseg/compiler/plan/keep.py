"""What forward keeps for backward, decided once for a joint graph.

Results of compute-intensive ops and of random ops are kept, but for those of which a second run is nearly free
(``nearly_free.py``).  Everything cheap is recomputed from them, with these exceptions: a value that is much smaller
than its inputs, a value for which a much larger one would have to be computed first, the end of a long chain of cheap
calls, and what forward returns, because it lives anyway.  Views cost nothing.  A norm and a dropout are recomputed in
another form, the norm from its statistics, whatever the column ``cheap`` says of them (``FORMS`` of ``recompute.py``).

A result of the graph that eager mode does not keep may be changed in place before backward.  It counts as any other
value, and where it must be kept, a copy of it is.

``by_rules`` reads the graph and decides.  ``apply`` writes the decision into the graph: it gives backward copies of
what it recomputes.  It notes the labels of nodes, which are those of a checkpoint, and
``partition.divide_along_labels`` writes them, so that PyTorch's own partitioner divides the graph along them.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...ops.low_bit.spec import FEWEST_VALUES
from ..graph import (
    LARGER,
    SMALL,
    Joint,
    behind,
    call,
    call_of,
    calls_view,
    copied,
    is_cheap,
    is_compute_intensive,
    is_op,
    is_random,
    nbytes_of,
    node_at,
    nodes_from,
    size_of,
    tensors_of,
)
from . import nearly_free, recompute
from .schedule import PeakTarget, inputs_first

LABEL = "recompute"
# The largest number of calls in a chain, of which backward runs each once.
LONGEST = 64
# Returns which of the kept compute-intensive ops run again.
Repeats = Callable[[set[fx.Node], Joint], set[fx.Node]]
RECOMPUTE, KEEP = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


@dataclass
class Decision:
    """What backward reads of forward.

    Attributes:
        kept: the nodes that forward keeps.
        recomputed: the nodes that backward recomputes, each with the nodes that this reads.
        readers: for each of these nodes, who reads it: nodes of ``recomputed`` and nodes of backward.
        reading: the nodes of backward.
        instead: nodes that backward reads in place of others, with the same value.
        peak_target: how the order of backward weighs the peak against compute-intensive ops that run a third time; None
            without a budget and bits.
        labels: what the partitioner is told of each node, once ``apply`` has written the decision.
    """

    kept: set[fx.Node] = field(default_factory=set)
    recomputed: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    readers: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    instead: dict[fx.Node, fx.Node] = field(default_factory=dict)
    peak_target: PeakTarget | None = None
    reading: list[fx.Node] = field(default_factory=list)
    labels: dict[fx.Node, CheckpointPolicy] = field(default_factory=dict)


def is_available(node: fx.Node) -> bool:
    """Whether backward has a value anyway: an argument, a number, or what a checkpoint in the model decides about."""
    return node.op in ("placeholder", "get_attr") or not tensors_of(node) or LABEL in node.meta


def call_node(node: fx.Node) -> fx.Node:
    """The call of which a node picks one of several results, or the node itself."""
    return node_at(node, 0) if node.target is operator.getitem else node


def is_view(node: fx.Node) -> bool:
    """Whether a value needs no memory of its own."""
    return calls_view(call_node(node))


def _may_run_again(node: fx.Node) -> bool:
    made = call_node(node)
    if is_cheap(made) or recompute.form_of(node) is not None:
        return True
    return is_op(made) and not made.all_input_nodes and not is_random(made)


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes from which backward recomputes a node."""
    form = recompute.form_of(node)
    return list(call_node(node).all_input_nodes) if form is None else recompute.read_by(form)


def sources_of(node: fx.Node, joint: Joint, intensive: Collection[fx.Node] | None = None) -> list[fx.Node] | None:
    """The nodes from which backward may recompute a node; None if it must be kept.

    intensive: those that may be recomputed; None for all that are not random.
    """
    made = call_node(node)
    repeats = node in intensive if intensive is not None else is_compute_intensive(made) and not is_random(made)
    if node in joint.held or not (repeats or _may_run_again(node)):
        return None
    sources = _sources(node)
    if not is_view(node) and any(source in joint.overwritten for source in sources):
        # Backward would read what forward has written there.
        return None
    return sources


def entries(joint: Joint, reading: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes of backward that read nodes of forward, and what they read.  The end of the graph reads gradients."""
    own = set(reading)
    for reader in (*reading, joint.end):
        for node in joint.gradients if reader is joint.end else reader.all_input_nodes:
            if node not in own and not is_available(node):
                yield reader, node


def readers_of_forward(joint: Joint, recomputed: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The nodes of backward, in the order of the graph.

    They are computed from a gradient, or backward alone needs them and they are not cheap, or they are computed from
    such nodes.

    recomputed: nodes that backward computes as it does values of forward.
    """
    found: dict[fx.Node, None] = {}

    def is_of_backward(node: fx.Node) -> bool:
        if node in joint.backward:
            return True
        if node.op != "call_function" or not tensors_of(node) or node in recomputed or call_node(node) in joint.forward:
            # Symbolic sizes are computed in forward.
            return False
        return not _may_run_again(node) or any(source in found for source in node.all_input_nodes)

    for node in joint.graph.nodes:
        if is_of_backward(node):
            found[node] = None
    return list(found)


def by_rules(joint: Joint, repeats: Repeats = nearly_free.repeated) -> Decision:
    """Decides by the rules; ``repeats`` names kept compute-intensive ops that run again."""
    first = _decided(joint, set())
    twice_run = repeats(first.kept, joint)
    # A compute-intensive op that runs again may need an input that backward would not keep otherwise.
    choices = [_decided(joint, twice_run), first] if twice_run else [first]
    for choice in choices:
        _keep_later(choice, joint)
        _take_along(choice)
    return min(choices, key=lambda choice: sum(map(nbytes_of, choice.kept)))


def decision_that_recomputes(
    joint: Joint, recomputed: Collection[fx.Node], instead: Mapping[fx.Node, fx.Node] = MappingProxyType({})
) -> Decision:
    """What backward reads if just these values are recomputed, and others are read in place of some nodes."""
    reading = readers_of_forward(joint, recomputed)
    found = Decision(reading=reading, instead=dict(instead))
    for reader, entry in entries(joint, reading):
        node = instead.get(entry, entry)
        found.readers.setdefault(node, set()).add(reader)
        stack = [node]
        while stack:
            one = stack.pop()
            if one in found.kept or one in found.recomputed:
                continue
            if one not in recomputed:
                found.kept.add(one)
                continue
            found.recomputed[one] = [instead.get(source, source) for source in _sources(one)]
            stack += [source for source in found.recomputed[one] if not is_available(source)]
        _read(node, found)
    return found


def _decided(joint: Joint, intensive: Collection[fx.Node]) -> Decision:
    """What backward reads by the rules if these compute-intensive ops run again."""
    found = Decision(reading=readers_of_forward(joint))
    # The calls that must run before a value is there; none for one that is kept.
    calls: dict[fx.Node, frozenset[str]] = {}

    def inputs(node: fx.Node) -> list[fx.Node]:
        return [source for source in sources_of(node, joint, intensive) or () if not is_available(source)]

    for reader, entry in entries(joint, found.reading):
        found.readers.setdefault(entry, set()).add(reader)
        for node in inputs_first(entry, inputs, calls):
            sources = sources_of(node, joint, intensive)
            before = frozenset[str]().union(*(calls.get(source, ()) for source in sources or ()))
            needed = before | {call_of(call_node(node))}
            if sources is None or _is_worth_keeping(node, sources, calls, needed):
                found.kept.add(node)
                calls[node] = frozenset()
            else:
                found.recomputed[node] = sources
                calls[node] = before if is_view(node) else needed
        # Only what the entry needs is read.
        _read(entry, found)
    return found


def _is_worth_keeping(
    node: fx.Node, sources: list[fx.Node], calls: dict[fx.Node, frozenset[str]], needed: frozenset[str]
) -> bool:
    if is_view(node):
        # Keeping a view would keep all of its memory.
        return False
    size = size_of(node)
    if isinstance(recompute.form_of(node), recompute.MaxPool):
        # A result that is too small to be rounded is kept, so that it has no noise.
        return size < FEWEST_VALUES
    rebuilt = [source for source in sources if calls.get(source)]
    if any(not is_available(s) for s in sources) and size * SMALL <= max(map(size_of, sources)):
        return True
    positions = any(t.dtype == torch.int64 for t in tensors_of(node))
    return len(needed) > LONGEST or (not positions and any(size_of(s) >= LARGER * size for s in rebuilt))


def _read(node: fx.Node, found: Decision) -> None:
    """Notes who reads the nodes from which a node is recomputed."""
    stack = [node]
    while stack:
        reader = stack.pop()
        for source in found.recomputed.get(reader, ()):
            if is_available(source):
                continue
            readers = found.readers.setdefault(source, set())
            if reader not in readers:
                readers.add(reader)
                stack.append(source)


def _keep_later(found: Decision, joint: Joint) -> None:
    """Keeps a value in place of the one before it, if nothing else reads that one: relu(conv(x)), not conv(x)."""
    waiting = [node for node in joint.graph.nodes if node in found.kept and node not in joint.held]
    while waiting:
        node = waiting.pop()
        if node not in found.kept:
            continue
        reader = _only_reader(node, found)
        while reader is not None and is_view(reader):
            reader = _only_reader(reader, found)
        if reader is None or nbytes_of(reader) > nbytes_of(node):
            continue
        sources = found.recomputed.pop(reader)
        found.kept.add(reader)
        waiting.append(reader)
        drop_reader(reader, sources, found)


def _only_reader(node: fx.Node, found: Decision) -> fx.Node | None:
    readers = found.readers.get(node, set())
    reader = next(iter(readers), None)
    return reader if len(readers) == 1 and reader in found.recomputed else None


def drop_reader(reader: fx.Node, sources: list[fx.Node], found: Decision) -> None:
    """``reader`` reads these sources no longer; what nobody reads is neither kept nor recomputed."""
    for source in sources:
        readers = found.readers.get(source)
        if readers is None:
            continue
        readers.discard(reader)
        if not readers:
            del found.readers[source]
            found.kept.discard(source)
            if source in found.recomputed:
                drop_reader(source, found.recomputed.pop(source), found)


def _take_along(found: Decision) -> None:
    """Results that come with a call which runs again anyway are not kept, such as the statistics of a layer norm."""
    for node in [node for node in found.kept if node.target is operator.getitem]:
        others = (
            other for other in call_node(node).users if other in found.recomputed and recompute.form_of(other) is None
        )
        other = next(others, None)
        if other is not None:
            found.kept.remove(node)
            found.recomputed[node] = found.recomputed[other]
            _read(node, found)


class Unpacking(Protocol):
    """Kept nodes that are packed, the nodes that pack them, and what backward reads in their place."""

    packed: dict[fx.Node, tuple[Any, ...]]
    packing: list[fx.Node]

    def read(self, node: fx.Node, before: fx.Node) -> fx.Node: ...


def apply(joint: Joint, decided: Decision, storage: Unpacking | None = None) -> None:
    """Lets backward read what it recomputes, and what ``storage`` unpacks; ``decided`` gets its labels."""
    labels = decided.labels = dict.fromkeys(storage.packing, KEEP) if storage is not None else {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in [node for node in joint.graph.nodes if node in decided.kept]:
        if storage is not None and node in storage.packed:
            continue
        if node in joint.changeable:
            copies[node] = call(joint.graph, torch.ops.aten.clone.default, node, before=behind(node))
            labels[copies[node]] = KEEP
            continue
        labels.update((one, KEEP) for one in (node, call_node(node)) if LABEL not in one.meta)
    writer = _Writer(joint, decided, storage, copies)
    for reader in decided.reading:
        read = functools.partial(writer.read, before=reader)
        reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), read)
    (returned,) = joint.end.args
    gradients = set(joint.gradients)
    joint.end.args = (
        fx.map_arg(returned, lambda n: writer.read(n, joint.end) if n in gradients and n not in joint.returned else n),
    )


class _Writer:
    """Gives backward the nodes that it reads."""

    def __init__(
        self, joint: Joint, decided: Decision, storage: Unpacking | None, copies: dict[fx.Node, fx.Node]
    ) -> None:
        self.graph, self.decided, self.storage, self.copies = joint.graph, decided, storage, copies
        self.labels = decided.labels
        self.changeable = joint.changeable
        self.made: dict[fx.Node, fx.Node] = {}

    def read(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """What backward reads in place of a node of forward: the node itself, or a copy with other inputs."""
        node = self.decided.instead.get(node, node)
        if self.storage is not None and node in self.storage.packed:
            last = before.prev
            made = self.storage.read(node, before)
            for new in nodes_from(last.next, before):
                self._labelled(new)
            return made
        if node not in self.decided.recomputed:
            return self.copies.get(node, node)
        if node not in self.made:
            self.made[node] = self._recompute(node, before)
        return self.made[node]

    def _recompute(self, node: fx.Node, before: fx.Node) -> fx.Node:
        form = recompute.form_of(node)
        if form is not None:
            last = before.prev
            made = form.write(self.graph, lambda n: self.read(n, before), before)
            for new in nodes_from(last.next, before):
                self._labelled(new)
            return made
        whole = call_node(node)
        swapped = {source: self.read(source, before) for source in whole.all_input_nodes}
        if node not in self.changeable and all(source is other for source, other in swapped.items()):
            return self._labelled(node, whole)
        if node is whole:
            return self._labelled(copied(self.graph, node, swapped, before))
        if whole not in self.made:
            self.made[whole] = self._labelled(copied(self.graph, whole, swapped, before))
        return self._labelled(copied(self.graph, node, {whole: self.made[whole]}, before))

    def _labelled(self, node: fx.Node, *others: fx.Node) -> fx.Node:
        self.labels.update(dict.fromkeys((node, *others), RECOMPUTE))
        return node
