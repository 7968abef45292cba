"""InPlaceABN on aten ops, a few values at a time: wherever a tile ends, the results are those of float64."""

import pytest
import torch
from torch.nn import functional as F

from fusedseg.functional import inplace_abn
from fusedseg.ops.norm import reference as norm_reference
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, gradients, norm_act, relative_error
from tests.tools.tensors import channels_last

# name -> elements of a tile
WAYS = {"one call": 2**20, "in tiles": 16, "in tiny tiles": 3}
SHAPES = {
    "1d": (2, 5, 9),
    "odd plane": (2, 5, 3, 7),
    "one sample": (1, 5, 4, 5),
    "3d": (3, 5, 2, 3, 2),
    "chunks without a rest": (2, 4, 2, 4),
    "one over": (1, 3, 2, 4),
    "rows": (9, 5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "identity"])
def test_results_are_those_of_float64(way, dtype, activation, monkeypatch):
    monkeypatch.setattr(norm_reference, "TILE", WAYS[way])
    param = {"elu": 1.0}.get(activation, 0.2)
    for name, shape in SHAPES.items():
        for rows in (False, True)[: 1 + (len(shape) > 3)]:
            for kept, with_residual in ((False, False), (True, False), (False, True)):
                C = shape[1]
                x, dz, residual = (torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(3))
                # Values at the kink may round to its other side, and the gradient of such a value counts for nothing.
                weight, bias = torch.rand(C, dtype=torch.float64) + 0.5, torch.rand(C, dtype=torch.float64) - 0.5
                # A weight of zero makes a kept channel.
                weight[1:2] *= not kept
                weight, bias = (v.to(torch.promote_types(dtype, torch.float32)) for v in (weight, bias))
                added = residual if with_residual else None
                expected = norm_act(x, weight, bias, activation=activation, param=param, residual=added).out
                linear = norm_act(x, weight, bias, activation="identity", residual=added).out
                dz.masked_fill_(linear.abs() < 0.05, 0)
                exact = gradients(dz, x, weight, bias, added, activation=activation, param=param)
                leaves = [t.clone().requires_grad_() for t in (x, weight, bias, *([residual] if with_residual else []))]
                if rows:
                    leaves[0] = channels_last(leaves[0].detach()).requires_grad_()
                given = leaves[0] * 1
                z = inplace_abn(given, None, None, leaves[1], leaves[2], training=True, activation=activation,
                                activation_param=param, residual=leaves[3] if with_residual else None)  # fmt: skip
                # read before anything else: z lies in the memory of ``given``
                assert relative_error(z.detach().double(), expected) < FORWARD_TOLERANCE[dtype], name
                found = torch.autograd.grad(z, leaves, dz)
                # The gradients of weight and bias are sums.  z was rounded to ``dtype``, so each term has an error in
                # proportion to its size, and terms of different sign may nearly cancel in the sum.
                others = [d for d in range(x.dim()) if d != 1]
                terms = dz.double() * F.batch_norm(x.double(), None, None, training=True), dz.double()
                sums = [term.abs().sum(others).norm() for term in terms]
                scales = [exact[0].norm(), *sums, exact[0].norm()]
                for gradient, of_float64, scale in zip(found, exact, scales, strict=False):
                    bound = GRADIENT_TOLERANCE[dtype] * max(scale, 1.0)
                    assert (gradient.double() - of_float64).norm() < bound, name
