"""The private names of PyTorch that this package uses, each with its use and with what happens where it is missing.

PyTorch promises nothing about private names: a later version may drop one, and an earlier version may lack it.  So
they are looked up here, once, when the package is imported, and no other file names them (``tests/test_private.py``).
All of them exist in PyTorch 2.8 to 2.15.  A missing name never changes a gradient:

* Without a name of ``_or``, a stand-in gives the same results, or PyTorch itself raises the error.
* Without a name of ``_needed``, the feature that needs it raises RuntimeError, which names it.

Names of modules that ``import torch`` does not load, such as the compiler, are looked up at their first use.  The base
classes of stock modules (``_BatchNorm``) stand beside them in PyTorch's documentation, and are no part of this file.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, TypeVar

import torch

# All names that are looked up at import, and the missing ones.
NAMES: list[str] = []
MISSING: list[str] = []
_ABSENT = object()


def _find(path: str) -> Any:
    """The object of a dotted path, whose modules are imported; ``_ABSENT`` if there is none."""
    found: object = torch
    parts = path.split(".")
    for i, name in enumerate(parts[1:], 2):
        if not hasattr(found, name):
            try:
                importlib.import_module(".".join(parts[:i]))
            # An import may fail in any way in a version that nobody has tried.
            except Exception:
                return _ABSENT
        found = getattr(found, name, _ABSENT)
    return found


def _or(path: str, stand_in: object) -> Any:
    NAMES.append(path)
    found = _find(path)
    if found is _ABSENT:
        MISSING.append(path)
        return stand_in
    return found


def _raise(path: str, feature: str) -> NoReturn:
    raise RuntimeError(
        f"fusedseg: {feature} needs {path}, which PyTorch {torch.__version__} does not have; "
        "`python -m fusedseg doctor` names the versions that are tested"
    )


def _needed(path: str) -> Any:
    """A class or function of the estimates; if it is missing, a class that raises an error when it is called."""

    class Missing:
        def __init__(self, *args: object, **kwargs: object) -> None:
            _raise(path, "looking at a model or its memory")

    return _or(path, Missing)


def later(path: str, feature: str) -> Any:
    """The object of a path that is looked up at its first use, because its module takes long to import."""
    found = _find(path)
    return _raise(path, feature) if found is _ABSENT else found


Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Lets the compiler call the function once, while it traces, and treat the result as a constant.

    It replaces ``torch.compiler.assume_constant_result``.  PyTorch's decorator imports ``torch._dynamo``, and with it
    triton and sympy, which takes longer than the rest of ``import fusedseg``.  Then it only sets this attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# A context in which no function mode sees calls.
DisableTorchFunction = _or("torch._C.DisableTorchFunction", nullcontext)
# The number of the backward pass that runs in this thread, or -1.  Without it, the second forward of a checkpoint moves
# running statistics again, as the stock norms do.
current_graph_task_id = _or("torch._C._current_graph_task_id", lambda: -1)
# A context in which no dispatch mode sees calls.  Without it, modes see calls on fake tensors too.
no_dispatch_modes = _or("torch.utils._python_dispatch._disable_current_modes", nullcontext)


# Memory without values, by type of device: the allocation of Inductor's code, which parses fewer arguments than
# ``torch.empty_strided``.
EMPTY_STRIDED: dict[str, Callable[[Any, Any, torch.dtype], torch.Tensor]] = {
    device: _or(
        f"torch._C._dynamo.guards._empty_strided_{device}",
        lambda size, stride, dtype, on=device: torch.empty_strided(size, stride, dtype=dtype, device=on),
    )
    for device in ("cuda", "cpu")
}
# Copies of several tensors in one call, to other dtypes too, and zeros.
foreach_copy = _or("torch._foreach_copy_", lambda made, of: [a.copy_(b) for a, b in zip(made, of, strict=True)])
foreach_zero = _or("torch._foreach_zero_", lambda made: [a.zero_() for a in made])
# The classes of an op of torch.ops whose overload is not chosen yet, and of calls of graphs.
OpOverloadPacket: Any = _or("torch._ops.OpOverloadPacket", SimpleNamespace)
HigherOrderOperator: Any = _or("torch._ops.HigherOrderOperator", SimpleNamespace)
# Attributes of tensors and storages, which callers read from the object.
for _path in ("torch.Tensor._version", "torch.Tensor._base", "torch.Tensor._is_view", "torch.UntypedStorage._cdata"):
    _or(_path, None)
# PyTorch's hooks of all modules.  Without a name, such a hook sees the tensors of fused modules.
global_module_hooks: tuple[dict[int, Any], ...] = tuple(
    _or(f"torch.nn.modules.module._global_{name}_hooks", {})
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)
# A context in which writes to a tensor are no changes to autograd.  Without it, backward raises PyTorch's error of a
# saved tensor that was modified in place.
preserve_version_counter = _or("torch.autograd._unsafe_preserve_version_counter", lambda t: nullcontext())
# Transforms of torch.func.  PyTorch itself refuses our functions of autograd inside a transform, with another message.
are_functorch_transforms_active = _or("torch._C._are_functorch_transforms_active", lambda: False)
# A tensor inside of a transform of torch.func.  PyTorch's own error follows where one is not recognised.
is_functorch_wrapped_tensor = _or("torch._C._functorch.is_functorch_wrapped_tensor", lambda t: False)
# Batches of gradients.  A batch that is not recognised raises an error where its memory is read or written.
is_batchedtensor = _or("torch._C._functorch.is_batchedtensor", lambda t: False)
is_legacy_batchedtensor = _or("torch._C._functorch.is_legacy_batchedtensor", lambda t: False)

# Forward-mode differentiation.  Its level is -1 outside of it; level 0 makes callers look at each tensor.
forward_ad: Any = torch.autograd.forward_ad
if _or("torch.autograd.forward_ad._current_level", None) is None:
    forward_ad = SimpleNamespace(_current_level=0, unpack_dual=forward_ad.unpack_dual)

# Ops that write over a tensor.  Callers ask who else holds a tensor (``Tensor._use_count``) and its memory; without
# these two names nothing is reused.  Without the others every view is refused, and a tensor overlaps itself if it has a
# stride of 0.
storage_use_count = _or("torch._C._storage_Use_Count", None)
counts_holders = _or("torch.Tensor._use_count", None) is not None and storage_use_count is not None
_creation_meta = _or("torch._C._autograd._get_creation_meta", None)
_creation_metas = _or("torch._C._autograd.CreationMeta", None)


def is_plain_view(x: torch.Tensor) -> bool:
    """Whether autograd can follow a write into the view ``x``: it is not one of several, nor made without grad mode."""
    if _creation_meta is None or _creation_metas is None:
        return False
    return _creation_meta(x) == _creation_metas.DEFAULT


debug_has_internal_overlap = _or(
    "torch._debug_has_internal_overlap",
    lambda x: int(any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape, strict=True))),
)

# The number of dispatch modes that see the calls of this thread.  Without it, every call is taken for a seen one.
len_torch_dispatch_stack = _or("torch._C._len_torch_dispatch_stack", lambda: 1)
# The dispatch modes of this thread.
dispatch_modes = _or("torch.utils._python_dispatch._get_current_dispatch_mode_stack", lambda: [None])
# The modes that PyTorch's trees of CUDA graphs put around each run and each recording look at branches and loops alone.
_RECORDING = "torch._higher_order_ops.cudagraph_conditional_nodes"


def is_seen() -> bool:
    """Whether a dispatch mode must see the calls of this thread.

    Those of selective checkpointing must, although they ignore a compiler: they return results that they have seen.
    """
    return not all(type(mode).__module__ == _RECORDING for mode in dispatch_modes())


class _Aten:
    """The functions of torch.ops.aten, which do not take None for ``out``."""

    def __getattr__(self, name: str) -> Any:
        op = getattr(torch.ops.aten, name)
        return lambda *args, out=None, **kwargs: op(*args, **kwargs, **({} if out is None else {"out": out}))


# Bindings that stock functions call; they have less overhead than torch.ops.
nn = _or("torch._C._nn", _Aten())
prelu_kernel = _or("torch._prelu_kernel", lambda y, w: torch.where(y > 0, y, w * y))


# A call of an overload is the shortest way to an op that has no binding.
prelu_kernel_backward = _or(
    "torch.ops.aten._prelu_kernel_backward.default",
    lambda dz, y, w: (torch.where(y > 0, dz, w * dz), torch.where(y > 0, 0, y * dz)),
)
# A device that sleeps while the host queues work: it makes measurements steadier.
cuda_sleep = _or("torch.cuda._sleep", lambda cycles: None)


def _memory_format(t: torch.Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(t.dim())
    is_last = last is not None and not t.is_contiguous() and t.is_contiguous(memory_format=last)
    return last if last is not None and is_last else torch.contiguous_format


suggest_memory_format = _or("torch._prims_common.suggest_memory_format", _memory_format)


# The class of ops in torch.ops.  Tensors without values, dispatch modes and trees of tensors: the estimates of memory.
_FAKE = "torch._subclasses.fake_tensor"
_TREE = "torch.utils._pytree"
if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
else:
    OpOverload = _or("torch._ops.OpOverload", SimpleNamespace)
    FakeTensor = _needed(f"{_FAKE}.FakeTensor")
    FakeTensorMode = _needed(f"{_FAKE}.FakeTensorMode")
    unset_fake_temporarily = _or(f"{_FAKE}.unset_fake_temporarily", nullcontext)
    # Errors that nothing raises then.
    DataDependentOutputException = _or(f"{_FAKE}.DataDependentOutputException", type("Missing", (Exception,), {}))
    UnsupportedFakeTensorException = _or(f"{_FAKE}.UnsupportedFakeTensorException", type("Missing", (Exception,), {}))
    TorchDispatchMode = _needed("torch.utils._python_dispatch.TorchDispatchMode")
    tree_leaves = _needed(f"{_TREE}.tree_leaves")
    tree_map = _needed(f"{_TREE}.tree_map")
# Fake tensors ask this function for the memory format of a convolution's results, and remember the results here.
_format_of_convolutions = _or("torch._C._conv_determine_backend_memory_format", None)
_remembered_results = _or(f"{_FAKE}.FakeTensorMode.cache", None)
_remembered_of_a_gpu: dict[Any, Any] = {}


def format_of_cudnn(x: torch.Tensor, weight: torch.Tensor, *backend: object) -> torch.memory_format:
    """The memory format of cuDNN's convolutions: channels_last if image or weight has it, and not in float64."""
    formats = {suggest_memory_format(x), suggest_memory_format(weight)} - {torch.contiguous_format}
    return formats.pop() if formats and torch.float64 not in (x.dtype, weight.dtype) else torch.contiguous_format


