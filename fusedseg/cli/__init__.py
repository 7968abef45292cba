"""``python -m fusedseg profile`` and ``plan``: where a model's memory goes, and which batch fits.

models.py              the model that MODEL names, and what fusedseg makes of it
profile.py, plan.py    the commands
"""

from .plan import add_plan
from .profile import add_profile

__all__ = ["add_plan", "add_profile"]
