from __future__ import annotations

import json
from pathlib import Path

from enginecore.config import EngineArgs
from enginecore.frontend.fingerprint import WEIGHTS_SAMPLE_BYTES, weights_hash
from enginecore.server.args import ServerArgs

from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running

GOOD = {"prompt": "ab", "max_tokens": 2}


async def test_every_reply_has_it_and_it_can_be_looked_up() -> None:
    async with running(parrot) as server:
        answer = await server.post("/v1/completions", **GOOD)
        name = answer.json()["system_fingerprint"]
        messages = [{"role": "user", "content": "hi"}]
        chat = (await server.post("/v1/chat/completions", messages=messages, max_tokens=2)).json()
        assert chat["system_fingerprint"] == name
        stream = await server.post("/v1/chat/completions", messages=messages, max_tokens=2, stream=True)
        chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert {chunk["system_fingerprint"] for chunk in chunks} == {name}
        for response in (answer, await server.post("/v1/messages"), await server.http.get("/health")):
            assert response.headers["x-system-fingerprint"] == name
        found = (await server.http.get(f"/v1/fingerprint/{name}")).json()
        assert found["id"] == name and found == (await server.http.get("/v1/fingerprint")).json()
        for member in ("weights", "tokenizer", "chat_template", "dtype", "device", "batch_invariant", "code",
                       "libraries", "sampling_defaults", "seed_policy"):  # fmt: skip
            assert member in found
        assert found["settings"]["enable_prefix_caching"] is True and len(found["code"]["enginecore"]["sha256"]) == 64
        other = await server.http.get("/v1/fingerprint/fp_0")
        check_error(other.status_code, other.text, 404)


async def test_what_changes_results_changes_it_and_names_do_not(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"weights")

    async def name(**settings: object) -> str:
        defaults = settings.pop("defaults", {})
        template = settings.pop("template", None)
        args = ServerArgs(override_generation_config=defaults)  # type: ignore[arg-type]
        engine_args = EngineArgs(chat_template=template)  # type: ignore[arg-type]
        async with running(parrot, args=args, engine_args=engine_args, **settings) as server:
            found: str = server.app.state.fingerprint["id"]
            return found

    base = await name(model_path=str(tmp_path))
    assert base == await name(model_path=str(tmp_path), served_model_name="other")
    changes: tuple[dict[str, object], ...] = (
        {"dtype": "bfloat16"}, {"enable_prefix_caching": False}, {"seed": 1}, {"quantization": "int8"},
        {"num_threads": 3}, {"defaults": {"temperature": 0.5}}, {"template": "{{ messages }}"},
    )  # fmt: skip
    changed = [await name(model_path=str(tmp_path), **change) for change in changes]
    (tmp_path / "a.safetensors").write_bytes(b"weightz")
    changed.append(await name(model_path=str(tmp_path)))
    assert len({base, *changed}) == len(changed) + 1


def test_large_weights_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    size = WEIGHTS_SAMPLE_BYTES + 2**26
    with open(path, "wb") as file:
        file.truncate(size)  # a hole: it takes no space
    first = weights_hash(path)
    assert first["method"] == "sampled"
    for place in (0, size // 2, size - 1):
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x" * (2**17 if place == size // 2 else 1))
        second = weights_hash(path)
        assert second != first
        first = second
