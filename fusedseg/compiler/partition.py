"""The partitioner: passes over the joint graph, the decision what to keep, and the compiler's own cut along it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from .. import _torch
from . import branches, choose, forms, fused, joint, keep, order, rounded, simplify, split
from .report import note_after
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
        self, module: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        outputs = options["num_fwd_outputs"]
        plan = prepare(module, outputs, self.settings)
        # Equal nodes are one already, and the partitioner does not know which must stay apart.
        with _parts.config.patch(activation_memory_budget=1.0, cse=False):
            forward, backward = _parts.min_cut(module, joint_inputs, **options)
        if self.settings.codegen == "aten":
            order.rewrite(backward, plan.goal)
        note_after(plan, (forward, backward), outputs, self.settings.codegen == "inductor")
        return forward, backward


def prepare(module: fx.GraphModule, forward_outputs: int, settings: Settings) -> keep.Plan:
    """Rewrites and labels a joint graph, so that the compiler's partitioner keeps what the plan says."""
    module.graph.eliminate_dead_code()
    simplify.forget_labels(module.graph)
    wanted, eager = settings.wanted, 0
    if wanted is not None:
        eager = choose.eager_bytes(joint.Joint(module, forward_outputs))
    if _parts.config.cse:
        module.graph = _parts.fx_graph_cse(module.graph)
        simplify.part(module.graph)
    graph = module.graph
    if (settings.bits is not None or wanted is not None) and any(keep.LABEL in node.meta for node in graph.nodes):
        say_once(
            ": the options bits and budget change nothing in the parts of the model that are inside of a checkpoint"
        )
    simplify.rewrite(graph)
    forms.forget_running(graph)
    if settings.codegen == "inductor" or settings.bits is not None:
        # The last bits may differ from those of the graph as it is.
        split.rewrite(graph)
    graph.eliminate_dead_code()
    if settings.bits is None:
        of = joint.Joint(module, forward_outputs)
        decided, storage = keep.plan(of), None
        if wanted is not None:
            decided = choose.choose(of, wanted, eager, settings.codegen == "inductor")
    else:
        of, decided, found = _rounded(module, forward_outputs, settings.bits)
        storage = rounded.Storage(graph, found, settings.seed)
    keep.apply(of, decided, storage)
    if settings.bits is not None and settings.codegen == "inductor":
        fused.rewrite(module)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return decided


def _rounded(module: fx.GraphModule, outputs: int, bits: int) -> tuple[joint.Joint, keep.Plan, rounded.Rounded]:
    """What is kept, and in how many bits; ops of backward with branches become chains where they need exact values."""
    forms.round_inputs(module.graph)
    stuck: set[fx.Node] = set()
    while True:
        of = joint.Joint(module, outputs)
        decided = keep.plan(of, repeats=False)
        found = rounded.choose(of, decided, bits, stuck)
        if not found.asking:
            return of, decided, found
        stuck |= {node for node in found.asking if not branches.write_chain(module.graph, node)}
        module.graph.eliminate_dead_code()
