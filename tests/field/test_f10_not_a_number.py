"""F10: NaN, infinities and ranges are refused in strict JSON; a tiny temperature is greedy."""

from __future__ import annotations

import pytest

from tests.field.support import CHAT, COMPLETIONS, Solo, post_raw, refused, scripted, unharmed
from tests.serving import ServerProcess

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
OUT_OF_RANGE = {
    "temperature": ["-0.1", "-1e-9", "1e300"],
    "top_p": ["0", "-0.5", "1.01", "2"],
    "top_k": ["-2", "-100"],
    "min_p": ["-0.1", "1.5"],
    "presence_penalty": ["-2.01", "2.5"],
    "frequency_penalty": ["-3", "2.0001"],
    "repetition_penalty": ["0", "-1"],
    "logit_bias": ['{"5": 100.5}', '{"5": -101}', '{"5": 1e300}'],
}
IN_RANGE = {
    "temperature": ["0", "2", "1e-10"],
    "top_p": ["1e-9", "1"],
    "top_k": ["-1", "0", "1", "100000"],
    "min_p": ["0", "1"],
    "presence_penalty": ["-2", "2"],
    "repetition_penalty": ["0.01", "10"],
    "logit_bias": ['{"5": -100}', '{"5": 100}', "{}"],
}


def _body(path: str, field: str, value: str) -> bytes:
    prompt = '"prompt": "a"' if path == COMPLETIONS else '"messages": [{"role": "user", "content": "a"}]'
    return f'{{{prompt}, "max_tokens": 2, "{field}": {value}}}'.encode()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_not_finite(sim_server: ServerProcess, path: str) -> None:
    with unharmed(sim_server):
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', '"inf"'):
            for field in NUMBERS:
                refused(post_raw(sim_server, path, _body(path, field, value)))
            refused(post_raw(sim_server, path, _body(path, "logit_bias", f'{{"5": {value}}}')))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ranges(sim_server: ServerProcess, path: str) -> None:
    with unharmed(sim_server):
        for field, values in OUT_OF_RANGE.items():
            for value in values:
                refused(post_raw(sim_server, path, _body(path, field, value)), 400, field)
        for field, values in IN_RANGE.items():
            for value in values:
                assert post_raw(sim_server, path, _body(path, field, value)).status_code == 200, (field, value)


@pytest.mark.parametrize("temperature", [1e-10, 1e-6, 1e-4, 1e-3])
def test_a_tiny_temperature_is_greedy(sim_server: ServerProcess, temperature: float) -> None:
    answer = sim_server.complete(
        prompt=[5, 6, 7], temperature=temperature, seed=3, max_tokens=20, ignore_eos=True, return_token_ids=True
    )
    assert answer["choices"][0]["token_ids"] == scripted([5, 6, 7], 20)


@pytest.mark.model
def test_a_tiny_temperature_on_the_real_model(server: ServerProcess, solo: Solo) -> None:
    prompt = "My favourite fruit is"
    for temperature in (1e-10, 1e-3):
        answer = server.complete(prompt=prompt, temperature=temperature, seed=3, max_tokens=8, logprobs=1)
        assert answer["choices"][0]["text"] == solo.text(prompt, 8)
        assert all(value <= 0 for value in answer["choices"][0]["logprobs"]["token_logprobs"])
