"""Changes the compiled kernels in one place at a time, and counts which changes the checks notice.

    python -m tests.ptx.mutants [--arch sm_90] [--most 8] [-k conv] [--list]

Kinds of changes:

    no barrier       a barrier of the CTA is left out
    wait later       cp.async, or wgmma, may have one more group under way
    store unmasked   a store loses its mask
    mask off by one  < becomes <= and the like, in a comparison of integers
    shuffle          a lane gets the value of another lane
    constant         a number in an addition, a multiplication or a move is another one
    operand          two registers of a matrix product change places

A change of a mask, or of a number that lanes select, is *unreached* if no lane of the case tells the two apart.  The
script finds out: it runs the kernel with an instruction before the changed one that stores to address 0 if a lane does.
A change that is reached and not noticed *survives*.  docs/compiled.md has the figures, and what was read in the
survivors.
"""

import argparse
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tests.tools.tensors import slots_of

from .driver import Driver, driven
from .memory import OutOfBounds
from .option import harmless

OFF_BY_ONE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
CPU = torch.device("cpu")
F16, F32 = torch.float16, torch.float32


class Mutant(NamedTuple):
    """``text`` stands in place of a line.  ``probe``, before the line, fails if a lane tells the two apart."""

    kind: str
    line: int
    text: str
    probe: str = ""


def constant(code: str) -> str | None:
    """The instruction with another number as its last operand."""
    if not re.match(r"(add|mad|mul|sub|shl|shr|and|or|xor|mov|fma|selp)\.", code):
        return None
    if found := re.search(r", 0f([0-9A-F]{8})\b", code):
        # The new number is about 1.5 times the old one, or 0.5 for 0.
        return code.replace(found[0], f", 0f{int(found[1], 16) ^ 0x00400000 if int(found[1], 16) else 0x3F000000:08X}")
    if found := re.search(r", (-?\d+);$", code):
        return code.replace(found[0], f", {int(found[1]) + 1};")
    return None


def mutants_of(ptx: str) -> Iterator[Mutant]:
    for number, line in enumerate(ptx.splitlines()):
        code = line.strip()
        if re.match(r"bar\.sync|barrier\.sync", code):
            yield Mutant("no barrier", number, "")
        elif found := re.match(r"(cp\.async\.wait_group|wgmma\.wait_group\.sync\.aligned)\s+(\d+)", code):
            yield Mutant("wait later", number, f"{found[1]} {int(found[2]) + 1};")
        elif found := re.match(r"@(!?)(%p\d+) (st\.global.*)", code):
            probe = f"@{'' if found[1] else '!'}{found[2]} st.global.b32 [0], 0;"
            yield Mutant("store unmasked", number, found[3], probe)
        elif found := re.match(r"setp\.(lt|le|gt|ge)\.[su](32|64)\s+%p\d+, (\S+), (\S+);", code):
            equal = f"setp.eq.b{found[2]} equal, {found[3]}, {found[4]}"
            probe = f"{{ .reg .pred equal; {equal}; @equal st.global.b32 [0], 0; }}"
            yield Mutant("mask off by one", number, code.replace(found[1], OFF_BY_ONE[found[1]], 1), probe)
        elif found := re.match(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )(\d+)(,.*)", code):
            yield Mutant("shuffle", number, f"{found[1]}{max(int(found[2]) // 2, 3 - int(found[2]))}{found[3]}")
        elif found := re.match(r"(wgmma\.mma_async.*\}, )(%rd\d+), (%rd\d+)(,.*)", code):
            yield Mutant("operand", number, f"{found[1]}{found[3]}, {found[2]}{found[4]}")
        elif code.startswith("mma.sync"):
            a, b = re.findall(r"\{([^}]*)\}", code)[1].split(",")[:2]
            yield Mutant("operand", number, code.replace(f"{a},{b}", f"{b},{a}", 1))
        elif changed := constant(code):
            probe = ""
            if found := re.match(r"selp\.\w+\s+\S+, (\S+), (\S+), (%p\d+);", code):
                # Which lanes select the number.
                probe = f"@{'' if found[1] not in changed else '!'}{found[3]} st.global.b32 [0], 0;"
            yield Mutant("constant", number, changed, probe)


