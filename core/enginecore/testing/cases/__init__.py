"""All cases, by level: 0 contract, 1 ops, 2 memory, 3 graphs, 4 collectives, 5 whole models, 6 performance.

The list is the same for every backend, so that a report can be compared with another's; what a backend does not claim
ends as "declared-unsupported".
"""

from __future__ import annotations

from enginecore.testing.case import Case
from enginecore.testing.profile import id_matches

LEVELS = {0: "contract", 1: "ops", 2: "memory", 3: "graphs", 4: "collectives", 5: "models", 6: "performance"}


def all_cases() -> list[Case]:
    """Every case, in the order in which they run. Touches no device."""
    from enginecore.testing.cases import (
        activations,
        attention,
        blocks,
        cache,
        collectives,
        contract,
        graphs,
        latents,
        layers,
        linear,
        memory,
        models,
        norms,
        performance,
        quantized,
        rotary,
        sampling,
        speculation,
    )

    modules = (
        contract, attention, cache, norms, rotary, activations, linear, sampling, speculation, quantized, layers,
        latents, memory, blocks, graphs, collectives, models, performance,
    )  # fmt: skip
    cases = [case for module in modules for case in module.cases()]
    duplicates = {case.id for case in cases if sum(other.id == case.id for other in cases) > 1}
    if duplicates:
        raise ValueError(f"case ids must be unique: {sorted(duplicates)}")
    return sorted(cases, key=lambda case: case.level)


def select(cases: list[Case], level: str | int | None = None, only: str | None = None) -> list[Case]:
    """Cases of `level` ("1", "0-2", "0,5") whose id holds one of the comma-separated patterns `only`."""
    levels = _levels(level)
    patterns = [p.strip() for p in (only or "").split(",") if p.strip()]
    wanted = [case for case in cases if case.level in levels]
    return [case for case in wanted if not patterns or any(id_matches(case.id, f"*{p}*") for p in patterns)]


def _levels(level: str | int | None) -> set[int]:
    if level is None:
        return set(LEVELS)
    chosen: set[int] = set()
    for part in str(level).upper().replace("L", "").split(","):
        low, _, high = part.strip().partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise ValueError(f"level must look like 1, 0-2 or 0,5, got {level!r}")
        chosen |= set(range(int(low), int(high or low) + 1))
    if not chosen <= set(LEVELS):
        raise ValueError(f"levels are {min(LEVELS)} to {max(LEVELS)}, got {level!r}")
    return chosen
