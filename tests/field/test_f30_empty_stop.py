"""F30: an empty stop string is refused; an empty list is no stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore import SamplingParams

from tests.field.answers import both, user
from tests.field.support import CHAT, COMPLETIONS, refused
from tests.serving import ServerProcess


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], [None], 5, {}, True, ["a"] * 10_000, ["a" * 20_000]])
def test_refused_on_all_routes(sim_server: ServerProcess, stop: Any) -> None:
    for path, content in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [user("x")]})):
        for stream in (False, True):
            error = refused(sim_server.post(path, {**content, "stop": stop, "stream": stream}))
            assert error["param"].startswith("stop")
    if len(str(stop)) < 20_000:
        with pytest.raises(ValueError, match="stop"):
            SamplingParams(stop=stop)


def test_none_and_an_empty_list(sim_server: ServerProcess) -> None:
    for stop in list[Any]((None, [])):
        answer = both(sim_server, prompt="x", max_tokens=3, ignore_eos=True, temperature=0, stop=stop)
        assert answer["choices"][0]["finish_reason"] == "length"
