"""What ``torch.jit.script`` says of the modules of this package."""

from typing import NoReturn


class Unscriptable:
    """A base class beside ``nn.Module``: TorchScript cannot compile the module, and the error names alternatives."""

    @classmethod
    def _name(cls) -> str:
        """The name of the module in errors."""
        return f"fusedseg.{cls.__name__}"

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"{self._name()}: torch.jit.script cannot compile this module; use torch.export, "
            "torch.onnx.export or torch.jit.trace, whose programs call stock functions in place of the module"
        )
