"""Instructions that a thread of the packing kernels issues for each value, from compiled code.  No GPU is needed.

    python -m bench.gpu.instructions

A copy of ``n`` bytes a value leaves time for ``n`` / bandwidth * (warps that issue in a cycle) * 32 * clock
instructions: beyond that (``most``), arithmetic takes longer than memory does.
"""

import argparse
import json
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from .predict import DEVICES, Instruction, disassembled, loops_of, resident_of

DEVICE = DEVICES["H100"]
BITS = (8, 4)


class Issued(NamedTuple):
    """Of one kernel: instructions for each value, the most that memory leaves time for, registers, resident warps."""

    kernel: str
    rows: bool
    dtype: str
    bits: int
    instructions: float
    most: float
    registers: int
    resident: int


def executed(code: Sequence[Instruction], trips: float, access: str) -> float:
    """The instructions that a thread executes, if all loops together make ``trips`` such accesses of the tensor.

    What lies behind the last exit are divisions of rare numbers.
    """
    code = code[: 1 + max(place for place, of in enumerate(code) if of.name == "EXIT")]
    total = float(len(code))
    for body in loops_of(code):
        accesses = sum(of.name.startswith(access) and "128" in of.name for of in body)
        total += len(body) * (trips / accesses - 1) if accesses else 0
    return total


def issued(launch: Any, rows: bool, dtype: Any, bits: int, values: int) -> Issued:
    registers, code = disassembled(launch.compiled)
    warps = launch.compiled.metadata.num_warps
    of_thread = values / (prod(launch.grid) * 32 * warps)
    packs = launch.name == "low_bit_pack_kernel"
    found = executed(code, of_thread / (16 // dtype.itemsize), "LDG" if packs else "STG")
    most = (dtype.itemsize + bits / 8) / DEVICE.bandwidth * DEVICE.multiprocessors * 4 * 32 * DEVICE.clock
    resident = warps * resident_of(registers, warps, launch.compiled.metadata.shared)
    name = launch.name.removeprefix("low_bit_").removesuffix("_kernel")
    return Issued(name, rows, str(dtype).removeprefix("torch."), bits, found / of_thread, most, registers, resident)


def of_packing(names: Sequence[str]) -> list[Issued]:
    from fusedseg.kernels.dry_run import dry_run

    from tests.kernels.low_bit_launches import DTYPES, SHAPE, launch

    found = []
    for name in names:
        for rows in (True, False):
            for bits in BITS:
                with dry_run(DEVICE.arch) as launches:
                    launch(DTYPES[name], rows, bits, True)
                found += [issued(of, rows, DTYPES[name], bits, prod(SHAPE)) for of in launches[-2:]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="*", default=["fp16", "bf16", "fp32"])
    parser.add_argument("--json", action="store_true", help="for tests")
    given = parser.parse_args()
    found = of_packing(given.dtypes)
    if given.json:
        print(json.dumps([of._asdict() for of in found]))
        return
    print("| kernel | layout | dtype | bits | instructions a value | most at a copy's speed | registers | warps |")
    print("|---|---|---|---|---|---|---|---|")
    for of in found:
        layout = "rows" if of.rows else "planes"
        print(
            f"| {of.kernel} | {layout} | {of.dtype} | {of.bits} | {of.instructions:.0f} | {of.most:.0f} "
            f"| {of.registers} | {of.resident} |"
        )


if __name__ == "__main__":
    main()
