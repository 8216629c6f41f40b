"""Ahead-of-time compilation: two kernels for an architecture of each vendor here; all of it is `make kernels`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from enginecore_triton import aot, configs
from enginecore_triton.aot_table import table
from enginecore_triton.targets import SMALLEST, TARGETS

ARCHITECTURES = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950", "gfx1100"}


def test_kernels_compile_without_a_device() -> None:
    """In a process of its own: this one has the interpreter."""
    command = [sys.executable, "-m", "enginecore_triton.aot", "--op", "rotary_embedding", "--op", "merge_parts"]
    command += ["--arch", "sm_90", "--arch", "gfx942", "--json", "--jobs", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert {o["target"] for o in outcomes} == {"sm_90", "gfx942"}
    assert all(o["registers"] > 8 and not o["spills"] and not o["problem"] for o in outcomes)


def test_under_the_interpreter_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "enginecore_triton.aot", "--op", "rms_norm"], capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 2 and "unset it" in done.stderr


def test_all_targets_and_every_config_are_compiled() -> None:
    assert set(TARGETS) == ARCHITECTURES
    jobs = [job for op in aot.op_names() for job in aot.jobs_for(op, list(TARGETS))]
    assert aot.unreached(jobs) == []
    for op in ("paged_decode", "paged_prefill", "rms_norm", "reshape_and_cache", "rotary_embedding"):
        assert {job.target for job in jobs if job.op == op} == ARCHITECTURES
    for op in configs.names():
        assert set(configs.table(op)) - {configs.DEFAULT} <= ARCHITECTURES - set(SMALLEST), "the default must fit those"


def test_a_config_that_nothing_reaches_is_told() -> None:
    missing = aot.unreached([])
    assert any("paged_decode.json: row 0 of sm_90" in line for line in missing)


def test_what_does_not_fit_is_a_problem() -> None:
    outcome = aot.Outcome("op", "case", "gfx942", "default", registers=512, spills=3, shared=70_000)
    problem = aot.problem_of(outcome, TARGETS["gfx942"])
    assert "spills 3" in problem and "70000" in problem and "65536" in problem
    assert aot.problem_of(aot.Outcome("op", "case", "sm_90", "sm_90", 255, 0, 227 * 1024), TARGETS["sm_90"]) == ""
    text = table([aot.Outcome("op", "case", "gfx942", "default", 512, 3, 70_000, problem=problem)])
    assert text.splitlines()[-1] == "| op | case | 512 / 68.4 ! |"
