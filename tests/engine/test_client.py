"""The engine in a process of its own: the ways to talk to it, and every way in which it or its parent may end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import zmq
from enginecore.config import EngineArgs
from enginecore.engine import channel
from enginecore.engine.client import ProcessClient
from enginecore.errors import EngineCoreError, EngineDeadError, KVCacheTooSmall, ModelError, ParameterError
from enginecore.request import EngineRequest, EngineStats, SamplingParams
from enginecore_sim import EXIT_PROMPT, RAISE_PROMPT, expected_tokens

VOCAB = 1000
#: Longer than anything here takes on a busy machine; what hangs is found, what is slow is not an error.
PATIENCE = 30.0
Start = Callable[..., Coroutine[Any, Any, ProcessClient]]


def arguments(model: str, **fields: Any) -> EngineArgs:
    defaults: dict[str, Any] = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 8}
    return EngineArgs(model=model, device="sim", **{**defaults, **fields})


def request(name: str, prompt: list[int], count: int = 4) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0), count)


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets' folders go, so that what is left behind is seen. Short: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="ec"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest_asyncio.fixture
async def start(config_only: str, temporary: Path) -> AsyncIterator[Start]:
    clients: list[ProcessClient] = []

    async def start(**fields: Any) -> ProcessClient:
        clients.append(await ProcessClient.start(arguments(config_only, **fields)))
        return clients[-1]

    yield start
    for client in clients:
        await asyncio.wait_for(client.shutdown(), PATIENCE)
        assert not client.alive and not psutil.pid_exists(client.pid)
    assert list(temporary.iterdir()) == [], "the sockets' folder is left behind"


async def collect(client: ProcessClient, names: set[str]) -> tuple[dict[str, list[int]], EngineStats]:
    """Tokens of the named requests until all have ended."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    left = set(names)
    while True:
        step = await asyncio.wait_for(client.recv(), PATIENCE)
        for output in step.outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                left.discard(output.request_id)
        if not left:
            return tokens, step.stats


async def dead(client: ProcessClient) -> EngineDeadError:
    """The error that `recv` ends with."""

    async def receive() -> None:
        while True:
            await client.recv()

    with pytest.raises(EngineDeadError) as caught:
        await asyncio.wait_for(receive(), PATIENCE)
    assert not client.alive
    return caught.value


async def test_one_life(start: Start) -> None:
    client = await start()
    assert client.alive and client.ready.config.device == "sim"
    prompts = {f"r{i}": [i, 2, 3] * 20 for i in range(10)}
    for name, prompt in prompts.items():
        client.add(request(name, prompt, 30))
    tokens, stats = await collect(client, set(prompts))
    assert tokens == {name: expected_tokens(prompt, 30, vocab_size=VOCAB) for name, prompt in prompts.items()}
    assert (stats.num_running, stats.num_used_blocks, stats.generation_tokens) == (0, 0, 300)

    client.add(request("endless", [1, 2], 250))
    client.add(request("never", [1] * 300, 9))
    client.add(request("short", [7, 8], 3))
    refused = None
    while refused is None:
        for output in (await asyncio.wait_for(client.recv(), PATIENCE)).outputs:
            refused = output if output.request_id == "never" else refused
    assert refused.finish_reason == "error" and "max_model_len" in str(refused.error)
    client.abort(["endless", "short", "unknown"])
    while True:  # figures come after an abort even when nothing runs any more
        step = await asyncio.wait_for(client.recv(), PATIENCE)
        if step.stats.num_running == step.stats.num_waiting == 0:
            break
    assert step.stats.num_used_blocks == 0

    receiver = asyncio.create_task(client.recv())
    assert await asyncio.wait_for(client.call("reset_prefix_cache"), PATIENCE) > 0
    assert await asyncio.wait_for(client.call("reset_prefix_cache"), PATIENCE) == 0
    receiver.cancel()


async def test_a_cancelled_recv_loses_nothing(start: Start) -> None:
    client = await start(device_options={"step_time_s": 0.004})
    client.add(request("a", [1, 2, 3], 60))
    tokens: list[int] = []
    cancelled = 0
    while len(tokens) < 60:
        try:
            step = await asyncio.wait_for(client.recv(), 0.003)
        except asyncio.TimeoutError:
            cancelled += 1
            continue
        tokens += [token for output in step.outputs for token in output.token_ids]
    assert tokens == expected_tokens([1, 2, 3], 60, vocab_size=VOCAB) and cancelled > 0


async def test_a_failing_step_ends_the_engine(start: Start) -> None:
    client = await start()
    client.add(request("a", [1, 2, 3], 50))
    client.add(request("b", list(RAISE_PROMPT)))
    waiting = asyncio.create_task(client.call("stats"))
    error = await dead(client)
    assert "SimulatedFailure" in str(error)
    await asyncio.wait({waiting}, timeout=PATIENCE)
    assert waiting.done()
    with pytest.raises(EngineDeadError):
        client.add(request("c", [1]))
    with pytest.raises(EngineDeadError):
        await client.call("stats")
    client.abort(["a"])
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(client.recv(), PATIENCE)


