"""A class of ours says what it can do: ``getattr`` and ``hasattr`` ask objects of others only, or a name is data.

A registry's method once was asked for by ``getattr(registry, "packs", None)``.  When the method was deleted, nothing
failed, and a peak grew by a half.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = "the function of PyTorch with this name"
VERSIONS = "what this version of PyTorch or Triton has"
CALLED = "any function, with or without a name"
STOCK = "an attribute of the stock activation, by its name in the table"
NODE = "a node of autograd, of any class"
USERS = "the user's model, module or setting"
CHANNELS = "the number of channels of a module of PyTorch, by its name in the kind"
MONAI = "a word, or MONAI's enumeration"
FRAMEWORK = "an object of the framework, by name"
GRAPH = "a target in a graph of PyTorch"

# File -> {the first argument: why it is asked}.
ALLOWED = {
    "fusedseg/_torch.py": {
        "found": VERSIONS,
        "torch.ops.aten": VERSIONS, "_find('torch._inductor.config')": VERSIONS, "op": "an op, or its overload",
        "torch.ops.fusedseg": "an op, by its name",
        "compiled": USERS, "target": USERS, "module": GRAPH, "compiler": USERS, "handler": VERSIONS,
        "context": VERSIONS, "getattr(context, 'fw_metadata', None)": VERSIONS, "type(node)": NODE, "node": VERSIONS,
    },
    "fusedseg/cli/models.py": {"found": USERS},
    "fusedseg/compiler/codegen/aten.py": {"aten": NAMED, "torch": NAMED, "Tensor": NAMED},
    "fusedseg/compiler/plan/aliasing.py": {"aten": NAMED, "packet": NAMED},
    "fusedseg/compiler/estimate.py": {"error": VERSIONS},
    "fusedseg/convert.py": {"act": STOCK, "block": FRAMEWORK, "block.skip": FRAMEWORK, "norm": CHANNELS},
    "fusedseg/doctor/gpu.py": {"torch": NAMED},
    "fusedseg/doctor/report.py": {"importlib.import_module(name)": VERSIONS},
    "fusedseg/integrations/inplace_abn.py": {"module": USERS, "sys.modules[module]": FRAMEWORK},
    "fusedseg/integrations/nnunet/loss.py": {"dice": FRAMEWORK, "dice.apply_nonlin": CALLED, "module": FRAMEWORK},
    "fusedseg/losses/monai.py": {"reduction": MONAI},
    "fusedseg/memory/meter.py": {"node": NODE},
    "fusedseg/nn/norm_act.py": {"self": CHANNELS},
    "fusedseg/nn/stock_norm.py": {"self": CHANNELS},
    "fusedseg/ops/registry.py": {"torch.ops.fusedseg": "an op, by its name"},
    "fusedseg/ops/conv/choice.py": {"backends.cudnn": VERSIONS},
    "fusedseg/ops/conv/join_conv.py": {"node.next_functions[0][0]": NODE},
    "fusedseg/ops/conv/sources.py": {"aten": NAMED, "t": "the dtype or the device of a tensor"},
    "fusedseg/ops/norm/sync.py": {"distributed": VERSIONS},
    "kernels/launcher.py": {"enter": VERSIONS, "leave": VERSIONS},
    "kernels/triton_names.py": {"triton": VERSIONS},
}  # fmt: skip


def asked(text: str) -> set[str]:
    """The first arguments of ``getattr`` and ``hasattr``."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    names = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")]
    return {ast.unparse(node.args[0]) for node in names}


def test_only_objects_of_others_are_asked():
    paths = [*(ROOT / "fusedseg").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): asked(path.read_text()) for path in paths}
    assert {name: of for name, of in found.items() if of} == {name: set(of) for name, of in ALLOWED.items()}
