"""Predicts the time of the norm kernels from compiled code, grids and the constants of a GPU.  No GPU is needed.

    python -m bench.gpu.predict                 every launch of the shapes that are hard to serve
    python -m bench.gpu.predict --gpu H100 --shapes "odd planes"

Most of these shapes were never measured.  For those that one H100 has measured, the model was 2 to 7 % too fast
(NOTES.md).  No constant was fitted to our kernels.

Registers, warps and shared memory say how many programs a multiprocessor holds at once (``resident``).  The machine
code says how many bytes of loads a thread asks for before it needs the first of them, and how many instructions a tile
takes.  ``n`` programs that run at a time then take for one tile of each

    chain      a load's latency, once for each time that the code waits, and the instructions of one program
    memory     the bytes of n tiles at a copy's bandwidth; what the launch before has left in L2, at L2's bandwidth
    issue      the instructions of the programs of a multiprocessor, at 4 warps a cycle

or a little more than the longest of them (``combined``).  Programs start in waves, and the last wave may be nearly
empty.  What is left out: how memory serves addresses, clocks under load, the order in which programs really start, and
all work beside the kernels.  The model ranks kernels of one kind; it does not replace a measurement.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from .shapes import HARD


class Device(NamedTuple):
    """``bandwidth`` is a copy's, in bytes a second; ``hot`` is the part of L2 that a second pass finds."""

    arch: str
    multiprocessors: int
    clock: float
    bandwidth: float
    hot: float

    @property
    def l2_bandwidth(self) -> float:
        # This is a guess: 28 bytes a cycle for each multiprocessor.
        return 28 * self.clock * self.multiprocessors


# The bandwidth of the H100 (SXM) is measured: a copy of 1 GiB.  That of the H200 was measured by others.
DEVICES = {
    "H100": Device("sm_90", 132, 1.75e9, 3.0e12, 25e6),
    "H200": Device("sm_90", 132, 1.75e9, 4.3e12, 30e6),
}
# Seconds from a load to its value while memory is busy, and from the end of a launch to the loads of the next one.
LATENCY, START = 0.8e-6, 2e-6
# Cycles between two instructions of one warp.  A result takes four, but a thread has several values to work on.
DEPENDENT = 2
REGISTERS, THREADS, PROGRAMS, SHARED = 65536, 2048, 32, 228 << 10
# These arguments are as large as the activation tensor, or as its kept channels.
LARGE = ("x_ptr", "y_ptr", "out_ptr", "saved_ptr", "dz_ptr", "dx_ptr", "residual_ptr", "dresidual_ptr", "kept_ptr")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str

    @property
    def bytes_loaded(self) -> int:
        if not self.name.startswith("LDG"):
            return 0
        return next((size for part, size in BYTES.items() if part in self.name.split(".")), 4)


class Code(NamedTuple):
    """A kernel's registers, and of its loop over tiles the bytes that a thread loads, the most of them that it waits
    for at once, and its cycles to issue.  A kernel without a loop counts as one."""

    registers: int
    loaded: int
    under_way: int
    cycles: int
    loops: bool


class Prediction(NamedTuple):
    """Of one launch.  ``waves`` is a fraction: 1.5 if the second wave is half full.  ``fraction`` is that of a copy's
    bandwidth on ``nbytes``, ``kilobytes`` those of loads under way in a multiprocessor.  ``runs`` says how the launch
    cuts its tensors."""

    kernel: str
    registers: int
    warps: int
    resident: int
    programs: int
    runs: tuple
    waves: float
    kilobytes: float
    cycles: int
    nbytes: int
    seconds: float
    fraction: float


def disassembled(compiled: Any) -> tuple[int, list[Instruction]]:
    """The registers of a thread, and the instructions."""
    from tests.tools.codegen import cuobjdump

    text = cuobjdump(compiled, "-sass", "-res-usage")
    found = [Instruction(int(at, 16), name, of) for at, name, of in INSTRUCTION.findall(text)]
    return int(re.findall(r"REG:(\d+)", text)[0]), found


