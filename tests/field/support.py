"""What the field cases share: LIVE, the baseline after a case, streams that can be cut off, many requests at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
from enginecore_sim import expected_tokens

from tests.server.checkers import check_error, parse_events, strict_json
from tests.serving import MODEL_NAME, ServerProcess

T = TypeVar("T")

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"

VOCAB, EOS = 49152, 2
#: Threads that wait must not spin: servers of several cases share few cores.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
#: The simulated device does little arithmetic, and one thread does it best.
ONE_THREAD = {**PASSIVE, "OMP_NUM_THREADS": "1"}
#: "Right after": five seconds, and room for a machine that is busy with other things.
LIVE_SECONDS = 15.0


# ---- a server's state ------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool], what: str, timeout: float = LIVE_SECONDS) -> None:
    """Poll until `condition` holds; AssertionError naming `what` when it never does."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.02)


def live(server: ServerProcess) -> None:
    """A plain 5-token completion and /health answer."""
    answer = server.post(COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 5}, timeout=LIVE_SECONDS)
    assert answer.status_code == 200, answer.text
    assert server.http.get("/health", timeout=LIVE_SECONDS).status_code == 200


def gauges(server: ServerProcess) -> tuple[float, float, float]:
    """(running, waiting, share of blocks in use)."""
    values = server.metrics()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    running, waiting, usage = (values[f"enginecore:{name}"] for name in names)
    return running, waiting, usage


def baseline(server: ServerProcess) -> None:
    """Nothing runs, nothing waits, every block is free again."""
    wait_until(lambda: gauges(server) == (0, 0, 0), "the gauges are back at 0")


@contextlib.contextmanager
def unharmed(server: ServerProcess) -> Iterator[None]:
    """After what happens inside, the server is LIVE and back at its baseline."""
    yield
    live(server)
    baseline(server)


def counter(server: ServerProcess, name: str, **labels: str) -> float:
    """The sum of a counter's samples that have these labels; `name` without prefix."""
    from prometheus_client.parser import text_string_to_metric_families

    text = server.http.get("/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"enginecore:{name}" and labels.items() <= sample.labels.items()
    )


# ---- requests --------------------------------------------------------------------------------------------------------


def refused(answer: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The answer is an error envelope with this status (and field); returns its inside."""
    return check_error(answer.status_code, answer.content, status, param)


def post_raw(server: ServerProcess, path: str, body: bytes) -> httpx.Response:
    """A body that need not be JSON."""
    return server.http.post(path, content=body, headers={"content-type": "application/json"})


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """All calls at once, each in a thread of its own; results in order, the first error raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def cut_stream(server: ServerProcess, path: str, body: dict[str, Any], *, chunks: int, **options: Any) -> str:
    """Read this many events of a stream, then hang up. Returns what was read of the text."""
    text = ""
    with server.http.stream("POST", path, json={**body, "stream": True}, **options) as answer:
        if answer.status_code != 200:
            raise AssertionError(answer.read())
        for count, line in enumerate(filter(None, answer.iter_lines()), 1):
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice.get("text", "") + choice.get("delta", {}).get("content", "")
            if count >= chunks:
                break
    return text


def whole_stream(server: ServerProcess, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The events of a stream that is read to its end."""
    answer = server.post(path, {**body, "stream": True}, **options)
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


class InFlight:
    """`with InFlight([call, ...]) as flight:` runs the calls in threads meanwhile; their results are in `results`."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._pool = ThreadPoolExecutor(len(calls))
        self._calls = calls
        self.results: list[Any] = []

    def __enter__(self) -> InFlight:
        self._futures = [self._pool.submit(call) for call in self._calls]
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._pool.shutdown()
        if kind is None:
            self.results = [future.result() for future in self._futures]


# ---- what is right ---------------------------------------------------------------------------------------------------


class Solo:
    """Greedy answers of requests that run alone. A salt of its own keeps each from the prefix cache."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._known: dict[str, dict[str, Any]] = {}
        self._count = itertools.count()
        self._nonce = os.urandom(8).hex()
        self._lock = threading.Lock()

    def __call__(self, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        """The whole answer to the request."""
        body = {"model": MODEL_NAME, "temperature": 0, **body}
        key = path + json.dumps(body, sort_keys=True)
        with self._lock:
            if key not in self._known:
                salted = {**body, "cache_salt": f"{self._nonce}-{next(self._count)}"}
                answer = self._server.post(path, salted)
                assert answer.status_code == 200, answer.text
                self._known[key] = strict_json(answer.content)
                assert self._known[key]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            return self._known[key]

    def text(self, prompt: str | list[int], max_tokens: int, **body: Any) -> str:
        """The text of a plain completion."""
        answer = self(prompt=prompt, max_tokens=max_tokens, **body)
        text: str = answer["choices"][0]["text"]
        return text


def scripted(prompt: Sequence[int], count: int, *, ignore_eos: bool = True) -> list[int]:
    """What the simulated device answers."""
    tokens: list[int] = expected_tokens(prompt, count, vocab_size=VOCAB, eos_token_ids=() if ignore_eos else (EOS,))
    return tokens


def token_prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other seed gives, for the simulated device."""
    return [2 + (seed * 7919 + index * 104729 + seed * index) % (VOCAB - 2) for index in range(length)]
