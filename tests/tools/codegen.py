"""Compiles kernels for GPUs on a machine without a GPU, and reads registers, spills and widths of accesses.

    report = warm.json_of("tests.tools.codegen", "sm_90", "tests.kernels.norm_act_launches", "CASES")
    report[0]  ->  {"case": "planes-fp16", "kernel": "norm_stats_kernel", "registers": 40, "spilled": 0,
                    "accesses": {"x_ptr": {"load": {"16": 2}, "store": {}}, ...}, "matrix": [], ...}

Kernels are compiled in a separate process, because the calling process may have imported them for the interpreter.
The named dict of the named module has functions that call launchers with CPU tensors, such as CASES, all of them, or
FEW of ``tests/kernels/*_launches.py``.  The tensors are never touched, so their size costs nothing.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Access = tuple[str, str]


class Kernels(NamedTuple):
    """The kernels of a family.

    Attributes:
        names: those that are compiled; for losses there are more.
        accesses: of one compiled launch, the bytes that each thread moves at once by an argument and a kind of access.
        most_registers: of a thread, on sm_90.
    """

    names: set[str]
    accesses: Callable[[dict[str, Any]], dict[Access, str]]
    most_registers: int = 255


# All architectures that kernels are compiled for, and one architecture of each vendor.
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
VENDORS = ("sm_90", "gfx942")
# Architectures that a few launches are compiled for as well.  OLDER ones are left to aten (``fusedseg/_backend.py``).
OTHERS, OLDER = ("sm_86", "sm_89", "sm_120", "gfx90a", "gfx950"), ("sm_75",)
# Shared memory of a block, in bytes, for every architecture that kernels are compiled for.
SHARED = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


def cuobjdump(compiled, *options: str) -> str:
    """What Triton's own cuobjdump prints about compiled code for NVIDIA's GPUs."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run([tool, *options, cubin.name], capture_output=True, text=True, check=True).stdout


def resources(compiled) -> dict[str, int]:
    """Reads registers per thread, spilled bytes per thread and shared memory per block."""
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        counts = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\n", compiled.asm["amdgcn"])}
        spilled = 4 * (counts["vgpr_spill_count"] + counts["sgpr_spill_count"]) + counts["private_segment_fixed_size"]
        return {"registers": counts["vgpr_count"], "spilled": spilled, "shared": shared}
    counts = {
        key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", cuobjdump(compiled, "-res-usage"))
    }
    return {"registers": counts["REG"], "spilled": counts["STACK"] + counts["LOCAL"], "shared": shared}


def type_bytes(text: str) -> int:
    """Size of an LLVM type: ``<4 x i32>``, ``half``, or in the spelling of intrinsics, ``v4i32``, ``f32``."""
    count, element = re.fullmatch(r"(?:<(?=\d)|v(?=\d))?(?:(\d+)(?: x |(?=[a-z])))?(\w+)>?", text.strip()).groups()
    return int(count or 1) * (BITS.get(element) or int(element[1:])) // 8


# Without a mask there is no predicate, so that a tab, \\09, comes before the instruction.
NVIDIA_ACCESS = r"(?:\b|(?<=\\09))(ld|st)\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.b(\d+) .*ptr addrspace\(1\) (%[\w.]+)"
# An asynchronous copy reads global memory and writes shared memory.
ASYNC_COPY = r"\bcp\.async\.c[ag]\.shared\.global .*?\], 0x(\w+).*ptr addrspace\(1\) (%[\w.]+)"
AMD_ACCESS = r"call .*buffer\.(load|store)\.(\w+)\(.*?ptr addrspace\(8\) (%[\w.]+)"


def access(line: str) -> tuple[str, int, str] | None:
    """Reads an LLVM instruction on global memory as ("load" or "store", bytes, address); returns None for all others.

    An asynchronous copy to shared memory is a load.
    """
    # Triton writes inline assembly here, so that a mask can be a predicate.
    if found := re.search(NVIDIA_ACCESS, line):
        kind, vector, bits, address = found.groups()
        return {"ld": "load", "st": "store"}[kind], int(vector or 1) * int(bits) // 8, address
    if found := re.search(ASYNC_COPY, line):
        return "load", int(found[1], 16), found[2]
    # AMD's buffer instructions reach 2 GiB; their bounds check serves as the mask.
    if found := re.search(AMD_ACCESS, line):
        return found[1], type_bytes(found[2]), found[3]
    if found := re.search(r"= load (.+?), ptr addrspace\(1\) (%[\w.]+)", line):
        return "load", type_bytes(found[1]), found[2]
    if found := re.search(r"\bstore (<.+?>|\w+) \S+, ptr addrspace\(1\) (%[\w.]+)", line):
        return "store", type_bytes(found[1]), found[2]
    return None


