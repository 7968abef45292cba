"""The ops.  Each folder holds the schema, aten body, Triton implementation, fake and backward of its ops.

The files beside the folders hold code that several ops share.
"""

# Registers the self-test, which the choice of a backend asks for.
from .self_test import first_use as first_use
