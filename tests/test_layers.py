"""Each layer imports only what ``ALLOWED`` names, in no circle; "Layers" in docs/design.md says what a layer holds."""

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Small modules that every layer may import: they choose the implementation, look for hooks of modules, describe the
# activations, read sizes, and have the private names of PyTorch.
BASE = {"_backend", "_module_hooks", "_sizes", "_torch", "activation"}
# What ops share, in the files beside their folders: it knows no op.
SHARED = {
    *("ops/at_size", "ops/check", "ops/double_backward", "ops/layout", "ops/registry", "ops/reuse", "ops/self_test"),
    "ops/unfused",
}
# What an op may import that the table does not name.
AN_OP = {"_backend", "_torch", "kernels"} | SHARED, {"torch"}
# Layer -> (layers that it may import, packages outside the standard library that it may import).
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "kernels": (set(), {"torch", "triton"}),
    "_backend": ({"_torch"}, {"torch"}),
    "_module_hooks": ({"_torch"}, {"torch"}),
    "_sizes": (set(), set()),
    "_torch": (set(), {"torch"}),
    "activation": ({"_torch"}, {"torch"}),
    "progress": (set(), set()),
    "ops": (set(), set()),
    "ops/ahead": ({"_torch", "kernels"}, {"torch"}),
    "ops/at_size": ({"_backend", "_torch", "kernels"}, {"torch"}),
    "ops/check": ({"_backend", "_torch"}, {"torch"}),
    "ops/double_backward": ({"_torch"}, {"torch"}),
    "ops/layout": (set(), {"torch"}),
    "ops/registry": ({"ops/check"}, {"torch"}),
    "ops/together": (AN_OP[0] | {"ops/replay"}, {"torch"}),
    "ops/reuse": ({"_torch", "ops/double_backward"}, {"torch"}),
    "ops/unfused": ({"_torch"}, {"torch"}),
    "ops/norm": (AN_OP[0] | {"activation"}, {"torch"}),
    "ops/conv": (AN_OP[0] | {"activation", "ops/norm", "ops/upsample"}, {"cudnn", "torch"}),
    # It numbers the positions of a window by numpy.
    "ops/max_pool": (AN_OP[0] | {"ops/conv"}, {"numpy", "torch"}),
    "ops/segmentation": (AN_OP[0] | {"ops/upsample"}, {"torch"}),
    "ops/self_test": ({"_backend", "_torch", "ops/ahead", "ops/check", "ops/registry"}, {"torch"}),
    "functional": (BASE | {"ops"}, {"torch"}),
    "nn": (BASE | {"ops"}, {"torch"}),
    "losses": ({"ops"}, {"torch"}),
    "inference": ({"ops", "progress"}, {"torch"}),
    "unet": ({"nn", "ops/check"}, {"torch"}),
    "memory": ({"_backend", "_torch", "ops/layout"}, {"torch"}),
    "convert": ({"_module_hooks", "_torch", "activation", "memory", "ops"}, {"torch"}),
    "compiler": (BASE - {"_module_hooks"} | {"memory", "ops", "progress"}, {"torch"}),
    "planning": ({"_sizes", "_torch", "compiler", "convert", "memory"}, {"matplotlib", "torch"}),
    "integrations": (
        {"_torch", "activation", "compiler", "convert", "functional", "inference", "losses", "nn", "ops", "progress"},
        {"monai", "nnunetv2", "numpy", "torch"},
    ),
    "__init__": (
        BASE | {"convert", "functional", "inference", "losses", "memory", "nn", "ops", "planning", "unet"},
        {"torch"},
    ),
    "doctor": (BASE | {"__init__", "cli", "compiler", "memory", "ops", "progress"}, {"torch"}),
    "cli": ({"convert", "integrations", "memory", "planning", "progress", "unet"}, {"torch"}),
    "__main__": ({"__init__", "cli", "doctor", "integrations"}, {"torch"}),
}
# The floors of ``fusedseg/compiler``, from the ground up: a folder or a file imports from lower floors, or from itself.
# Files of one floor, which are no folders, may import each other.
COMPILER = (
    ("budget", "graph", "op_table", "passes", "settings", "subclasses"),
    ("capture",),
    ("plan",),
    ("rewrite",),
    ("codegen", "low_bit"),
    ("counting", "eager_step", "module_errors", "notes", "report", "traffic"),
    ("decide",),
    ("partition",),
    ("backend", "estimate"),
    ("__init__",),
)
# These are imported only inside functions, because they need triton, or the packages of an extra.
LAZY = {"integrations", "kernels"}
LAZY_PACKAGES = {"cudnn", "matplotlib", "monai", "nnunetv2"}
# These files are themselves imported only inside functions.
LAZY_FILES = {
    "fusedseg/integrations/monai.py",
    "fusedseg/integrations/nnunet/predictor.py",
    "fusedseg/integrations/nnunet/trainers/nnUNetTrainerFusedseg.py",
}


