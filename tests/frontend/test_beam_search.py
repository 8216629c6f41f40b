"""`LLM.beam_search` against transformers' `generate(num_beams=k)`, as tools/write_beam_reference.py recorded it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from enginecore import LLM, BeamSearchParams, SamplingParams
from enginecore.errors import ParameterError
from enginecore.request import BeamOptions

DATA = Path(__file__).parents[1] / "data" / "beams_float32.json"
SETTINGS = ("beam_width", "num_return_sequences", "max_tokens", "length_penalty", "early_stopping", "stop_token_ids")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2-135m", device="cpu", dtype="float32", max_model_len=256, num_blocks=256, max_num_seqs=40) as llm:
        yield llm


@pytest.mark.model
def test_the_real_model_answers_as_transformers_does(llm: LLM) -> None:
    cases = json.loads(DATA.read_text())["cases"]
    prompts = [case["prompt_token_ids"] for case in cases]
    params = [BeamSearchParams(**{name: case[name] for name in SETTINGS}).sampling_params() for case in cases]
    outputs = llm.generate(prompts, params, use_tqdm=False)  # all searches of all kinds at once
    for case, output in zip(cases, outputs, strict=True):
        assert [choice.token_ids for choice in output.outputs] == case["answers"]
        if case["scores"] is not None:
            assert [choice.score for choice in output.outputs] == pytest.approx(case["scores"], rel=1e-5, abs=2e-4)
    stats = llm._client.call("stats")
    assert stats.num_forks > 20 and stats.num_used_blocks == 0


@pytest.mark.model
def test_what_comes_back(llm: LLM) -> None:
    text = "The capital of France is"
    params = BeamSearchParams(beam_width=3, max_tokens=6, logprobs=1, ignore_eos=True)
    first, second = llm.beam_search([text, {"prompt_token_ids": [504, 3575, 282, 4649]}], params)
    assert len(first.sequences) == len(second.sequences) == 3
    assert len({tuple(sequence.tokens) for sequence in first.sequences}) == 3, "answers are distinct"
    best = first.sequences[0]
    assert best.text.startswith(text) and best.text[len(text) :] == best.completion.text
    assert len(best.completion.token_ids) == 6 and best.tokens[-6:] == best.completion.token_ids
    assert best.finish_reason == "length"
    assert best.score == pytest.approx(best.cum_logprob / 6, abs=1e-6)
    assert best.logprobs is not None and len(best.logprobs) == 6
    chosen = [entry[token].logprob for entry, token in zip(best.logprobs, best.completion.token_ids, strict=True)]
    assert sum(chosen) == pytest.approx(best.cum_logprob, abs=1e-4)
    scores = [sequence.score for sequence in first.sequences]
    assert scores == sorted(scores, reverse=True)
    (other,) = llm.beam_search(text, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    assert other.sequences[0].tokens == best.tokens and other.sequences[0].logprobs is None


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 1000}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"beam_width": 2, "num_return_sequences": 3}, "n"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": None}, "max_tokens"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        BeamSearchParams(**settings)
    assert caught.value.param == param


@pytest.mark.parametrize("field", [{"stop": "x"}, {"seed": 1}, {"top_p": 0.5}, {"best_of": 2}, {"min_tokens": 1}])
def test_what_has_no_place_in_a_search_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(beam=BeamOptions(2), temperature=0, n=1, **field)
    assert caught.value.param in field


def test_too_wide_for_the_engine_is_refused_and_nobody_else_is_hurt(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="beam_width 41 is more than max_num_seqs 40"):
        llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=41))
    assert llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=1, max_tokens=1))[0].sequences[0].tokens
