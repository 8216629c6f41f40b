"""A server that loads adapters while it answers: the official client asks for them by name."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from enginecore.models.inspect import inspect_model
from enginecore.models.store import resolve_model
from openai import OpenAI

from tests.lora.making import DATA, make_tensors, write_adapter, write_known
from tests.serving import ServerProcess

BOSS = {"Authorization": "Bearer boss"}


def test_adapters_come_and_go_while_the_server_answers(tmp_path: Path, smollm2: str) -> None:
    linears = inspect_model(resolve_model("smollm2-135m"), "float32").linears
    root = tmp_path / "root"
    write_known(root, linears)
    nan = {name: tensor * float("nan") for name, tensor in make_tensors(linears, 1, 8, ("q_proj",)).items()}
    write_adapter(root / "nan", nan, 8, ("q_proj",))
    write_adapter(tmp_path / "outside", {"x": torch.ones(1)})
    (root / "link").symlink_to(tmp_path / "outside")
    known = json.loads((DATA / "adapters_float32.json").read_text())

    options = ["--dtype", "float32", "--max-model-len", "1024", "--num-blocks", "128", "--max-num-seqs", "8"]
    options += ["--enable-lora", "--lora-root", str(root), "--lora-modules", f"a={root / 'a'}", "--max-loras", "2"]
    options += ["--api-key", "k", "--admin-key", "boss"]
    with (
        ServerProcess(*options, log=tmp_path / "log") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):

        def answer(model: str, prompt: int) -> list[int]:
            done: Any = client.completions.create(
                model=model, prompt=known["prompts"][prompt], max_tokens=10, temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            assert done.model == model
            tokens: list[int] = done.choices[0].token_ids
            return tokens

        def operate(route: str, **body: Any) -> Any:
            return server.http.post(f"/v1/{route}_lora_adapter", json=body, headers=BOSS)

        long = client.completions.create(
            model="a", prompt=known["prompts"][0], max_tokens=900, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert next(iter(long)).choices[0].text is not None
        assert operate("load", lora_name="b", lora_path="b").status_code == 200
        assert {model.id for model in client.models.list()} == {"smollm2", "a", "b"}
        refused = [operate("load", lora_name="x", lora_path=path)
                   for path in ("../outside", "link", str(tmp_path / "outside"), "/etc", "nan", "nothing")]  # fmt: skip
        assert [reply.status_code for reply in refused] == [400] * 6
        assert ["under the folder for adapters" in reply.text for reply in refused] == [True] * 4 + [False, True]
        assert "NaN" in refused[4].text

        said: dict[str, list[int]] = {}
        threads = [threading.Thread(target=lambda name=name: said.update({name: answer(name, 1)}))
                   for name in ("smollm2", "a", "b")]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert said == {name: known["outputs"]["" if name == "smollm2" else name][1] for name in said}

        gone = operate("unload", lora_name="a").json()
        assert gone["sequences_in_flight"] == 1, "the long answer goes on"
        assert operate("load", lora_name="a", lora_path="c").status_code == 200
        assert answer("a", 2) == known["outputs"]["c"][2]
        assert [next(iter(long)).choices[0].finish_reason for _ in range(3)] == [None] * 3
        long.close()
        metrics = server.http.get("/metrics").text
        steps = next(line for line in metrics.splitlines() if line.startswith("enginecore:adapter_steps_total"))
        assert float(steps.rpartition(" ")[2]) > 20
