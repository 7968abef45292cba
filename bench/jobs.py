"""What the contenders do in a round: one layer, or one network."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerJob:
    """Norm and activation as a layer inside a network: x is not a leaf, dz is given."""

    def __init__(self, layer: nn.Module, data: dict[str, Tensor]) -> None:
        self.layer, self.x, self.dz = layer, data["x"], data["dz"]
        self.weight, self.bias = layer.parameters()
        with torch.no_grad():
            self.weight.copy_(data["weight"])
            self.bias.copy_(data["bias"])

    def prepare(self) -> Tensor:
        # a copy for everybody, since some contenders overwrite it
        return self.x.clone()

    def forward(self, prepared: Tensor) -> Tensor:
        return self.layer(prepared)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (self.x, self.weight, self.bias), self.dz)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(("z", "dx", "dweight", "dbias"), (out.detach(), *grads), strict=True))

    def owned(self) -> list[Tensor]:
        return [*self.layer.parameters(), *self.layer.buffers()]


class NetJob:
    """A step of a network without its optimizer, which is the same for all; autocast is to bf16.

    forward ends with the logits; the loss counts in backward.
    """

    def __init__(
        self,
        net: nn.Module,
        x: Tensor,
        target: Tensor,
        autocast: bool = False,
        class_weight: Tensor | None = None,
    ) -> None:
        self.net, self.x, self.target, self.autocast, self.class_weight = net, x, target, autocast, class_weight
        self.params = list(net.parameters())

    def prepare(self) -> Tensor:
        return self.x

    def forward(self, prepared: Tensor) -> Tensor:
        with torch.autocast(prepared.device.type, torch.bfloat16, enabled=self.autocast):
            return self.net(prepared)

    def loss(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out.float() if self.autocast else out, self.target, self.class_weight)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(out), self.params)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"logits": out.detach(), "gradients": torch.cat([grad.flatten() for grad in grads])}

    def owned(self) -> list[Tensor]:
        return [*self.net.parameters(), *self.net.buffers()]
