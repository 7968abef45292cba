"""Activations and their gradients, as functions of kernels.

    activation   phi(y)                            phi'(y), from z = phi(y)   phi^-1(z)
    identity     y                                 1                          z
    leaky_relu   y > 0 ? y : p y                   z > 0 ? 1 : p              z > 0 ? z : z / p
    elu          y > 0 ? y : p (exp(y) - 1)        z > 0 ? 1 : z + p          z > 0 ? z : log(1 + z / p)
    selu         y > 0 ? l y : k (exp(y) - 1)      z > 0 ? l : z + k          z > 0 ? z / l : log(1 + z / k)

The constants of SELU are l = 1.0507 and k = 1.7581.  The tails of ELU and SELU saturate.  If rounding has made
1 + z / p less than CLAMP, CLAMP is used instead, so y is never below log(CLAMP).

The activations of the next table have no inverse; phi'(y) is computed from y.  s is the sigmoid, and P is the normal
distribution function.

    relu         max(y, 0)                         y > 0
    relu6        min(max(y, 0), 6)                 0 < y < 6
    silu         y s(y)                            s(y) + y s(y) s(-y)
    gelu         y P(y)                            P(y) + y P'(y)
    gelu_tanh    y s(2 u), u the cubic in y        s(2 u) + y s(2 u) s(-2 u) 2 u'
    mish         y t, t = tanh(log(1 + exp(y)))    t + y s(y) (1 - t^2)
    hardswish    y min(max(y + 3, 0), 6) / 6       y <= -3 ? 0 : y < 3 ? y / 3 + 1 / 2 : 1
    softplus     y > 20 ? y : log(1 + exp(y))      y > 20 ? 1 : s(y)
    celu         y > 0 ? y : p (exp(y / p) - 1)    y > 0 ? 1 : exp(y / p)

No formula subtracts numbers that are nearly equal, and NaN stays NaN, as on aten.
"""

import triton
import triton.language as tl


@triton.jit
def exp(v):
    """exp(v).  In fp32 these are two instructions, and results below 2**-126 are 0; ``tl.exp`` takes five."""
    if v.dtype == tl.float32:
        e = tl.exp2(v * 1.4426950408889634)
    else:
        e = tl.exp(v)
    return e


@triton.jit
def reciprocal(d):
    """1 / d for 1 <= d < 2**60.  In fp32 these are two instructions; a division takes eight, for huge and tiny d."""
    if d.dtype == tl.float32:
        r = tl.rsqrt(d * d)
    else:
        r = 1.0 / d
    return r


@triton.jit
def expm1(y):
    """exp(y) - 1 for y <= 0.  Near 0 the difference cancels, so fp32 uses a Taylor polynomial, exact to y^7 / 40320."""
    v = exp(y) - 1.0
    if y.dtype == tl.float32:
        near = tl.fma(y, 1.984126984126984e-4, 1.3888888888888889e-3)
        near = tl.fma(y, near, 8.333333333333333e-3)
        near = tl.fma(y, near, 4.1666666666666664e-2)
        near = tl.fma(y, near, 0.16666666666666666)
        near = tl.fma(y, near, 0.5)
        near = tl.fma(y, near, 1.0)
        v = tl.where(y > -0.25, y * near, v)
    return v


@triton.jit
def log1p(e):
    """log(1 + e) for -1 / 2 <= e <= 1, with full relative accuracy also for a small e."""
    if e.dtype == tl.float32:
        # log(1 + e) = 2 artanh(s), |s| = |e / (2 + e)| <= 1 / 3.  The polynomial is fitted to artanh(s) / s - 1 with an
        # error of 6e-9.
        s = e * reciprocal(2.0 + e)
        t = s * s
        v = tl.fma(t, 0.1400599330663681, 0.14000903069972992)
        v = tl.fma(t, v, 0.2001076340675354)
        v = tl.fma(t, v, 0.3333320915699005)
        v = 2.0 * s * tl.fma(t, v, 1.0)
    else:
        # The rounding error of 1 + e causes a proportional error of log(1 + e), which the factor e / (u - 1) corrects.
        u = 1.0 + e
        v = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return v


