"""`enginecore plugin new`: what it writes installs, passes the kit untouched, and serves the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from enginecore.cli.main import main
from enginecore.cli.plugin import FILES, render, template_names
from enginecore.frontend.tokenizer import Tokenizer

from tests import boundaries
from tests.cli.vendor import Vendor


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    """A vendor's machine: a fresh environment in which the written package was installed with pip."""
    return Vendor.new(tmp_path_factory.mktemp("vendor"))


def test_pip_installs_it_and_devices_shows_it(vendor: Vendor) -> None:
    found = vendor.run("enginecore", "devices", "--json")
    assert found.returncode == 0, found.stderr
    [row] = [row for row in json.loads(found.stdout)["devices"] if row["device"] == "acme_npu"]
    assert (row["status"], row["distribution"], row["contract"]) == ("available", "enginecore-acme", "1.0")


@pytest.mark.slow
def test_its_own_tests_pass_untouched(vendor: Vendor) -> None:
    found = vendor.run("pytest", "-q", "-p", "no:cacheprovider")
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout and "failed" not in found.stdout


@pytest.mark.model
def test_serve_answers_with_the_real_model(vendor: Vendor, smollm2: str, greedy_reference: list[dict]) -> None:
    case = min(greedy_reference, key=lambda case: len(case["prompt_token_ids"]))
    count = 8
    wanted = Tokenizer.load(smollm2).decode(case["output_token_ids"][:count])
    options = ["--device", "acme_npu", "--dtype", "float32", "--max-model-len", "512", "--port", "0"]
    with vendor.start("enginecore", "serve", smollm2, *options) as server:
        assert server.stderr is not None
        said = ""
        while not (address := re.search(r"http://127\.0\.0\.1:\d+", said)):
            line = server.stderr.readline()
            assert line, said
            said += line
        body = {"prompt": case["prompt_token_ids"], "max_tokens": count, "temperature": 0}
        reply = httpx.post(f"{address[0]}/v1/completions", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == wanted


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