@contextmanager
def convolutions_of_a_gpu() -> Iterator[None]:
    """Inside, convolutions of tensors without values return the memory format of a GPU, on every machine.

    PyTorch gives them the format in which this machine computes the convolution.  On a CPU that depends on the dtype,
    on the instructions that the CPU has, and on the number of threads.
    """
    if _format_of_convolutions is None or _remembered_results is None:
        yield
        return
    bindings: Any = torch._C
    before = bindings._conv_determine_backend_memory_format, FakeTensorMode.cache
    bindings._conv_determine_backend_memory_format = format_of_cudnn
    FakeTensorMode.cache = _remembered_of_a_gpu
    try:
        yield
    finally:
        bindings._conv_determine_backend_memory_format = before[0]
        FakeTensorMode.cache = before[1]


class ListingMode(FakeTensorMode):
    """A fake mode in which ops choose as on the device of their tensors; launches are listed, and not made."""


def is_listed(t: torch.Tensor) -> bool:
    """Whether launches on a tensor are only listed."""
    return isinstance(t, FakeTensor) and isinstance(t.fake_mode, ListingMode)


def resolve_process_group(name: str) -> Any:
    """The process group of a name.  Some builds of PyTorch do not have this module."""
    return later("torch.distributed.distributed_c10d._resolve_process_group", "a synchronised norm")(name)


