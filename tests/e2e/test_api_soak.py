"""Every route at once, with hang-ups, malformed bodies and oversize input: no 500, nothing left behind, flat memory.

Six seconds here; SOAK_SECONDS=300 for the full run. The device is simulated, so that the API is what is tried.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import MODEL_NAME, SMALL, ServerProcess

SECONDS = float(os.environ.get("SOAK_SECONDS", "6"))
CLIENTS = 12
GROWTH = 24 * 2**20
KEY = {"authorization": "Bearer soak"}

ASK = [{"role": "user", "content": "Count to ten, and then back."}]
TOOL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]
GENERATING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "One, two,", "max_tokens": 20, "n": 2}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 9, "logprobs": 3, "echo": True}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 60, "tools": CHAT_TOOLS, "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 30, "response_format": {"type": "json_object"}}),
    ("/v1/messages", {"model": MODEL_NAME, "messages": ASK, "max_tokens": 20}),
    ("/v1/messages", {"model": MODEL_NAME, "messages": ASK, "max_tokens": 20,
                      "system": [{"type": "text", "text": "Brief! " * 20, "cache_control": {"type": "ephemeral"}}]}),
    ("/v1/responses", {"input": "Count.", "max_output_tokens": 20}),
    ("/v1/responses", {"input": "Count.", "max_output_tokens": 20, "background": True}),
)  # fmt: skip
LOOKING: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/tokenize", {"messages": ASK}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/v1/messages/count_tokens", {"model": MODEL_NAME, "messages": ASK}),
    ("POST", "/v1/responses/input_tokens", {"input": "Count."}),
    ("POST", "/v1/cache/pin", {"prompt": [7] * 40, "ttl": 0.5}),
    ("POST", "/reset_prefix_cache", None),
    *(("GET", path, None) for path in ("/v1/models", "/metrics", "/v1/memory", "/load", "/server_info", "/health",
                                       "/openapi.json", "/v1/fingerprint", "/v1/cache/pins", "/is_sleeping")),
)  # fmt: skip
BAD: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b'{"prompt": 1e999}', b'{"messages": [{"role": 5}]}', b"\xff\xfe", b'{"a":' * 500,
    b'{"prompt": "x", "max_tokens": -1}', b'{"input": [{"type": "odd"}], "stream": true}', b'{"tools": {"a": 1}}',
    b'{"model": "' + b"y" * 5000 + b'"}', b'{"prompt": "' + b"word " * 60_000 + b'"}', b'{"prompt": "\\ud800"}',
)  # fmt: skip


class _Soak:
    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._end = time.monotonic() + SECONDS
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        chance = random.Random(number)
        acts: tuple[Callable[[random.Random], None], ...] = (
            self._generate, self._generate, self._hang_up, self._look, self._go_on, self._malformed, self._oversize,
        )  # fmt: skip
        while time.monotonic() < self._end:
            self._try(chance.choice(acts), chance)

    def _try(self, act: Callable[[random.Random], None], chance: random.Random) -> None:
        try:
            act(chance)
        except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
            with self._lock:
                self.failures.append(f"{type(error).__name__}: {error}"[:500])

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        reply = self._server.http.request(method, path, headers=KEY, timeout=150, **options)
        with self._lock:
            self.statuses[reply.status_code] += 1
        assert reply.status_code < 500, (method, path, reply.status_code, reply.text[:300])
        return reply

    def _generate(self, chance: random.Random) -> None:
        path, body = chance.choice(GENERATING)
        reply = self._ask("POST", path, json={**body, "stream": chance.random() < 0.5})
        assert reply.status_code == 200, (path, reply.text[:300])

    def _hang_up(self, chance: random.Random) -> None:
        path, body = chance.choice(GENERATING)
        long = {name: value * 10 if name.startswith("max_") else value for name, value in body.items()}
        with (
            contextlib.suppress(httpx.ReadTimeout),
            self._server.http.stream(
                "POST", path, json={**long, "stream": True}, headers=KEY, timeout=chance.choice((0.02, 30))
            ) as reply,
        ):
            assert reply.status_code == 200, reply.read()
            for _ in itertools.islice(reply.iter_lines(), chance.randrange(6)):
                pass

    def _look(self, chance: random.Random) -> None:
        method, path, body = chance.choice(LOOKING)
        reply = self._ask(method, path, **({} if body is None else {"json": body}))
        assert reply.status_code in (200, 409), (path, reply.text[:300])

    def _go_on(self, chance: random.Random) -> None:
        """A conversation of responses, which are looked at and deleted."""
        first = self._ask("POST", "/v1/responses", json={"input": "a", "max_output_tokens": 5}).json()["id"]
        body = {"input": "b", "max_output_tokens": 5, "previous_response_id": first}
        self._ask("POST", "/v1/responses", json=body)
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", ""), ("GET", "")):
            self._ask(method, f"/v1/responses/{first}{path}")

    def _malformed(self, chance: random.Random) -> None:
        path = chance.choice([path for path, _ in GENERATING] + ["/tokenize", "/v1/messages/count_tokens"])
        body = chance.choice(BAD)
        reply = self._ask("POST", path, content=body, params={"x": "y"})
        assert reply.status_code in (200, 400, 404), (path, body[:80], reply.status_code)

    def _oversize(self, chance: random.Random) -> None:
        path, _ = chance.choice(GENERATING)
        body = b'{"prompt": "' + b"x" * 400_000 + b'"}'
        assert self._ask("POST", path, content=body).status_code == 413


@pytest.mark.slow
@pytest.mark.timeout(300 + 3 * SECONDS)
def test_every_route_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*SMALL, "--api-key", "soak", "--max-body-size", "384KiB", "--max-stored-responses", "50",
               "--device-option", "step_time_s=0.001")  # fmt: skip
    with ServerProcess(*options, device="sim", log=tmp_path / "log", env={"OMP_NUM_THREADS": "1"}) as server:
        soak = _Soak(server)
        memory: list[int] = []
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(soak.client, number) for number in range(CLIENTS)]
            while not all(client.done() for client in clients):
                memory.append(server.resident_bytes())
                time.sleep(0.25)
            for client in clients:
                client.result()
        deadline = time.monotonic() + 30
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(server.metrics()[f"enginecore:{name}"] for name in names):
            assert time.monotonic() < deadline, server.metrics()
            time.sleep(0.05)
        log = (tmp_path / "log").read_text()
    assert not soak.failures, soak.failures[:5]
    assert "Traceback" not in log and {200, 400, 404, 413} <= set(soak.statuses)
    warm = memory[len(memory) // 5 :]
    halves = [statistics.median(half) for half in (warm[: len(warm) // 2], warm[len(warm) // 2 :])]
    with capsys.disabled():
        told = ", ".join(f"{count} x {status}" for status, count in sorted(soak.statuses.items()))
        print(f"\n{SECONDS:g} s of every route: {told}; resident {halves[0] / 2**20:.0f}, {halves[1] / 2**20:.0f} MiB")
    assert halves[1] - halves[0] < GROWTH or SECONDS < 30, "flat once it is warm"
