"""The partitioner: passes over the joint graph, the decision what to keep, and the compiler's own cut along it."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from .. import _torch
from . import branches, choose, cut, forms, joint, keep, live, order, rounded, simplify, split, twice
from .report import note_after
from .settings import Settings

_parts = _torch.compiler_parts()
# The files whose code decides what a graph becomes; Inductor's caches forget what another version of them has made.
_OURS = (joint, keep, twice, forms, simplify, split, branches, rounded, choose, cut, live, order)
FILES = (*(str(module.__file__) for module in _OURS), __file__)


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
        with _parts.config.patch(activation_memory_budget=1.0):
            forward, backward = _parts.min_cut(module, joint_inputs, **options)
        if self.settings.codegen == "aten":
            order.rewrite(backward, plan.goal)
        note_after(plan, (forward, backward), outputs, self.settings.codegen == "inductor")
        return forward, backward


def prepare(module: fx.GraphModule, forward_outputs: int, settings: Settings) -> keep.Plan:
    """Rewrites and labels a joint graph, so that the compiler's partitioner keeps what the plan says."""
    graph = module.graph
    graph.eliminate_dead_code()
    wanted, eager = settings.wanted, 0
    if wanted is not None:
        eager = choose.eager_bytes(joint.Joint(module, forward_outputs))
    simplify.rewrite(graph)
    forms.forget_running(graph)
    if settings.codegen == "inductor" or settings.bits is not None:
        # The last bits may differ from those of the graph as it is.
        split.rewrite(graph)
    graph.eliminate_dead_code()
    of = joint.Joint(module, forward_outputs)
    storage = None
    if settings.bits is not None:
        branches.simplify_backward(of)
        of = joint.Joint(module, forward_outputs)
    if wanted is None:
        decided = keep.plan(of, repeats=settings.bits is None)
    else:
        decided = choose.choose(of, wanted, eager, settings.codegen == "inductor")
    if settings.bits is not None:
        storage = rounded.Storage(graph, rounded.choose(of, decided, settings.bits), settings.seed)
    keep.apply(of, decided, storage)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return decided
