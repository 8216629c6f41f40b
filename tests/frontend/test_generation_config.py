from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from enginecore.errors import ParameterError
from enginecore.frontend.generation_config import sampling_defaults


def write(folder: Path, **values: object) -> str:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


def test_precedence_and_off_switch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "enginecore.frontend")
    model = write(tmp_path, temperature=0.6, top_k=20, max_new_tokens=5, do_sample=True, top_p=None, eos_token_id=2)
    assert sampling_defaults("auto", model) == {"temperature": 0.6, "top_k": 20, "max_tokens": 5}
    assert "temperature=0.6" in caplog.text
    assert sampling_defaults("auto", model, {"top_k": 3}) == {"temperature": 0.6, "top_k": 3, "max_tokens": 5}
    assert sampling_defaults("none", model) == {} and sampling_defaults("none", model, {"top_p": 0.5}) == {"top_p": 0.5}
    assert sampling_defaults(model, "/nowhere") == sampling_defaults("auto", model)
    assert sampling_defaults("auto", "/nowhere/model.gguf") == {}


def test_bad_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path, temperature=-1, top_k=20)
    assert sampling_defaults("auto", model) == {"top_k": 20}
    assert "ignored temperature" in caplog.text
    for overrides in ({"temperature": -1}, {"nonsense": 1}):
        with pytest.raises(ParameterError):
            sampling_defaults("auto", model, overrides)
    with pytest.raises(ParameterError, match="no generation_config"):
        sampling_defaults(str(tmp_path / "missing"), model)
