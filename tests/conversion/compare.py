"""Compares a converted model with its stock form."""

import io

import torch
from torch import Tensor, nn

from tests.reference import gradient_errors, relative_error


def saved(model: nn.Module) -> nn.Module:
    """The model after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def results(model: nn.Module, x: Tensor, training: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of input and parameters under a loss that no norm cancels."""
    model.train(training)
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    # A model may write over its input, and PyTorch forbids that for a leaf.
    out = model(leaf.view_as(leaf))
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    (out * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out, gradients | {"input": leaf.grad}


# For float64.
TOLERANCE = 1e-9


def assert_same(ours: nn.Module, stock: nn.Module, x: Tensor, training: bool = True) -> None:
    """Asserts that outputs, gradients, and buffers after the step agree to rounding."""
    out, gradients = results(ours, x, training)
    expected, expected_gradients = results(stock, x, training)
    assert relative_error(out, expected) < TOLERANCE
    errors = gradient_errors(gradients, expected_gradients)
    assert all(error < TOLERANCE for error in errors.values()), errors
    buffers, expected_buffers = dict(ours.named_buffers()), dict(stock.named_buffers())
    assert buffers.keys() == expected_buffers.keys()
    for name, buffer in buffers.items():
        assert relative_error(buffer, expected_buffers[name]) < TOLERANCE, name
