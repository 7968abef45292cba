"""Runs the tests of a file on each of its defects: ``python -m tests.mutation --help``."""

import argparse
import fnmatch
import itertools
import os
import random
import re
import shutil
import subprocess
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
CONV_OPS = ["tests/ops/test_conv*.py", "tests/ops/test_join_conv.py", "tests/nn/test_conv*.py"]
RELATED = {
    "kernels/activation.py": ["tests/kernels/test_activation.py", "tests/test_activation.py"],
    "kernels/conv3d.py": ["tests/kernels/test_conv3d.py"],
    "kernels/conv*.py": ["tests/kernels/test_conv_abn*.py", "tests/kernels/test_sanitize.py"],
    "kernels/max_pool.py": ["tests/kernels/test_max_pool.py", "tests/ops/test_max_pool.py"],
    "kernels/concat.py": ["tests/kernels/test_concat.py", "tests/ops/test_concat.py"],
    "kernels/upsample.py": ["tests/ops/test_upsample.py"],
    "kernels/segmentation_*.py": ["tests/kernels/test_segmentation_sums.py", "tests/ops/test_segmentation_sums*.py"],
    "kernels/low_bit.py": ["tests/kernels/test_low_bit.py", "tests/ops/test_low_bit*.py"],
    "kernels/launcher.py": ["tests/kernels/test_launcher.py"],
    "kernels/dry_run.py": ["tests/kernels/test_launcher.py", "tests/kernels/test_*codegen.py"],
    "kernels/*": NORM_KERNELS,
    "fusedseg/ops/low_bit/*": ["tests/ops/test_low_bit*.py", "tests/compiler/test_bits*.py"],
    "fusedseg/ops/norm/*": NORM_OPS,
    "fusedseg/ops/self_test/*": ["tests/ops/test_self_test*.py", "tests/test_doctor*.py", "tests/test_backend.py"],
    "fusedseg/ops/conv*": CONV_OPS,
    "fusedseg/ops/max_pool*": ["tests/ops/test_max_pool*.py", "tests/nn/test_max_pool.py"],
    "fusedseg/ops/concat.py": ["tests/ops/test_concat.py", "tests/compiler/test_concatenation.py"],
    "fusedseg/ops/upsample.py": ["tests/ops/test_upsample.py"],
    "fusedseg/ops/segmentation*": [
        "tests/ops/test_segmentation_sums*.py",
        "tests/ops/test_conv_logits.py",
        "tests/losses/test_everywhere.py",
    ],
    "fusedseg/losses*": ["tests/losses/test_*.py"],
    "fusedseg/ops/avg_pool.py": ["tests/compiler/test_channels_last.py"],
    "fusedseg/ops/reuse.py": [
        "tests/ops/test_segmentation_sums_memory.py",
        "tests/ops/test_transients*.py",
        "tests/ops/test_in_place.py",
    ],
    "fusedseg/ops/unfused.py": ["tests/training/test_export.py"],
    "fusedseg/ops/*": ["tests/ops/test_*.py", "tests/test_activation.py"],
}
# The arguments that choose the tests marked slow instead of the default ones.
SLOW = ("-m", "slow")
# Seconds that the tests of one defect may take.
PATIENCE = 1800
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


def copied(root: Path, folder: Path) -> Path:
    """Copies the checkout, so that files may be changed; ``fusedseg/kernels`` finds the copied kernels."""
    left_out = shutil.ignore_patterns("__pycache__", ".git", "*.venv", "results")
    for name in ("fusedseg", "kernels", "bench", "docs", "tests"):
        shutil.copytree(root / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, folder / name)
    return folder


def outcome(folder: Path, tests: list[str], marks: tuple[str, ...] = ()) -> tuple[str, str]:
    """Runs tests in a process of their own, up to the first one that fails.

    ``marks`` are arguments of pytest that choose among the tests.  Returns "caught", "survived" or "timed out", and the
    name of the test that failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *marks, *tests]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "timed out", ""
    if done.returncode not in CAUGHT:
        return "survived", ""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.+?)?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return "caught", failed[1] if failed else ""


def sampled(root: Path, folders: list[str], size: int, seed: int) -> list[tuple[Path, Mutant]]:
    """Chooses ``size`` defects among all, each as likely as any other.

    They come in random order, so that what a stopped run has printed is a sample too.
    """
    found = [(path, mutant) for path in sources(root, folders) for mutant in mutants((root / path).read_text())]
    random.Random(seed).shuffle(found)
    fit = ((path, mutant) for path, mutant in found if parses(mutant.applied((root / path).read_text())))
    return list(itertools.islice(fit, size))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="files or folders to change (default: %(default)s)")
    parser.add_argument("--sample", type=int, default=50, help="how many defects (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--slow", action="store_true", help="try what survives the default tests on the tests marked slow as well"
    )
    options = parser.parse_args(argv)
    found: dict[str, Counter] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = copied(ROOT, Path(name))
        for path, mutant in sampled(ROOT, options.folders, options.sample, options.seed):
            source, start = (ROOT / path).read_text(), time.monotonic()
            (folder / path).write_text(mutant.applied(source))
            result, test = outcome(folder, related(folder, path))
            if options.slow and result == "survived":
                result, test = outcome(folder, related(folder, path), SLOW)
                result = "slow" if result != "survived" else result
            (folder / path).write_text(source)
            found.setdefault(path.as_posix(), Counter())[result] += 1
            by = f"  by {test}" if test else ""
            seconds = time.monotonic() - start
            print(f"{result:9s} {seconds:4.0f} s  {path}:{mutant.line}  {mutant.what}{by}", flush=True)
    print("\ncaught of all")
    for path, counts in found.items():
        print(f"{counts.total() - counts['survived']:3d} of {counts.total():3d}  {path}")
    total = sum(found.values(), Counter())
    print(f"{total.total() - total['survived']:3d} of {total.total():3d}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
