"""docs/writing-a-plugin.md followed by the letter: its files are written and its commands run, in the page's order."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from enginecore.device.contract import contract_version
from enginecore.frontend.tokenizer import Tokenizer

from tests import boundaries
from tests.testing.vendor import Vendor

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-plugin.md"
FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    file: str
    text: str
    section: str

    @property
    def commands(self) -> list[str]:
        """Command lines of a console block; they begin with "$ "."""
        lines = self.text.splitlines() if self.language == "console" else []
        return [line[2:] for line in lines if line.startswith("$ ")]


def blocks() -> list[Block]:
    page = PAGE.read_text()
    sections = [(match.start(), match[1]) for match in re.finditer(r"^## (\d+)\.", page, re.MULTILINE)]
    return [
        Block(match[1], match[2] or "", match[3], [name for at, name in sections if at < match.start()][-1])
        for match in FENCE.finditer(page)
    ]


SECTIONS = list(dict.fromkeys(block.section for block in blocks() if block.commands or block.file))


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    return Vendor.new(tmp_path_factory.mktemp("vendor"))


@pytest.fixture(scope="module")
def done() -> list[str]:
    """Sections that went well: each builds on those before it."""
    return []


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("section", SECTIONS)
def test_section(
    vendor: Vendor, done: list[str], section: str, smollm2: str, greedy_reference: list[dict]
) -> None:  # fmt: skip
    before = SECTIONS[: SECTIONS.index(section)]
    assert done == before, f"run the sections in order: {before} come first"
    for block in (block for block in blocks() if block.section == section):
        if block.file:
            (vendor.folder / block.file).write_text(block.text)
        for command in block.commands:
            if command.startswith("enginecore serve"):
                answers_with_the_real_model(vendor, command, smollm2, greedy_reference)
            else:
                ran_well(vendor, command)
    done.append(section)


def ran_well(vendor: Vendor, command: str) -> None:
    found = vendor.run(command)
    assert found.returncode == 0, f"{command}\n{found.stdout}{found.stderr}"
    if command == "enginecore devices":
        line = rf"^acme_npu +enginecore-acme +0\.1\.0 +{re.escape(contract_version())} +available"
        assert re.search(line, found.stdout, re.MULTILINE)
    elif command == "pytest":
        assert " passed" in found.stdout and "failed" not in found.stdout
    elif "--support" in command:
        state = "native" if "Impl(" in (vendor.folder / "enginecore_acme/ops.py").read_text() else "reference"
        assert re.search(rf"^rms_norm +{state} +{state} +re", found.stdout, re.MULTILINE), found.stdout
    elif "--json" in command:
        assert json.loads(found.stdout)["backend"]["distribution"] == "enginecore-acme"
    elif "conformance" in command and "--list" not in command:
        assert "conforms" in found.stdout and "enginecore-acme 0.1.0" in found.stdout


def answers_with_the_real_model(vendor: Vendor, command: str, model: str, references: list[dict]) -> None:
    """The page's command, on a free port, in the reference's dtype and with a context that fits a small machine."""
    case = min(references, key=lambda case: len(case["prompt_token_ids"]))
    count = 8
    wanted = Tokenizer.load(model).decode(case["output_token_ids"][:count])
    with vendor.start(f"{command} --port 0 --dtype float32 --max-model-len 512") as server:
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


def test_loose_python_blocks_run() -> None:
    loose = [block.text for block in blocks() if block.language == "python" and not block.file]
    assert loose
    for text in loose:
        exec(compile(text, str(PAGE), "exec"), {})


def test_files_of_the_page_keep_to_what_a_plugin_may_import() -> None:
    files = [block for block in blocks() if block.file.endswith(".py")]
    assert len(files) >= 5
    for block in files:
        module = block.file.removesuffix(".py").replace("/", ".")
        assert not boundaries.plugin_imports_of_core(block.text, module)
        assert max(map(len, block.text.splitlines())) <= 120


def test_every_hook_of_the_contract_is_on_the_page() -> None:
    from enginecore.device.hookspecs import HookSpecs

    page = PAGE.read_text()
    assert all(name in page for name in vars(HookSpecs) if name.startswith("enginecore_"))
