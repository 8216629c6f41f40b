"""Which torch is installed and whether it suits a plugin, told from files: nothing here loads torch."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

from packaging.version import InvalidVersion, Version

from enginecore.device.manifest import Manifest, ProbeCause, ProbeResult, ProbeStatus

#: The fields of torch/version.py that name a toolkit, with the prefix that the variants of such builds have.
_TOOLKITS = {"cuda": "cu", "hip": "rocm", "rocm": "rocm", "xpu": "xpu"}


def torch_build() -> str | None:
    """The installed torch as "VERSION+VARIANT" ("2.13.0+cpu", "2.13.0+cu130"), None when there is none.

    Wheels from PyPI and builds from source have no variant in their version, or a commit in its place; then the toolkit
    that torch/version.py names makes the variant ("2.13.0+cu13.0").
    """
    try:
        distribution = metadata.distribution("torch")
    except PackageNotFoundError:
        return None
    public, _, variant = distribution.version.partition("+")
    try:
        facts = _constants(Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return distribution.version
    for name, prefix in _TOOLKITS.items():
        if facts.get(name):
            return f"{public}+{variant if variant.startswith(prefix) else prefix + facts[name]}"
    return f"{public}+{variant or 'cpu'}"


def _constants(source: str) -> dict[str, str]:
    """Module-level assignments of string constants; None and other values become ""."""
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        value = node.value.value if isinstance(node.value, ast.Constant) else ""
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                found[target.id] = value if isinstance(value, str) else ""
    return found


def torch_problem(manifest: Manifest, build: str | None) -> ProbeResult | None:
    """None when `build` suits the plugin, else the BROKEN result to return. Call it before importing torch."""
    wanted = f"torch>={manifest.torch_min}" if manifest.torch_min else "torch"
    fix = manifest.torch_install or f"pip install --upgrade '{wanted}'"
    if build is None:
        return _wrong("torch is not installed", fix)
    version, _, variant = build.partition("+")
    if manifest.torch_variant and not variant.startswith(manifest.torch_variant):
        return _wrong(
            f"it needs a torch build whose variant starts with {manifest.torch_variant!r}; torch {build} is installed",
            fix,
        )
    try:
        too_old = manifest.torch_min is not None and Version(version) < Version(manifest.torch_min)
    except InvalidVersion:
        return _wrong(f"the version of the installed torch, {build!r}, cannot be read", fix)
    if too_old:
        return _wrong(f"it needs torch {manifest.torch_min} or newer; torch {build} is installed", fix)
    return None


def _wrong(reason: str, fix: str) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.BROKEN, reason=reason, fix=fix, cause=ProbeCause.WRONG_TORCH)


class _TorchGate:
    """A meta path finder that lets `refuse` raise before torch's first import; only the installing thread is gated."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch" and threading.get_ident() == self._thread:
            self._refuse()
        return None


@contextmanager
def torch_gate(refuse: Callable[[], None]) -> Iterator[None]:
    """Inside the block the first `import torch` calls `refuse`, which raises to forbid it."""
    gate = _TorchGate(refuse)
    sys.meta_path.insert(0, gate)
    try:
        yield
    finally:
        sys.meta_path.remove(gate)
