"""The command line: shows the memory of a model, and finds the batch that fits.

command.py                          the parser of all commands: their help and their errors
models.py                           the model that MODEL names, its input, and its fused form
profile.py, plan.py                 the commands
nnunet.py                           the commands for nnU-Net
"""

from .command import Parser, add_command
from .nnunet import add_nnunet
from .plan import add_plan
from .profile import add_profile

__all__ = ["Parser", "add_command", "add_nnunet", "add_plan", "add_profile"]