def is_optimized_module(module: object) -> TypeGuard[torch.nn.Module]:
    """Whether ``torch.compile`` has made a module of another one."""
    compiled = _find("torch._dynamo.OptimizedModule")
    return compiled is not _ABSENT and isinstance(module, compiled)


# Batch norms as the compiler traces them: one that returns new running statistics, one that writes over them, and one
# without them.
_NORM = "torch.ops.aten._native_batch_norm_legit"
functional_batch_norm = _or(f"{_NORM}_functional.default", None)
writing_batch_norm = _or(f"{_NORM}.default", None)
batch_norm_without_running = _or(f"{_NORM}.no_stats", None)
# Softmax and its gradient as the compiler traces them.
_softmax = (
    _or(f"torch.ops.aten.{op}{of}", None) for op in ("_softmax", "_log_softmax") for of in ("", "_backward_data")
)
softmax_ops = [op for op in _softmax if op is not None]
# The gradients of the interpolation "nearest-exact", by the number of spatial dimensions.
nearest_exact_backward = {
    dims: _or(f"torch.ops.aten._upsample_nearest_exact{dims}d_backward.default", None) for dims in (1, 2, 3)
}

# What the compiler backend and the planner need (``fusedseg/compiler/``), and for Inductor alone.  Importing some of
# them takes seconds.
_BACKEND = {
    "aot_autograd": "torch._dynamo.backends.common.aot_autograd",
    "make_boxed_func": "torch._functorch._aot_autograd.utils.make_boxed_func",
    "config": "torch._functorch.config",
    "fx_graph_cse": "torch._functorch.compile_utils.fx_graph_cse",
    "stock_partition": "torch._functorch.partitioners.min_cut_rematerialization_partition",
}
_FOR_INDUCTOR = {
    "CustomPartitionerFn": "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "CustomGraphPass": "torch._inductor.custom_graph_pass.CustomGraphPass",
    "get_hash_for_files": "torch._inductor.custom_graph_pass.get_hash_for_files",
    "compile_fx": "torch._inductor.compile_fx.compile_fx",
    "list_mode_options": "torch._inductor.list_mode_options",
    "decompositions": "torch._inductor.decomposition.select_decomp_table",
    "force_stride_order": "torch._inductor.inductor_prims.force_stride_order",
}


