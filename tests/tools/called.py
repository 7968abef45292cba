"""Notes the ops that run."""

from torch.utils._python_dispatch import TorchDispatchMode

NO_WORK = ("detach", "empty", "empty_like", "new_empty", "promote_types")


class Called(TorchDispatchMode):
    """``names`` lists the ops that compute, in their order; views and new tensors without values are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_WORK:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
