"""Workload files, and the built-in one."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli.bench_workload import WorkItem, load_workload
from enginecore.errors import ParameterError


def test_the_built_in_workload() -> None:
    items = load_workload(None, 128)
    assert all(isinstance(item.prompt, str) for item in items)
    assert round(statistics.fmean(item.output_tokens for item in items)) == 117


def test_a_file_is_taken_from_its_start_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text(json.dumps([{"prompt": "a", "output_tokens": 1}, {"prompt_token_ids": [5], "output_tokens": 2}]))
    first, second = WorkItem("a", 1), WorkItem([5], 2)
    assert load_workload(path, 1) == [first]
    assert load_workload(path, 5) == [first, second, first, second, first]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("nope", "not JSON"),
        ([], "not empty"),
        ({"prompt": "a"}, "must be a list"),
        (["a"], "request 0 is not an object"),
        ([{"prompt": "a", "output_tokens": 1}, {"prompt": "", "output_tokens": 1}], "request 1"),
        ([{"prompt_token_ids": [True], "output_tokens": 1}], "prompt_token_ids"),
        ([{"prompt": "a"}], "output_tokens"),
        ([{"prompt": "a", "output_tokens": 0}], "output_tokens"),
        ([{"prompt": "a", "output_tokens": True}], "output_tokens"),
    ],
)
def test_what_is_not_a_workload(content: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ParameterError, match=said) as caught:
        load_workload(path, 1)
    assert "work.json" in caught.value.message
