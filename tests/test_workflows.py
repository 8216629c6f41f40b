"""The workflows are sound as far as this machine can tell: their YAML, their shell, their options, their inputs."""

from __future__ import annotations

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
    matrix = set(jobs["without_hardware"]["strategy"]["matrix"]["plugin"])
    devices = {path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")} - {"triton"}
    assert devices <= called | matrix


def test_no_input_is_pasted_into_a_script_but_the_one_that_is_a_script() -> None:
    pasted = [script for script in scripts(REUSABLE) if "inputs." in script]
    assert pasted == ["${{ inputs.setup }}"]