@triton.jit
def log1p_down(e, CLAMP: tl.constexpr):
    """log(1 + e) for e <= 0; CLAMP counts as the least 1 + e."""
    w = tl.maximum(e + 1.0, CLAMP)
    if e.dtype == tl.float32:
        # w = 2^k m with 1 / 2 < m <= 1, so that log(m) and k log(2) have one sign.  Where k = 0, m - 1 is e itself,
        # with all of its digits; elsewhere w and m - 1 are exact.
        bits = w.to(tl.int32, bitcast=True)
        exponent = (bits - 0x3F000001) & -0x800000
        rest = tl.where(exponent == 0, e, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)
        # log(2) / 2^23, because ``exponent`` is k 2^23.
        v = tl.fma(exponent.to(tl.float32), 8.262958294867817e-08, log1p(rest))
    else:
        v = tl.where(e > -0.5, log1p(tl.maximum(e, -0.5)), tl.log(w))
    return v


@triton.jit
def sigmoid_parts(v):
    """s(v) and its derivative s(v) s(-v), computed with one exponential, which does not overflow."""
    e = exp(-tl.abs(v))
    r = reciprocal(1.0 + e)
    return tl.where(v > 0, r, e * r), e * r * r


@triton.jit
def gelu_cubic(y):
    """2 u and its derivative: tanh(u) = 2 s(2 u) - 1 makes 0.5 y (1 + tanh(u)) into y s(2 u)."""
    u2 = y * (1.5957691216057308 + 0.07135481627260025 * y * y)
    return u2, 1.5957691216057308 + 0.21406444881780076 * y * y


@triton.jit
def mish_parts(y):
    """t = tanh(log(1 + exp(y))) and s(y) (1 - t^2), computed from powers of e = exp(-|y|), which does not overflow.

    With n = 1 + 2 e and d = n + 2 e^2 for y > 0, and n = e^2 + 2 e and d = n + 2 otherwise, t is n / d.  1 - t^2 is
    (d - n) (n + d) / d^2, where n + d is 2 (1 + e)^2.
    """
    e = exp(-tl.abs(y))
    square = e * e
    n = 2.0 * e + tl.where(y > 0, 1.0, square)
    r = reciprocal(n + 2.0 * tl.where(y > 0, square, 1.0))
    return n * r, 4.0 * tl.where(y > 0, square, e) * (1.0 + e) * (r * r)


@triton.jit
def normal_parts(y):
    """P(y) and its derivative.

    In fp32, P(-|y|) is exp(-y^2 / 2) times a polynomial, fitted to P with an error of 7e-8, which takes half of the
    instructions of ``tl.erf``.
    """
    e = exp(-0.5 * y * y)
    if y.dtype == tl.float32:
        size = tl.minimum(tl.abs(y), 5.5)
        tail = tl.fma(size, -3.15547567e-07, 7.708868e-06)
        tail = tl.fma(size, tail, -8.47717529e-05)
        tail = tl.fma(size, tail, 0.000563656329)
        tail = tl.fma(size, tail, -0.00259010098)
        tail = tl.fma(size, tail, 0.0090038674)
        tail = tl.fma(size, tail, -0.0254718419)
        tail = tl.fma(size, tail, 0.0619239509)
        tail = tl.fma(size, tail, -0.132805794)
        tail = tl.fma(size, tail, 0.249972582)
        tail = tl.fma(size, tail, -0.398940593)
        tail = tl.fma(size, tail, 0.49999997)
        cdf = tl.where(y > 0, 1.0 - tail * e, tail * e)
    else:
        cdf = 0.5 * (1.0 + tl.erf(y * 0.7071067811865476))
    return cdf, e * 0.3989422804014327


@triton.jit
def act_fwd(y, ACT: tl.constexpr, PARAM: tl.constexpr):
    if ACT == "leaky_relu":
        z = tl.where(y > 0, y, y * PARAM)
    elif ACT == "elu":
        # The exponential in the branch that is not taken must not overflow.  A minimum of y and 0 would lose NaN.
        z = tl.where(y > 0, y, expm1(tl.where(y > 0, 0.0, y)) * PARAM)
    elif ACT == "selu":
        z = tl.where(y > 0, y * 1.0507009873554805, expm1(tl.where(y > 0, 0.0, y)) * 1.7580993408473766)
    elif ACT == "relu":
        z = tl.where(y <= 0, 0.0, y)
    elif ACT == "relu6":
        z = tl.where(y <= 0, 0.0, tl.where(y >= 6, 6.0, y))
    elif ACT == "silu":
        s, _ = sigmoid_parts(y)
        z = y * s
    elif ACT == "gelu":
        cdf, _ = normal_parts(y)
        z = y * cdf
    elif ACT == "gelu_tanh":
        u2, _ = gelu_cubic(y)
        s, _ = sigmoid_parts(u2)
        z = y * s
    elif ACT == "mish":
        t, _ = mish_parts(y)
        z = y * t
    elif ACT == "hardswish":
        z = tl.where(y <= -3, y * 0.0, tl.where(y >= 3, y, y * (y + 3.0) * 0.16666666666666666))
    elif ACT == "celu":
        z = tl.where(y > 0, y, expm1(tl.where(y > 0, 0.0, y / PARAM)) * PARAM)
    elif ACT == "softplus":
        # This form does not overflow, and returns y above 20, as the stock function does.
        z = tl.where(y > 20, y, tl.where(y > 0, y, 0.0) + log1p(exp(-tl.abs(y))))
    elif ACT == "identity":
        z = y
    else:
        tl.static_assert(False, "act_fwd has no branch for this activation")
    return z


