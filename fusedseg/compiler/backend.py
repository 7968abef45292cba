"""The backend: ``torch.compile(model, backend="fusedseg", options={...})``.

The entry point group ``torch_dynamo_backends`` names ``backend``, so that no import is needed.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, fx

from .. import _torch
from .._backend import on_gpu
from ..ops.conv import cudnn_graphs
from ..progress import Progress
from . import passes, subclasses
from .capture.prepare import prepare
from .graph import copy_of
from .notes import current, note_of, noting_on, remember
from .settings import OP, QUIET_SECONDS, Settings, parse, say_once
from .traffic import InductorMovesLess, check

Compiled = TypeVar("Compiled")
# The modes of ``torch.compile`` that are not Inductor's alone.
MODES = (None, "default", "reduce-overhead")
PHASES = {
    "fw_compiler": "code of forward",
    "bw_compiler": "code of backward",
    "inference_compiler": "code of forward",
}


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph that Dynamo has captured; ``torch.compile(model, backend="fusedseg")`` calls it."""
    settings = with_vendor(with_codegen(parse(options), mode), example_inputs)
    if _has_streams(module):
        say_once(": a graph with streams of its own is left to PyTorch, without options but those of Inductor")
        return _as_pytorch_runs_it(module, example_inputs, settings)
    limits = settings.limits
    if limits is not None and limits.is_absolute and _torch.reason_of_break(module):
        say_once(
            ": the model has a graph break, and each of its graphs keeps and peaks at up to "
            f"budget={settings.budget!r} by itself; a share such as budget=0.3 holds for all of them together"
        )
    graph, captured = note_of(module, example_inputs)
    with noting_on(graph), Progress(f"{OP}: {graph.calls} calls", QUIET_SECONDS) as progress:
        places = subclasses.places_of(example_inputs)
        inputs = subclasses.without_classes(module, example_inputs, places)

        def compiled(module: fx.GraphModule, settings: Settings) -> Any:
            current().codegen = settings.codegen or "aten"
            compiler = _inductor if settings.by_inductor else _aten
            return compiler(module, inputs, settings, mode, progress)

        run = with_least_traffic(module, settings, compiled)
    if places:
        run = subclasses.unwrapping(run, places)
    remember(run, graph, captured)
    return run


def _has_streams(module: fx.GraphModule) -> bool:
    """Whether a captured graph names streams, which nodes that this package writes would not run on."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return any(str(node.target).startswith("streams.") or "stream" in node.meta.get("custom", ()) for node in calls)


def _as_pytorch_runs_it(module: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Any:
    if (settings if settings.codegen else _with_inductor(settings)).by_inductor:
        return _torch.compiler_parts().compile_fx(module, example_inputs, config_patches=dict(settings.inductor))
    return module.forward


def with_codegen(settings: Settings, mode: str | None = None) -> Settings:
    """The settings with the codegen that options or mode ask for, if it works here.  None is left as it is."""
    asks = settings.codegen == "inductor" or bool(settings.inductor) or mode not in MODES
    if settings.codegen == "aten" or not asks:
        return settings
    if settings.codegen == "inductor" and (problem := _torch.inductor_problem()):
        raise RuntimeError(f"{OP}: codegen='inductor' cannot work here: {problem}; use codegen='aten'")
    return _with_inductor(settings)


def with_vendor(settings: Settings, example_inputs: Sequence[Any]) -> Settings:
    """The settings without ``fused_convolutions`` on a GPU where the package with its kernels is missing."""
    if not settings.fused_convolutions or cudnn_graphs.is_installed():
        return settings
    if not any(isinstance(t, Tensor) and on_gpu(t) for t in example_inputs):
        return settings
    say_once(
        ": option fused_convolutions has no effect without the package nvidia-cudnn-frontend; "
        "pip install 'fusedseg[cudnn]'"
    )
    return replace(settings, fused_convolutions=False)


def _with_inductor(settings: Settings) -> Settings:
    """The settings with Inductor, or if that cannot work here, with PyTorch's kernels and a warning."""
    problem = _torch.inductor_problem()
    if not problem:
        return replace(settings, codegen="inductor")
    say_once(f" runs PyTorch's own kernels (codegen='aten'), because Inductor cannot work here: {problem}")
    return replace(settings, codegen="aten", inductor={})


