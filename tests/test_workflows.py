"""The workflows are sound as far as this machine can tell: their YAML, their shell, their options, their inputs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from enginecore.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"
TEMPLATE = ROOT / "core/enginecore/cli/templates/plugin/github/ci.yml.in"
FILES = [*sorted(FOLDER.glob("*.yml")), TEMPLATE]
REUSABLE = FOLDER / "plugin-conformance.yml"


def load(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text().replace("@@device@@", "acme_npu"))
    found["on"] = found.pop(True)  # YAML 1.1 reads the key "on" as a truth value
    return found


def scripts(path: Path) -> list[str]:
    jobs = load(path)["jobs"].values()
    return [step["run"] for job in jobs for step in job.get("steps", []) if "run" in step]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_scripts_are_shell_and_their_options_exist(path: Path) -> None:
    command = typer.main.get_command(app)
    for script in scripts(path):
        plain = re.sub(r"\$\{\{.*?\}\}", "x", script)
        done = subprocess.run(["bash", "-n"], input=plain, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        for line in re.findall(r"enginecore ((?:doctor|conformance|devices|plugin).*)", plain):
            words = line.split()
            known = {option for p in command.commands[words[0]].params for option in p.opts}  # type: ignore[attr-defined]
            used = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
            assert used <= known, (words, used - known)


def expanded(path: Path) -> list[str]:
    """The scripts of a workflow, one for each of the matrix where they name it."""
    found = []
    for job in load(path)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = matrix.get("include") or [{"plugin": name} for name in matrix.get("plugin", [""])]
        for row in rows if isinstance(rows, list) else []:
            for step in job.get("steps", []):
                text = step.get("run", "")
                found.append(re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda m, row=row: str(row.get(m[1], m[0])), text))
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.name)
def test_what_the_scripts_name_exists(path: Path) -> None:
    """Targets of make, modules of python -m, files of the repository, architectures of the compiler."""
    from enginecore_triton.targets import TARGETS

    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for script in expanded(path):
        assert set(re.findall(r"\bmake ([a-z]+)", script)) <= targets, script
        for module in re.findall(r"python -m ([\w.]+)", script):
            assert module in ("venv", "build") or importlib.util.find_spec(module), script
        for name in re.findall(r"(?<![\w/.-])(?:\./)?((?:plugins|tests|\.ci|docs|tools)/[\w./-]+)", script):
            assert (ROOT / name).exists(), (name, script)
        assert set(re.findall(r"--arch (\w+)", script)) <= set(TARGETS), script
        assert "{{ matrix" not in script or path == REUSABLE, script


def test_every_architecture_of_the_compiler_is_compiled_for() -> None:
    from enginecore_triton.targets import TARGETS

    compiled = {arch for script in expanded(FOLDER / "backends.yml") for arch in re.findall(r"--arch (\w+)", script)}
    assert compiled == set(TARGETS)


def test_callers_give_the_reusable_workflow_what_it_takes() -> None:
    inputs = load(REUSABLE)["on"]["workflow_call"]["inputs"]
    assert inputs["device"]["required"] and all("description" in given for given in inputs.values())
    required = {name for name, given in inputs.items() if given.get("required")}
    page = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    [vendor] = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]
    callers = [vendor, *map(load, FILES)]
    calls = [job for caller in callers for job in caller["jobs"].values() if "uses" in job]
    assert len(calls) >= 4
    for call in calls:
        assert call["uses"].split("@")[0].endswith(f".github/workflows/{REUSABLE.name}")
        assert required <= set(call["with"]) <= set(inputs)


def test_every_backend_of_the_repository_is_in_the_matrix() -> None:
    jobs = load(FOLDER / "backends.yml")["jobs"]
    called = {job["with"]["path"].removeprefix("plugins/") for job in jobs.values() if "uses" in job}
    matrix = {row["plugin"] for row in jobs["without_hardware"]["strategy"]["matrix"]["include"]}
    devices = {path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")} - {"triton"}
    assert devices <= called | matrix


def test_no_input_is_pasted_into_a_script_but_the_one_that_is_a_script() -> None:
    pasted = [script for script in scripts(REUSABLE) if "inputs." in script]
    assert pasted == ["${{ inputs.setup }}"]
