"""The command as a shell runs it: output that cannot be written, and models that end the program."""

import pytest

from tests.tools import warm

PROFILE = ("profile", "tests.cli.test_memory:linear", "--input", "4,8", "--codegen", "aten")
# The command, in a process that has imported PyTorch's compiler already.  If OUT is a function, it opens the output.
RUN = f"""
import os, runpy, sys
sys.path.insert(0, {str(warm.ROOT)!r})
if OUT is not None:
    sys.stdout = open(OUT(), "w")
runpy.run_module("fusedseg", run_name="__main__", alter_sys=True)
"""
WITHOUT_READER = """
def OUT():
    reader, writer = os.pipe()
    os.close(reader)
    return writer
"""
FULL_DISK = """
def OUT():
    return os.open("/dev/full", os.O_WRONLY)
"""


@pytest.mark.parametrize(
    ("out", "status", "message"),
    [(WITHOUT_READER, 141, ""), (FULL_DISK, 1, "fusedseg: No space left on device\n")],
    ids=["head", "full"],
)
def test_output_that_cannot_be_written(out, status, message):
    """``| head -1`` and ``> /dev/full`` ended in tracebacks."""
    run = warm.run_code(out + RUN, "doctor")
    assert (run.returncode, run.stderr) == (status, message)


def test_an_encoding_without_the_characters():
    """PYTHONIOENCODING=ascii makes such an output."""
    run = warm.run_code("import sys\nOUT = None\nsys.stdout.reconfigure(encoding='ascii')" + RUN, *PROFILE)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("tests.cli.test_memory:linear on 4?8 fp32\n")


MODELS = """
from torch import nn

def ends():
    raise SystemExit(0)

def frozen():
    return nn.Conv2d(3, 4, 3).requires_grad_(False)
"""
ENDS = "MODEL called sys.exit(0) (models.py:5)"
NOTHING = (
    "no parameter of Conv2d requires a gradient, so the optimizer has nothing to train; leave it out (--optimizer none)"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # The command ended with 0, and printed nothing.
        (("profile", "models:ends"), ENDS),
        (("plan", "models:ends", "--budget", "1GiB"), ENDS),
        # "optimizer got an empty parameter list"
        (("plan", "models:frozen", "--budget", "1GiB"), NOTHING),
    ],
    ids=["profile", "plan", "frozen"],
)
def test_models_that_end_the_program_or_cannot_be_trained(arguments, message, tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    run = warm.run_code("OUT = None" + RUN, *arguments, "--input", "1,3,8,8", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"fusedseg {arguments[0]}: {message}\n"
