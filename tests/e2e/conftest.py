"""One server on the simulated device for the tests of this folder that need no real answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import SMALL, ServerProcess

KEY = "open-sesame"


@pytest.fixture(scope="module")
def sim_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A step takes 5 ms or more, so that a request lasts long enough to be given up in mid-flight. Clients need KEY."""
    options = (*SMALL, "--device-option", "step_time_s=0.005", "--api-key", KEY)
    log = tmp_path_factory.mktemp("sim_server") / "log"
    with ServerProcess(*options, device="sim", log=log, env={"OMP_NUM_THREADS": "1"}) as running:
        yield running