@triton.jit
def act_grad(dz, z, ACT: tl.constexpr, PARAM: tl.constexpr):
    """dz * phi'(y), computed from z."""
    if ACT == "leaky_relu":
        g = tl.where(z > 0, dz, dz * PARAM)
    elif ACT == "elu":
        g = tl.where(z > 0, dz, dz * (z + PARAM))
    elif ACT == "selu":
        g = dz * tl.where(z > 0, 1.0507009873554805, z + 1.7580993408473766)
    elif ACT == "identity":
        g = dz
    else:
        tl.static_assert(False, "act_grad has no branch for this activation")
    return g


@triton.jit
def act_grad_of_input(dz, y, ACT: tl.constexpr, PARAM: tl.constexpr):
    """dz * phi'(y), computed from y."""
    if ACT == "leaky_relu":
        g = tl.where(y > 0, dz, dz * PARAM)
    elif ACT == "elu":
        g = tl.where(y > 0, dz, dz * PARAM * exp(tl.where(y > 0, 0.0, y)))
    elif ACT == "selu":
        # Two products, because dz times the chosen factor spilled 32 bytes a thread in on-chip rows on sm_80.
        g = tl.where(y > 0, dz * 1.0507009873554805, dz * 1.7580993408473766 * exp(tl.where(y > 0, 0.0, y)))
    elif ACT == "relu":
        g = tl.where(y <= 0, 0.0, dz)
    elif ACT == "relu6":
        g = tl.where((y <= 0) | (y >= 6), 0.0, dz)
    elif ACT == "silu":
        s, ds = sigmoid_parts(y)
        g = dz * tl.fma(y, ds, s)
    elif ACT == "gelu":
        cdf, density = normal_parts(y)
        g = dz * tl.fma(y, density, cdf)
    elif ACT == "gelu_tanh":
        u2, du2 = gelu_cubic(y)
        s, ds = sigmoid_parts(u2)
        # The order matters, because y * du2 overflows when ds is 0.
        g = dz * tl.fma(y * ds, du2, s)
    elif ACT == "mish":
        t, dt = mish_parts(y)
        g = dz * tl.fma(y, dt, t)
    elif ACT == "hardswish":
        g = tl.where(y <= -3, 0.0, tl.where(y >= 3, dz, dz * (y * 0.3333333333333333 + 0.5)))
    elif ACT == "celu":
        g = tl.where(y > 0, dz, dz * exp(tl.where(y > 0, 0.0, y / PARAM)))
    elif ACT == "softplus":
        s, _ = sigmoid_parts(y)
        g = tl.where(y > 20, dz, dz * s)
    elif ACT == "identity":
        g = dz
    else:
        tl.static_assert(False, "act_grad_of_input has no branch for this activation")
    return g


@triton.jit
def act_inverse(z, ACT: tl.constexpr, PARAM: tl.constexpr, CLAMP: tl.constexpr):
    if ACT == "leaky_relu":
        y = tl.where(z > 0, z, z * (1.0 / PARAM))
    elif ACT == "elu":
        y = tl.where(z > 0, z, log1p_down(tl.where(z > 0, 0.0, z * (1.0 / PARAM)), CLAMP))
    elif ACT == "selu":
        # One side is 0.  A choice between the sides made the compiler of sm_90 load one vector after the other.
        tail = log1p_down(tl.minimum(z, 0.0) * (1.0 / 1.7580993408473766), CLAMP)
        y = tl.maximum(z, 0.0) * (1.0 / 1.0507009873554805) + tail
    elif ACT == "identity":
        y = z
    else:
        tl.static_assert(False, "act_inverse has no branch for this activation")
    return y
