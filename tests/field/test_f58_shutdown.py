"""F58: a signal lets streams finish and refuses new requests; then nothing is left. (Timeouts, second signals and the
engine's own end: tests/server/test_run.py.)"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.field.support import COMPLETIONS, InFlight, refused, token_prompt, wait_until, whole_stream
from tests.serving import SMALL, ServerProcess

OFFLINE = """
from enginecore import LLM, SamplingParams
llm = LLM("smollm2-135m", device="sim", max_model_len=64, num_blocks=8, max_num_seqs=2)
(output,) = llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids))
raise SystemExit(7)
"""


def test_three_streams_and_sigterm(tmp_path: Path) -> None:
    options = (*SMALL, "--device-option", "step_time_s=0.02", "--shutdown-timeout", "60")
    with ServerProcess(*options, device="sim", log=tmp_path / "log") as server:
        started = psutil.Process(server.process.pid).children(recursive=True)
        assert started, "the engine is a process of its own"
        bodies: list[dict[str, Any]] = [
            {"prompt": token_prompt(index, 9), "max_tokens": 60 + 10 * index, "ignore_eos": True} for index in range(3)
        ]
        calls = [lambda body=body: whole_stream(server, COMPLETIONS, body) for body in bodies]
        with InFlight(calls) as flight:
            wait_until(lambda: server.metrics()["enginecore:num_requests_running"] == 3, "three streams run")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.http.get("/health").status_code == 503, "readiness is withdrawn")
            answer = server.post(COMPLETIONS, {"prompt": "x"})
            assert refused(answer, 503)["code"] == "shutting_down" and answer.headers["retry-after"]
        for body, events in zip(bodies, flight.results, strict=True):
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert body["max_tokens"] >= len(events) > 1
        assert server.process.wait(30) == 0
        assert not psutil.wait_procs(started, timeout=10)[1], "no child is left"
        with socket.socket() as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", server.port))
        assert "Traceback" not in server.log.read_text()


def test_offline_exits_without_being_asked_to() -> None:
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (7, "4\n"), done.stderr
