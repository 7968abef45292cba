"""Runs the tests of a file on each of its defects: ``python -m tests.mutation --help``."""

import argparse
import fnmatch
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.mutation import __doc__ as about
from tests.mutation.mutants import Mutant, mutants, parses

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "fusedseg/ops")
# Files and the tests that belong to them; the first row that fits counts.  Tests that fail soonest come first.
NORM_KERNELS = ["tests/kernels/test_norm_act*.py", "tests/kernels/test_sanitize.py", "tests/kernels/test_launcher.py",
                "tests/nn/test_inplace*.py", "tests/nn/test_norm_act.py"]  # fmt: skip
NORM_OPS = ["tests/ops/test_norm_act*.py", "tests/ops/test_inplace*.py", "tests/ops/test_kept.py",
            "tests/ops/test_strides.py", "tests/nn/test_inplace*.py", "tests/nn/test_norm_act.py"]  # fmt: skip
CONV_OPS = ["tests/ops/test_conv*.py", "tests/nn/test_conv_abn*.py"]
SCOPE = ["tests/ops/test_stock.py", "tests/ops/test_recompute.py", "tests/ops/test_recompute_[chlw]*s.py",
         "tests/ops/test_recompute_certain.py", "tests/ops/test_recompute_memory.py", "tests/ops/test_recipe.py",
         "tests/ops/test_recompute_networks.py"]  # fmt: skip
TRANSIENTS = ["tests/ops/test_transients*.py"]
RELATED = {
    "kernels/activation.py": ["tests/kernels/test_activation.py", "tests/test_activation.py"],
    "kernels/conv*.py": ["tests/kernels/test_conv_abn*.py", "tests/kernels/test_sanitize.py"],
    "kernels/max_pool.py": ["tests/kernels/test_max_pool.py", "tests/ops/test_max_pool.py"],
    "kernels/segmentation_*.py": ["tests/kernels/test_segmentation_sums.py", "tests/ops/test_segmentation_sums*.py"],
    "kernels/low_bit.py": ["tests/kernels/test_low_bit.py", "tests/ops/test_low_bit*.py"],
    "kernels/launcher.py": ["tests/kernels/test_launcher.py"],
    "kernels/dry_run.py": ["tests/kernels/test_launcher.py", "tests/kernels/test_*codegen.py"],
    "kernels/*": NORM_KERNELS,
    "fusedseg/ops/low_bit/*": ["tests/ops/test_low_bit*.py", "tests/compiler/test_bits.py"],
    "fusedseg/ops/norm/*": NORM_OPS,
    "fusedseg/ops/observer.py": SCOPE,
    "fusedseg/ops/labels.py": ["tests/ops/test_recompute_compiled*.py"],
    "fusedseg/scope/recipes.py": [*SCOPE, "tests/ops/test_in_place.py"],
    "fusedseg/scope/compiled.py": ["tests/ops/test_recompute_compiled*.py"],
    "fusedseg/scope/registry.py": [*SCOPE, "tests/ops/test_recompute_compiled*.py"],
    "fusedseg/scope/joins.py": ["tests/conversion/test_convs.py", *SCOPE],
    "fusedseg/scope/*": [*SCOPE, "tests/ops/test_transients*.py"],
    "fusedseg/ops/self_test/*": ["tests/ops/test_self_test*.py", "tests/test_doctor*.py", "tests/test_backend.py"],
    "fusedseg/ops/*join_conv.py": ["tests/ops/test_join_conv.py", "tests/nn/test_join_conv.py"],
    "fusedseg/ops/*sources.py": ["tests/ops/test_join_conv.py", *CONV_OPS, "tests/conversion/test_convs.py"],
    "fusedseg/ops/conv*": CONV_OPS,
    "fusedseg/ops/max_pool*": ["tests/ops/test_max_pool*.py", "tests/nn/test_max_pool.py"],
    "fusedseg/ops/segmentation*": [
        "tests/ops/test_segmentation_sums*.py",
        "tests/ops/test_conv_logits.py",
        "tests/losses/test_everywhere.py",
    ],
    "fusedseg/losses*": ["tests/losses/test_*.py"],
    "fusedseg/ops/cast.py": ["tests/ops/test_cast.py"],
    "fusedseg/ops/reuse.py": [*TRANSIENTS, *SCOPE],
    "fusedseg/ops/unfused.py": ["tests/training/test_export.py"],
    "fusedseg/ops/*": ["tests/ops/test_*.py", "tests/test_activation.py"],
}
# The arguments that choose the tests marked slow instead of the default ones.
SLOW = ("-m", "slow and not variants")
# Seconds of computing, which other work on the machine does not change, and seconds of waiting.
PATIENCE = 600
LONGEST = 3600
# The exit statuses of pytest if a test fails, or cannot be collected.
CAUGHT = (1, 2, 4)


def sources(root: Path, folders: Iterable[str]) -> list[Path]:
    """Lists the files with code, relative to the checkout."""
    found = [
        path for name in folders for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    ]
    return sorted(path.relative_to(root) for path in found if mutants(path.read_text()))


def related(root: Path, path: Path) -> list[str]:
    patterns = next(tests for pattern, tests in RELATED.items() if fnmatch.fnmatch(path.as_posix(), pattern))
    found = [test.relative_to(root).as_posix() for pattern in patterns for test in sorted(root.glob(pattern))]
    return list(dict.fromkeys(found))


