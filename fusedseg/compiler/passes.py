"""The passes that change a graph, from what Dynamo has captured to the code that runs: one tuple, in their order.

Each stage of a compilation runs its slice of the tuple (``run``).  A row names its function, which is imported when it
runs, because files on every floor of the compiler run passes.
"""

import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from torch import fx

from .. import _backend
from ..ops.norm.graph import statistics
from .graph import is_tensor, value_of
from .settings import Settings, left_out, written

# What Dynamo captures; what AOTAutograd traces of it, forward and backward in one; the two parts of that; and what it
# traces where nothing is trained.
CAPTURED, JOINT, FORWARD, BACKWARD, INFERENCE = "captured", "joint", "forward", "backward", "inference"


class Stage(Enum):
    """A part of a compilation that runs a slice of the passes, and who runs it."""

    CAPTURE = "capture/prepare.py: prepare"
    TRACED = "partition.py: Partition, or before Inductor's own passes codegen/inductor.py: BeforeOthers"
    LAYOUT = "partition.py: Partition; on a graph without a backward backend.py: _laying_out, or BeforeOthers"
    CANDIDATE = "decide.py: decide, for each candidate"
    PACKED = "low_bit/packing.py: packed"
    DIVIDED = "partition.py: Partition; on a graph without a backward BeforeOthers"
    JOINED = "codegen/aten.py: emit"
    CALLS = "codegen/aten.py: emit, which knows by then how many bytes are alive at each node"


def _by_sources(settings: Settings, graph: fx.Graph) -> bool:
    """Whether backward of a convolution of a concatenation is computed source by source.

    The peak is lower then.  But on a GPU the parts take longer than the concatenation does, which is formed again.
    """
    limits, given = settings.limits, filter(is_tensor, graph.find_nodes(op="placeholder"))
    if settings.bits is not None:
        return True
    if any(_backend.on_gpu(value_of(node)) for node in given):
        return limits is not None and limits.peak is not None
    return settings.by_inductor or limits is not None


BY_SOURCES = "bits, Inductor or a budget; on a GPU bits or a budget of the peak"
# When a pass runs, for a page and for a program.
WHEN: dict[str, Callable[[Settings, fx.Graph], bool]] = {
    "": lambda settings, graph: True,
    "aten": lambda settings, graph: not settings.by_inductor,
    "Inductor": lambda settings, graph: settings.by_inductor,
    "bits": lambda settings, graph: settings.bits is not None,
    "bits and Inductor": lambda settings, graph: settings.bits is not None and settings.by_inductor,
    "aten and fused_convolutions": lambda settings, graph: settings.fused_convolutions and not settings.by_inductor,
    "a norm was divided": lambda settings, graph: bool(graph.find_nodes(op="call_function", target=statistics)),
    BY_SOURCES: _by_sources,
}


class Pass(NamedTuple):
    """A pass.

    function: its module in ``fusedseg.compiler``, and its name there.
    stage: who runs it.  on: the graphs on which it runs.
    takes: what it is given, by the names of ``run``.
    when: a key of ``WHEN``, which says whether it runs.
    where: the tensors that it changes something for; "" for all.
    without: the name in ``settings.OPTIONAL`` by which it can be left out; "" if it always runs.
    after: the functions of other passes that must have run before it.
    """

    function: str
    stage: Stage
    on: tuple[str, ...]
    takes: tuple[str, ...] = ("graph",)
    when: str = ""
    where: str = ""
    without: str = ""
    after: tuple[str, ...] = ()

    def __call__(self, given: dict[str, Any]) -> Any:
        return pkgutil.resolve_name(f"{__package__}.{self.function}")(*map(given.__getitem__, self.takes))