def cases() -> dict[str, Callable[[], None]]:
    """Small calls that launch every kernel, and compare everything that it writes with float64."""
    from tests.kernels import conv_abn_cases as convs
    from tests.kernels import test_max_pool as pools
    from tests.kernels import test_norm_act as batches
    from tests.kernels import test_norm_act_groups as norms
    from tests.kernels.conv_abn_cases import Conv

    # Samples and channels nearly fill their blocks, because a change in a register that no lane uses has no effect.
    plane = (4, 6, 7, 9)

    def norm(rows, dtype, groups, keep, kept=False, shape=plane):
        given = norms.inputs(shape, rows, dtype, CPU)
        if kept:
            given[3][0], given[3][2], given[4][0], given[4][2] = 0.0, 1e-4, 3.0, -0.5
        norms.check(*given, groups, keep=keep, kept=slots_of([0, 2], shape[1], CPU) if kept else None)

    def batch(rows, dtype, shape, training=True):
        running = torch.zeros(shape[1]), torch.ones(shape[1])
        given = batches.inputs(shape, rows, dtype, CPU)
        batches.check(*given, running=running, training=training)

    def conv(of, dtype, rows, training=True):
        given, out = convs.inputs(of, dtype, CPU, rows), convs.output(of, dtype, CPU, rows)
        convs.check(of, given, out, training=training, running=convs.running_statistics(of, CPU))

    large = Conv((2, 72, 8, 9), (60, 72, 2, 2), padding=(1, 0))
    return {
        "norm-onchip-planes": lambda: norm(False, F32, None, "output", kept=True),
        "norm-onchip-rows-group": lambda: norm(True, F16, 2, "input", shape=(2, 24, 7, 9)),
        "norm-split-planes": lambda: batch(False, F32, (9, 2, 65, 65)),
        "norm-split-rows": lambda: batch(True, F16, (3, 70, 20, 21)),
        "norm-split-rows-group": lambda: norm(True, F32, 3, "output", shape=(2, 24, 40, 31)),
        "norm-eval-planes": lambda: batch(False, F16, plane, training=False),
        "conv-rows": lambda: conv(large, F16, True),
        "conv-rows-eval": lambda: conv(large, F16, True, training=False),
        "conv-planes": lambda: conv(Conv((2, 13, 9, 7), (14, 13, 3, 3), padding=1), F32, False),
        "pool-planes": lambda: pools.check((1, 5, 33, 139), 2, 2, 0, 1, False, False, CPU, F16),
        "pool-rows": lambda: pools.check((2, 19, 15, 17), 3, 2, 1, 1, False, True, CPU),
    }


def attempt(driver: Driver, case: Callable[[], None]) -> str:
    """Runs a case and returns the error that was noticed, or an empty text."""
    before = dict(driver.findings)
    torch.manual_seed(0)
    try:
        case()
    except Exception as error:
        return type(error).__name__
    new = {f.kind for f, count in driver.findings.items() if count != before.get(f) and not harmless(f)}
    return ", ".join(sorted(new))


def replaced(ptx: str, mutant: Mutant, probe: bool = False) -> str:
    lines = ptx.splitlines()
    lines[mutant.line] = f"{mutant.probe}\n{lines[mutant.line]}" if probe else mutant.text
    return "\n".join(lines)


class Results:
    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.survivors: list[str] = []

    @staticmethod
    def noticed(driver: Driver, case: Callable[[], None], ptx: str, other: str) -> str:
        driver.replaced = {ptx: other}
        try:
            return attempt(driver, case)
        finally:
            driver.replaced = {}
            driver.programs.pop(other, None)

    def judge(self, driver: Driver, name: str, case: Callable[[], None], ptx: str, mutant: Mutant) -> None:
        noticed = self.noticed(driver, case, ptx, replaced(ptx, mutant))
        probed = "" if noticed or not mutant.probe else replaced(ptx, mutant, probe=True)
        if probed and self.noticed(driver, case, ptx, probed) != OutOfBounds.__name__:
            self.counts[mutant.kind]["unreached"] += 1
            return
        self.counts[mutant.kind]["caught" if noticed else "survived"] += 1
        if noticed:
            self.counts[mutant.kind][f"by {noticed}"] += 1
        else:
            where = driver.programs[ptx].where(mutant.line + 1)
            self.survivors.append(f"{mutant.kind}: {name}: {where} -> {mutant.text.strip()}")

    def report(self) -> None:
        print(f"{'kind':18}{'made':>6}{'caught':>8}{'unreached':>11}{'survived':>10}")
        for kind, counts in sorted(self.counts.items()):
            numbers = [counts[of] for of in ("caught", "unreached", "survived")]
            print(f"{kind:18}{sum(numbers):>6}{numbers[0]:>8}{numbers[1]:>11}{numbers[2]:>10}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_80", choices=("sm_80", "sm_90"), help="the architecture (default: sm_80)")
    parser.add_argument("--most", type=int, default=8, help="the most changes of a kind and a kernel (default: 8)")
    parser.add_argument("-k", default="", help="a part of the names of the cases to run")
    parser.add_argument("--list", action="store_true", help="print the survivors")
    parser.add_argument("--seed", type=int, default=0, help="which changes are chosen (default: 0)")
    args = parser.parse_args(arguments)
    results, driver = Results(), Driver(args.arch)
    driver.options.limit = 5_000_000
    # New memory holds NaN, so that an element that is never written is found.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with driven(driver):
        for name, case in cases().items():
            if args.k not in name:
                continue
            start, known = time.perf_counter(), set(driver.programs)
            # A case's changes are the same if it runs alone.
            pick = random.Random(f"{args.seed} {name}")
            if clean := attempt(driver, case):
                raise RuntimeError(f"{name} fails without a change: {clean}")
            for ptx in [ptx for ptx in driver.programs if ptx not in known]:
                kinds = defaultdict(list)
                for mutant in mutants_of(ptx):
                    kinds[mutant.kind].append(mutant)
                for found in kinds.values():
                    for mutant in pick.sample(found, min(args.most, len(found))):
                        results.judge(driver, name, case, ptx, mutant)
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    results.report()
    for survivor in results.survivors if args.list else ():
        print(survivor)


if __name__ == "__main__":
    main()
