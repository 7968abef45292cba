"""The partitioner: passes over the joint graph, the decision what to keep, and the compiler's own cut along it."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from .. import _torch
from ..ops.recompute import knapsack
from . import choose, forms, joint, keep, live, simplify, split
from .settings import Settings

_parts = _torch.compiler_parts()
# The files whose code decides what a graph becomes; Inductor's caches forget what another version of them has made.
FILES = (*(str(module.__file__) for module in (joint, keep, forms, simplify, split, choose, live, knapsack)), __file__)


class Partition(_parts.CustomPartitionerFn):  # type: ignore[name-defined]
    """Divides a joint graph into forward and backward.  It can be pickled, so that Inductor's caches work."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES, repr(self.settings))

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        prepare(module, options["num_fwd_outputs"], self.settings)
        with _parts.config.patch(activation_memory_budget=1.0):
            return _parts.min_cut(module, joint_inputs, **options)


def prepare(module: fx.GraphModule, forward_outputs: int, settings: Settings) -> keep.Plan:
    """Rewrites and labels a joint graph, so that the compiler's partitioner keeps what the plan says."""
    graph = module.graph
    graph.eliminate_dead_code()
    wanted, eager = settings.wanted, 0
    if wanted is not None:
        eager = choose.eager_bytes(joint.Joint(module, forward_outputs))
    simplify.rewrite(graph)
    forms.forget_running(graph)
    if settings.codegen == "inductor":
        # The last bits may differ from those of the graph as it is.
        split.rewrite(graph)
    graph.eliminate_dead_code()
    of = joint.Joint(module, forward_outputs)
    decided = keep.plan(of) if wanted is None else choose.choose(of, wanted, eager, settings.codegen == "inductor")
    keep.apply(of, decided)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return decided
