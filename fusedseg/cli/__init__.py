"""The command line: shows the memory of a model, and finds the batch that fits.

command.py                          the parser of all commands: their help and their errors
models.py                           the model that MODEL names, its input, and its fused form
profile.py, plan.py                 the commands
"""

from .command import Parser, add_command
from .plan import add_plan
from .profile import add_profile

__all__ = ["Parser", "add_command", "add_plan", "add_profile"]
