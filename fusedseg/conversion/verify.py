"""Compares a converted model with its stock form: outputs, gradients and buffers."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._torch import tree_map_only
from .observe import parse_inputs, set_training, tensors_in
from .revert import revert


class Difference(NamedTuple):
    """The largest relative difference over all tensors, and the name of the tensor that has it.

    The relative difference of a tensor is |ours - stock| / |stock| in 2-norms.  If the norm of a gradient is below a
    thousandth of the largest norm of a gradient, the difference is divided by the largest norm instead.  For example,
    the gradient of a bias before a norm consists of rounding errors only, which cannot agree.

    Attributes:
        size: the relative difference.
        where: the name of the tensor; "" if all tensors are identical.
    """

    size: float
    where: str

    def __str__(self) -> str:
        return f"{self.size:.2g} ({self.where})" if self.size else "identical to the last bit"


class Verification(NamedTuple):
    """The largest relative differences between a converted model and its stock form.

    Attributes:
        value: the difference of the outputs.
        gradient: the difference of the gradients of inputs and parameters.
        buffers: the difference of the buffers after the step.
        rounding: the relative size of one rounding in the dtype of the outputs, for comparison; None if no output has a
            floating-point dtype.
    """

    value: Difference
    gradient: Difference
    buffers: Difference
    rounding: float | None = None

    @property
    def largest(self) -> float:
        return max(part.size for part in (self.value, self.gradient, self.buffers))

    def __str__(self) -> str:
        title = "largest relative difference to the stock model"
        if self.largest == 0:
            return f"{title}: none, outputs, gradients and buffers are identical to the last bit"
        one = "" if self.rounding is None else f" (one rounding is {self.rounding:.2g})"
        return f"{title}{one}\n  outputs    {self.value}\n  gradients  {self.gradient}\n  buffers    {self.buffers}"


def verify(model: nn.Module, example: object, training: bool | None = None) -> Verification:
    """Runs copies of the model and of its reverted form; see ``ConversionReport.verify``."""
    ours, stock = copy.deepcopy(model), revert(copy.deepcopy(model))
    random = torch.get_rng_state()
    found = []
    for net in (ours, stock):
        if training is not None:
            set_training(net, training)
        torch.set_rng_state(random)
        found.append(_results(net, example))
    torch.set_rng_state(random)
    (out, gradients, buffers), (stock_out, stock_gradients, stock_buffers) = found
    rounding = max((torch.finfo(y.dtype).eps for y in out.values() if y.is_floating_point()), default=None)
    return Verification(
        _largest(out, stock_out), _largest(gradients, stock_gradients, 1e-3), _largest(buffers, stock_buffers), rounding
    )


def _results(model: nn.Module, example: object) -> tuple[dict[str, Tensor], ...]:
    """Runs the model forward and backward; returns its outputs, gradients and buffers by name."""
    args, kwargs = tree_map_only(Tensor, _leaf, parse_inputs("fusedseg.verify", example))
    # The model gets views, because it may write over its input, and a leaf must not be overwritten.
    out = model(*tree_map_only(Tensor, lambda t: t.view_as(t), args), **kwargs)
    outputs = {f"output {i}": tensor for i, tensor in enumerate(tensors_in(out))}
    loss = sum((_weights(y) * y).sum() for y in outputs.values() if y.is_floating_point() and y.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    leaves = {f"input {i}": tensor for i, tensor in enumerate(tensors_in((args, kwargs)))}
    leaves |= dict(model.named_parameters())
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return outputs, gradients, dict(model.named_buffers())


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _weights(y: Tensor) -> Tensor:
    """Weights for the sum over an output.  All weights differ, so a norm does not cancel the gradient of the sum."""
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).cos().mul(7).sin().view(y.shape)


def _largest(ours: dict[str, Tensor], stock: dict[str, Tensor], small: float = 0.0) -> Difference:
    """The largest relative difference.  Tensors below ``small`` times the largest norm are divided by that norm."""
    assert ours.keys() == stock.keys(), set(ours) ^ set(stock)
    norms = {name: torch.linalg.vector_norm(value.detach().double()).item() for name, value in stock.items()}
    largest = max(norms.values(), default=0.0)
    found = Difference(0.0, "")
    for name, value in ours.items():
        difference = torch.linalg.vector_norm(value.detach().double() - stock[name].detach().double()).item()
        size = difference / ((norms[name] if norms[name] >= small * largest else largest) or 1.0)
        # The condition is `not <=`, so that NaN counts as a difference.
        if not size <= found.size:
            found = Difference(size, name)
    return found
