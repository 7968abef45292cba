"""``python -m fusedseg profile``, ``plan`` and ``convert``: where a model's memory goes, which batch fits, and what
conversion does to it.

models.py                           the model that MODEL names, and what fusedseg makes of it
profile.py, plan.py, convert.py     the commands
"""

from .convert import add_convert
from .plan import add_plan
from .profile import add_profile

__all__ = ["add_convert", "add_plan", "add_profile"]
