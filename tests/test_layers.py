"""Each layer imports only the layers and packages that the table "Layers" in docs/design.md allows."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Small modules that every layer may import: they choose the implementation, look for hooks of modules, describe the
# activations and PyTorch's functions, read sizes, refuse options of the compiler backend, and have the private names
# of PyTorch.
BASE = {"_backend", "_module_hooks", "_moved", "_sizes", "_torch", "activation", "rules"}
# Layer -> (layers that it may import, packages outside the standard library that it may import).
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "kernels": (set(), {"torch", "triton"}),
    "_backend": ({"_torch"}, {"torch"}),
    "_module_hooks": ({"_torch"}, {"torch"}),
    "_moved": (set(), set()),
    "_sizes": (set(), set()),
    "_torch": (set(), {"torch"}),
    "activation": ({"_torch"}, {"torch"}),
    "rules": (set(), {"torch"}),
    "progress": (set(), set()),
    # numpy handles the few values of a channel vector on a CPU.
    "ops": (BASE | {"kernels"}, {"numpy", "torch"}),
    "functional": (BASE | {"ops"}, {"torch"}),
    "nn": (BASE | {"ops"}, {"torch"}),
    "losses": ({"ops"}, {"torch"}),
    "inference": ({"ops", "progress"}, {"torch"}),
    "unet": ({"nn"}, {"torch"}),
    "memory": ({"_backend", "_module_hooks", "_sizes", "_torch", "activation"}, {"matplotlib", "torch"}),
    "conversion": (BASE - {"_backend"} | {"memory", "nn", "ops"}, {"torch"}),
    "compiler": (BASE - {"_module_hooks"} | {"memory", "ops"}, {"torch"}),
    # The frameworks are imported by name, in functions of common.py, but nnU-Net, whose code has types.
    "integrations": (
        {"_torch", "activation", "compiler", "conversion", "functional", "inference", "losses", "memory", "nn", "ops"}
        | {"progress"},
        {"nnunetv2", "numpy", "torch"},
    ),
    "__init__": (BASE | {"conversion", "functional", "inference", "losses", "memory", "nn", "ops", "unet"}, {"torch"}),
    "doctor": (BASE | {"", "cli", "kernels", "ops", "progress"}, {"torch"}),
    "cli": ({"_sizes", "compiler", "conversion", "integrations", "memory", "progress", "unet"}, {"torch"}),
    "__main__": ({"", "cli", "doctor"}, {"torch"}),
}
# These are imported only inside functions, because they need triton, or the packages of an extra.
LAZY = {"integrations", "kernels"}
LAZY_PACKAGES = {"matplotlib", "nnunetv2"}
# These files are themselves imported only inside functions.
LAZY_FILES = {
    "fusedseg/integrations/nnunet/predictor.py",
    "fusedseg/integrations/nnunet/trainers/nnUNetTrainerFusedseg.py",
}


@functools.cache
def sources() -> dict[str, list[Path]]:
    """Maps each layer to its files."""
    layers: dict[str, list[Path]] = {"kernels": sorted((ROOT / "kernels").rglob("*.py"))}
    for path in sorted((ROOT / "fusedseg").rglob("*.py")):
        layers.setdefault(path.relative_to(ROOT / "fusedseg").parts[0].removesuffix(".py"), []).append(path)
    return layers


def package_of(path: Path) -> list[str]:
    """The parts of the name of the package that contains a file."""
    parts = list(path.relative_to(ROOT).parts[:-1])
    return ["fusedseg", *parts] if parts[0] == "kernels" else parts


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(absolute name, whether the import runs when the module is loaded) of each import in a file."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = package_of(path)
                prefix = package[: len(package) - child.level + 1] if child.level else []
                base = [*prefix, *([child.module] if child.module else [])]
                yield from ((".".join([*base, alias.name]), at_import) for alias in child.names)
            else:
                inside_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, at_import and not inside_function)

    yield from visit(ast.parse(path.read_text()), True)


def layer_of(name: str, layers: set[str]) -> str:
    """The layer that contains an absolute name of the package; "" for a name of the package itself."""
    second = name.split(".")[1]
    return second if second in layers else ""


@pytest.mark.parametrize("layer", sorted(sources()))
def test_a_layer_imports_only_what_the_table_allows(layer):
    assert layer in ALLOWED, f"{layer} is no layer of the table: add it to docs/design.md, and here"
    layers, packages = ALLOWED[layer]
    wrong = []
    for path in sources()[layer]:
        lazy_file = str(path.relative_to(ROOT)) in LAZY_FILES
        for name, at_import in imports(path):
            top = name.split(".")[0]
            if top == "fusedseg":
                target = layer_of(name, set(sources()))
                allowed = target == layer or (target in layers and not (at_import and target in LAZY))
            else:
                allowed = top in packages and not (at_import and top in LAZY_PACKAGES and not lazy_file)
                allowed |= top in sys.stdlib_module_names
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}{' when imported' if at_import else ''}")
    assert not wrong


def test_the_table_has_no_layer_that_is_gone():
    assert set(ALLOWED) <= set(sources())
