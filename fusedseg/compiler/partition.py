"""The partitioner, from a joint graph to the graphs of forward and backward; each phase is a file of its own.

"Life of a joint graph" in docs/design.md has what goes into each phase, and what comes out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch
from . import passes, traffic
from .codegen.inductor import FILES
from .decide import decide
from .graph import POLICY, Joint, Outputs, is_tensor, outputs_of
from .notes import current, note_bytes
from .passes import Stage
from .plan import eager_mode
from .plan.choose import Known
from .plan.decision import SAVE
from .settings import Settings

_parts = _torch.compiler_parts()


class Partition(_parts.CustomPartitionerFn):  # type: ignore[name-defined]
    """Divides a joint graph into forward and backward.  It can be pickled, so that Inductor's caches work.

    ``known`` has what was found of other copies of the graph, in an estimate, which no cache sees.
    """

    def __init__(self, settings: Settings, known: Known | None = None) -> None:
        self.settings = settings
        self._known = known

    def uuid(self) -> Any:
        return _parts.get_hash_for_files(FILES, self.settings.identity)

    def __call__(
        self, module: fx.GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **options: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        module.graph.eliminate_dead_code()
        passes.run(Stage.TRACED, passes.JOINT, module)
        outputs = eager_mode.read(module.graph, num_fwd_outputs, counted=self.settings.limits is not None)
        passes.run(Stage.LAYOUT, passes.JOINT, module, self.settings)
        decision = decide(module, outputs, self.settings, self._known)
        forward, backward = divide_along_policies(module, joint_inputs, num_fwd_outputs, decision.policies, options)
        if self.settings.codegen is None:
            current().moved = traffic.check([forward.graph, backward.graph])
        for on, part in ((passes.FORWARD, forward), (passes.BACKWARD, backward)):
            if passes.run(Stage.DIVIDED, on, part, self.settings, peak_target=decision.peak_target):
                part.recompile()
        note_bytes(decision, (forward, backward), num_fwd_outputs, self.settings.by_inductor)
        return forward, backward


def divide_along_policies(
    module: fx.GraphModule,
    joint_inputs: Sequence[object],
    outputs: int,
    policies: Mapping[fx.Node, CheckpointPolicy],
    options: Mapping[str, object],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of forward, which has so many ``outputs``, and of backward, along the policies of a joint graph.

    Forward also returns what it packs, behind its own outputs, while PyTorch's partitioner divides the graph.  The
    partitioner regards a policy of forward only where a result of forward needs the node.  Else it keeps what is
    packed, and packs in backward, wherever codes and their ranges are not smaller.
    """
    for node, policy in policies.items():
        node.meta[POLICY] = policy
    of = Joint(module.graph, Outputs(outputs))
    others = (node for node in module.graph.nodes if node not in of.forward and is_tensor(node))
    kept = [node for node in others if node.meta.get(POLICY) == SAVE]
    last = outputs + len(kept)
    _return(module.graph, kept, outputs, outputs)
    # Equal nodes are one already, and the partitioner does not know which must stay apart.
    with _parts.config.patch(activation_memory_budget=1.0, cse=False):
        forward, backward = _parts.stock_partition(module, joint_inputs, num_fwd_outputs=last, **options)
    for graph in (module.graph, forward.graph):
        _return(graph, [], outputs, last)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    return forward, backward


def _return(graph: fx.Graph, nodes: Sequence[fx.Node], first: int, last: int) -> None:
    """The graph returns these nodes in place of its outputs from ``first`` to ``last``."""
    end, returned = graph.output_node(), outputs_of(graph)
    end.args = ((*returned[:first], *nodes, *returned[last:]),)
    if (says := end.meta.get("desc")) is not None:
        end.meta["desc"] = [*says[:first], *([None] * len(nodes)), *says[last:]]
