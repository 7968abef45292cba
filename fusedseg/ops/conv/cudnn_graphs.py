"""The kernels of ``norm_conv.py`` as graphs of cuDNN, by the package nvidia-cudnn-frontend (``fusedseg[cudnn]``).

A graph names tensors and ops, and cuDNN makes one kernel of it.  Images and weights lie in channels_last.  Arithmetic
is in fp32.  The graph of each kind of call is built once, and its first ``MOST_PLANS`` plans are timed then.

The gradient of the weight is PyTorch's: cuDNN proposes it with a norm before it for ReLU, fp16 and images alone, and
rounds scale and bias to fp16 there.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._backend import launching
from ..layout import FORMATS
from . import choice
from .norm_conv import SLOPES, VENDORS, NormConv, each

MOST_PLANS = 4
# The tensors that a graph writes: y or g, and the sums.
OUTPUTS = ("y", "sum", "products")
# The tensors of a graph of cuDNN, by name.
Tensors = dict[str, Any]


def is_installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("cudnn") is not None


@functools.cache
def _package() -> Any:
    import cudnn

    return cudnn


@functools.cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return _package().create_handle()


def _window(call: NormConv) -> dict[str, Any]:
    stride, padding, dilation = map(list, call.geometry[:3])
    return {"stride": stride, "padding": padding, "dilation": dilation}


def _slope(call: NormConv) -> float:
    """The slope of the activation below 0, which is 1 for none."""
    act = call.norm.act
    return SLOPES[act.name](act.param)


class Graph:
    """A graph of cuDNN; each op computes in fp32, and its result has no memory unless it is an output."""

    def __init__(self, io: torch.dtype, at: Mapping[str, Any]) -> None:
        types = _package().data_type
        self.types = {torch.float32: types.FLOAT, torch.float16: types.HALF, torch.bfloat16: types.BFLOAT16}
        self.io, self.fp32 = self.types[io], types.FLOAT
        self.of = _package().pygraph(
            io_data_type=self.io, intermediate_data_type=self.fp32, compute_data_type=self.fp32, **at
        )

    def input(self, name: str, t: Tensor) -> Any:
        return self.of.tensor(name=name, dim=list(t.shape), stride=list(t.stride()), data_type=self.types[t.dtype])

    def output(self, tensor: Any, t: Tensor) -> None:
        tensor.set_output(True).set_data_type(self.types[t.dtype]).set_dim(list(t.shape)).set_stride(list(t.stride()))

    def do(self, op: Callable[..., Any], **given: Any) -> Any:
        return op(compute_data_type=self.fp32, **given).set_data_type(self.fp32)

    def sums(self, value: Any, also: Any) -> Tensors:
        """The sums of a tensor, and of its products with another one."""
        each = {"sum": value, "products": self.do(self.of.mul, a=value, b=also)}
        mode = _package().reduction_mode.ADD
        return {name: self.do(self.of.reduction, input=of, mode=mode) for name, of in each.items()}

    def normed(self, t: Tensors) -> tuple[Any, Any]:
        """x - mean, and the output of the norm."""
        centred = self.do(self.of.sub, a=t["x"], b=t["mean"])
        y = self.do(self.of.mul, a=centred, b=t["scale"])
        return centred, self.do(self.of.add, a=y, b=t["bias"]) if "bias" in t else y


def _forward(g: Graph, t: Tensors, call: NormConv) -> Tensors:
    image, slope = t["x"], _slope(call)
    if "mean" in t:
        _, image = g.normed(t)
        if slope != 1:
            image = g.do(g.of.relu, input=image, negative_slope=slope)
        image.set_data_type(g.io)
    y = g.do(g.of.conv_fprop, image=image, weight=t["weight"], **_window(call))
    if "conv_bias" in t:
        y = g.do(g.of.add, a=y, b=t["conv_bias"])
    if "sum" not in t:
        return {"y": y}
    d = g.do(g.of.sub, a=y, b=t["shift"]) if "shift" in t else y
    return {"y": y, **g.sums(d, d)}


def _input_gradient(g: Graph, t: Tensors, call: NormConv) -> Tensors:
    dz, slope = g.do(g.of.conv_dgrad, loss=t["dy"], filter=t["weight"], **_window(call)), _slope(call)
    # With a stride of 2 the size of the input does not follow from that of dy.
    dz.set_dim(t["x"].get_dim()).set_stride(t["x"].get_stride())
    centred, y = g.normed(t)
    if slope != 1:
        dz = g.do(g.of.leaky_relu_backward, loss=dz, input=y, negative_slope=slope)
    return {"y": dz, **g.sums(dz, centred)}


def planned(call: NormConv, given: Mapping[str, Tensor], at: Mapping[str, Any]) -> tuple[Graph, Tensors]:
    """A graph with plans, and its tensors; raises an error of the package if cuDNN proposes none.

    ``given`` are tensors of the shapes, strides and dtypes, with those that are written: "y", "sum" and "products".
    """
    graph = Graph(given["x"].dtype, at)
    t = {name: None if name in OUTPUTS else graph.input(name, like) for name, like in given.items()}
    made = (_forward if call.dy is None else _input_gradient)(graph, t, call)
    for name, tensor in made.items():
        graph.output(tensor, given[name])
    graph.of.validate()
    graph.of.build_operation_graph()
    modes = _package().heur_mode
    graph.of.create_execution_plans([modes.A, modes.FALLBACK])
    return graph, t | made


class _Built:
    """A graph with the plan that took the least time; raises ``choice.Unserved`` if cuDNN proposes none."""

    def __init__(self, call: NormConv, given: Mapping[str, Tensor]) -> None:
        if not is_installed():
            raise choice.Unserved
        self.handle = _handle(given["x"].device)
        try:
            self.graph, self.tensors = planned(call, given, {"handle": self.handle})
        # cuDNN refuses graphs by errors of several classes.
        except Exception as error:
            raise choice.Unserved from error
        times, problem = {}, None
        for plan in range(min(MOST_PLANS, self.graph.of.get_execution_plan_count())):
            try:
                self.graph.of.build_plan_at_index(plan)
                self(given, plan)
                times[plan] = min(choice.cuda_seconds(functools.partial(self, given, plan)) for _ in range(3))
            # A plan that cannot be built has errors of several classes.
            except Exception as error:
                problem = error
        if not times:
            raise RuntimeError("no plan of cuDNN can be built") from problem
        self.plan = min(times, key=times.__getitem__)

    def __call__(self, given: Mapping[str, Tensor], plan: int | None = None) -> None:
        plan, of, device = self.plan if plan is None else plan, self.graph.of, given["x"].device
        size = max(1, of.get_workspace_size_plan_at_index(plan))
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        with launching(given["x"]):
            _package().set_stream(handle=self.handle, stream=torch.cuda.current_stream(device).cuda_stream)
            of.execute_plan_at_index({self.tensors[n]: t for n, t in given.items()}, workspace, plan, self.handle)


# One for each kind of call that was measured (``choice.py``), so that there are few.
_built: dict[Any, _Built] = {}


def _vectors(call: NormConv) -> dict[str, Tensor]:
    """The mean, scale and bias of a norm in fp32."""
    x, weight, bias, mean, rstd = call[:5]
    if mean is None:
        return {}
    scale = rstd if weight is None else (rstd.view(-1, x.shape[1]) * weight).flatten()
    vectors = {"mean": mean, "scale": scale, "bias": bias}
    return {name: each(v.float(), x, call.norm) for name, v in vectors.items() if v is not None}


def tensors_of(call: NormConv) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors of a graph, and the memory of its sums."""
    x, fmt = call.x, FORMATS[call.x.dim()]
    weight = call.conv_weight.contiguous(memory_format=fmt)
    given, sums = {"x": x, "weight": weight, **_vectors(call)}, None
    if call.dy is None:
        shape, of_sums = call.geometry.output_shape(x.shape, weight.shape), call.after
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=fmt)
        if call.conv_bias is not None:
            given["conv_bias"] = call.conv_bias.view(1, -1, *[1] * (x.dim() - 2))
        if call.running_mean is not None and of_sums is not None:
            given["shift"] = each(call.running_mean.float(), y, of_sums)
    else:
        y, of_sums = torch.empty_like(x), call.norm
        given["dy"] = call.dy.contiguous(memory_format=fmt)
    given["y"] = y
    if of_sums is not None:
        sums = torch.empty(2, of_sums.over.count(y), dtype=torch.float32, device=x.device)
        given |= {"sum": each(sums[0], y, of_sums), "products": each(sums[1], y, of_sums)}
    return given, sums


def compute(call: NormConv) -> tuple[Tensor, Tensor | None]:
    """``norm_conv.Kernels`` by cuDNN."""
    given, sums = tensors_of(call)
    forms = tuple((name, t.dtype, t.shape, t.stride()) for name, t in given.items())
    key = call.norm.act, call.geometry, call.dy is None, call.x.device, forms
    if key not in _built:
        _built[key] = _Built(call, given)
    _built[key](given)
    return given["y"], sums


VENDORS.append(compute)
