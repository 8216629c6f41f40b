"""Every route at once, gRPC's methods too, with hang-ups, malformed bodies and oversize input: no 500, nothing left
behind, flat memory.

Six seconds here; SOAK_SECONDS=300 for the full run. The device is simulated, so that the API is what is tried. A run of
30 seconds or more has an embedding model beside it, on the CPU, and `run-batch` over and over.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from enginecore.server.app import ROUTES
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc.enginecore_pb2_grpc import InferenceStub

from tests.serving import MODEL_NAME, SMALL, ServerProcess

SECONDS = float(os.environ.get("SOAK_SECONDS", "6"))
#: From so many seconds on, memory has to be flat, and what takes long to start is there too.
LONG = 30
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
#: On a server that generates; one for pooling answers them.
POOLING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/embeddings", {"input": ["One, two", "three"], "encoding_format": "base64"}),
    ("/pooling", {"input": "One", "task": "token_embed"}),
    *((path, {"text_1": "One", "text_2": ["two", "three"]}) for path in ("/score", "/v1/score")),
    *((path, {"query": "One", "documents": ["two", "three"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
)
#: Refused by a server that is what it is: 403, 404 or 400.
REFUSED: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/classify", {"input": "One"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("POST", "/v1/cache/unpin", {"id": "none"}),
    ("GET", "/v1/models/none", None),
    ("GET", "/v1/fingerprint/none", None),
    ("GET", "/v1/requests/none/explain", None),
)
LOOKING: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/tokenize", {"messages": ASK}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/v1/messages/count_tokens", {"model": MODEL_NAME, "messages": ASK}),
    ("POST", "/v1/responses/input_tokens", {"input": "Count."}),
    ("POST", "/v1/cache/pin", {"prompt": [7] * 40, "ttl": 0.5}),
    ("POST", "/reset_prefix_cache", None),
    *(("GET", path, None) for path in ("/v1/models", "/metrics", "/v1/memory", "/load", "/server_info", "/health",
                                       "/openapi.json", "/v1/fingerprint", "/v1/cache/pins", "/is_sleeping",
                                       "/version", "/ping")),
    ("POST", "/ping", None),
)  # fmt: skip
BAD: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b'{"prompt": 1e999}', b'{"messages": [{"role": 5}]}', b"\xff\xfe", b'{"a":' * 500,
    b'{"prompt": "x", "max_tokens": -1}', b'{"input": [{"type": "odd"}], "stream": true}', b'{"tools": {"a": 1}}',
    b'{"model": "' + b"y" * 5000 + b'"}', b'{"prompt": "' + b"word " * 60_000 + b'"}', b'{"prompt": "\\ud800"}',
)  # fmt: skip


#: They would stop the rest, or need a device that can.
LEFT_OUT = {"/sleep", "/wake_up"}


class _Soak:
    def __init__(self, server: ServerProcess, pooling: ServerProcess | None) -> None:
        self._server, self._pooling = server, pooling
        found = re.search(r"gRPC at (\S+)", server.log.read_text())
        assert found is not None
        self.channel = grpc.insecure_channel(found[1])
        self._end = time.monotonic() + SECONDS
        self.statuses: Counter[int | str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        chance = random.Random(number)
        acts: tuple[Callable[[random.Random], None], ...] = (
            self._generate, self._generate, self._hang_up, self._look, self._go_on, self._malformed, self._oversize,
            self._refused, self._pool, self._call, self._call_and_go,
        )  # fmt: skip
        while time.monotonic() < self._end:
            self._try(chance.choice(acts), chance)

    def _try(self, act: Callable[[random.Random], None], chance: random.Random) -> None:
        try:
            act(chance)
        except (httpx.HTTPError, grpc.RpcError, AssertionError, ValueError, KeyError) as error:
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

    def _refused(self, chance: random.Random) -> None:
        method, path, body = chance.choice(REFUSED)
        reply = self._ask(method, path, **({} if body is None else {"json": body}))
        assert reply.status_code in (400, 403, 404), (path, reply.status_code, reply.text[:300])

    def _pool(self, chance: random.Random) -> None:
        path, body = chance.choice(POOLING)
        assert self._ask("POST", path, json=body).status_code == 400, path
        if self._pooling is not None:
            for given, status in ((body, 200), ({**body, "model": "none"}, 404), ({}, 400)):
                reply = self._pooling.http.post(path, json=given, timeout=150)
                assert reply.status_code == status, (path, given, reply.text[:300])

    def _call(self, chance: random.Random) -> None:
        """A call of gRPC that ends by itself."""
        stub, key = InferenceStub(self.channel), tuple(KEY.items())
        text, ids = pb.GenerateRequest(text="One, two,"), pb.TokenIds(ids=[5, 6])
        calls: tuple[tuple[Any, Any, Any, str], ...] = (
            (stub.Generate, text, key, "OK"),
            (stub.Generate, pb.GenerateRequest(token_ids=ids, sampling=pb.Sampling(n=2, logprobs=2)), key, "OK"),
            (stub.Generate, pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(**ASK[0])]),
                                               sampling=pb.Sampling(max_tokens=9)), key, "OK"),
            (stub.Tokenize, pb.TokenizeRequest(text="One"), key, "OK"),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=[5, 6]), key, "OK"),
            (stub.Embed, pb.EmbedRequest(texts=["One"]), key, "UNIMPLEMENTED"),
            (stub.Generate, pb.GenerateRequest(), key, "INVALID_ARGUMENT"),
            (stub.Generate, pb.GenerateRequest(text="x", sampling=pb.Sampling(top_p=9)), key, "INVALID_ARGUMENT"),
            (stub.Generate, text, (), "UNAUTHENTICATED"),
            (stub.Generate, pb.GenerateRequest(text="x", model="none"), key, "NOT_FOUND"),
            (stub.Tokenize, pb.TokenizeRequest(text="x" * 400_000), key, "RESOURCE_EXHAUSTED"),
        )  # fmt: skip
        method, request, metadata, status = chance.choice(calls)
        found = "OK"
        try:
            method(request, metadata=metadata, timeout=150)
        except grpc.RpcError as error:
            found = error.code().name  # type: ignore[attr-defined]
        with self._lock:
            self.statuses[found] += 1
        assert found == status, (request, found)

    def _call_and_go(self, chance: random.Random) -> None:
        """A stream of gRPC that is given up, or runs out of time."""
        sampling = pb.Sampling(max_tokens=200, ignore_eos=True)
        deadline = chance.choice((0.02, 150))
        stream = InferenceStub(self.channel).GenerateStream(
            pb.GenerateRequest(text="One", sampling=sampling), metadata=tuple(KEY.items()), timeout=deadline
        )
        try:
            for _ in itertools.islice(stream, chance.randrange(6)):
                pass
            stream.cancel()
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error  # type: ignore[attr-defined]

    def batches(self, folder: Path) -> None:
        """`run-batch` as often as there is time."""
        source, out = folder / "batch.jsonl", folder / "answers.jsonl"
        lines = [{"custom_id": str(number), "method": "POST", "url": path, "body": body}
                 for number, (path, body) in enumerate(GENERATING * 20) if "background" not in body]  # fmt: skip
        source.write_text("\n".join(json.dumps(line) for line in lines) + "\n{\n")
        options = ["--device", "sim", *SMALL, "--served-model-name", MODEL_NAME, "--overwrite", "--json"]
        while time.monotonic() < self._end:
            command = [sys.executable, "-m", "enginecore", "run-batch", str(source), str(out), *options]
            done = subprocess.run(command, capture_output=True, text=True)
            told = json.loads(done.stdout)
            if (done.returncode, told["succeeded"], told["invalid"]) != (9, len(lines), 1):
                with self._lock:
                    self.failures.append(f"run-batch: {done.returncode}, {told}, {done.stderr[-300:]}")

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


def test_the_mix_has_every_route() -> None:
    paths = {path for path, *_ in (*GENERATING, *POOLING)} | {path for _, path, _ in (*LOOKING, *REFUSED)} | LEFT_OUT
    for _, path, _ in ROUTES:
        pattern = re.sub(r"\\{[^}]*\\}", ".+", re.escape(path))
        kept = path.startswith("/v1/responses/{")  # looked up under the ids that were given, see _go_on
        assert kept or any(re.fullmatch(pattern, each) for each in paths), f"{path} is not in the mix"


def _settle(server: ServerProcess) -> None:
    """Until nothing runs and no block is held."""
    deadline = time.monotonic() + 30
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(server.metrics()[f"enginecore:{name}"] for name in names):
        assert time.monotonic() < deadline, server.metrics()
        time.sleep(0.05)


@contextlib.contextmanager
def _servers(tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess | None]]:
    options = (*SMALL, "--api-key", "soak", "--max-body-size", "384KiB", "--max-stored-responses", "50",
               "--device-option", "step_time_s=0.001", "--grpc-port", "0")  # fmt: skip
    with ServerProcess(*options, device="sim", log=tmp_path / "log", env={"OMP_NUM_THREADS": "1"}) as server:
        if SECONDS < LONG:
            yield server, None
            return
        sizes = ("--kv-cache-memory", "64MiB", "--num-threads", "1")
        with ServerProcess(*sizes, model="all-minilm-l6-v2", log=tmp_path / "pooling") as pooling:
            yield server, pooling


@pytest.mark.slow
@pytest.mark.timeout(300 + 3 * SECONDS)
def test_every_route_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _servers(tmp_path) as (server, pooling):
        soak = _Soak(server, pooling)
        memory: list[int] = []
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            clients = [pool.submit(soak.client, number) for number in range(CLIENTS)]
            if SECONDS >= LONG:
                clients.append(pool.submit(soak.batches, tmp_path))
            while not all(client.done() for client in clients):
                memory.append(server.resident_bytes())
                time.sleep(0.25)
            for client in clients:
                client.result()
        soak.channel.close()
        _settle(server)
        log = (tmp_path / "log").read_text()
    assert not soak.failures, soak.failures[:5]
    assert "Traceback" not in log and {200, 400, 404, 413, "OK"} <= set(soak.statuses)
    warm = memory[len(memory) // 5 :]
    halves = [statistics.median(half) for half in (warm[: len(warm) // 2], warm[len(warm) // 2 :])]
    with capsys.disabled():
        told = ", ".join(f"{count} x {status}" for status, count in sorted(soak.statuses.items(), key=str))
        print(f"\n{SECONDS:g} s of every route: {told}; resident {halves[0] / 2**20:.0f}, {halves[1] / 2**20:.0f} MiB")
    assert halves[1] - halves[0] < GROWTH or SECONDS < LONG, "flat once it is warm"
