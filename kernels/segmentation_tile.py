"""What the kernels of ``segmentation_sums.py`` compute on a tile of logits: loads, softmax, sigmoid, focal
factors, and online forms.

A tile is (classes, positions).  The online forms compute a value of each position from several tiles of its classes.
"""

import triton
import triton.language as tl


@triton.jit
def program_of(S, tiles_per_program, BLOCK_S: tl.constexpr):
    """The sample of a program, and its first tile and the tile after its last one."""
    tiles = (S - 1) // BLOCK_S + 1
    programs = (tiles - 1) // tiles_per_program + 1
    n = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * tiles_per_program
    return n, first, tl.minimum(first + tiles_per_program, tiles)


@triton.jit
def offsets(k, s, K, S, LAST: tl.constexpr):
    """Offsets in a sample of classes k, (BLOCK_K, 1), and positions s, (1, BLOCK_S).

    LAST says that the classes of a position are adjacent.
    """
    if LAST:
        offs = s * K + k
    else:
        offs = k.to(tl.int64) * S + s
    return offs


@triton.jit
def load_logits(x_ptr, n, k, s, K, S, LAST: tl.constexpr, ACC: tl.constexpr):
    """A tile of x.  It is -inf for classes that do not exist, and 0 at positions that do not exist."""
    x = tl.load(x_ptr + n * K * S + offsets(k, s, K, S, LAST), mask=(k < K) & (s < S), other=0.0).to(ACC)
    return tl.where(k < K, x, float("-inf"))


@triton.jit
def load_target(y_ptr, mask_ptr, n, k, s, K, S, stride_n, IGNORE: tl.constexpr, DENSE: tl.constexpr,
                Y_LAST: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """y and m of a tile, in shapes that broadcast to it.  Sample n of the target begins at n * stride_n."""
    m = (s < S).to(ACC)
    if mask_ptr is not None:
        m = tl.load(mask_ptr + n * S + s, mask=s < S, other=0).to(ACC)
    if DENSE:
        y = tl.load(y_ptr + n * stride_n + offsets(k, s, K, S, Y_LAST), mask=(k < K) & (s < S), other=0).to(ACC)
        if IGNORE is not None:
            m = tl.where(y == IGNORE, 0.0, m)
    else:
        label = tl.load(y_ptr + n * stride_n + s, mask=s < S, other=0).to(tl.int32)
        if IGNORE is not None:
            m = tl.where(label == IGNORE, 0.0, m)
        y = (label == k).to(ACC)
    return y, m


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def minus_log_sigmoid(x):
    """-log(sigmoid(x)), which neither overflows nor loses digits."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) of a small e: the error of rounding 1 + e is taken out again.
    rounded = 1.0 + e
    rest = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    log1p = tl.where(rounded == 1.0, e, tl.log(rounded) * (e / rest))
    return tl.maximum(-x, 0.0) + log1p


@triton.jit
def one_minus(p):
    """1 - p, above 0, so that it has a logarithm and an inverse."""
    return tl.maximum(1.0 - p, 1e-30)


@triton.jit
def focal(p, GAMMA: tl.constexpr):
    """(1 - p) ** GAMMA, the factor of a focal loss."""
    return tl.exp(GAMMA * tl.log(one_minus(p)))


@triton.jit
def focal_slope(p, GAMMA: tl.constexpr):
    """The gradient of (1 - p) ** GAMMA * l in l = log(p)."""
    p_l = p * tl.log(tl.maximum(p, 1e-30))
    return focal(p, GAMMA) * (1.0 - GAMMA * p_l / one_minus(p))


@triton.jit
def focal_of_sigmoid(x, y, GAMMA: tl.constexpr):
    """The factor of a focal loss with a sigmoid."""
    return tl.exp(-GAMMA * minus_log_sigmoid(x * (1.0 - 2.0 * y)))


@triton.jit
def u_of(p, y, m, d_overlap, d_prediction, SQUARED: tl.constexpr, MINIMUM: tl.constexpr):
    """The gradient of p."""
    u = d_prediction
    if SQUARED:
        u = u * (2.0 * p)
    if MINIMUM:
        # At p = y, autograd takes half of the gradient of a minimum.
        u = u + d_overlap * tl.where(p < y, 1.0, tl.where(p == y, 0.5, 0.0))
    else:
        u = u + d_overlap * y
    return u * m


@triton.jit
def v_of(p, y, m, d_nll, d_other, GAMMA: tl.constexpr):
    """The gradient of -l.  It is 0 where m is 0, even if d_nll is NaN, as it is for a mean over no positions."""
    v = d_nll * y
    if GAMMA != 0.0:
        v = v * focal_slope(p, GAMMA)
    return tl.where(m == 0.0, 0.0, (v + d_other) * m)


@triton.jit
def grad_of_sigmoid_nll(x, y, m, d_nll, d_other, GAMMA: tl.constexpr):
    """The gradient of x by the likelihood of a sigmoid; it is 0 where m is 0, as in ``v_of``."""
    p = sigmoid(x)
    dx = d_nll * y * (p - 1.0) + d_other * (1.0 - y) * p
    if GAMMA != 0.0:
        nll = d_nll * y * minus_log_sigmoid(x) + d_other * (1.0 - y) * minus_log_sigmoid(-x)
        sign = 2.0 * y - 1.0
        dx = (dx - GAMMA * nll * sign * sigmoid(x * sign)) * focal_of_sigmoid(x, y, GAMMA)
    return tl.where(m == 0.0, 0.0, dx * m)


@triton.jit
def softmax(x):
    """The softmax of a tile with all classes, and lse."""
    most = tl.max(x, 0, keep_dims=True)
    e = tl.exp(x - most)
    total = tl.sum(e, 0, keep_dims=True)
    return e / total, most + tl.log(total)


@triton.jit
def online_lse(x_ptr, n, s, K, S, blocks_k, LAST: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr,
               BLOCK_S: tl.constexpr):  # fmt: skip
    """lse of positions whose classes are in several tiles."""
    most = tl.full((1, BLOCK_S), float("-inf"), ACC)
    total = tl.zeros((1, BLOCK_S), ACC)
    for j in range(blocks_k):
        k = j * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
        x = load_logits(x_ptr, n, k, s, K, S, LAST, ACC)
        higher = tl.maximum(most, tl.max(x, 0, keep_dims=True))
        # While all classes are -inf, -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.sum(tl.exp(x - base), 0, keep_dims=True)
        most = higher
    return most + tl.log(total)


@triton.jit
def online_argmax(x_ptr, n, s, K, S, blocks_k, LAST: tl.constexpr, ACC: tl.constexpr, BLOCK_K: tl.constexpr,
                  BLOCK_S: tl.constexpr):  # fmt: skip
    """The first class with the largest logit of each position."""
    most = tl.full((1, BLOCK_S), float("-inf"), ACC)
    best = tl.zeros((1, BLOCK_S), tl.int32)
    for j in range(blocks_k):
        k = j * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
        x = load_logits(x_ptr, n, k, s, K, S, LAST, ACC)
        higher = tl.max(x, 0, keep_dims=True)
        best = tl.where(higher > most, j * BLOCK_K + tl.argmax(x, 0, keep_dims=True), best)
        most = tl.maximum(most, higher)
    return best
