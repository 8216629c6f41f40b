"""The layout's rules hold, and each of them bites on a planted violation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import boundaries

ROOT = Path(__file__).resolve().parents[1]
CORE = boundaries.modules(ROOT / "core", "enginecore")
PLUGINS = {
    name: source
    for folder in sorted((ROOT / "plugins").iterdir())
    for package in sorted(folder.glob("enginecore_*"))
    if package.is_dir()
    for name, source in boundaries.modules(folder, package.name).items()
}
NO_TORCH = {name: source for name, source in CORE.items() if name.split(".")[1:2] in (["scheduler"], ["kvcache"])}

Rule = Callable[[str, str], list[str]]


def violations(rule: Rule, sources: dict[str, str]) -> list[str]:
    """What `rule` finds, without what is allowed with a reason."""
    return [
        problem
        for module, source in sources.items()
        for problem in rule(source, module)
        if not any(module == allowed and what in problem for allowed, what in boundaries.ALLOWED)
    ]


def test_there_is_something_to_check() -> None:
    assert len(CORE) > 20 and len(NO_TORCH) > 2
    assert {name.split(".")[0] for name in PLUGINS} >= {"enginecore_cpu", "enginecore_cuda", "enginecore_sim"}


def test_every_package_of_the_core_has_its_place() -> None:
    known = {*boundaries.LAYERS, *boundaries.LEAVES, boundaries.KIT, "__init__", "__main__"}
    assert {name.split(".")[1] for name in CORE} <= known


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (boundaries.upward_imports, CORE),
        (boundaries.imports_of_plugins, CORE),
        (boundaries.vendor_attributes, CORE),
        (boundaries.device_branches, CORE),
        (boundaries.too_long, CORE),
        (boundaries.device_libraries, NO_TORCH),
        (boundaries.plugin_imports_of_core, PLUGINS),
        (boundaries.too_long, PLUGINS),
    ],
    ids=lambda value: value.__name__ if callable(value) else f"{len(value)}-modules",
)
def test_rule(rule: Rule, sources: dict[str, str]) -> None:
    assert violations(rule, sources) == []


@pytest.mark.parametrize(("module", "what"), boundaries.ALLOWED)
def test_what_is_allowed_is_needed(module: str, what: str) -> None:
    rules = (boundaries.upward_imports, boundaries.device_branches)
    found = [problem for rule in rules for problem in rule(CORE[module], module)]
    assert any(what in problem for problem in found), "remove it from ALLOWED"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("enginecore.kvcache.pool", "from enginecore.scheduler import scheduler"),
        ("enginecore.kvcache.pool", "from ..engine.engine import Engine"),
        ("enginecore.device.backend", "import enginecore.models.loader"),
        ("enginecore.device.backend", "from enginecore import runner"),
        ("enginecore.ops.schema", "from enginecore import LLM"),
        (
            "enginecore.models.loader",
            "def f():\n    import importlib\n    importlib.import_module('enginecore.server.app')",
        ),
        ("enginecore.server.app", "from enginecore.cli.main import app"),
        ("enginecore.engine.engine", "from enginecore.testing import kit"),
        ("enginecore.testing.kit", "from enginecore.testing2 import kit"),
        ("enginecore.request", "from enginecore.device import Manifest"),
    ],
)
def test_upward_imports_are_seen(module: str, source: str) -> None:
    assert boundaries.upward_imports(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("enginecore.scheduler.queue", "from enginecore.kvcache.pool import Pool\nfrom enginecore.request import X"),
        ("enginecore.scheduler.queue", "from .policy import Policy\nfrom . import policy\nfrom ..kvcache import pool"),
        ("enginecore.cli.serve", "from enginecore.server.app import app\nfrom enginecore.testing import kit"),
        ("enginecore.testing.kit", "from enginecore.models.loader import load_model"),
        ("enginecore.engine.engine", "from enginecore import __version__, errors\nimport os, numpy"),
    ],
)
def test_downward_imports_are_not(module: str, source: str) -> None:
    assert boundaries.upward_imports(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "from enginecore.scheduler.scheduler import Scheduler",
        "from enginecore import LLM",
        "import enginecore",
        "from enginecore.config import EngineArgs",
        "import enginecore.models",
    ],
)
def test_a_plugin_beyond_the_contract_is_seen(source: str) -> None:
    assert boundaries.plugin_imports_of_core(source, "enginecore_acme.plugin")


@pytest.mark.parametrize(
    "source",
    [
        "from enginecore import hookimpl",
        "from enginecore.device import Backend",
        "from enginecore.device.memory import KVCacheSpec",
        "from enginecore.ops.schema import OPS",
        "import enginecore.testing",
        "from enginecore.errors import UnsupportedError",
        "from . import kernels\nfrom enginecore_acme.kernels import run\nimport torch.cuda",
    ],
)
def test_a_plugin_within_the_contract_is_not(source: str) -> None:
    assert boundaries.plugin_imports_of_core(source, "enginecore_acme.plugin") == []


@pytest.mark.parametrize(
    "source",
    ["import enginecore_cpu", "from enginecore_sim.tokens import mix", "__import__('enginecore_cuda.plugin')"],
)
def test_an_import_of_a_plugin_is_seen(source: str) -> None:
    assert boundaries.imports_of_plugins(source, "enginecore.engine.engine")


@pytest.mark.parametrize(
    "source", ["import torch", "from torch.nn import Linear", "def f():\n    import triton.language"]
)
def test_a_device_library_is_seen(source: str) -> None:
    assert boundaries.device_libraries(source, "enginecore.scheduler.queue")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize()",
        "import torch as t\nt.cuda.is_available()",
        "from torch import cuda",
        "from torch import cuda as device",
        "import torch.cuda",
        "from torch.cuda import Stream",
        "from torch.backends import cuda",
        "getattr(torch, 'cuda').empty_cache()",
        "hasattr(torch, 'cuda')",
        "operator.attrgetter('cuda.empty_cache')(torch)",
        "importlib.import_module('torch.cuda')",
        "sys.modules['torch.cuda']",
        "tensor.cuda()",
        "torch.version.cuda",
    ],
)
def test_torch_cuda_is_seen_in_every_form(source: str) -> None:
    assert boundaries.vendor_attributes(source, "enginecore.runner.runner")


@pytest.mark.parametrize(
    "source",
    [
        "if device == 'cuda': pass",
        "x = 1 if 'cpu' != name else 2",
        "if device in ('rocm', 'xpu'): pass",
        "if device.type == 'cuda:0': pass",
        "while not name.startswith('cuda'): pass",
        "if name.startswith(('hip', 'cuda')): pass",
        "match device:\n    case 'npu' | 'tpu': pass",
        "if 'sim' in names: pass",
    ],
)
def test_a_branch_on_a_device_name_is_seen(source: str) -> None:
    assert boundaries.device_branches(source, "enginecore.engine.engine")


def test_a_device_name_elsewhere_is_no_branch() -> None:
    source = "parser.add('--device', default='cpu')\nif device == 'auto': pass\nfix = 'pip install enginecore-cpu'"
    assert boundaries.device_branches(source, "enginecore.cli.serve") == []


def test_size_ceilings_bite() -> None:
    body = "\n".join(f"    x = {i}" for i in range(80))
    options = "".join(f"    option_{i}=None,\n" for i in range(100))
    assert boundaries.too_long(f"def f(\n{options}):\n{body}", "m") == []
    assert boundaries.too_long(f"def f():\n{body}\n    return x", "m")
    assert boundaries.too_long(f"class A:\n  async def f(self):\n{body}\n    return x", "m")
    assert boundaries.too_long("x = 1\n" * 400, "m") == []
    assert boundaries.too_long("x = 1\n" * 401, "m")


@pytest.mark.parametrize("package", ["scheduler", "kvcache", "device", "server", "cli"])
def test_no_torch_comes_in_by_a_detour(package: str) -> None:
    """Importing every module of the package, in a new process, loads neither torch nor a plugin."""
    names = [name.removesuffix(".__init__") for name in CORE if name.startswith(f"enginecore.{package}.")]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "bad = sorted(m for m in sys.modules if m == 'torch' or m.startswith('enginecore_'))\nassert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