def with_least_traffic(
    module: fx.GraphModule, settings: Settings, compiled: Callable[[fx.GraphModule, Settings], Compiled]
) -> Compiled:
    """What ``compiled`` makes of a captured graph with the codegen of the settings.

    Without one it begins with PyTorch's kernels.  The graphs that it divides say whether Inductor's move clearly fewer
    bytes (``traffic.py``); then it begins again with Inductor, before any code was generated.
    """
    if settings.codegen is not None:
        return compiled(module, settings)
    twin = copy_of(module)
    try:
        return compiled(module, settings)
    except InductorMovesLess as less:
        current().moved = less.moved
    return compiled(twin, _with_inductor(settings))


def _showing(progress: Progress, text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that says first what it does."""

    def shown(*args: Any, **kwargs: Any) -> Any:
        progress.update(text)
        return function(*args, **kwargs)

    return shown


def _laying_out(compiler: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """A compiler of graphs without a backward, which no partitioner sees: they are laid out here."""

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if passes.run(passes.Stage.LAYOUT, passes.INFERENCE, module, settings):
            module.recompile()
        if settings.codegen is None:
            current().moved = check([module.graph])
        return compiler(module, inputs)

    return compiled


def _aten(
    module: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, mode: str | None, progress: Progress
) -> Any:
    if mode not in MODES:
        raise ValueError(f"{OP}: mode={mode!r} is Inductor's; codegen='aten' takes 'default' and 'reduce-overhead'")
    from .codegen import cuda_graphs
    from .codegen.aten import emit
    from .partition import Partition

    parts = _torch.compiler_parts()
    compilers: dict[str, Callable[..., Any]] = dict.fromkeys(PHASES, emit)
    if settings.cudagraphs or mode == "reduce-overhead":
        recorder = cuda_graphs.Recorder()
        compilers = {
            "fw_compiler": recorder.forward,
            "bw_compiler": recorder.backward,
            "inference_compiler": partial(recorder.forward, inference=True),
        }
    compilers["inference_compiler"] = _laying_out(compilers["inference_compiler"], settings)
    compilers = {key: _showing(progress, PHASES[key], function) for key, function in compilers.items()}
    divide = _showing(progress, "choosing what forward keeps", Partition(settings))
    compiler = parts.aot_autograd(**compilers, partition_fn=divide, keep_inference_input_mutations=True)
    progress.update("tracing forward and backward")
    return compiler(prepare(module, settings), example_inputs)


def _inductor(
    module: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, mode: str | None, progress: Progress
) -> Any:
    from .codegen.inductor import BeforeOthers, WeightsAsTheyAre
    from .partition import Partition
    from .rewrite.branches import whole_activations

    parts = _torch.compiler_parts()
    _torch.read_after_writes()
    own = {"joint_custom_pre_pass": BeforeOthers(settings), "post_grad_custom_pre_pass": WeightsAsTheyAre()}
    patches = {**own, **settings.inductor}
    if settings.cudagraphs:
        patches["triton.cudagraphs"] = True
    if mode not in (None, "default"):
        patches = {**parts.list_mode_options(mode), **patches}
    patches["custom_partitioner_fn"] = Partition(settings)
    progress.update("Inductor traces and compiles forward and backward")
    table = None if settings.bits is None else whole_activations()
    return parts.compile_fx(prepare(module, settings), example_inputs, config_patches=patches, decompositions=table)


def _reset() -> None:
    """``torch._dynamo.reset`` calls it: recorded graphs and their memory go."""
    if "torch._inductor.cudagraph_trees" in sys.modules:
        _torch.cuda_graph_parts().reset()


backend.reset = _reset  # type: ignore[attr-defined]
