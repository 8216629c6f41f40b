"""One server with the real small model, for the official clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import SMALL, ServerProcess

KEY = "open-sesame"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("clients") / "log"
    with ServerProcess(*SMALL, "--api-key", KEY, "--grpc-port", "0", log=log) as running:
        yield running
