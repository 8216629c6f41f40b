"""The rules of the layout as functions from source text to the lines that break them. Used by test_boundaries.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

#: Packages of the core in order: each may import itself and those after it. `cli` stands above all of them.
LAYERS = (
    "cli",
    "server",
    "frontend",
    "engine",
    "scheduler",
    "kvcache",
    "runner",
    "models",
    "layers",
    "ops",
    "parallel",
    "device",
)
LEAVES = (
    "request", "constraints", "plan", "clock", "randomness", "config", "errors", "metrics", "pooling", "adapters",
    "_version",
)  # fmt: skip
#: The conformance kit drives what it tests; of the core only the command line may import it.
KIT = "testing"
#: What `from enginecore import NAME` may fetch inside the core, besides packages and leaves.
ROOT_NAMES = ("__version__", "hookimpl")

#: What the rules let pass, as (module, what it imports or mentions) with the reason. An entry that is not used fails.
ALLOWED = {
    ("enginecore.testing.cases.memory", "branches on a device's name"): "torch's name for host memory",
}

PLUGIN_MAY_IMPORT = ("device", "ops", "testing", "errors")

DEVICE_LIBRARIES = ("torch", "cupy", "jax", "triton")
#: Names of devices, of this repository's plugins and of others, that no branch of the core may mention.
DEVICE_NAMES = ("cpu", "cuda", "rocm", "hip", "xpu", "sim", "mps", "npu", "hpu", "tpu")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones resolved in `package`, and of import_module("...")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _names_of_core(name: str) -> str | None:
    """The package or leaf of the core that a dotted import name reaches, None for anything else."""
    parts = name.split(".")
    if parts[0] != "enginecore":
        return None
    return parts[1] if len(parts) > 1 else ""


def upward_imports(source: str, module: str) -> list[str]:
    """Imports of core module `module` ("enginecore.kvcache.pool") that do not point down the list of layers."""
    own = module.split(".")[1]
    if own.startswith("__"):
        return []  # enginecore/__init__.py names what is public, __main__.py starts the command line
    found = []
    for line, name in imports(ast.parse(source), module.rpartition(".")[0]):
        target = _names_of_core(name)
        if target is None or target == own or target in LEAVES or target in ROOT_NAMES or own == "cli":
            continue
        allowed = LAYERS if own == KIT else LAYERS[LAYERS.index(own) :] if own in LAYERS else ()
        if target not in allowed:
            found.append(f"{module}:{line} imports {name}")
    return found


def plugin_imports_of_core(source: str, module: str) -> list[str]:
    """Imports of a plugin that reach beyond the contract."""
    found = []
    for line, name in imports(ast.parse(source), module.rpartition(".")[0]):
        target = _names_of_core(name)
        if target is not None and target not in PLUGIN_MAY_IMPORT and target != "hookimpl":
            found.append(f"{module}:{line} imports {name}")
    return found


def imports_of_plugins(source: str, module: str) -> list[str]:
    """Imports of a plugin's package in the core."""
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(ast.parse(source), module.rpartition(".")[0])
        if name.startswith("enginecore_")
    ]


def device_libraries(source: str, module: str) -> list[str]:
    """Imports of torch and its like."""
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(ast.parse(source), module.rpartition(".")[0])
        if name.split(".")[0] in DEVICE_LIBRARIES
    ]


def vendor_attributes(source: str, module: str) -> list[str]:
    """`torch.cuda` in any form: attribute, import, getattr, or its name in a string."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        text = None
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            text = ast.unparse(node)
        elif isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr", "attrgetter"):
            if any(isinstance(a, ast.Constant) and str(a.value).split(".")[0] == "cuda" for a in node.args):
                text = ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch.cuda"):
            text = repr(node.value)
        if text:
            found.append(f"{module}:{node.lineno} touches {text}")
    for line, name in imports(tree, module.rpartition(".")[0]):
        if name.startswith("torch.") and "cuda" in name.split("."):
            found.append(f"{module}:{line} imports {name}")
    return found


def device_branches(source: str, module: str) -> list[str]:
    """Comparisons, matches and prefix tests with the name of a device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        operands: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            operands = [node.pattern]
        elif isinstance(node, ast.Call) and _called(node) in ("startswith", "endswith"):
            operands = list(node.args)
        if any(_mentions_device(operand) for operand in operands):
            line = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno  # type: ignore[attr-defined]
            found.append(f"{module}:{line} branches on a device's name")
    return found


def _mentions_device(node: ast.AST) -> bool:
    """Whether a literal, or a literal collection, in `node` is a device name, with or without an index."""
    inside = ast.walk(node) if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.pattern)) else [node]
    return any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.split(":")[0] in DEVICE_NAMES
        for each in inside
    )


def too_long(source: str, module: str) -> list[str]:
    """A file or a function's body past its ceiling. A signature is no logic: options of commands are declared there."""
    found = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        found.append(f"{module} has {lines} lines, more than {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            start = node.body[0].lineno
            length = (node.end_lineno or start) - start + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{module}:{node.lineno} {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}")
    return found


def modules(root: Path, package: str) -> dict[str, str]:
    """Source by dotted name of every module of `package` under `root`."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts)] = path.read_text(encoding="utf-8")
    return found
