"""docs/cli.md and the commands, and the paths that the docs name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "core" / "enginecore"


def test_the_reference_is_in_step_with_the_commands() -> None:
    script = [sys.executable, str(ROOT / "tools" / "write_cli_docs.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`", text)
    missing = [path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()]
    assert len(paths) > 20 and not missing, missing


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/measurements.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    assert not missing, missing


def test_make_targets_are_there() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("install", "serve", "demo", "test", "lint", "bench", "conformance"):
        assert re.search(rf"^{target}:", text, re.MULTILINE), target