@functools.cache
def sources() -> dict[str, list[Path]]:
    """Maps each layer to its files."""
    layers: dict[str, list[Path]] = {"kernels": sorted((ROOT / "kernels").rglob("*.py"))}
    for path in sorted((ROOT / "fusedseg").rglob("*.py")):
        layers.setdefault(layer_of(name_of(path)), []).append(path)
    return layers


def name_of(path: Path) -> str:
    """The absolute name of the module of a file."""
    return ".".join([*package_of(path), *([] if path.stem == "__init__" else [path.stem])])


def package_of(path: Path) -> list[str]:
    """The parts of the name of the package that contains a file."""
    parts = list(path.relative_to(ROOT).parts[:-1])
    return ["fusedseg", *parts] if parts[0] == "kernels" else parts


@functools.cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
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

    return tuple(visit(ast.parse(path.read_text()), True))


def layer_of(name: str) -> str:
    """The layer that contains an absolute name: an op or a file of ``ops``, or else a folder or a file of ``fusedseg``.

    "__init__" for the file of the package itself.
    """
    _, *parts = name.split(".")
    if not parts:
        return "__init__"
    inside = ROOT / "fusedseg" / "ops"
    if parts[0] == "ops" and len(parts) > 1 and ((inside / parts[1]).is_dir() or (inside / f"{parts[1]}.py").exists()):
        return f"ops/{parts[1]}"
    known = parts[0] == "kernels" or (ROOT / "fusedseg" / parts[0]).is_dir()
    return parts[0] if known or (ROOT / "fusedseg" / f"{parts[0]}.py").exists() else "__init__"


def allows(layers: set[str], target: str) -> bool:
    """Whether ``target`` is among ``layers``; "ops" stands for all ops."""
    return target in layers or (target.startswith("ops/") and "ops" in layers)


@pytest.mark.parametrize("layer", sorted(sources()))
def test_a_layer_imports_only_what_the_table_allows(layer):
    assert layer in ALLOWED or layer.startswith("ops/"), f"{layer} is no layer: add it to docs/design.md, and here"
    layers, packages = ALLOWED.get(layer, AN_OP)
    wrong = []
    for path in sources()[layer]:
        lazy_file = str(path.relative_to(ROOT)) in LAZY_FILES
        for name, at_import in imports(path):
            top = name.split(".")[0]
            if top == "fusedseg":
                target = layer_of(name)
                allowed = target == layer or (allows(layers, target) and not (at_import and target in LAZY))
            else:
                allowed = top in packages and not (at_import and top in LAZY_PACKAGES and not lazy_file)
                allowed |= top in sys.stdlib_module_names
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}{' when imported' if at_import else ''}")
    assert not wrong


def test_the_table_has_no_layer_that_is_gone():
    assert set(ALLOWED) <= set(sources())


def file_of(name: str, files: set[str]) -> str:
    """The module that an imported name is, or that it lies in."""
    while name not in files:
        name = name.rpartition(".")[0]
    return name


@functools.cache
def imported() -> dict[str, set[str]]:
    """The modules that each module imports, inside of functions and for types too."""
    files = {name_of(path): path for paths in sources().values() for path in paths}
    ours = [(name, other) for name, path in files.items() for other, _ in imports(path) if other.startswith("fusedseg")]
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, other in ours:
        graph[name].add(file_of(other, set(files)))
    return graph


def test_no_files_import_each_other_in_a_circle():
    # ``prepare`` raises a CycleError that names a circle.
    graphlib.TopologicalSorter({name: others - {name} for name, others in imported().items()}).prepare()


def test_no_folders_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for name, others in imported().items():
        graph.setdefault(layer_of(name), set()).update({layer_of(other) for other in others} - {layer_of(name)})
    graphlib.TopologicalSorter(graph).prepare()


def wing_of(name: str) -> str:
    """The folder or the file of ``fusedseg/compiler`` that contains a module; "__init__" for the package itself."""
    _, _, *parts = name.split(".")
    return parts[0] if parts else "__init__"


def is_lower(target: str, wing: str) -> bool:
    """Whether a folder or a file of the compiler may import another one."""
    floor_of = {one: floor for floor, ones in enumerate(COMPILER) for one in ones}
    folders = {one for one in floor_of if (ROOT / "fusedseg" / "compiler" / one).is_dir()}
    same = floor_of[target] == floor_of[wing] and not {target, wing} & folders
    return target == wing or floor_of[target] < floor_of[wing] or same


def test_the_compiler_imports_in_one_direction():
    graph = {name: others for name, others in imported().items() if name.startswith("fusedseg.compiler")}
    assert {wing_of(name) for name in graph} == {one for ones in COMPILER for one in ones}
    wrong = []
    for name, others in graph.items():
        for other in others & set(graph):
            # ``from . import settings`` in a file beside it names the package too.
            if other != "fusedseg.compiler" and not is_lower(wing_of(other), wing_of(name)):
                wrong.append(f"{name} imports {other}")
    assert not wrong
