"""Norms whose time ``predict.py`` predicts: hard shapes, each with its reason."""

from typing import NamedTuple

ACT = ("leaky_relu", 0.01)
# Activations with their parameters.  Those of INVERTED are computed backwards from the output.
INVERTED, KEPT = ("elu", "selu", "identity"), ("input", "output")
ACTS = dict.fromkeys(
    ("selu", "identity", "relu", "silu", "gelu", "gelu_tanh", "mish", "hardswish", "relu6", "softplus"), 0.0
) | {"elu": 1.0, "celu": 1.0}


class Norm(NamedTuple):
    """A norm with its activation: the shape of x with all positions in the last axis but one.

    ``kind`` is "batch", "instance" or "group"; ``keep`` is what is kept for backward, the "input" or the "output";
    ``kept`` is the number of kept channels.
    """

    shape: tuple[int, int, int, int]
    kind: str = "batch"
    keep: str = "output"
    act: tuple[str, float] = ACT
    rows: bool = False
    kept: int = 0
    groups: int = 8
    dtype: str = "fp16"

    def launch(self) -> None:
        """Launches forward and backward on CPU tensors that no kernel touches."""
        from tests.kernels.norm_act_launches import DTYPES, FORMATS, launch

        groups = {"batch": None, "instance": self.shape[1], "group": self.groups}[self.kind]
        launch(
            self.shape, DTYPES[self.dtype], FORMATS["rows" if self.rows else "planes"], act=self.act,
            kept=self.kept, groups=groups, keep=self.keep,
        )  # fmt: skip


RELU = {"keep": "input", "act": ("relu", 0.0)}
STAGE = (8, 64, 512, 512)
HARD = {
    # All tiles are whole, and every access takes 16 bytes: the least that a kernel can do wrong.
    "large planes": Norm(STAGE),
    "large rows": Norm(STAGE, rows=True),
    # A thread of rows holds the parameters of 8 channels, and with a kept input also mean and rstd.
    "rows, input kept": Norm((128, 64, 56, 56), rows=True, **RELU),
    "rows of samples, input kept": Norm((2, 32, 128, 128 * 128), kind="instance", rows=True, **RELU),
    # No tile, or only a part of the tiles, is full.
    "cut tiles 56": Norm((128, 64, 56, 56)),
    "cut tiles 112": Norm((128, 64, 112, 112)),
    "cut rows": Norm((2, 64, 513, 513), rows=True),
    # Runs in memory begin at multiples of 8 or of 2 bytes.
    "planes of 14 x 14": Norm((128, 1024, 14, 14)),
    "odd planes": Norm((8, 64, 513, 513)),
    # Channels that are no power of two, so that programs fill waves badly.
    "C = 320": Norm((8, 320, 96, 96)),
    "C = 320, rows": Norm((8, 320, 96, 96), rows=True),
    # A few groups must be cut into many programs.
    "few groups": Norm((2, 64, 256, 512), kind="group"),
    "few groups, rows": Norm((2, 64, 256, 512), kind="group", rows=True),
    "few channels": Norm((1, 8, 1024, 1024)),
    # A slab has one program for each channel, and waits for itself.
    "slabs of 64 KB": Norm((8, 512, 64, 64)),
    "slabs of 16 KB": Norm((8, 1024, 32, 32)),
    # Values of kept channels lie in a tensor of their own, one after the other.
    "kept channel, rows": Norm(STAGE, rows=True, kept=1),
    "four kept channels, rows": Norm(STAGE, rows=True, kept=4),
    "eight kept channels, rows": Norm(STAGE, rows=True, kept=8),
    "kept channel, planes": Norm(STAGE, kept=1),
    # Launches take longer than their bytes.
    "small, 216 positions": Norm((2, 256, 6, 36), kind="instance"),
    "small": Norm((8, 64, 16, 16)),
    # Instructions of an activation take registers, or longer than memory.
    **{
        f"{name}{', rows' * rows}": Norm(STAGE, keep=KEPT[name in INVERTED], act=(name, of), rows=rows)
        for name, of in ACTS.items()
        for rows in (False, True)
    },
}
