import pytest
import torch
from torch._dynamo import list_backends, register_backend

from fusedseg.compiler import backend


@pytest.fixture(autouse=True)
def afresh():
    # The entry point does this where the package is installed; a checkout may not be.
    if "fusedseg" not in list_backends():
        register_backend(name="fusedseg", compiler_fn=backend)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