def compiler_parts() -> SimpleNamespace:
    """The parts of PyTorch's compiler that the backend uses; those that divide a graph serve the planner too.

    Without those of Inductor, which exist since PyTorch 2.9, the backend runs PyTorch's own kernels.
    """
    needed = {name: later(path, 'torch.compile(backend="fusedseg")') for name, path in _BACKEND.items()}
    found = {name: _find(path) for name, path in _FOR_INDUCTOR.items()}
    for base in ("CustomPartitionerFn", "CustomGraphPass"):
        if found[base] is _ABSENT:
            found[base] = object
    return SimpleNamespace(**needed, **found)


_CUDA_GRAPHS = {
    "cudagraphify_impl": "torch._inductor.cudagraph_trees.cudagraphify_impl",
    "get_manager": "torch._inductor.cudagraph_trees.get_manager",
    "reset": "torch._inductor.cudagraph_trees.reset_cudagraph_trees",
    "get_placeholder_info": "torch._inductor.cudagraph_utils.get_placeholder_info",
    "find_input_mutations": "torch._dynamo.backends.cudagraphs.find_input_mutations",
    "get_stack_traces": "torch._dynamo.backends.cudagraphs.get_stack_traces",
    "TracingContext": "torch._guards.TracingContext",
}


def cuda_graph_parts() -> SimpleNamespace:
    """The parts of PyTorch's trees of CUDA graphs that record and replay the codegen "aten"."""
    feature = 'torch.compile(backend="fusedseg", options={"cudagraphs": True})'
    return SimpleNamespace(**{name: later(path, feature) for name, path in _CUDA_GRAPHS.items()})


def inductor_problem() -> str:
    """The reason why the backend cannot hand graphs to Inductor, or ""."""
    missing = any(_find(path) is _ABSENT for path in _FOR_INDUCTOR.values())
    if missing or not hasattr(_find("torch._inductor.config"), "custom_partitioner_fn"):
        return f"PyTorch {torch.__version__} does not let others divide its graphs"
    check = _find("torch._inductor.cpp_builder.get_cpp_compiler")
    try:
        check()
    # A version may raise another error for a compiler that is missing.
    except Exception as error:
        return f"there is no C++ compiler ({type(error).__name__})"
    return ""