def copied(root: Path, tests: Path, folder: Path) -> Path:
    """Copies the checkout, so that files may be changed; ``fusedseg/kernels`` finds the copied kernels."""
    left_out = shutil.ignore_patterns("__pycache__", ".git", "*.venv", "results")
    for name in ("fusedseg", "kernels", "bench", "docs"):
        shutil.copytree(root / name, folder / name, ignore=left_out)
    shutil.copytree(tests / "tests", folder / "tests", ignore=left_out)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(tests / name, folder / name)
    return folder


def found_in_copy(folder: Path) -> None:
    """Removes finders of imports that find the package elsewhere, as an installation in development mode may do.

    With such a finder for the kernels, their defects stood in files that no test imported, and all of them survived.
    """
    for finder in [*sys.meta_path]:
        for name, path in (("fusedseg", [str(folder)]), ("fusedseg.kernels", [str(folder / "fusedseg")])):
            spec = finder.find_spec(name, path)
            if spec is not None and not str(spec.origin).startswith(str(folder)):
                sys.meta_path.remove(finder)
                break


def outcome(folder: Path, tests: list[str], marks: tuple[str, ...] = ()) -> tuple[str, str]:
    """Runs tests in a process that has imported PyTorch already, up to the first one that fails.

    ``marks`` are arguments of pytest that choose among the tests.  Returns "caught", "survived" or "timed out", and the
    name of the test that failed.
    """
    output = folder / "output.txt"
    child = os.fork()
    if not child:
        code = 3
        try:
            os.setsid()
            os.chdir(folder)
            resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
            sys.path.insert(0, str(folder))
            os.environ["PYTHONPATH"] = str(folder)
            found_in_copy(folder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            import pytest

            code = pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly", *marks, *tests])
        finally:
            os._exit(code)
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            time.sleep(0.05)
            continue
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return "timed out", ""
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in CAUGHT:
            return "survived", ""
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.+?)?)(?: - .*)?$", output.read_text(), re.MULTILINE)
        return "caught", failed[1] if failed else ""
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return "timed out", ""


def chosen(root: Path, folders: list[str], each: int, seed: int) -> list[tuple[Path, Mutant]]:
    """Chooses up to ``each`` defects of each file; the same sources and seed give the same defects."""
    found = []
    for path in sources(root, folders):
        text = (root / path).read_text()
        of_file = mutants(text)
        random.Random(f"{seed} {path}").shuffle(of_file)
        picked = itertools.islice((mutant for mutant in of_file if parses(mutant.applied(text))), each)
        found += [(path, mutant) for mutant in sorted(picked)]
    return found


def sampled(root: Path, folders: list[str], size: int, seed: int) -> list[tuple[Path, Mutant]]:
    """Chooses ``size`` defects among all, each as likely as any other.

    They come in random order, so that what a stopped run has printed is a sample too.
    """
    found = [(path, mutant) for path in sources(root, folders) for mutant in mutants((root / path).read_text())]
    random.Random(seed).shuffle(found)
    fit = ((path, mutant) for path, mutant in found if parses(mutant.applied((root / path).read_text())))
    return list(itertools.islice(fit, size))


def earlier(lines: Iterable[str]) -> dict[str, str]:
    """Reads the printed lines of a run: each defect that it caught, and the test that failed, if one was named."""
    found = (re.fullmatch(r"(?:caught|timed out|slow) +\d+ s  (.+?)(?:  by (tests/.+))?", line) for line in lines)
    return {match[1]: match[2] or "" for match in found if match}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="files or folders to change (default: %(default)s)")
    parser.add_argument("--each", type=int, default=1, help="defects of each file")
    parser.add_argument("--sample", type=int, help="so many defects among all, instead of --each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout whose tests run")
    parser.add_argument(
        "--after",
        type=Path,
        help="what an earlier run printed: only what it caught is tried, first on the test that caught it",
    )
    parser.add_argument(
        "--slow", action="store_true", help="try what survives the default tests on the tests marked slow as well"
    )
    parser.add_argument("--part", default="1/1", help="1/2 and 2/2: halves, for two processes")
    options = parser.parse_args(argv)
    index, parts = map(int, options.part.split("/"))
    first = earlier(options.after.read_text().splitlines()) if options.after else {}

    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Each mutant is tested in a fork of this process, which finds these modules imported.
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    found: dict[str, Counter] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = copied(ROOT, options.tests.resolve(), Path(name))
        if options.sample:
            defects = sampled(ROOT, options.folders, options.sample, options.seed)
        else:
            defects = chosen(ROOT, options.folders, options.each, options.seed)
        for path, mutant in defects[index - 1 :: parts]:
            name = f"{path}:{mutant.line}  {mutant.what}"
            if options.after and name not in first:
                continue
            source, start = (ROOT / path).read_text(), time.monotonic()
            (folder / path).write_text(mutant.applied(source))
            result, test = outcome(folder, [first[name]]) if first.get(name) else ("", "")
            if not test or test != first.get(name):
                result, test = outcome(folder, related(folder, path))
            if options.slow and result == "survived":
                result, test = outcome(folder, related(folder, path), SLOW)
                result = "slow" if result != "survived" else result
            (folder / path).write_text(source)
            found.setdefault(path.as_posix(), Counter())[result] += 1
            by = f"  by {test}" if test else ""
            print(f"{result:9s} {time.monotonic() - start:4.0f} s  {name}{by}", flush=True)
    print("\ncaught of all")
    for path, counts in found.items():
        print(f"{counts.total() - counts['survived']:3d} of {counts.total():3d}  {path}")
    total = sum(found.values(), Counter())
    print(f"{total.total() - total['survived']:3d} of {total.total():3d}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