@pytest.mark.parametrize("how", ["exits", "is killed while it waits"])
async def test_the_process_disappears(start: Start, how: str) -> None:
    client = await start()
    if how == "exits":
        client.add(request("a", list(EXIT_PROMPT)))
    else:
        os.kill(client.pid, signal.SIGKILL)
    error = await dead(client)
    assert ("86" if how == "exits" else "-9") in str(error)


async def test_shutdown_in_the_middle_of_work(start: Start) -> None:
    client = await start(device_options={"step_time_s": 0.01})
    client.add(request("a", [1, 2, 3], 200))
    await asyncio.wait_for(client.recv(), PATIENCE)
    await asyncio.wait_for(client.shutdown(), PATIENCE)
    with pytest.raises(EngineDeadError):
        client.add(request("b", [1]))
    await asyncio.wait_for(client.shutdown(), PATIENCE)


async def test_shutdown_of_an_engine_that_is_stuck_in_a_step(start: Start) -> None:
    client = await start(device_options={"step_time_s": 3000.0})
    client.add(request("a", [1, 2, 3], 200))
    await asyncio.wait_for(client.shutdown(timeout=0.5), PATIENCE)
    assert not client.alive


@pytest.mark.parametrize(
    ("fields", "kind", "code", "text"),
    [
        ({"model": "/no/such/model"}, ModelError, 1, "does not exist"),
        ({"num_blocks": 15}, KVCacheTooSmall, 1, "needed 16 blocks"),
    ],
)
async def test_errors_at_start(
    config_only: str, temporary: Path, fields: dict[str, Any], kind: type[EngineCoreError], code: int, text: str
) -> None:
    args = arguments(config_only, **{k: v for k, v in fields.items() if k != "model"})
    if "model" in fields:
        args = msgspec.structs.replace(args, model=fields["model"])
    with pytest.raises(kind, match=text) as caught:
        await asyncio.wait_for(ProcessClient.start(args), PATIENCE)
    assert type(caught.value) is kind and caught.value.exit_code == code
    assert list(temporary.iterdir()) == []
    assert not [child for child in psutil.Process().children() if "enginecore.engine.process" in child.cmdline()]


async def test_a_start_that_is_given_up_leaves_nothing(config_only: str, temporary: Path) -> None:
    starting = asyncio.create_task(ProcessClient.start(arguments(config_only)))
    while not psutil.Process().children():
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, PATIENCE)
    assert list(temporary.iterdir()) == []
    assert not [child for child in psutil.Process().children() if "enginecore.engine.process" in child.cmdline()]


def test_exit_codes_of_the_process_itself(config_only: str, temporary: Path) -> None:
    """What a supervisor sees; the last words are complete even though the process is gone at once."""
    context = zmq.Context()
    with context.socket(zmq.PUSH) as to, context.socket(zmq.PULL) as back:
        to.bind(f"ipc://{temporary}/in")
        back.bind(f"ipc://{temporary}/out")
        command = [sys.executable, "-m", "enginecore.engine.process", f"ipc://{temporary}/in", f"ipc://{temporary}/out"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(arguments(config_only, max_model_len=513)) + b"\n")
        process.stdin.flush()
        assert process.wait(PATIENCE) == ParameterError.exit_code
        kind, body = back.recv_multipart()
        process.stdin.close()
    context.term()
    failure = channel.decode_failure(body)
    assert (kind, failure.kind, failure.exit_code) == (channel.FAILURE, "ParameterError", 2) and failure.fix


PARENT = """
import asyncio, sys
from enginecore.config import EngineArgs
from enginecore.engine.client import ProcessClient
from enginecore.request import EngineRequest, SamplingParams

async def main():
    args = EngineArgs(model=sys.argv[1], device="sim", num_blocks=64, max_model_len=256,
                      device_options={"step_time_s": 3000.0})
    client = await ProcessClient.start(args)
    client.add(EngineRequest("a", [1, 2, 3], SamplingParams(temperature=0), 4))
    await asyncio.sleep(0.2)
    print(client.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent(config_only: str, temporary: Path) -> None:
    """Even in the middle of a step. Nobody else can remove the sockets' folder then."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, config_only], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = psutil.Process(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + PATIENCE
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlives its parent"
        time.sleep(0.02)
    assert list(temporary.iterdir()) == []


async def test_a_wrong_call_is_its_callers_error_and_the_engine_goes_on(start: Start) -> None:
    client = await start()
    for method, values in (("shutdown", ()), ("stats", (1, 2))):
        call = asyncio.create_task(client.call(method, *values))
        receiver = asyncio.create_task(client.recv())
        with pytest.raises(EngineCoreError, match=method):
            await asyncio.wait_for(call, PATIENCE)
        receiver.cancel()
    assert client.alive


async def test_a_long_name_of_the_temporary_folder(
    start: Start, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path may be short of the place that a user's temporary folder has."""
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    client = await start()
    assert client.alive
    deep.rmdir()  # nothing is in it


async def test_cancelled_while_the_process_is_being_made(temporary: Path, config_only: str) -> None:
    task = asyncio.create_task(ProcessClient.start(arguments(config_only)))
    while not list(temporary.iterdir()):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(temporary.iterdir()) == []