@functools.cache
def read_after_writes() -> None:
    """Lets code of Inductor for a CPU read memory after what has been written there, as PyTorch 2.14 does by itself.

    Inductor gives memory a new name with each write, such as a draw of ``bernoulli_``, and readers wait for the name
    that they read.  Before 2.14, a reader whose loops are changed to fit those of another kernel got the first name
    back: it read the memory before the draw, in stock ``torch.compile`` too.
    """
    node = _find("torch._inductor.scheduler.SchedulerNode")
    changed = getattr(node, "recompute_size_and_body", None)
    if changed is None:
        return

    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        changed(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    node.recompute_size_and_body = recompute_size_and_body


def is_call_of_numpy(node: torch.fx.Node) -> bool:
    """Whether a node of a captured graph is a call of NumPy in the model; such a node is a tensor in the graph."""
    paths = [f"torch._dynamo.utils.numpy_{what}_wrapper" for what in ("to_tensor", "method", "operator", "attr")]
    return any(node.target is found or type(node.target) is found for found in map(_find, paths))


def decomposition(op: object) -> Any:
    """The function by which the compiler writes an op as simpler ones; None if it has none."""
    return later("torch._decomp.decomposition_table", "bits of the compiler backend").get(op)


def uncompiled(compiled: Callable[..., object]) -> Any:
    """The module or function from which ``torch.compile`` has made ``compiled``."""
    if is_optimized_module(compiled):
        return compiled._orig_mod
    return inspect.unwrap(getattr(compiled, "_torchdynamo_orig_callable", compiled))


def is_compiled_in_place(module: object) -> bool:
    """Whether ``module.compile()`` was called; False where the attribute is missing."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compiling() -> Any:
    """The module or function that the compiler compiles now, further down in this stack; None if it is not found."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("eval_frame.py") and "fn" in frame.f_locals:
            # The compiler wraps the modules of PyTorch itself.
            target = inspect.unwrap(frame.f_locals["fn"])
            return getattr(target, "__self__", target)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def reason_of_break(module: object) -> str:
    """Why a captured graph ends before the end of the model, and where; "" if it does not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    place = f"{reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}" if reason.user_stack else ""
    return f"{place}: {reason.reason.strip().splitlines()[0]}"


def known(answer: object) -> bool:
    """Whether a question about symbolic sizes has the answer True for all of them; no guard is added."""
    path = "torch.fx.experimental.symbolic_shapes.statically_known_true"
    return answer if isinstance(answer, bool) else later(path, "the compiler backend")(answer)


def depends_on_data(*tensors: torch.Tensor) -> bool:
    """Whether a size depends on values, as the rows of ``x[mask]`` do.

    Such a symbol has no example, and each question about it that is not ``known`` would raise an error.
    """
    return any(not isinstance(n, int) and not n.node.has_hint() for t in tensors for n in t.shape)


def changes_grad_mode(node: torch.fx.Node) -> bool:
    """Whether a call of a captured graph switches gradients on or off for what follows."""
    target = node.target
    name = getattr(target, "__name__", "") if node.op == "call_function" else ""
    return name in ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def is_traced_in_backward(node: torch.fx.Node) -> bool:
    """Whether AOTAutograd has traced a node of a joint graph in backward; False where the note is missing."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def donate_nothing() -> None:
    """Says that the graphs which AOTAutograd compiles now write over nothing that forward keeps.

    AOTAutograd refuses a second backward pass through graphs that may.
    """
    context = later("torch._guards.TracingContext", "the compiler backend").try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated:
        donated.clear()


def compiles_for_fusedseg(frame: Any) -> bool:
    """Whether a frame of a traceback is the one in which Dynamo compiles for the backend of this package.

    ``torch.compile`` was given its name, its function, or a ``functools.partial`` of that.
    """
    compiler = frame.f_locals.get("compiler_fn") if frame.f_code.co_name == "_compile_inner" else None
    # Dynamo's wrapper has the attributes of the one that ``torch.compile`` has made.
    for name in ("compiler_fn", "func"):
        compiler = getattr(compiler, name, compiler)
    return getattr(compiler, "__module__", "") == "fusedseg.compiler.backend"


class _Lasting(list):
    """Functions that PyTorch calls when a compilation begins or ends; the first one stays when all are taken away.

    ``torch._dynamo.reset()`` takes them away, and tells a backend nothing of it.
    """

    def clear(self) -> None:
        del self[1:]


def call_around(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Lets PyTorch call a function before each compilation, and another one at its end.

    At the end ``sys.exc_info()`` has the error, if any.
    """
    handler = later("torch._dynamo.callback.callback_handler", "the compiler backend")
    if hasattr(handler, "end_callbacks"):
        handler.start_callbacks = _Lasting([before, *handler.start_callbacks])
        handler.end_callbacks = _Lasting([after, *handler.end_callbacks])


def python_dispatcher() -> Any:
    """The context in which ops compute shapes from symbolic sizes."""
    return later("torch._dispatch.python.enable_python_dispatcher", "the compiler backend")()


def bare_op(op: object) -> Any:
    """The binding that an op of ``torch.ops`` calls; the op itself if it has none."""
    return getattr(op, "_op", op)


def saves_result(node: Any) -> bool:
    """Whether the autograd node keeps the output of its op, as those of sigmoid and relu do."""
    return hasattr(type(node), "_raw_saved_result")


def write_gradient(op: Any, out: torch.Tensor | None, *args: object, **kwargs: object) -> torch.Tensor:
    """The gradient that a backward op of ``torch.ops.aten`` computes, in ``out`` unless ``out`` is None."""
    if out is None:
        return op.default(*args, **kwargs)
    try:
        return op.grad_input(*args, **kwargs, grad_input=out)
    except KeyError:
        # ``torch.autograd.graph.allow_mutation_on_saved_tensors`` takes ops that name their result "out" alone.
        return out.copy_(op(*args, **kwargs))


def composite_op(name: str, schema: str, function: Callable[..., Any]) -> Any:
    """An op that a tracer looks into.  The caches of compilers take it, where they take no function of ours."""
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeImplicitAutograd", function)
    return getattr(torch.ops.fusedseg, name.partition("::")[2]).default
