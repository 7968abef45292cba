"""Where the bytes of a training step go, and which batch fits; nothing runs, so that no GPU is needed.

ways.py      the ways to run a step, and the bytes that each of them needs
profile.py   ``fusedseg.profile``: the ways beside each other, and what is kept, module by module
plan.py      ``fusedseg.plan``: the largest batch that fits in a budget, or the cheapest way to a wanted batch
answer.py    ``Plan``, the answer, and its text
picture.py   memory over the step
"""

from .answer import Plan
from .plan import plan
from .profile import Profile, profile

__all__ = ["Plan", "Profile", "plan", "profile"]


__dir__ = __all__.copy