def loops_of(code: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """The code between each branch back and its target."""
    for of in code:
        target = re.search(r"0x([0-9a-f]+)", of.operands) if of.name == "BRA" else None
        if target and int(target[1], 16) < of.address:
            yield [one for one in code if int(target[1], 16) <= one.address <= of.address]


def most_under_way(code: Sequence[Instruction]) -> int:
    """The most bytes of loads that have been asked for before an instruction reads a value of theirs."""
    waiting: list[tuple[range, int]] = []
    most = 0
    for of in code:
        named = [int(r) for r in re.findall(r"\bR(\d+)", of.operands)]
        waiting = [load for load in waiting if not any(r in load[0] for r in named)]
        if of.bytes_loaded and named:
            waiting.append((range(named[0], named[0] + max(1, of.bytes_loaded // 4)), of.bytes_loaded))
            most = max(most, sum(size for _, size in waiting))
    return most


def cycles_of(code: Sequence[Instruction]) -> int:
    """The cycles in which a quarter of a multiprocessor issues the code for one warp."""
    special = sum(of.name.startswith("MUFU") for of in code)
    return max(len(code), 8 * special)


_codes: dict[str, Code] = {}


def code_of(compiled: Any) -> Code:
    if compiled.hash not in _codes:
        _codes[compiled.hash] = read_code(compiled)
    return _codes[compiled.hash]


def read_code(compiled: Any) -> Code:
    registers, instructions = disassembled(compiled)
    body = max(loops_of(instructions), key=lambda loop: sum(of.bytes_loaded for of in loop), default=[])
    loops = any(of.bytes_loaded for of in body)
    body = body if loops else instructions
    loaded = sum(of.bytes_loaded for of in body)
    return Code(registers, loaded, most_under_way(body), cycles_of(body), loops)


def resident_of(registers: int, warps: int, shared: int) -> int:
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, THREADS // (32 * warps), PROGRAMS, SHARED // (shared + 1024))


def combined(chain: float, busy: float, sharpness: float) -> float:
    """At least the longer of two times that overlap; their sum if nothing does (``sharpness`` 1)."""
    return (chain**sharpness + busy**sharpness) ** (1 / sharpness)


def predict(launch: Any, device: Device, before: Any = None) -> Prediction:
    """``before`` is the launch that has read the same tensors, if there is one."""
    from tests.tools.codegen import accesses

    code = code_of(launch.compiled)
    warps, programs = launch.compiled.metadata.num_warps, prod(launch.grid)
    resident = resident_of(code.registers, warps, launch.compiled.metadata.shared)
    sizes = {name: t.nbytes for name, t in launch.arguments.items() if name in LARGE and t is not None}
    touched = {name: kinds for name, kinds in accesses(launch.compiled).items() if name in sizes}
    read = sum(sizes[name] for name, kinds in touched.items() if kinds["load"])
    nbytes = read + sum(sizes[name] for name, kinds in touched.items() if kinds["store"])
    hits = 0.0 if before is None else read * hit_rate(read, device, runs_of(before) == runs_of(launch))
    tiles = launch.arguments.get("tiles_per_split", 1)
    share = ((nbytes - hits) / device.bandwidth + hits / device.l2_bandwidth) / (programs * tiles)
    waits = -(-code.loaded // max(1, code.under_way))
    chain = waits * LATENCY + DEPENDENT * code.cycles / device.clock

    def wave(n: int) -> float:
        on_one = -(-n // device.multiprocessors)
        issue = on_one * code.cycles * warps / 4 / device.clock
        # Warps of a loop do not wait for each other.  A slab's warps do, so only other programs overlap with it.
        return tiles * combined(chain, max(n * share, issue), 4 if code.loops else max(1.0, min(4, on_one)))

    places = resident * device.multiprocessors
    seconds = START + (programs // places) * wave(places) + (wave(programs % places) if programs % places else 0)
    kilobytes = min(resident, programs / device.multiprocessors) * code.under_way * 32 * warps / 1024
    name = launch.name.removeprefix("norm_").removesuffix("_kernel")
    return Prediction(name, code.registers, warps, resident, programs, runs_of(launch), programs / places, kilobytes,
                      code.cycles, nbytes, seconds, nbytes / device.bandwidth / seconds)  # fmt: skip


def runs_of(launch: Any) -> tuple:
    """How a launch cuts its tensors into runs, one for each program."""
    of = launch.arguments
    return (*launch.grid, of.get("tiles_per_split", 1) * of.get("BLOCK_N", 1) * of.get("BLOCK_L", 1))


def hit_rate(nbytes: int, device: Device, equal: bool) -> float:
    """The share of a second reading that L2 holds.  If programs end elsewhere, they meet hot memory by chance."""
    hot = device.hot / max(1, nbytes)
    return 1.0 if hot >= 1 else hot if equal else hot * hot


def predictions(launches: Sequence[Any], device: Device) -> list[Prediction]:
    """Those of one forward or backward pass, in order: a launch that applies follows one that has read its tensors."""
    found, before = [], None
    for launch in launches:
        if "apply" not in launch.name:
            found.append(predict(launch, device))
            before = launch if "merge" not in launch.name else before
        else:
            found.append(predict(launch, device, before))
            before = None
    return found


def both_ways(norm: Any, device: Device) -> tuple[list[Prediction], list[Prediction]]:
    """The launches of forward and of backward; a launch that rebuilds z is left out."""
    from fusedseg.kernels.dry_run import dry_run

    with dry_run(device.arch) as launches:
        norm.launch()
    if norm.keep == "input":
        launches = launches[:-1]
    split = next(k for k, of in enumerate(launches) if "saved_ptr" in of.arguments)
    return predictions(launches[:split], device), predictions(launches[split:], device)


def row(name: str, of: Prediction) -> str:
    return (
        f"| {name} | {of.kernel} | {of.registers} | {of.resident} | {of.programs} | {of.waves:.2f} | {of.kilobytes:.0f}"
        f" | {of.cycles} | {1e6 * of.seconds:.1f} | {of.fraction:.2f} |"
    )


def print_shapes(device: Device, names: Sequence[str]) -> None:
    print("| shape | kernel | registers | resident | programs | waves | KB | cycles | us | fraction |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in names:
        for way, launches in zip(("forward", "backward"), both_ways(HARD[name], device), strict=True):
            for of in launches:
                print(row(name, of))
            seconds, nbytes = sum(of.seconds for of in launches), sum(of.nbytes for of in launches)
            fraction = nbytes / device.bandwidth / seconds
            print(f"| {name} | **{way}** | | | | | | | {1e6 * seconds:.1f} | {fraction:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=DEVICES, action="append", help="default: all")
    parser.add_argument("--shapes", nargs="*", help="default: all")
    parser.add_argument("--json", action="store_true", help="print the launches of --shapes as JSON, for tests")
    given = parser.parse_args()
    gpus = given.gpu or list(DEVICES)
    if given.json:
        found = {name: both_ways(HARD[name], DEVICES[gpus[0]]) for name in given.shapes or HARD}
        print(json.dumps({name: [[of._asdict() for of in way] for way in ways] for name, ways in found.items()}))
        return
    for gpu in gpus:
        print(f"\n{gpu}\n")
        print_shapes(DEVICES[gpu], given.shapes or list(HARD))


if __name__ == "__main__":
    main()
