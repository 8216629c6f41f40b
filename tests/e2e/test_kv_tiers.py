"""Lower tiers of a whole server: killed in the middle of writing, started again, its files harmed while it runs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from tests.field.support import scripted, token_prompt
from tests.serving import ServerProcess

#: The device's cache holds two of the prompts.
OPTIONS = ("--max-model-len", "256", "--num-blocks", "24", "--max-num-seqs", "4")
PROMPTS = [token_prompt(seed, 180 + seed) for seed in range(8)]


def started(folder: Path, log: Path) -> ServerProcess:
    options = (*OPTIONS, "--kv-disk", str(folder), "--kv-disk-size", "64MiB", "--kv-host-memory", "8KiB")
    return ServerProcess(*options, device="sim", log=log, env={"OMP_NUM_THREADS": "1"})


def ask(server: ServerProcess, prompt: list[int], **fields: Any) -> int:
    """Prompt tokens that were not computed; the answer is checked."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = server.complete(**body, **fields)
    assert answer["choices"][0]["token_ids"] == scripted(prompt, 4)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def tier(server: ServerProcess) -> dict[str, int]:
    figures: dict[str, int] = server.http.get("/v1/memory").json()["kv_cache"]["tiers"]["disk"]
    return figures


def test_killed_restarted_and_harmed(tmp_path: Path) -> None:
    """Never a wrong token; what is whole is found again, what is not is computed."""
    folder, rng = tmp_path / "kv", random.Random(0)
    with started(folder, tmp_path / "first.log") as server:
        for prompt in PROMPTS:
            assert ask(server, prompt) == 0
        deadline = time.monotonic() + 30
        while tier(server)["blocks"] < 60 and time.monotonic() < deadline:
            time.sleep(0.05)
        for prompt in PROMPTS:
            ask(server, prompt[::-1])
        server.kill()
    files = sorted(folder.rglob("*.kv"))
    assert len(files) >= 60
    for path in rng.sample(files, 6):
        path.write_bytes(path.read_bytes()[: rng.randrange(200)])
    with started(folder, tmp_path / "second.log") as server:
        cached = [ask(server, prompt) for prompt in PROMPTS]
        assert sum(count > 0 for count in cached) >= 4, cached
        assert tier(server)["read"] > 10
        for path in folder.rglob("*.kv"):
            choice = rng.random()
            if choice < 0.3:
                path.unlink(missing_ok=True)
            elif choice < 0.6:
                data = bytearray(path.read_bytes())
                data[rng.randrange(len(data))] ^= 1
                path.write_bytes(data)
        for number, prompt in enumerate(PROMPTS * 2):
            ask(server, prompt)
            assert ask(server, prompt, cache_salt=f"salt {number}") == 0
        assert tier(server)["failed"] > 0 and server.http.get("/health").status_code == 200
        assert server.stop() == 0
    assert "is computed again" in (tmp_path / "second.log").read_text()
