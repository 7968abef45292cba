"""Bytes and launches of a training step by kind of kernel, from the graphs of the codegen "aten" at full size.

No GPU is needed: tensors have no values, a CPU stands for the GPU, and the rules for GPUs decide::

    python -m bench.gpu.counts "ResNet-50, 128x3x224x224 bf16 nhwc"
    python -m bench.gpu.counts --bits 4 "PlainConvUNet, 2x1x128x128x128 fp16 nhwc"
    python -m bench.gpu.counts --keep "PlainConvUNet, 2x1x128x128x128 fp16 nchw"
    python -m bench.gpu.counts --fused "PlainConvUNet, 2x1x128x128x128 fp16 nhwc"

The times at the end are predicted: bytes at the bandwidth of ``BANDWIDTH``, and convolutions as they were measured.
Parameters are in half precision, so that the casts of autocast are missing.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Before Triton is imported: a CPU is a device of its kernels then.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, fx, nn

import fusedseg
from fusedseg import _torch
from fusedseg.compiler.capture.prepare import prepare
from fusedseg.compiler.codegen import concatenation, convolution_backward, replays, shorter
from fusedseg.compiler.codegen.aten import emit
from fusedseg.compiler.graph import calls_view, name_of, value_of
from fusedseg.compiler.partition import Partition
from fusedseg.compiler.settings import AS_IT_IS, BITS, Settings
from fusedseg.compiler.traffic import norm_passes
from fusedseg.memory.meter import mean_of
from fusedseg.ops.conv import norm_conv
from fusedseg.ops.layout import is_rows
from fusedseg.ops.low_bit.graph import norm_kink
from fusedseg.ops.norm import graph as norms

from ..data import DTYPES
from .steps import CASES, Case

# Bytes a second of a copy on an H100.
BANDWIDTH = 2.9e12
RESULTS = Path(__file__).parents[1] / "results" / "nvidia-h100-80gb-hbm3" / "steps.json"
# Kinds by a part of the name of the called function.
KINDS = {
    "convolution": "convolution", "cat": "concatenation", "concat": "concatenation", "put": "concatenation",
    "put_enlarged": "upsampling",
    "interpolate": "upsampling", "interpolate_backward": "upsampling", "max_pool": "pool", "max_pool_backward": "pool",
    "max_pool_pick": "pool", "add": "addition", "add_": "addition", "clone": "copy", "copy_": "copy", "dense": "copy",
    "_to_copy": "copy",
    "native_batch_norm": "norm", "_native_batch_norm_legit": "norm", "mm": "convolution", "addmm": "convolution",
    "low_bit_round": "pack", "low_bit_unpack": "unpack", "bits_pack": "pack masks", "bits_unpack": "unpack masks",
}  # fmt: skip
# What generated code calls for the gradient of a convolution that no kernel of this package computes; it has no name.
BARE_CONVOLUTION_BACKWARD, *_ = shorter.CONVOLUTIONS[torch.ops.aten.convolution_backward.default]
# Calls that move no bytes.
NOTHING = {"empty", "view", "detach", "_unsafe_view", "getitem", "without_views", "sym_size", "alias", "t"}


class Moved(NamedTuple):
    """What a kernel, or several, read and write."""

    kind: str
    read: int
    written: int
    launches: int = 1


def nbytes(*values: object) -> int:
    """The bytes of tensors, of nodes and of lists of them."""
    total = 0
    for value in values:
        found = value_of(value) if isinstance(value, fx.Node) else value
        if isinstance(found, (list, tuple)):
            total += nbytes(*found)
        elif isinstance(found, Tensor):
            total += found.numel() * found.element_size()
    return total


def _norm(node: fx.Node) -> Moved | None:
    """What a norm in generated code moves; None for other nodes."""
    passes, forward = norm_passes(node), norms.NormCall.of(node)
    if passes is None:
        return None
    read, written = passes
    again = forward is not None and forward.mean is not None
    launches = read.count(node.args[0]) if norms.GradientCall.of(node) is None else 2
    return Moved("norm, once more" if again else "norm", nbytes(*read), written * nbytes(node.args[0]), launches)


def _convolution_backward(node: fx.Node) -> Iterator[Moved]:
    if node.target is convolution_backward.convolution_backward:
        (x,), dy, w = node.args[:3]
    else:
        dy, x, w = node.args[:3]
    of_x, of_w, of_bias = node.args[-1]
    value = value_of(dy)
    if not value.is_contiguous() and not is_rows(value):
        yield Moved("copy", nbytes(dy), nbytes(dy))
    if of_x:
        yield Moved("convolution", nbytes(dy, w), nbytes(x))
    if of_w:
        yield Moved("convolution", nbytes(dy, x), nbytes(w))
    if of_bias:
        yield Moved("gradient of a bias", nbytes(dy), 0)


def _norm_conv(node: fx.Node) -> Iterator[Moved]:
    """What a convolution and the norms beside it move if the vendor's kernels compute all of it."""
    if node.target is not norm_conv.norm_conv_backward_op:
        y, *_ = value_of(node)
        yield Moved("convolution", nbytes(node.args[0], node.args[5]), nbytes(y))
        return
    dy, x, *_, w = node.args[:7]
    if node.args[-2]:
        yield Moved("norm, once more", nbytes(x), nbytes(x))
        yield Moved("convolution", nbytes(dy, x), nbytes(w))
    if node.args[-1]:
        yield Moved("gradient of a bias", nbytes(dy), 0)
    # The kernel reads x for the activation and for the sums; a pass over g and x follows.
    yield Moved("convolution", nbytes(dy, w, x), nbytes(x))
    yield Moved("norm", nbytes(x, x), nbytes(x))


