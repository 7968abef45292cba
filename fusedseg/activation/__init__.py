"""Activation functions: a table of their properties (``table.py``), and the arguments that name them."""

from .arguments import EXACT_ONLY as EXACT_ONLY
from .arguments import IDENTITY as IDENTITY
from .arguments import INVERTIBLE as INVERTIBLE
from .arguments import NAMES as NAMES
from .arguments import Activation as Activation
from .arguments import check_slope_given as check_slope_given
from .arguments import parse_activation as parse_activation
from .arguments import parse_invertible as parse_invertible
from .table import OF_MODULE as OF_MODULE
from .table import TABLE as TABLE
from .table import is_invertible as is_invertible
