"""The ops.  Each folder holds the schema, aten body, Triton implementation, fake and backward of its ops.

The files beside the folders hold code that several ops share.
"""

import importlib
import pkgutil

# Every file registers what it has (``registry.py``), and the self-test, which the choice of a backend asks for.
for _file in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_file.name)
