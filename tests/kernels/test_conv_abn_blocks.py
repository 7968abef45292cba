"""Compares every configuration of the convolution kernel that ``conv_blocks`` can choose with float64.

Flattened loops over taps and channels with 8 warps have come out wrong on GPUs, for some block sizes only.  The
interpreter knows no warps: run this with ``--device cuda`` after a change of Triton.
"""

import itertools
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.conv_abn_cases import Conv, check, inputs, output, running_statistics

# (dtype, tf32); half precision always uses tensor cores.
KINDS = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
}
# Numbers of multiprocessors that 2 tiles of 128 positions fill, or do not fill.
PROCESSORS = {128: 1, 64: 100}
# Numbers of output channels for each block size; most of them do not fill the block.
CHANNELS_OUT = {16: 7, 32: 32, 64: 60, 128: 120}
# Numbers of input channels for each block size; the last step is incomplete or complete.
CHANNELS_IN = {16: (3, 16), 32: (20, 32), 64: (72, 128)}
CHANNELS_IN_FP32 = {16: (3, 16), 32: (36, 64)}
# Without tensor cores a step sums 16 channels.
CHANNELS_IN_IEEE = {16: (3, 16, 36)}


class Case(NamedTuple):
    kind: str
    block_m: int
    C: int
    K: int

    @property
    def conv(self):
        return Conv((2, self.C, 8, 9), (self.K, self.C, 2, 2), padding=(1, 0))


def cases():
    for kind, (dtype, tf32) in KINDS.items():
        tensor_cores = tf32 or dtype != torch.float32
        channels_in = (CHANNELS_IN_FP32 if tf32 else CHANNELS_IN_IEEE) if dtype == torch.float32 else CHANNELS_IN
        channels_out = [K for block, K in CHANNELS_OUT.items() if tensor_cores or block <= 64]
        for block_m, of_block, (number, K) in itertools.product(
            PROCESSORS, channels_in.values(), enumerate(channels_out)
        ):
            # Each block of input channels has each of its numbers.
            yield Case(kind, block_m, of_block[number % len(of_block)], K)


def chosen(kind, M, C, K, device, affine=False):
    """The choices of ``conv_blocks`` that distinguish compiled kernels."""
    from fusedseg.kernels.conv import conv_blocks

    dtype, tf32 = KINDS[kind]
    meta = conv_blocks(M, (K, C), 1, dtype, tf32 or dtype != torch.float32, device, affine).meta
    return kind, *(meta[name] for name in ("BLOCK_M", "BLOCK_K", "BLOCK_C", "num_warps"))


@pytest.fixture
def processors(monkeypatch, replanned):
    """Sets the number of multiprocessors; one program takes all tiles of a column."""
    from fusedseg.kernels import conv

    monkeypatch.setattr(conv, "PROGRAMS_PER_SM", 0)

    def set_count(count):
        monkeypatch.setattr(conv, "multiprocessors", lambda device: count)
        replanned()

    return set_count


def test_the_cases_below_reach_every_configuration(processors, device):
    reached, possible, reached_affine, possible_affine = set(), set(), set(), set()
    channels = sorted({n for power in range(3, 8) for n in (2**power - 1, 2**power, 2**power + 1)} - {0})
    for block_m, count in PROCESSORS.items():
        processors(count)
        reached |= {chosen(of.kind, 144, of.C, of.K, device) for of in cases() if of.block_m == block_m}
        reached_affine |= {chosen(of.kind, 144, of.C, of.K, device, True) for of in cases() if of.block_m == block_m}
        for kind, C, K in itertools.product(KINDS, channels, channels):
            possible.add(chosen(kind, 144, C, K, device))
            possible_affine.add(chosen(kind, 144, C, K, device, affine=True))
    # Block sizes: 2 of positions; 4 (without tensor cores 3) of output channels; 3 (tf32 2, fp32 1) of input channels.
    assert len(possible) == 2 * (3 * 1 + 4 * 2 + 4 * 3 + 4 * 3)
    assert reached == possible
    # In eval mode a block has at most 64 output channels.
    assert reached_affine == possible_affine == {of for of in possible if of[2] <= 64}


@pytest.mark.parametrize("case", list(cases()), ids=lambda of: f"{of.kind}-{of.block_m}-{of.C}-to-{of.K}")
def test_configuration(case, processors, device):
    processors(PROCESSORS[case.block_m])
    check_case(case, device, training=True)


@pytest.mark.parametrize(("kind", "block_m"), list(itertools.product(KINDS, PROCESSORS)))
def test_configurations_in_eval(kind, block_m, processors, device):
    """Each configuration once: several cases of training have one in eval mode."""
    processors(PROCESSORS[block_m])
    mine = [of for of in cases() if (of.kind, of.block_m) == (kind, block_m)]
    for case in {chosen(kind, 144, of.C, of.K, device, affine=True): of for of in mine}.values():
        check_case(case, device, training=False)


def check_case(case, device, training):
    dtype, tf32 = KINDS[case.kind]
    conv = case.conv
    # Training writes rows of channels and eval mode writes planes, so both layouts are tested.
    given, out = inputs(conv, dtype, device), output(conv, dtype, device, rows=training)
    check(conv, given, out, training=training, running=running_statistics(conv, device), tf32=tf32)
