"""F28: a stop string is found wherever it lies among tokens, and neither it nor what follows is ever shown."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from enginecore import LLM, SamplingParams

from tests.field.answers import both, text, texts
from tests.field.support import together, token_prompt
from tests.serving import ServerProcess

STORY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 32}


def test_every_short_substring_of_an_answer() -> None:
    """Offline, so that hundreds of stop strings are quick; the tokens of the simulated device cross characters."""
    settings: dict[str, Any] = {"max_model_len": 128, "num_blocks": 1024, "max_num_seqs": 128}
    with LLM("smollm2-135m", device="sim", device_options={"output": "tokens"}, **settings) as llm:
        prompts, base = [token_prompt(seed, 12) for seed in range(20)], SamplingParams(temperature=0, max_tokens=60)
        outputs = [output.outputs[0] for output in llm.generate(prompts, base, use_tqdm=False)]
        index = next(i for i, output in enumerate(outputs) if len(output.token_ids) == 60 and not output.text.isascii())
        prompt, whole = prompts[index], outputs[index].text
        stops = list({whole[i : i + size] for i in range(0, len(whole) - 6, 3) for size in range(1, 7)})
        assert len(stops) > 300
        for include in (False, True):
            params = [
                SamplingParams(
                    temperature=0, max_tokens=60, ignore_eos=True, stop=stop, include_stop_str_in_output=include
                )
                for stop in stops
            ]
            for stop, result in zip(stops, llm.generate([prompt] * len(stops), params, use_tqdm=False), strict=True):
                (choice,) = result.outputs
                before = whole.split(stop)[0]
                assert choice.text == (before + stop if include else before), stop
                assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert llm._client.call("stats").num_used_blocks == 0


def test_stream_and_plain(server: ServerProcess) -> None:
    whole = text(server.complete(**STORY))
    stops = [" Nova", "va Ha", "s a thri", whole[-1], whole[:2]]
    assert all(stop in whole for stop in stops)

    def check(stop: Any, include: bool) -> None:
        answer = both(server, **STORY, stop=stop, include_stop_str_in_output=include)
        (choice,) = answer["choices"]
        listed = [stop] if isinstance(stop, str) else stop
        first = min((whole.index(each) + len(each), -len(each), each) for each in listed if each in whole)[2]
        before = whole.split(first)[0]
        assert choice["text"] == (before + first if include else before)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first)

    several = [[" thriving", " Nova", "zzz"], ["Haven", " Hav"], ["va", "ova H"]]
    cases: list[tuple[Any, bool]] = [*((each, True) for each in stops), *((each, False) for each in stops + several)]
    together([functools.partial(check, *case) for case in cases])


def test_what_does_not_stop(server: ServerProcess) -> None:
    story = {**STORY, "max_tokens": 8}
    whole = text(server.complete(**story))
    stops: tuple[Any, ...] = (None, [], "time", ["upon a", "never said"])
    for answer in together([functools.partial(both, server, **story, stop=stop) for stop in stops]):
        assert texts(answer) == [whole] and answer["choices"][0]["finish_reason"] == "length"
    echoed = both(server, **story, stop=["upon"], echo=True)
    assert text(echoed).startswith("Once upon a time,"), "a stop string in the prompt does not count"


def test_unicode_and_several_choices(server: ServerProcess) -> None:
    emoji = server.post("/tokenize", {"prompt": "😀", "add_special_tokens": False}).json()["tokens"]
    assert len(emoji) == 3, "one character in several tokens"
    forced = {"prompt": "Once upon a time", "temperature": 0, "allowed_token_ids": emoji, "max_tokens": 8}
    assert text(both(server, **forced)).startswith("😀😀")
    answer = both(server, **forced, stop="😀")
    assert text(answer) == "" and answer["choices"][0]["stop_reason"] == "😀"
    assert text(both(server, **forced, stop="😀", include_stop_str_in_output=True)) == "😀"
    answer = both(server, choices=2, **{**STORY, "temperature": 1}, seed=4, n=2, stop=[",", "."])
    assert all(not set(",.") & set(each) for each in texts(answer))


@pytest.mark.parametrize("size", [4, 64])
def test_length_of_the_list(server: ServerProcess, size: int) -> None:
    stops = [f"never{index}" for index in range(size - 1)] + [" Nova"]
    assert text(both(server, **STORY, stop=stops)) == ", the city of"