def moved_by(node: fx.Node) -> Iterator[Moved]:
    """What a node of a graph as it runs reads and writes."""
    target: Any = node.target
    name = name_of(node) or str(getattr(target, "__name__", target)).rpartition("::")[2].partition(".")[0]
    if calls_view(node) or name in NOTHING:
        return
    norm = _norm(node)
    if norm is not None:
        yield norm
    elif target in (norm_conv.norm_conv_op, norm_conv.norm_conv_moving, norm_conv.norm_conv_backward_op):
        yield from _norm_conv(node)
    elif name == "convolution_backward" or target is BARE_CONVOLUTION_BACKWARD:
        yield from _convolution_backward(node)
    elif name == "convolution":
        x, w, bias = node.args[:3]
        yield Moved("convolution", nbytes(x, w), nbytes(node))
        if bias is not None:
            yield Moved("addition", nbytes(node), nbytes(node))
    elif target is concatenation.put:
        yield Moved("concatenation", nbytes(node.args[1]), nbytes(node.args[1]))
    elif target is concatenation.put_enlarged:
        large = nbytes(node) // value_of(node).shape[1] * value_of(node.args[1]).shape[1]
        yield Moved("upsampling", nbytes(node.args[1]), large)
    elif target is norm_kink:
        # Of x it reads the shape.
        vectors = [source for source in node.all_input_nodes if source is not node.args[0]]
        yield Moved("kink", nbytes(*vectors), nbytes(node))
    elif target is concatenation.dense:
        yield Moved("copy", nbytes(node), nbytes(node))
    else:
        yield Moved(KINDS.get(name, "rest"), nbytes(*node.all_input_nodes), nbytes(node))


@contextmanager
def on_triton() -> Iterator[None]:
    before = fusedseg.backend
    fusedseg.backend = "triton"
    try:
        yield
    finally:
        fusedseg.backend = before


