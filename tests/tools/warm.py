"""Runs modules as programs in processes that have imported PyTorch and Triton already.

    done = run("tests.tools.codegen", "sm_90", ...)      # as subprocess.run([sys.executable, "-m", ...]) would

Importing takes three to six seconds.  A server process does it once, runs nothing, and forks a process for each
program.  The server has no TRITON_INTERPRET, so a program may compile kernels.  It must not interpret any, because
Triton reads the variable where its own functions are defined too.  A test of what an import does takes ``run_bare``,
whose programs find PyTorch imported and nothing else.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# No module of pytest's plugins: pytest rewrites their assertions when it imports them.
PRELOADED = ("numpy", "torch", "torch._dynamo", "triton", "pytest")
BARE = ("torch",)


def without(names: Iterable[str]) -> dict[str, str]:
    """The environment variables of this process, except those whose names begin with one of ``names``."""
    return {key: value for key, value in os.environ.items() if not key.startswith(tuple(names))}


@functools.cache
def _server(preloaded: tuple[str, ...]) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.tools.warm", *preloaded]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(
        command, cwd=ROOT, env=without(["TRITON_INTERPRET"]), text=True, start_new_session=True, **pipes
    )
    # Leaving the context closes the pipes, and the server ends with its input.
    atexit.register(server.__exit__, None, None, None)
    return server


def _served(
    preloaded: tuple[str, ...],
    kind: str,
    program: str,
    *arguments: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Runs a program in the folder ``cwd``, by default without TRITON_INTERPRET."""
    server = _server(preloaded)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = {kind: program, "arguments": arguments, "cwd": str(cwd), "out": str(out), "err": str(err)}
        job["env"] = without(["TRITON_INTERPRET"]) if env is None else dict(env)
        try:
            print(json.dumps(job), file=server.stdin, flush=True)
            answer = server.stdout.readline()
        except BaseException:
            # The next request would read the answer to this one.
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        if not answer:
            raise RuntimeError("the server of tests/tools/warm.py ended; its error stands above")
        return subprocess.CompletedProcess([program, *arguments], int(answer), out.read_text(), err.read_text())


# ``python -m module arguments``, and ``python -c code arguments``, also in a process that has imported PyTorch alone.
run = functools.partial(_served, PRELOADED, "module")
run_code = functools.partial(_served, PRELOADED, "code")
run_bare = functools.partial(_served, BARE, "code")


def json_of(module: str, *arguments: str) -> Any:
    """What ``python -m module arguments`` prints as JSON."""
    done = run(module, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def _become(job: dict) -> int:
    """Turns this process, a fork of the server, into the program; returns its exit status."""
    for path, number in ((os.devnull, 0), (job["out"], 1), (job["err"], 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "w" if number else "r") for number in range(3))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv, sys.path[0] = [job.get("module", "-c"), *job["arguments"]], job["cwd"]
    try:
        if "code" in job:
            exec(compile(job["code"], "<code>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, str):
            return int(end.code or 0)
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve(preloaded: Iterable[str]) -> None:
    for name in preloaded:
        __import__(name)
    if "triton" in preloaded:
        from triton.runtime import cache

        # Triton hashes its own library before it compiles a kernel, in half of a second, and remembers the result.
        if hasattr(cache, "triton_key"):
            cache.triton_key()
    # The garbage collectors of the programs leave alone what they share with the server.
    gc.freeze()
    # Programs print to files; what the server itself prints answers the calls of `run`.
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 70
            try:
                status = _become(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1:])
