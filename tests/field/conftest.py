"""Servers that the field cases share: one of each kind a session, started when the first case asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.field.support import PASSIVE, Solo
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
    with ServerProcess(*SMALL, "--device-option", "step_time_s=0.002", device="sim", log=log) as running:
        yield running


@pytest.fixture(scope="session")
def solo(server: ServerProcess) -> Solo:
    """Answers of the real model to requests that run alone and meet no cached block."""
    return Solo(server)