def pointer_origins(lines: list[str], parameters: dict[str, str]) -> dict[str, set[str]]:
    """For each LLVM value, the kernel arguments whose addresses it was computed from."""
    origins = defaultdict(set, {value: {name} for value, name in parameters.items()})
    # A load returns data and not an address in the same tensor.
    computed = [
        line.split(" = ", 1) for line in lines if " = " in line and not ((of := access(line)) and of[0] == "load")
    ]
    steps = [(result.strip(), re.findall(r"%[\w.]+", expression)) for result, expression in computed]
    while True:
        before = sum(map(len, origins.values()))
        for result, values in steps:
            for value in values:
                origins[result] |= origins.get(value, set())
        if sum(map(len, origins.values())) == before:
            return origins


def accesses(compiled) -> dict[str, dict[str, Counter]]:
    """Counts the loads and stores in the code of one thread, for each pointer argument and width in bytes."""
    body = compiled.asm["llir"].split("\ndefine ", 1)[1].split("\n}", 1)[0].splitlines()
    signature = [(name, kind) for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    parameters = {f"%{i}": name for i, (name, kind) in enumerate(signature) if kind.startswith("*")}
    origins = pointer_origins(body[1:], parameters)
    found = {name: {"load": Counter(), "store": Counter()} for name in parameters.values()}
    for line in body[1:]:
        touched = access(line)
        if touched is None:
            if re.search(r"\b(load|store|ld|st|cp)\b.*ptr addrspace\([18]\)", line):
                raise ValueError(f"an access to global memory that this tool cannot read: {line.strip()}")
            continue
        kind, width, address = touched
        (name,) = origins[address]
        found[name][kind][width] += 1
    return found


def matrix_instructions(compiled) -> list[str]:
    """Instructions of tensor cores in the code: ``wgmma.mma_async``, ``mma.sync``, ``tcgen05.mma``, ``v_mfma``."""
    code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma)(?=[._])", code)))


def describe(case: str, launch) -> dict:
    return {
        "case": case,
        "kernel": launch.name,
        **resources(launch.compiled),
        "accesses": accesses(launch.compiled),
        "matrix": matrix_instructions(launch.compiled),
    }


def check_spills(launches: Sequence[dict], known: Mapping[str, int], record_property: Callable) -> set[str]:
    """Fails if a kernel spills more bytes a thread than are known of its case; returns the names of the kernels."""
    registers = {f"{of['case']} {of['kernel']}": of["registers"] for of in launches}
    record_property("registers", registers)
    print("\nregisters a thread")
    for name, count in registers.items():
        print(f"{count:5d}  {name}")
    spilled = {
        f"{of['case']} {of['kernel']}": of["spilled"] for of in launches if of["spilled"] > known.get(of["case"], 0)
    }
    assert spilled == {}, spilled
    return {of["kernel"] for of in launches}


def check_widths(launches: Sequence[dict], expected: Callable[[dict], dict[Access, str]]) -> set[Access]:
    """Fails if an access does not move as many bytes at once as is expected of its launch; returns all accesses."""
    wrong, seen = [], set()
    for of in launches:
        for (argument, kind), width in expected(of).items():
            seen.add((argument, kind))
            widths = of["accesses"][argument][kind]
            if set(widths) != {width}:
                wrong.append(f"{of['case']} {of['kernel']} {argument}: {kind} of {widths} bytes")
    assert not wrong
    return seen


def main(target: str, module: str, cases: str) -> None:
    from fusedseg.kernels.dry_run import dry_run

    report = []
    for case, launch_case in getattr(importlib.import_module(module), cases).items():
        with dry_run(target) as launches:
            launch_case()
        report += [describe(case, launch) for launch in launches]
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
