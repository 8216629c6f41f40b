"""F24: request, operator, generation_config.json, API default, in this order, on every route."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from enginecore import LLM
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError
from enginecore.request import SamplingParams
from enginecore.server.args import ServerArgs

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS
from tests.server.fake_engine import Running, parrot, running

OWN = {"top_k": 1, "temperature": 0.01, "repetition_penalty": 1.3, "max_new_tokens": 5}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model directory as far as defaults are concerned."""
    (tmp_path / "generation_config.json").write_text(json.dumps({**OWN, "bos_token_id": 1, "do_sample": True}))
    return str(tmp_path)


async def params_of(server: Running, **fields: Any) -> list[SamplingParams]:
    """What the engine is asked for on each route."""
    for path, content in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": [user("ab")]})):
        answer = await server.post(path, **content, **fields)
        assert answer.status_code == 200, answer.text
    return [request.params for request in server.engine.requests[-2:]]


async def test_the_models_own_defaults_and_the_requests_values(model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "enginecore.frontend")
    async with running(parrot, model_path=model) as server:
        for params in await params_of(server):
            assert (params.top_k, params.temperature, params.repetition_penalty) == (1, 0.01, 1.3)
            assert params.max_tokens == 5
        for params in await params_of(server, temperature=None, top_k=None, max_tokens=None):
            assert (params.top_k, params.temperature, params.max_tokens) == (1, 0.01, 5), "null is the default"
        for params in await params_of(server, temperature=0.7, top_k=0, repetition_penalty=1.0, max_tokens=7):
            assert (params.top_k, params.temperature, params.repetition_penalty) == (0, 0.7, 1.0)
            assert params.max_tokens == 7
    said = [record for record in caplog.records if "sampling defaults" in record.getMessage()]
    assert len(said) == 1 and all(f"{name}=" in said[0].getMessage() for name in ("top_k", "temperature", "max_tokens"))


async def test_the_operator_goes_over_the_model(model: str) -> None:
    args = ServerArgs(override_generation_config={"temperature": 0.5, "max_new_tokens": 9})
    async with running(parrot, model_path=model, args=args) as server:
        for params in await params_of(server):
            assert (params.top_k, params.temperature, params.max_tokens) == (1, 0.5, 9)
        for params in await params_of(server, temperature=0):
            assert params.temperature == 0


async def test_switched_off(model: str) -> None:
    async with running(parrot, model_path=model, engine_args=EngineArgs(generation_config="none")) as server:
        completion, chat = await params_of(server)
        for params in (completion, chat):
            assert (params.top_k, params.temperature, params.repetition_penalty) == (0, 1.0, 1.0)
        assert completion.max_tokens == 16 and chat.max_tokens is None


def test_python(model: str) -> None:
    """Without sampling parameters the defaults apply; parameters that are given are complete."""
    with LLM("smollm2-135m", device="sim", max_model_len=64, num_blocks=8, generation_config=model) as llm:
        assert llm.get_default_sampling_params().top_k == 1
        prompt = [5, 6, 7]
        assert len(llm.generate([prompt], use_tqdm=False)[0].outputs[0].token_ids) == 5
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 9


def test_a_directory_without_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"no generation_config\.json"):
        LLM("smollm2-135m", device="sim", max_model_len=64, num_blocks=8, generation_config=str(tmp_path))
