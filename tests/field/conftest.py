"""Servers that the field cases share: one of each kind a session, started when the first case asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.field.support import ONE_THREAD, PASSIVE, Solo
from tests.serving import SMALL, ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The real model in float32, 256 blocks, prefix caching on."""
    with ServerProcess(*SMALL, log=tmp_path_factory.mktemp("server") / "log", env=PASSIVE) as running:
        yield running


@pytest.fixture(scope="session")
def sim_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The simulated device with the same sizes. Its tokens tell of any wrong, stale or foreign block; a step takes 2 ms
    or more, so that a request lasts long enough to be met in mid-flight."""
    log = tmp_path_factory.mktemp("sim_server") / "log"
    options = (*SMALL, "--device-option", "step_time_s=0.002")
    with ServerProcess(*options, device="sim", log=log, env=ONE_THREAD) as running:
        yield running


@pytest.fixture(scope="session")
def solo(server: ServerProcess) -> Solo:
    """Answers of the real model to requests that run alone and meet no cached block."""
    return Solo(server)


#: As few blocks as one sequence of the longest length needs: two or three ordinary requests fill the pool.
TINY = ("--max-model-len", "256", "--num-blocks", "16", "--max-num-seqs", "16", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The simulated device with a tiny pool, first come first served, prefix caching on."""
    log = tmp_path_factory.mktemp("tiny_server") / "log"
    with ServerProcess(*TINY, device="sim", log=log, env=ONE_THREAD) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_priority_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The simulated device with a tiny pool, by priority, prefix caching off."""
    options = (*TINY, "--no-prefix-caching", "--scheduling-policy", "priority")
    log = tmp_path_factory.mktemp("tiny_priority_server") / "log"
    with ServerProcess(*options, device="sim", log=log, env=ONE_THREAD) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_swap_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The simulated device with a tiny pool, fair, and host memory that preempted sequences come back from."""
    options = (*TINY, "--kv-host-memory", "1MiB", "--scheduling-policy", "fair")
    log = tmp_path_factory.mktemp("tiny_swap_server") / "log"
    with ServerProcess(*options, device="sim", log=log, env=ONE_THREAD) as running:
        yield running
