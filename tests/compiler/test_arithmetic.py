"""Packing as arithmetic that Inductor fuses: the values of eager mode, and its passes over memory."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusedseg import _torch
from fusedseg.compiler.low_bit import arithmetic
from fusedseg.ops.low_bit import graph as ops
from fusedseg.ops.low_bit import traced

pytestmark = pytest.mark.skipif(bool(_torch.inductor_problem()), reason="Inductor needs a C++ compiler")
KEY = torch.tensor(12345)


def passes(function, *inputs):
    """The results of a compiled function, and the bytes that its kernels read and write."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    results = torch.compile(function)(*inputs)
    return results, metrics.num_bytes_accessed


@pytest.mark.parametrize("rows", [False, True], ids=["planes", "rows"])
def test_compiled_packing(rows):
    """Pack reads the tensor for the range of each group and again for the codes; unpack writes it once."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 32, 32)
    if rows:
        x = x.to(memory_format=torch.channels_last)
    form = traced.MemoryOrder.of(x.shape, x.stride())

    def pack(x, key):
        return traced.pack(x, traced.key_of(key, 1), 4, form)

    packed, moved = passes(pack, x, KEY)
    expected = pack(x, KEY)
    assert all(map(torch.equal, packed, expected))
    assert moved < 2.6 * x.nbytes
    values, moved = passes(lambda ends, *codes: traced.unpack(ends, codes, 4, form), *packed)
    assert torch.equal(values, traced.unpack(expected[0], expected[1:], 4, form))
    assert moved < 1.5 * x.nbytes


@pytest.mark.parametrize("place", range(4))
def test_each_step_has_another_key(place):
    """A sum of int32 that overflows lets a C++ compiler leave the key out: then each step rounds alike."""
    torch._dynamo.reset()
    run = torch.compile(lambda key: traced.hashed(torch.arange(3, dtype=torch.int32), traced.key_of(key, place)))
    for step in (0, 13, 12345678901):
        key = torch.tensor(step)
        expected = traced.hashed(torch.arange(3, dtype=torch.int32), traced.key_of(key, place))
        assert torch.equal(run(key), expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_packs_by_the_ops(device):
    """Inductor's code for the arithmetic did not compile within two minutes on an H100."""

    def run(x, key):
        packed = ops.round_op(x, 8, key, 0, None, x.stride())
        mask = ops.bits_pack(x > 0, 1, x.stride())
        unpacked = ops.bits_unpack(mask, 1, torch.bool, x.shape, x.stride())
        return ops.unpack_op(*packed, None, 8, x.shape, x.stride()), unpacked

    with FakeTensorMode() as mode:
        x, key = torch.empty(2, 8, 64, 64, device=device), torch.empty((), dtype=torch.int64)
    with mode:
        module = make_fx(run, tracing_mode="real")(x, key)
    for node in module.graph.nodes:
        node.meta.setdefault(arithmetic.LABEL, arithmetic.KEEP)
    arithmetic.rewrite(module)
    module.graph.eliminate_dead_code()
    of_ops = {op._opoverload for op in (ops.round_op, ops.unpack_op, ops.bits_pack, ops.bits_unpack)}
    found = {node.target for node in module.graph.nodes} & of_ops
    assert found == (of_ops if device == "cuda" else set())
