"""The process in which ``doctor --gpu`` runs kernels: ``python -m fusedseg.doctor.worker JOBS``.

JOBS is a list in JSON of jobs, each of which is a list of strings: ("test", device, family, dtype) or
("speed", device, what).  The process prints a line of JSON when a job begins and another when it has ended.  So the
parent knows which job was running if this process dies.  It ends early if a job has left the GPU unusable.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cli.command import first_line
from ..ops.self_test import first_use
from .speed import SPEEDS


def test(device: torch.device, family: str, dtype: str) -> dict[str, Any]:
    """Tests a family of kernels, and replaces its verdict on disk."""
    of = getattr(torch, dtype)
    verdict, trace = first_use.test_now(family, of, device)
    first_use.record(family, of, device, verdict)
    return {**verdict._asdict(), "traceback": trace}


def speed(device: torch.device, what: str) -> dict[str, Any]:
    with torch.no_grad(), torch.cuda.device_of(torch.empty(0, device=device)):
        return {"speeds": [of._asdict() for of in SPEEDS[what](device)]}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"test": test, "speed": speed}


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main(argv: Sequence[str]) -> int:
    for job in json.loads(argv[0]):
        name, where, *rest = job
        device = torch.device(where)
        say(began=job)
        try:
            found = JOBS[name](device, *rest)
        # The report shows every error of a compiler or a driver, whatever its class.
        except Exception as error:
            found = {"kind": "error", "text": first_line(error)}
        say(done=job, found=found)
        if found.get("kind") and not first_use.answers(device):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
