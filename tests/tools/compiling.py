"""Compares a network under ``torch.compile`` with the same network in eager mode; ``opcheck`` of one backend."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL = (*QUICK, "test_aot_dispatch_dynamic")


def opcheck(op: Callable, arguments: tuple, backend: str) -> None:
    """``torch.library.opcheck``; on Triton without its longest part, which traces the op and runs the traced program.

    The traced program holds the op, its fake and its formula of backward, which the backends share: the case on aten
    traces them.
    """
    torch.library.opcheck(op, arguments, test_utils=QUICK if backend == "triton" else ALL)


def check_compiled_follows(
    eager: nn.Module,
    compiler: str,
    batches: list[Tensor],
    changes: dict[int, Callable[[nn.Module], None]] | None = None,
    strides: bool = True,
) -> None:
    """Compares outputs and gradients of one SGD step per batch, the final state, and the output in eval mode.

    ``changes``: functions that change the eager network before a step; the compiled network loads its state dict.
    ``strides``: whether the outputs must have equal strides.
    """
    torch._dynamo.reset()
    copied = copy.deepcopy(eager)
    compiled = torch.compile(copied, fullgraph=True, backend=compiler)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (eager, copied)]
    for step, x in enumerate(batches):
        if changes and step in changes:
            with torch.no_grad():
                changes[step](eager)
            copied.load_state_dict(eager.state_dict())
        outs = []
        for net, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            out = net(x)
            out.square().mean().backward()
            outs.append(out)
        torch.testing.assert_close(outs[1], outs[0])
        assert not strides or outs[1].stride() == outs[0].stride()
        for a, b in zip(eager.parameters(), copied.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(copied.state_dict(), eager.state_dict())
    eager.eval()
    copied.eval()
    outs = [net(x) for net in (compiled, eager)]
    torch.testing.assert_close(*outs)
    pairs = zip(outs, (copied, eager), strict=True)
    grads = [torch.autograd.grad(out.square().mean(), [*net.parameters()]) for out, net in pairs]
    torch.testing.assert_close(*grads)
