"""docs/writing-a-plugin.md is true: its files make a plugin, its commands run, and the kit passes on the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-plugin.md"
FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks() -> Iterator[tuple[str, str, str]]:
    """(language, file name or "", text) of every fenced block of the page."""
    for match in FENCE.finditer(PAGE.read_text()):
        yield match[1], match[2] or "", match[3]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and what `pip install -e .` would leave beside them."""
    folder = tmp_path_factory.mktemp("acme")
    for _, name, text in blocks():
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    project = (folder / "pyproject.toml").read_text()
    [(name, version)] = re.findall(r'^name = "(.*)"\nversion = "(.*)"$', project, re.MULTILINE)
    group, points = re.findall(r'^\[project\.entry-points\."(.*)"\]\n((?:\w+ = .*\n)+)', project, re.MULTILINE)[0]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}".replace('"', ""))
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_devices_shows_the_plugin(plugin: Path) -> None:
    found = run(plugin, "enginecore.cli.main", "devices", "--json")
    assert found.returncode == 0, found.stderr
    [row] = [row for row in json.loads(found.stdout)["devices"] if row["device"] == "acme_npu"]
    assert (row["status"], row["distribution"]) == ("available", "enginecore-acme")


def conformance_commands() -> list[str]:
    lines = [line[2:] for language, _, text in blocks() if language == "console" for line in text.splitlines()]
    return [line for line in lines if line.startswith("enginecore conformance")]


@pytest.mark.slow
@pytest.mark.parametrize("command", conformance_commands())
def test_the_kit_passes_by_the_commands_of_the_page(plugin: Path, command: str) -> None:
    found = run(plugin, "enginecore.cli.main", *command.split()[1:])
    assert found.returncode == 0, found.stdout + found.stderr
    if "--json" in command:
        report = json.loads(found.stdout)
        assert report["ok"] and report["versions"]["enginecore-acme"] == "0.1.0"
    elif "--list" not in command:
        assert "conforms" in found.stdout


def test_the_plugins_own_test_file(plugin: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", "contract or copy_blocks"]
    found = run(plugin, "pytest", "tests/test_conformance.py", *options)
    assert found.returncode == 0, found.stdout
    assert "passed" in found.stdout


def test_loose_python_blocks_run() -> None:
    loose = [text for language, name, text in blocks() if language == "python" and not name]
    assert loose
    for text in loose:
        exec(compile(text, str(PAGE), "exec"), {})


def test_a_tiny_model_runs_on_the_plugin(plugin: Path) -> None:
    found = run(plugin, "enginecore.cli.main", "conformance", "--device", "acme_npu", "--only", "llama_chunked")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 pass" in found.stdout
