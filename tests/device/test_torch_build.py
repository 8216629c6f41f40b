"""Which torch is installed is read from files; the module itself is never loaded."""

from __future__ import annotations

import pytest
from enginecore.device import Manifest, ProbeCause, torch_problem
from enginecore.device.torch_build import torch_build

from tests.device.packages import Site


def manifest(**fields: object) -> Manifest:
    return Manifest(devices=("acme",), distribution="acme-npu", version="1", contract="1.0", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "facts", "build"),
    [
        ("2.13.0+cpu", None, "2.13.0+cpu"),
        ("2.13.0", None, "2.13.0"),
        ("2.13.0", "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "2.13.0+cu13.0"),
        ("2.13.0+cu130", "cuda = '13.0'", "2.13.0+cu130"),
        ("2.13.0", "cuda = None\nhip = None", "2.13.0+cpu"),
        ("2.13.0a0+git1234", "hip = '7.2.1'", "2.13.0a0+rocm7.2.1"),
        ("2.13.0a0+git1234", "xpu = '20260101'", "2.13.0a0+xpu20260101"),
        ("2.13.0", "this is ( not python", "2.13.0"),
    ],
)
def test_the_build_from_metadata(site: Site, version: str, facts: str | None, build: str) -> None:
    site.distribution("torch", version)
    if facts is not None:
        (site.root / "torch").mkdir()
        header = f"from typing import Optional\n__version__ = {version!r}\n"
        (site.root / "torch/version.py").write_text(f"{header}{facts}\n")
        (site.root / "torch/__init__.py").write_text("raise SystemError('torch was loaded')\n")
    assert torch_build() == build


@pytest.mark.parametrize(
    ("fields", "build", "reason"),
    [
        ({}, "2.13.0+cpu", None),
        ({}, None, "not installed"),
        ({"torch_min": "2.11"}, "2.11.0+cpu", None),
        ({"torch_min": "2.11"}, "2.9.1+cpu", "2.11 or newer"),
        ({"torch_min": "2.11"}, "unreadable", "cannot be read"),
        ({"torch_variant": "cu"}, "2.13.0+cu130", None),
        ({"torch_variant": "cu"}, "2.13.0+cpu", "'cu'"),
        ({"torch_variant": "rocm"}, "2.13.0", "'rocm'"),
    ],
)
def test_what_a_manifest_asks_for(fields: dict[str, str], build: str | None, reason: str | None) -> None:
    problem = torch_problem(manifest(**fields), build)
    assert (problem is None) is (reason is None)
    if problem is not None and reason is not None:
        assert problem.cause is ProbeCause.WRONG_TORCH and reason in problem.reason and "pip install" in problem.fix
