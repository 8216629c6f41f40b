"""F49: without a chat template a chat is a 400 that says what to do; one can be given at start-up."""

from __future__ import annotations

from pathlib import Path

import pytest
from enginecore import LLM
from enginecore.cli.main import main
from enginecore.errors import ParameterError

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, TOKENIZE
from tests.frontend.toy import ToyTokenizer
from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running


async def test_chat_is_refused_and_completions_work() -> None:
    tokenizer = ToyTokenizer()
    tokenizer.chat_template = None  # type: ignore[assignment]
    async with running(parrot, tokenizer=tokenizer) as server:
        for path in (CHAT, TOKENIZE):
            answer = await server.post(path, messages=[user("hi")])
            error = check_error(answer.status_code, answer.content, 400, "messages")
            assert error["code"] == "no_chat_template" and "supply one at start-up" in error["message"]
        assert (await server.post(COMPLETIONS, prompt="hi", max_tokens=1)).status_code == 200


def test_a_template_file_is_used(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with LLM("smollm2-135m", device="sim", max_model_len=64, num_blocks=8, chat_template=str(template)) as llm:
        (output,) = llm.chat([user("hi"), user("there")], use_tqdm=False)
        assert output.prompt == "[hi][there]"


def test_a_file_that_does_not_exist(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "nope.jinja")
    assert main(["serve", "--device", "sim", "--port", "0", "--chat-template", missing]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and missing in said[0] and "does not exist" in said[0]
    with pytest.raises(ParameterError, match="does not exist"):
        LLM("smollm2-135m", device="sim", max_model_len=64, num_blocks=8, chat_template=missing)


def test_a_template_that_does_not_compile(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    with pytest.raises(ParameterError, match="does not compile"):
        LLM("smollm2-135m", device="sim", max_model_len=64, num_blocks=8, chat_template=str(broken))
