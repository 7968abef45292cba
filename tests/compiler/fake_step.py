"""The bytes of a training step of the codegen "aten" on tensors without values, so that any size is counted quickly."""

from typing import NamedTuple

import torch

from fusedseg import _torch
from fusedseg.compiler.capture.prepare import prepare
from fusedseg.compiler.codegen.aten import emit
from fusedseg.compiler.partition import Partition
from fusedseg.compiler.settings import Settings
from fusedseg.memory.meter import LiveBytes, mean_of, tensors_of
from fusedseg.ops.layout import memory_of


class Bytes(NamedTuple):
    """What forward keeps without arguments, and the most bytes at once in forward and in backward."""

    kept: int
    forward: int
    backward: int


def _graphs_of(net, inputs, **options):
    """The number of outputs, and for each graph its arguments and the function that runs it."""
    settings = Settings(codegen="aten", **options)
    divide, parts = Partition(settings), _torch.compiler_parts()
    outputs, made = [], []

    def divided(joint, joint_inputs, **given):
        outputs.append(given["num_fwd_outputs"])
        return divide(joint, joint_inputs, **given)

    def compiled(module, example):
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        made.append((places, emit(module, example)))
        return parts.make_boxed_func(module.forward)

    compiler = parts.aot_autograd(
        fw_compiler=compiled, bw_compiler=compiled, partition_fn=divided, keep_inference_input_mutations=True
    )
    torch.compiler.reset()
    try:
        run = torch.compile(net, backend=lambda module, given: compiler(prepare(module, settings), given))
        mean_of(run(*inputs)).backward()
    finally:
        torch.compiler.reset()
    return *outputs, *made


def _bare(node):
    t = node.meta["val"]
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def fake_step(net, inputs, **options):
    """The bytes of one step of ``net``, inside a fake mode; ``options`` are those of the backend."""
    outputs, (given, forward), (read, backward) = _graphs_of(net, inputs, **options)
    arguments = [_bare(node) for node in given]
    own = {memory_of(t) for t in arguments}
    with LiveBytes() as live:
        results = forward(list(arguments))
        kept = results[outputs:]
        sizes = {memory_of(t): t.untyped_storage().nbytes() for t in tensors_of(kept) if memory_of(t) not in own}
        # The caller holds the output until backward has its gradient.
        of_forward, output = live.peak, results[:outputs]
        gradients = [_bare(node) for node in read if "tangents" in node.name]
        for t in gradients:
            live.track(t)
        del results, output, t
        live.peak = live.current
        arguments = [*kept, *gradients]
        kept = gradients = None
        backward(arguments)
    return Bytes(sum(sizes.values()), of_forward, live.peak)
