"""A base class of modules that TorchScript cannot compile from source; its error names the alternatives."""

from typing import NoReturn


class Unscriptable:
    """A base class beside ``nn.Module``."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"fusedseg.{type(self).__name__}: torch.jit.script cannot compile its source; use torch.export, "
            "torch.onnx.export or torch.jit.trace, which write it down in stock functions, or first give a model that "
            "fusedseg.convert has converted its stock modules back by fusedseg.revert"
        )