# Tensors that Triton's kernels serve, and those whose convolutions are faster in channels_last.
TRITON, HALF_ON_CUDA = "Triton's kernels", "half precision on CUDA, or what memory_format says"
# Those whose last bits may differ from eager mode's (``Settings.may_round``).
TRITON_OR_INDUCTOR = "Triton's kernels, or all with Inductor"
TRITON_INDUCTOR_OR_BITS = f"{TRITON_OR_INDUCTOR} or bits"
LAID_OUT, PARTS, WITHOUT_BACKWARD = (JOINT, INFERENCE), (FORWARD, BACKWARD, INFERENCE), (FORWARD, INFERENCE)
OF_MODULE, WITH_LIVENESS = ("module", "settings"), ("graph", "liveness")

PASSES = (
    Pass("capture.dead_bias:remove_dead_biases", Stage.CAPTURE, (CAPTURED,), OF_MODULE, where=TRITON_INDUCTOR_OR_BITS),
    Pass("capture.prepare:unfold", Stage.CAPTURE, (CAPTURED,), ("module",)),
    Pass(
        "capture.convolve_first:swap_interpolations", Stage.CAPTURE, (CAPTURED,), OF_MODULE, where=TRITON_OR_INDUCTOR,
        after=("capture.prepare:unfold",),
    ),
    Pass(
        "capture.stock_norms:replace_norms", Stage.CAPTURE, (CAPTURED,), ("graph", "norms"),
        after=("capture.dead_bias:remove_dead_biases", "capture.convolve_first:swap_interpolations"),
    ),
    Pass(
        "capture.pools_and_upsampling:rewrite_for_inductor", Stage.CAPTURE, (CAPTURED,), ("module",), "Inductor",
        after=("capture.convolve_first:swap_interpolations",),
    ),
    Pass(
        "capture.pools_and_upsampling:rewrite_for_aten", Stage.CAPTURE, (CAPTURED,), ("module",), "aten",
        after=("capture.convolve_first:swap_interpolations",),
    ),
    Pass("plan.eager_mode:note_changeable", Stage.TRACED, (JOINT,)),
    Pass("graph:note_written_later", Stage.TRACED, (JOINT,)),
    Pass(
        "rewrite.channels_last:lay_out", Stage.LAYOUT, LAID_OUT, ("graph", "settings"), where=HALF_ON_CUDA,
        without="channels_last", after=("plan.eager_mode:note_changeable",),
    ),
    Pass("rewrite.simplify:simplify", Stage.LAYOUT, (JOINT,), ("module",), after=("plan.eager_mode:note_changeable",)),
    Pass(
        "rewrite.one_channel:view_in_channels_last", Stage.LAYOUT, (JOINT,), without="one_channel",
        after=("rewrite.channels_last:lay_out",),
    ),
    Pass("rewrite.split_convolutions:split_backward", Stage.CANDIDATE, (JOINT,), when=BY_SOURCES),
    # Backward of a convolution that was split may read the result of another convolution, with its bias.
    Pass(
        "rewrite.late_bias:defer_biases", Stage.CANDIDATE, (JOINT,), when="aten", where=TRITON, without="late_bias",
        after=("rewrite.split_convolutions:split_backward",),
    ),
    Pass("plan.recompute:round_inputs", Stage.CANDIDATE, (JOINT,), when="bits"),
    Pass("rewrite.joined_norms:fuse_residuals", Stage.PACKED, (JOINT,), where=TRITON),
    Pass("rewrite.branches:write_activations", Stage.DIVIDED, PARTS, when="bits and Inductor"),
    Pass(
        "rewrite.fused_convolutions:fuse_norms", Stage.DIVIDED, (FORWARD, BACKWARD), when="aten and fused_convolutions",
        where=TRITON,
    ),
    # It orders what backward computes again, which is another op where a convolution takes its norm.
    Pass(
        "plan.schedule:reorder", Stage.DIVIDED, (BACKWARD,), ("module", "peak_target", "by_inductor"),
        after=("rewrite.fused_convolutions:fuse_norms",),
    ),
    Pass("codegen.divided_norms:divide", Stage.JOINED, WITHOUT_BACKWARD, where=TRITON),
    Pass(
        "rewrite.joined_norms:fuse_residuals", Stage.JOINED, WITHOUT_BACKWARD, when="a norm was divided", where=TRITON,
        after=("codegen.divided_norms:divide",),
    ),
    Pass(
        "rewrite.joined_norms:fuse_activations", Stage.JOINED, PARTS, where=TRITON,
        after=("rewrite.joined_norms:fuse_residuals",),
    ),
    Pass("codegen.casts:batch_casts", Stage.CALLS, PARTS, WITH_LIVENESS, without="casts"),
    Pass(
        "codegen.shorter:shorten_calls", Stage.CALLS, PARTS,
        after=("rewrite.joined_norms:fuse_activations", "codegen.casts:batch_casts"),
    ),
    Pass("codegen.shorter:write_zeros", Stage.CALLS, PARTS, without="zeros"),
    # Behind a write to an argument no cast is moved.
    Pass(
        "codegen.divided_norms:write_statistics", Stage.CALLS, PARTS,
        after=("codegen.casts:batch_casts", "codegen.shorter:shorten_calls"),
    ),
    Pass(
        "codegen.concatenation:concatenate_in_place", Stage.CALLS, PARTS, after=("rewrite.late_bias:defer_biases",),
    ),
    Pass("codegen.concatenation:make_dense", Stage.CALLS, PARTS),
    Pass(
        "codegen.gradient_sums:fuse_sums", Stage.CALLS, (BACKWARD,), WITH_LIVENESS, where=TRITON, without="sums",
        after=("codegen.shorter:shorten_calls",),
    ),
    # It writes results over the gradients that are free, and over the inputs of norms that are no ops any more.
    Pass(
        "codegen.in_place:write_in_place", Stage.CALLS, PARTS, without="in_place",
        after=("codegen.casts:batch_casts", "codegen.shorter:shorten_calls", "codegen.gradient_sums:fuse_sums"),
    ),
    Pass(
        "codegen.convolution_backward:free_inputs", Stage.CALLS, PARTS, WITH_LIVENESS,
        after=("codegen.concatenation:make_dense", "codegen.in_place:write_in_place"),
    ),
    # From here on convolutions, and then the ops of this package, are no ops any more.
    Pass(
        "codegen.shorter:write_convolutions", Stage.CALLS, PARTS,
        after=("codegen.concatenation:make_dense", "codegen.convolution_backward:free_inputs"),
    ),
    Pass(
        "codegen.replays:replay_launches", Stage.CALLS, PARTS, where=TRITON, without="replays",
        after=(
            "codegen.concatenation:concatenate_in_place", "codegen.concatenation:make_dense",
            "codegen.gradient_sums:fuse_sums", "codegen.in_place:write_in_place",
        ),
    ),
)  # fmt: skip


def run(stage: Stage, on: str, of: fx.GraphModule | fx.Graph, settings: Settings | None = None, **more: Any) -> bool:
    """Runs the passes of a stage on a graph, and returns whether there were any.

    Args:
        stage: the stage.
        on: which graph it is: one of CAPTURED, JOINT, FORWARD, BACKWARD and INFERENCE.
        of: the graph, or its module.
        settings: the options; None where no pass of the stage depends on them.
        more: what the passes of this stage are given besides ("takes").
    """
    asked = settings or Settings()
    out, ran = left_out(), False
    for row in PASSES:
        # A pass may put another graph into the module.
        graph = of if isinstance(of, fx.Graph) else of.graph
        is_wanted = row.stage is stage and on in row.on and row.without not in out
        if is_wanted and WHEN[row.when](asked, graph):
            count = row({"module": of, "graph": graph, "settings": asked, "by_inductor": asked.by_inductor, **more})
            if row.without:
                written[row.without] += count
            ran = True
    return ran
