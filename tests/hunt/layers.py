"""Steps that are layers: convolutions, norms, pools, interpolation, padding, dropout, embeddings."""

import torch

from tests.hunt.grow import Grower, floats, picking
from tests.hunt.steps import weight_dtype


@picking(floats(3, 4, 5))
def convolution(g: Grower, name: str) -> None:
    x, rng = g.of(name), g.rng
    n, c = x.dim() - 2, x.shape[1]
    out = rng.choice((c, c, c, 4, 3))
    if g.chance(0.3):
        kernel, padding = rng.choice(((1, 0), (3, 1)))
        layer = rng.choice((f"nn.Conv{n}d", f"nn.Conv{n}d", f"nn.ConvTranspose{n}d"))
        options = rng.choice(("", ", bias=False", ", stride=2"))
        weight = str(weight_dtype(g, x))
        m = g.module(f"{layer}({c}, {out}, {kernel}, padding={padding}{options}).to({weight})")
        g.step("convolution", f"{m}({name})")
        return
    if g.chance(0.15):
        w = _weight(g, (c, out, *[2] * n), x)
        g.step("convolution", f"F.conv_transpose{n}d({name}, {w}, stride=2)")
        return
    groups = rng.choice((1, 1, 1, 2)) if c % 2 == 0 and out % 2 == 0 else 1
    kernel, padding = rng.choice(((1, 0), (3, 1), (3, 1), (3, 0), (2, "'same'")))
    w = _weight(g, (out, c // groups, *[kernel] * n), x)
    bias = _weight(g, (out,), x) if g.chance(0.5) else "None"
    spelling = rng.choice((f"F.conv{n}d", f"F.conv{n}d", f"torch.conv{n}d"))
    if g.chance(0.1):
        g.step("convolution", f"{spelling}(input={name}, weight={w}, bias={bias}, padding={padding})")
        return
    stride = 1 if padding == "'same'" else rng.choice((1, 1, 1, 2))
    g.step("convolution", f"{spelling}({name}, {w}, {bias}, {stride}, {padding}, 1, {groups})")


def _weight(g: Grower, shape: tuple[int, ...], x) -> str:
    """A leaf, often an existing one; the scale keeps sums near one."""
    dtype = weight_dtype(g, x)
    leaves = [n for n, t in g.log.leaves.items() if t.shape == shape and t.dtype == dtype and t.requires_grad]
    if leaves and g.chance(0.6):
        return g.rng.choice(leaves)
    fan = 1
    for n in shape[1:]:
        fan *= n
    return g.leaf(shape, dtype, scale=round(max(fan, 1) ** -0.5, 2))


@picking(floats(2, 3, 4, 5))
def norm(g: Grower, name: str) -> None:
    x, rng = g.of(name), g.rng
    c, n = x.shape[1], max(x.dim() - 2, 1)
    if c == 0:
        return
    used = [m for m, module in g.log.modules.items() if "Norm" in type(module).__name__]
    if used and g.chance(0.5):
        m = rng.choice(used)
    else:
        momentum = rng.choice(("", "", ", momentum=None", ", momentum=0.5"))
        affine = rng.choice(("", "", ", affine=False"))
        track = rng.choice(("", "", "", ", track_running_stats=False"))
        kinds = [
            f"nn.BatchNorm{n}d({c}{momentum}{affine}{track})",
            f"nn.BatchNorm{n}d({c}{momentum}{affine}{track})",
            f"nn.InstanceNorm{n}d({c}, affine=True)",
            f"nn.InstanceNorm{n}d({c}, track_running_stats=True{momentum})",
            f"nn.GroupNorm({2 if c % 2 == 0 else 1}, {c}{affine})",
            f"nn.LayerNorm({tuple(x.shape[1:])})",
            f"nn.LayerNorm({x.shape[-1]}, elementwise_affine={g.chance(0.7)})",
        ]
        dtype = f".to({x.dtype})" if g.chance(0.7) else ""
        mode = rng.choice(("", "", "", ".eval()"))
        m = g.module(rng.choice(kinds) + dtype + mode)
    if g.chance(0.25):
        # Not back to training: PyTorch's gradient of a norm in eval mode would read the statistics after the next call.
        g.step("mode", f"{m}.eval()", outs=0)
    g.step("norm", f"{m}({name})")


@picking(floats(2, 3, 4, 5))
def norm_function(g: Grower, name: str) -> None:
    x, rng = g.of(name), g.rng
    c = x.shape[1]
    w, b = (_weight(g, (c,), x) if g.chance(0.7) else "None" for _ in range(2))
    mean, var = "None", "None"
    if g.chance(0.5):
        mean, var = (g.leaf((c,), x.dtype, grad=False, scale=0.5) for _ in range(2))
        var = f"{var}.abs_().add_(0.5)" if g.chance(0.1) else var
    own = mean == "None" or g.chance(0.7)
    # With a bias and no weight, PyTorch's own backward pass raises "tensor does not have a device".
    group_bias = "None" if w == "None" else b
    calls = [
        f"F.batch_norm({name}, {mean}, {var}, {w}, {b}, {own}, {rng.choice((0.1, 0.5, 1.0))})",
        f"F.batch_norm({name}, {mean}, {var}, weight={w}, bias={b}, training={own})",
        f"F.instance_norm({name}, {mean}, {var}, {w}, {b}, {own})",
        f"F.instance_norm({name})",
        f"F.group_norm({name}, 1, {w}, {group_bias})",
        f"F.layer_norm({name}, {name}.shape[1:])",
        f"F.rms_norm({name}, {name}.shape[-1:])",
        f"F.local_response_norm({name}, 2)",
        f"torch.group_norm({name}, {c}, {w}, {group_bias})",
    ]
    g.step("norm", rng.choice(calls))


@picking(floats(2, 3, 4, 5))
def norm_twice(g: Grower, name: str) -> None:
    """A norm that is called in one mode, then in another mode, before the backward pass."""
    x, rng = g.of(name), g.rng
    n = max(x.dim() - 2, 1)
    options = rng.choice(("", ", momentum=None", ", affine=False", ", momentum=0.7"))
    kind = rng.choice(("BatchNorm", "BatchNorm", "BatchNorm", "InstanceNorm"))
    if kind == "InstanceNorm":
        options += ", track_running_stats=True"
    m = g.module(f"nn.{kind}{n}d({x.shape[1]}{options}).to({x.dtype})")
    for mode in rng.sample(["train", "eval", "eval", "train"], 3):
        g.step("mode", f"{m}.{mode}()", outs=0)
        out = g.step("norm", f"{m}({name})")
        if out is not None and g.chance(0.6):
            g.step(
                "activation",
                rng.choice(
                    (f"F.relu({out})", f"F.silu({out}, inplace=True)", f"torch.sigmoid({out})", f"{out}.square()")
                ),
            )


@picking(floats(3, 4, 5))
def pool(g: Grower, name: str) -> None:
    n, rng = g.of(name).dim() - 2, g.rng
    ceil = g.chance(0.3)
    calls = [
        f"F.max_pool{n}d({name}, 2)", f"F.max_pool{n}d({name}, 3, 2, 1)",
        f"F.max_pool{n}d({name}, 2, ceil_mode={ceil})",
        f"F.max_pool{n}d({name}, kernel_size=2, stride=1)", f"torch.max_pool{n}d({name}, 3, 1, 1)",
        f"F.max_pool{n}d({name}, 2, return_indices=True)[0]", f"F.max_pool{n}d({name}, 2, 1, 0, 2)",
        f"F.avg_pool{n}d({name}, 2)", f"F.avg_pool{n}d({name}, 3, 1, 1, ceil_mode={ceil})",
        f"F.adaptive_avg_pool{n}d({name}, 1)", f"F.adaptive_avg_pool{n}d({name}, 3)",
        f"F.adaptive_max_pool{n}d({name}, 2)", f"F.lp_pool{min(n, 2)}d({name}, 2, 2)",
        f"nn.MaxPool{n}d(2)({name})", f"nn.AvgPool{n}d(2)({name})",
    ]  # fmt: skip
    g.step("pool", rng.choice(calls))


@picking(floats(4))
def unpool(g: Grower, name: str) -> None:
    if g.step("pool", f"F.max_pool2d({name}, 2, return_indices=True)", outs=2):
        values, indices = g.frames[-1][-2:]
        g.step("pool", f"F.max_unpool2d({values}, {indices}, 2)")


@picking(floats(3, 4, 5))
def interpolate(g: Grower, name: str) -> None:
    x, rng = g.of(name), g.rng
    n = x.dim() - 2
    modes = {1: ["linear", "area"], 2: ["bilinear", "bicubic", "area"], 3: ["trilinear", "area"]}[n]
    mode = rng.choice(["nearest", "nearest-exact", *modes])
    size = rng.choice(("scale_factor=2", "scale_factor=1.5", f"size={tuple(s + 2 for s in x.shape[2:])}",
                       f"size={g.shape[2:] if len(g.shape) == x.dim() else 4}", "scale_factor=0.5"))  # fmt: skip
    corners = ""
    if mode in ("linear", "bilinear", "bicubic", "trilinear"):
        corners = rng.choice(("", ", align_corners=True", ", align_corners=False"))
        if mode in ("bilinear", "bicubic") and g.chance(0.2):
            corners += ", antialias=True"
    calls = [f"F.interpolate({name}, {size}, mode={mode!r}{corners})"] * 3
    if "antialias" not in corners:
        calls.append(f"nn.Upsample({size}, mode={mode!r}{corners})({name})")
    g.step("interpolate", rng.choice(calls))


@picking(floats(2, 3, 4, 5))
def pad(g: Grower, name: str) -> None:
    x, rng = g.of(name), g.rng
    mode = rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    n = max(x.dim() - 2, 1)
    sizes = tuple(rng.choice((0, 1, 1)) for _ in range(2 * n)) if g.chance(0.7) else (1,) * 2 * n
    if mode == "constant":
        sizes = tuple(s - (g.chance(0.15) and 2) for s in sizes)
        calls = [f"F.pad({name}, {sizes})", f"F.pad({name}, {sizes}, value={rng.choice((0, 0.5, -1.0))})",
                 f"nn.ConstantPad{min(n, 3)}d(1, 0.3)({name})"]  # fmt: skip
    else:
        calls = [f"F.pad({name}, {sizes}, mode={mode!r})"]
    g.step("pad", rng.choice(calls))


@picking(floats())
def dropout(g: Grower, name: str) -> None:
    inplace, p = g.chance(g.rates.inplace), g.rng.choice((0.1, 0.3, 0.5, 0.0))
    training = g.rng.choice(("True", "True", "True", "False"))
    calls = [
        f"F.dropout({name}, {p}, {training}, {inplace})", f"F.dropout2d({name}, {p}, inplace={inplace})",
        f"F.dropout1d({name}, {p}, {training})", f"F.dropout3d({name}, p={p}, training={training})",
        f"F.alpha_dropout({name}, {p}, {training})", f"F.feature_alpha_dropout({name}, {p}, {training})",
        f"nn.Dropout({p}, inplace={inplace})({name})", f"torch.dropout({name}, {p}, {training})",
        f"torch.native_dropout({name}, {p}, {training})[0]", f"F.dropout({name}, {p})",
        f"{name} * torch.bernoulli(torch.full_like({name}, 0.6))", f"{name} + torch.randn_like({name}) * 0.1",
    ]  # fmt: skip
    g.step("dropout", g.rng.choice(calls))


def embedding(g: Grower) -> None:
    table = g.leaf((7, 4), g.dtype)
    if g.chance(0.3):
        index = g.leaf((2, 3), torch.int64)
    else:
        index = g.leaf((2, 8, 8), torch.int64)
    expression = g.rng.choice((f"F.embedding({index}.clamp(max=6), {table})", f"{table}[{index}.clamp(max=6)]",
                               f"F.embedding({index}.clamp(max=6), {table}, padding_idx=0)",
                               f"F.embedding({index}.clamp(max=6), {table}).movedim(-1, 1)"))  # fmt: skip
    g.step("embedding", expression)
