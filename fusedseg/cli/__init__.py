"""The command line: what is said of a model's memory, which batch fits, and what conversion does to it.

command.py                          the parser of all commands: their help and their errors
models.py                           the model that MODEL names, its input, and what fusedseg makes of it
profile.py, plan.py, convert.py     the commands
progress.py                         the line that long commands show on a terminal
"""

from .command import Parser, add_command
from .convert import add_convert
from .plan import add_plan
from .profile import add_profile
from .progress import Progress

__all__ = ["Parser", "Progress", "add_command", "add_convert", "add_plan", "add_profile"]
