"""`enginecore plugin new`: what it writes, and what it refuses.

That the package installs, passes the kit untouched and serves is in tests/testing/test_writing_a_plugin.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from enginecore.cli.main import main
from enginecore.cli.plugin import FILES, render, template_names

from tests import boundaries


def test_every_template_is_written_and_nothing_is_left_open(tmp_path: Path) -> None:
    folder = Path(main.__code__.co_filename).parent / "templates" / "plugin"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.in")} == set(FILES)
    files = render(template_names("big-iron", "iron_1"))
    assert not any("@@" in path + text for path, text in files.items())
    assert '"enginecore.backends"]\niron_1 = "enginecore_big_iron.plugin"\n' in files["pyproject.toml"]
    assert "class BigIronBackend(TorchBackend)" in files["enginecore_big_iron/backend.py"]
    lines = files["tests/test_conformance.py"].strip().splitlines()
    assert sum(bool(line) for line in lines[1:]) == 3, "three lines and an import"
    for path, text in files.items():
        if path.endswith(".py"):
            assert max(map(len, text.splitlines())) <= 120, path
            assert not boundaries.plugin_imports_of_core(text, path.removesuffix(".py").replace("/", "."))


def test_the_written_package_is_clean_for_ruff(tmp_path: Path) -> None:
    assert main(["plugin", "new", "acme", "--device", "acme_npu", "--dir", str(tmp_path / "x")]) == 0
    config = Path(__file__).parents[2] / "pyproject.toml"
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(config), str(tmp_path / "x")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Acme NPU"], "name must be lower case"),
        (["acme", "--device", "Acme"], "device must be lower case"),
        (["acme", "--device", "auto"], "not 'auto'"),
        (["acme", "--device", "cpu"], "enginecore-cpu"),
        (["acme", "--dir", "full"], "full is not empty"),
        ([], "NAME"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["plugin", "new", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_names_have_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugin", "new", "enginecore-big-iron"]) == 0
    text = (tmp_path / "enginecore-big-iron" / "enginecore_big_iron" / "plugin.py").read_text()
    assert 'devices=("big_iron",)' in text
