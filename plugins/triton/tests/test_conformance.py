"""A selection of the conformance kit's first level over the kernels, on the host's tensors, under the interpreter.

All of it, in some minutes: `enginecore conformance --level 1 --device plugins/triton/tests/interpreted.py:make`.
"""

from __future__ import annotations

from pathlib import Path

from enginecore.testing import BackendSource, Outcome
from enginecore.testing.cases import all_cases, select
from enginecore.testing.runner import Runner, groups

SOURCE = BackendSource(factory=f"{Path(__file__).with_name('interpreted.py')}:make")
CASES = (
    "L1/attention/output_buffer",
    "L1/attention/neighbours_do_not_mix",
    "L1/reshape_and_cache/padding_is_skipped",
    "L1/reshape_and_cache/overwrite",
    "L1/copy_blocks/copy_is_independent",
    "L1/swap_blocks/swap_through_host",
    "L1/rms_norm/*float16",
    "L1/rotary_embedding/h80",
    "L1/silu_and_mul/*float16",
    "L1/latent_cache/*float32",
    "L1/latent_attention/mixed*float32",
)


def test_the_kit_passes() -> None:
    chosen = select(all_cases(), only=",".join(CASES))
    with Runner(SOURCE, timeout=300) as runner:
        results = [result for group in groups(chosen) for result in runner.run_group(group)]
    assert [f"{r.case_id}: {r.message}" for r in results if not r.outcome.ok] == []
    passed = {r.case_id for r in results if r.outcome is Outcome.PASS}
    ops = {case_id.split("/")[1] for case_id in passed}
    assert ops >= {"attention", "rms_norm", "rotary_embedding", "silu_and_mul", "latent_attention"}, (
        "declared unsupported is no pass"
    )
