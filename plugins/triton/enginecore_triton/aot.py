"""Compile every kernel for every architecture on a machine that has none of them, and say what each takes.

    python -m enginecore_triton.aot [--arch sm_90] [--op rms_norm] [--json] [--write docs/kernels.md] [--jobs 2]

Each op module's `aot_cases()` says what to compile; each case is compiled with the config that each target would pick.
The exit status is 1 when a kernel does not compile, spills
registers, or takes more shared memory than the part has, and when no case reaches a shipped config. Triton's own cache
makes a second run quick.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from enginecore_triton import configs, ops
from enginecore_triton.aot_case import AotCase
from enginecore_triton.configs import DEFAULT, Config
from enginecore_triton.targets import TARGETS, Target


@dataclass(frozen=True)
class Job:
    """One compilation. `row` is the architecture whose config is taken: the target's own, or the default."""

    op: str
    index: int
    case: str
    target: str
    row: str


@dataclass(frozen=True)
class Outcome:
    """What came of a job; `problem` is empty when all is well. `spills` counts bytes (NVIDIA) or registers (AMD)."""

    op: str
    case: str
    target: str
    row: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    seconds: float = 0.0
    problem: str = ""


def op_names() -> list[str]:
    """Modules of `enginecore_triton.ops` that have kernels."""
    return [name for _, name, _ in pkgutil.iter_modules(ops.__path__) if not name.startswith("_")]


def cases_of(op: str) -> list[AotCase]:
    module = importlib.import_module(f"enginecore_triton.ops.{op}")
    return module.aot_cases() if hasattr(module, "aot_cases") else []


def jobs_for(op: str, targets: list[str]) -> list[Job]:
    found = []
    for index, case in enumerate(cases_of(op)):
        own = set(configs.table(case.config)) if case.config else set()
        for target in targets:
            if case.only is not None and target not in case.only:
                continue
            found.append(Job(op, index, case.name, target, target if target in own else DEFAULT))
    return found


def config_of(case: AotCase, row: str) -> Config:
    if not case.config:
        return Config(options=dict(case.options))
    return configs.pick(case.config, row, **case.sizes)


def source_of(case: AotCase, config: Config) -> Any:
    """Triton's description of one specialisation; every constexpr must come from the case or from the config."""
    from triton.compiler import ASTSource

    constants = {**case.constants, **config.constants}
    signature, constexprs, attributes = {}, {}, {}
    for position, name in enumerate(case.kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(position,)] = "constexpr", constants[name]
            continue
        if name not in case.signature:
            raise ValueError(f"{case.name}: {name} is neither in the signature nor a constant")
        kind, _, divisor = case.signature[name].partition(":")
        signature[name] = kind
        if divisor:
            attributes[(position,)] = [["tt.divisibility", int(divisor)]]
    return ASTSource(fn=case.kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def run_job(job: Job) -> Outcome:
    from enginecore_triton.aot_resources import resources

    target, started = TARGETS[job.target], time.monotonic()
    outcome = Outcome(job.op, job.case, job.target, job.row)
    try:
        case = cases_of(job.op)[job.index]
        compiled = compile_for(case, config_of(case, job.row), target)
        registers, spills = resources(compiled, target)
        outcome = replace(outcome, registers=registers, spills=spills, shared=compiled.metadata.shared)
        problem = problem_of(outcome, target)
    except Exception as error:  # whatever the compiler raises is the result of this job, not the end of the others
        problem = reason_of(error)
    return replace(outcome, problem=problem, seconds=round(time.monotonic() - started, 2))


def reason_of(error: BaseException) -> str:
    """The innermost cause in one line: the outer ones only quote the callers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())


def compile_for(case: AotCase, config: Config, target: Target) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    goal = GPUTarget(target.backend, target.arch, target.warp_size)
    return triton.compile(source_of(case, config), target=goal, options=config.compiler)


def problem_of(outcome: Outcome, target: Target) -> str:
    problems = []
    if outcome.spills:
        problems.append(f"spills {outcome.spills}")
    if outcome.shared > target.shared_bytes:
        problems.append(f"takes {outcome.shared} bytes of shared memory, {target.name} has {target.shared_bytes}")
    return "; ".join(problems)


def unreached(jobs: list[Job]) -> list[str]:
    """Shipped rows that no job compiles. Only meaningful for a run over all ops and targets."""
    reached = set()
    for job in jobs:
        case = cases_of(job.op)[job.index]
        if case.config:
            reached.add((case.config, job.row, id(config_of(case, job.row))))
    return [
        f"configs/{op}.json: row {number} of {architecture} is reached by no case"
        for op in configs.names()
        for architecture, rows in configs.table(op).items()
        for number, row in enumerate(rows)
        if (op, architecture, id(row)) not in reached
    ]


def run(jobs: list[Job], workers: int) -> list[Outcome]:
    if workers <= 1 or len(jobs) < 4:
        return [_told(run_job(job)) for job in jobs]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [_told(outcome) for outcome in pool.map(run_job, jobs, chunksize=2)]


def _told(outcome: Outcome) -> Outcome:
    """Problems are told as they come: all of it takes minutes."""
    if outcome.problem:
        print(line_of(outcome), file=sys.stderr, flush=True)
    return outcome


def line_of(o: Outcome) -> str:
    return f"{o.op} {o.case} on {o.target} ({o.row}): {o.problem}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m enginecore_triton.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", action="append", choices=list(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--op", action="append", choices=op_names(), help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--write", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: nothing can be compiled; unset it")
    started = time.monotonic()
    jobs = [job for op in options.op or op_names() for job in jobs_for(op, options.arch or list(TARGETS))]
    outcomes = run(jobs, options.jobs)
    missing = [] if options.op or options.arch else unreached(jobs)
    if options.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        from enginecore_triton.aot_table import table

        print(table(outcomes))
    if options.write:
        from enginecore_triton.aot_table import page

        options.write.write_text(page(outcomes))
    print(f"{len(outcomes)} compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)
    for problem in missing:
        print(problem, file=sys.stderr)
    return 1 if missing or any(o.problem for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