def graphs_of(case: Case, settings: Settings, tiny: bool = False) -> list[fx.Graph]:
    """Forward and backward of a network as they run."""
    made: list[fx.Graph] = []
    parts = _torch.compiler_parts()

    def compiled(module: fx.GraphModule, example: Any) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        twin = fx.GraphModule(module, graph)
        emit(twin, example)
        made.append(twin.graph)
        return parts.make_boxed_func(module.forward)

    compiler = parts.aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        partition_fn=Partition(settings),
        keep_inference_input_mutations=True,
    )
    fake = _torch.FakeTensor
    with (
        on_triton(),
        mock.patch.object(fake, "is_cpu", False),
        mock.patch.object(fake, "is_cuda", True),
        _torch.convolutions_of_a_gpu(),
        # Replays stand in place of the ops that are counted.
        mock.patch.object(replays, "replay_launches", return_value=0),
        _torch.FakeTensorMode(allow_non_fake_inputs=True),
    ):
        dtype, fmt, dims = DTYPES[case.dtype], case.memory_format(), len(case.shapes[tiny])
        net = case.make(tiny)
        for module in net.modules():
            # A fake module's ``to`` cannot exchange its parameters.
            for name, p in module.named_parameters(recurse=False):
                format_of = fmt if p.dim() == dims else torch.preserve_format
                setattr(module, name, nn.Parameter(p.detach().to(dtype, memory_format=format_of)))
        x = torch.empty(case.shapes[tiny], dtype=dtype).contiguous(memory_format=fmt)
        torch.compiler.reset()
        run = torch.compile(net, backend=lambda module, given: compiler(prepare(module, settings), given))
        mean_of(run(x)).backward()
    torch.compiler.reset()
    return made


def counted(graphs: list[fx.Graph]) -> dict[str, Moved]:
    """What the kernels of each kind move, the kind with the most bytes first."""
    found: dict[str, Moved] = {}
    for graph in graphs:
        for node in graph.nodes:
            for one in moved_by(node) if node.op == "call_function" else ():
                kind, read, written, launches = found.get(one.kind, Moved(one.kind, 0, 0, 0))
                found[kind] = Moved(kind, read + one.read, written + one.written, launches + one.launches)
    return dict(sorted(found.items(), key=lambda item: -item[1].read - item[1].written))


def convolutions_of(case: Case) -> float:
    """The milliseconds of convolutions that were measured for a case."""
    of = json.loads(RESULTS.read_text())["results"].get(str(case), {}).get("contenders", {}).get("aten", {})
    kinds = of.get("kernels", {}).get("kinds", {})
    return sum(kinds.get(kind, {}).get("ms", 0.0) for kind in ("convolution or product", "layout of convolutions"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m bench.gpu.counts", description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=[str(case) for case in CASES])
    parser.add_argument("--bits", type=int, choices=BITS, help="the option of the backend")
    parser.add_argument("--keep", action="store_true", help="no convolution computes in channels_last by itself")
    parser.add_argument("--fused", action="store_true", help="convolutions compute the norms beside them")
    parser.add_argument("--tiny", action="store_true", help="a network of few channels and positions")
    given = parser.parse_args(argv)
    case = next(case for case in CASES if str(case) == given.case)
    fmt = AS_IT_IS if given.keep else case.option()
    settings = Settings(codegen="aten", bits=given.bits, memory_format=fmt, fused_convolutions=given.fused)
    found = counted(graphs_of(case, settings, given.tiny))
    print(case)
    print(f"{'kind':20s} {'read GB':>8s} {'written GB':>10s} {'launches':>8s} {'ms, predicted':>13s}")
    total = 0.0
    for kind, one in found.items():
        ms = 0.0 if kind == "convolution" else (one.read + one.written) / BANDWIDTH * 1e3
        total += ms
        print(f"{kind:20s} {one.read / 1e9:8.2f} {one.written / 1e9:10.2f} {one.launches:8d} {ms:13.2f}")
    print(f"predicted without convolutions: {total:.1f} ms; convolutions as measured: {convolutions_of(case):.1f} ms")


if __name__ == "__main__":
    main()
