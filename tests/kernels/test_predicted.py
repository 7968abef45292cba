"""What the compiled kernels say about their speed, for shapes that are hard to serve: ``bench/gpu/predict.py``.

Nothing is measured here.  A kernel that streams needs programs that are resident at once, a last wave that is not
nearly empty, and bytes of loads under way.
"""

import json

import pytest
import torch

pytest.importorskip("triton")

from fusedseg.ops.layout import layout_of
from tests.tools import warm

QUICK = ("rows, input kept", "cut tiles 56", "odd planes", "C = 320", "kept channel, rows")
# Every other shape, with those activations whose loops read 16 bytes at a time.
OTHERS = (
    "large planes",
    "large rows",
    "rows of samples, input kept",
    "cut tiles 112",
    "cut rows",
    "planes of 14 x 14",
    "kept channel, planes",
    "silu",
    "silu, rows",
    "gelu",
    "gelu, rows",
    "mish",
    "mish, rows",
    "elu",
)
WANTED = 4
# KB of loads under way in a multiprocessor; 26 keep an H200's memory busy.  Activations of many instructions wait for
# arithmetic instead, so their loads come one vector after the other.
LEAST = 22
BOUND_BY_ISSUE = {
    "gelu, rows": 15,
    "mish, rows": 11,
    "silu, rows": 15,
    "mish": 15,
    "odd planes": 15,
    "kept channel, rows": 15,
}

# Three programs a group are planned for four places in a multiprocessor.  The compiler needs so few registers that five
# or six are resident, and the last of two waves is half empty: 0.81 and 0.97 of the limit are predicted for the second
# passes, 0.77 and 0.91 for one program a group.
EMPTY = {("C = 320", "act_fwd_apply"), ("C = 320", "act_bwd_apply"), ("C = 320", "act_bwd_reduce")}
# A thread of forward holds an address for each element of a kept channel.
FEW_RESIDENT = {("kept channel, rows", "act_fwd_apply")}


@pytest.mark.parametrize(
    "shapes", [pytest.param(QUICK, id="quick"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)
def test_kernels_fill_a_gpu(shapes):
    run = warm.run("bench.gpu.predict", "--gpu", "H200", "--json", "--shapes", *shapes)
    assert run.returncode == 0, run.stderr
    wrong = []
    for shape, launches in json.loads(run.stdout).items():
        # Slabs have one program for each channel, and small launches merge parts.
        for of in (of for of in launches if of["kernel"].endswith(("stats", "apply", "reduce"))):
            what = f"{shape}, {of['kernel']}: {of}"
            # 132 multiprocessors; programs of unaligned planes are half as large.
            each = -(-of["programs"] // 132)
            waves = of["programs"] / (132 * min(of["resident"], max(each, WANTED)))
            case = shape, of["kernel"]
            if of["resident"] < min(each, WANTED) and case not in FEW_RESIDENT:
                wrong.append(f"programs that wait: {what}")
            if 1 < waves < 4 and 0 < waves % 1 < 0.6 and case not in EMPTY:
                wrong.append(f"a last wave that is nearly empty: {what}")
            if of["kilobytes"] < BOUND_BY_ISSUE.get(shape, LEAST):
                wrong.append(f"few loads under way: {what}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("rows", [False, True])
def test_passes_cut_a_tensor_at_the_same_places(rows):
    """Rows were cut into 512 runs for statistics and 395 for the second pass, which then met hot memory by chance."""
    from fusedseg.kernels.launch import split_blocks

    memory_format = torch.channels_last if rows else torch.contiguous_format
    layout = layout_of(torch.empty((8, 64, 512, 512), dtype=torch.float16, device="meta", memory_format=memory_format))
    device = torch.device("cpu")
    passes = {
        "stats": split_blocks(layout, torch.float16, device, reduces=True, stats=True),
        "apply": split_blocks(layout, torch.float16, device),
        "sums": split_blocks(layout, torch.float16, device, reduces=True, backward=True),
        "dx": split_blocks(layout, torch.float16, device, backward=True),
    }
    runs = {name: of.tiles_per_split * of.meta["BLOCK_N"] * of.meta["BLOCK_L"] for name, of in passes.items()}
    assert runs["stats"] == runs["apply"]
    assert runs["sums"] == runs["dx"]


@pytest.mark.parametrize(
    ("groups", "tiles", "places", "splits"),
    [
        # As many programs as there are places, or a few less.
        (64, 512, 528, 8),
        (1, 4096, 396, 396),
        # Three waves of 320 programs fill two waves of places.
        (320, 24, 528, 3),
        # The groups fill the places by themselves.
        (640, 24, 528, 1),
        # There is one tile only.
        (320, 1, 528, 1),
    ],
)
def test_splits_fill_waves(groups, tiles, places, splits):
    from fusedseg.kernels.launch import splits_of

    assert splits_of(groups, tiles, tiles, places) == splits
