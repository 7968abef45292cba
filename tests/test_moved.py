"""Options of the compiler backend are refused elsewhere, with the line to write."""

import json

import pytest
from torch import nn

import fusedseg


@pytest.mark.parametrize("given", [{"budget": 0.3}, {"budget": "6GiB", "extra_flops": 0.1}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("name", ["convert", "recompute"])
def test_the_error_has_the_line_to_write(name, given):
    call, args = (fusedseg.convert, [nn.Linear(1, 1)]) if name == "convert" else (fusedseg.recompute, [])
    line = f'torch.compile(model, backend="fusedseg", options={json.dumps({"codegen": "aten", **given})})'
    with pytest.raises(TypeError) as raised:
        call(*args, **given)
    assert str(raised.value).startswith(f"fusedseg.{name}: {' and '.join(given)} must be given")
    assert line in str(raised.value)
