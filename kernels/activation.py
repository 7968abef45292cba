"""Activations on the device.

    activation   phi(y)                            phi'(y), from z = phi(y)   phi^-1(z)
    identity     y                                 1                          z
    leaky_relu   y > 0 ? y : p y                   z > 0 ? 1 : p              z > 0 ? z : z / p
    elu          y > 0 ? y : p (exp(y) - 1)        z > 0 ? 1 : z + p          z > 0 ? z : log(1 + z / p)

ELU's tail saturates: 1 + z / p is taken as CLAMP where rounding has left less, so y is never below log(CLAMP).
"""

import triton
import triton.language as tl


@triton.jit
def act_fwd(y, ACT: tl.constexpr, PARAM: tl.constexpr):
    if ACT == "leaky_relu":
        z = tl.where(y > 0, y, y * PARAM)
    elif ACT == "elu":
        # the exponential of the branch that is not taken must not overflow
        z = tl.where(y > 0, y, (tl.exp(tl.minimum(y, 0.0)) - 1.0) * PARAM)
    else:
        z = y
    return z


@triton.jit
def act_grad(dz, z, ACT: tl.constexpr, PARAM: tl.constexpr):
    """dz * phi'(y), from z."""
    if ACT == "leaky_relu":
        g = tl.where(z > 0, dz, dz * PARAM)
    elif ACT == "elu":
        g = tl.where(z > 0, dz, dz * (z + PARAM))
    else:
        g = dz
    return g


@triton.jit
def act_grad_of_input(dz, y, ACT: tl.constexpr, PARAM: tl.constexpr):
    """dz * phi'(y), from y."""
    if ACT == "leaky_relu":
        g = tl.where(y > 0, dz, dz * PARAM)
    elif ACT == "elu":
        g = tl.where(y > 0, dz, dz * PARAM * tl.exp(tl.minimum(y, 0.0)))
    else:
        g = dz
    return g


@triton.jit
def act_inverse(z, ACT: tl.constexpr, PARAM: tl.constexpr, CLAMP: tl.constexpr):
    if ACT == "leaky_relu":
        y = tl.where(z > 0, z, z * (1.0 / PARAM))
    elif ACT == "elu":
        w = tl.maximum(tl.minimum(z, 0.0) * (1.0 / PARAM) + 1.0, CLAMP)
        y = tl.where(z > 0, z, tl.log(w))
    else:
        y = z
    return y
