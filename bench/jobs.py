"""The jobs of the contenders in a round: a layer, or a network."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .contenders import Treat, as_it_is
from .harness import Job, Result, Timing, compete


def step_results(job: Job) -> dict[str, Tensor]:
    """The results of one step."""
    out = job.forward(job.prepare())
    return job.results(out, job.backward(out))


class LayerJob:
    """A layer inside a network: x is no leaf, and dz is given.

    ``data`` has x, dz and the values of the layer's parameters, in their order; ``treat`` returns the module that runs.
    """

    def __init__(self, layer: nn.Module, data: dict[str, Tensor], treat: Treat = as_it_is) -> None:
        self.x, self.dz = data["x"], data["dz"]
        self.names = [name for name in data if name not in ("x", "dz")]
        self.params = tuple(layer.parameters())
        with torch.no_grad():
            for name, param in zip(self.names, self.params, strict=True):
                param.copy_(data[name])
        self.layer = treat(layer)

    def prepare(self) -> Tensor:
        # Every contender gets a copy, because some overwrite it.
        return self.x.clone()

    def forward(self, prepared: Tensor) -> Tensor:
        return self.layer(prepared)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (self.x, *self.params), self.dz)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(("z", "dx", *(f"d{name}" for name in self.names)), (out.detach(), *grads), strict=True))

    def owned(self) -> list[Tensor]:
        return [*self.layer.parameters(), *self.layer.buffers()]


class ReadingJob(LayerJob):
    """A layer that never overwrites x.  x counts as owned, because the layer before keeps it as its output."""

    def prepare(self) -> Tensor:
        return self.x

    def owned(self) -> list[Tensor]:
        return [*super().owned(), self.x]


def exact_layer(layer: Callable[..., Tensor], data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of a ``LayerJob`` in float64; ``layer`` takes x and the parameters."""
    leaves = {name: value.detach().double().requires_grad_() for name, value in data.items() if name != "dz"}
    z = layer(*leaves.values())
    grads = torch.autograd.grad(z, [*leaves.values()], data["dz"].double())
    return {"z": z.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


class NetJob:
    """A step of a network without the optimizer, which is the same for all contenders.  Autocast is to bf16.

    forward ends with the logits; the time of the loss counts in backward.
    """

    def __init__(self, net: nn.Module, x: Tensor, target: Tensor, autocast: bool = False) -> None:
        self.net, self.x, self.target, self.autocast = net, x, target, autocast
        self.params = list(net.parameters())

    def prepare(self) -> Tensor:
        return self.x

    def forward(self, prepared: Tensor) -> Tensor:
        with torch.autocast(prepared.device.type, torch.bfloat16, enabled=self.autocast):
            return self.net(prepared)

    def loss(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out.float() if self.autocast else out, self.target)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        # Networks of other packages have parameters that a step does not use.
        return torch.autograd.grad(self.loss(out), self.params, materialize_grads=True)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"logits": out.detach(), "gradients": torch.cat([grad.flatten() for grad in grads])}

    def owned(self) -> list[Tensor]:
        return [*self.net.parameters(), *self.net.buffers()]

    def exact_results(self) -> dict[str, Tensor]:
        """The results in float64; the network is of no use afterwards."""
        return step_results(NetJob(self.net.double(), self.x.double(), self.target))


def net_tolerance(autocast: bool) -> dict[str, float]:
    """The allowed relative error of the logits and of all gradients together (2-norms).

    Rounding adds up over the layers.  If it crosses a kink or swaps the maximum of a pooling window, a gradient changes
    by more than a rounding error.
    """
    return {"logits": 2e-2, "gradients": 5e-2} if autocast else {"logits": 1e-4, "gradients": 1e-2}


def compete_networks(
    contenders: Iterable[str], build: Callable[[str], NetJob], autocast: bool, timing: Timing
) -> dict[str, Result]:
    """Lets the networks that ``build`` makes of the contenders' names compete; eager's in float64 is the reference."""
    return compete(contenders, build, lambda: build("eager").exact_results(), net_tolerance(autocast), timing)
