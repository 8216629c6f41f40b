"""The kit tells the truth: a right backend passes, and each planted fault is caught by the right case, by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from enginecore.testing.case import CaseResult, Outcome
from enginecore.testing.cases import all_cases, select
from enginecore.testing.process import Worker
from enginecore.testing.runner import Runner, groups
from enginecore.testing.source import BackendSource

TOY = f"{Path(__file__).with_name('toy_backend.py')}:create"

#: fault: (case that must catch it, outcome, words that its message must hold)
FAULTS: dict[str, tuple[str, Outcome, str]] = {
    "off_by_one_block": ("L1/attention/decode[float32]", Outcome.FAIL, "position 15 of 16"),
    "wrong_scale": ("L1/attention/decode[float32]", Outcome.FAIL, "NMSE"),
    "missing_causal_mask": ("L1/attention/prefill[float32]", Outcome.FAIL, "NMSE"),
    "unwritten_output": ("L1/attention/output_buffer", Outcome.FAIL, "NaN"),
    "writes_past_output": ("L1/attention/output_buffer", Outcome.FAIL, "after out_THD"),
    "stale_block_table": ("L1/attention/table_changes", Outcome.FAIL, "second step"),
    "follows_whole_table": ("L1/attention/wild_table_entries", Outcome.FAIL, "IndexError"),
    "reads_tail_slots": ("L1/attention/decode[float32]", Outcome.FAIL, "NaN"),
    "writes_out_of_bounds": ("L1/attention/shapes_made_up", Outcome.FAIL, "changed"),
    "writes_padding": ("L1/reshape_and_cache/padding_is_skipped", Outcome.FAIL, ""),
    "assumes_contiguous_keys": ("L1/attention/decode[float32]", Outcome.FAIL, "NMSE"),
    "gqa_heads_interleaved": ("L1/attention/gqa_3[float32]", Outcome.FAIL, "NMSE"),
    "unstable_softmax": ("L1/attention/large_scores", Outcome.FAIL, "NaN"),
    "window_off_by_one": ("L1/attention/window_15[float32]", Outcome.FAIL, "NMSE"),
    "ignores_sliding_window": ("L1/attention/window_15[float32]", Outcome.FALSE_CLAIM, "claimed and ignored"),
    "ignores_soft_cap": ("L1/attention/soft_cap_2[bfloat16]", Outcome.FALSE_CLAIM, "soft_cap"),
    "prompts_rounded_otherwise": ("L1/attention/batch_invariance", Outcome.FALSE_CLAIM, "token by token"),
    "rows_rounded_together": ("L1/pack_linear/batch_invariance[float32]", Outcome.FALSE_CLAIM, "among 130"),
    "returns_nan": ("L1/attention/decode[float32]", Outcome.FAIL, "NaN"),
    "refuses_bfloat16": ("L1/attention/mixed[bfloat16]", Outcome.FALSE_CLAIM, "not written yet"),
    "hangs_bfloat16": ("L1/attention/mixed[bfloat16]", Outcome.HANG, "killed"),
    "segfaults_bfloat16": ("L1/attention/mixed[bfloat16]", Outcome.CRASH, "SIGSEGV"),
    "copies_first_layer_only": ("L1/copy_blocks/all_layers[float32]", Outcome.FAIL, "layer 1"),
    "races_on_shared_block": ("L2/blocks/shared_block_race", Outcome.FAIL, "copy's owner"),
    "counts_other_processes": ("L2/memory/two_processes", Outcome.FALSE_CLAIM, "not its own"),
    "usable_shrinks_with_others": ("L2/memory/two_processes", Outcome.FAIL, "usable_bytes"),
    "copies_nothing": ("L2/blocks/copy_on_write", Outcome.FAIL, "step"),
    "swaps_backwards": ("L1/swap_blocks/swap_between_caches", Outcome.FAIL, ""),
    "accepts_everything": ("L0/contract/unknown_feature_refused", Outcome.FALSE_CLAIM, "telepathy"),
    "first_reason_only": ("L0/contract/absurd_query_refused", Outcome.FAIL, "reasons"),
    "refuses_what_it_claims": ("L0/contract/claims_agree", Outcome.FALSE_CLAIM, "second thoughts"),
    "accepts_any_device": ("L0/contract/missing_device_refused", Outcome.FAIL, "DriverMissingError"),
    "wrong_page_bytes": ("L0/contract/layout_sane", Outcome.FAIL, "page_bytes"),
    "thread_does_not_end": ("L0/shutdown/ends_cleanly", Outcome.HANG, "killed"),
    "leaks": ("L2/memory/no_leak", Outcome.FAIL, "more are held"),
    "counts_nothing": ("L2/memory/allocation_is_counted", Outcome.FALSE_CLAIM, "per_process_accounting"),
    "caches_overlap": ("L2/memory/fuzz_allocations", Outcome.FAIL, "overlap"),
    "sample_ignores_top_p": ("L1/sample/top_p_v46", Outcome.FAIL, "not one of"),
    "norm_without_eps": ("L1/rms_norm/extreme_rows", Outcome.FAIL, "NaN"),
    "rotary_not_in_place": ("L1/rotary_embedding/h64_neox[float32]", Outcome.FAIL, "in place"),
    "expert_minus_one_wraps": ("L1/moe_experts/silu[float32]", Outcome.FAIL, "experts with silu"),
    "adapter_minus_one_wraps": ("L1/lora_expand/three_slices[float32]", Outcome.FAIL, "lora_expand"),
    "padding_is_a_latent": ("L1/latent_cache/padding[float32]", Outcome.FAIL, "not what was to be written"),
    "padding_keeps_a_state": ("L1/ssd_scan/plain[float32]", Outcome.FAIL, "states of slots that no sequence has"),
    "drafts_taken_at_random": ("L1/rejection_sample/with_distribution", Outcome.FAIL, "is due"),
    "capture_fails": ("L3/graphs/replay_equals_eager", Outcome.FAIL, "cannot be captured"),
    "graph_keeps_first_inputs": ("L3/graphs/replay_equals_eager", Outcome.FAIL, "replay 0"),
    "graph_returns_first_result": ("L3/graphs/sizes_stay_apart", Outcome.FAIL, "turn 1, 1 rows"),
    "graph_metadata_kept": ("L3/graphs/decode_steps_replay", Outcome.FAIL, "a step of 3 sequences in the graph of 4"),
    "graph_memory_underestimated": ("L3/graphs/memory_within_plan", Outcome.FAIL, "plan() chose"),
    "graph_memory_untold": ("L3/graphs/memory_within_plan", Outcome.FALSE_CLAIM, "the books grew by 67108864"),
    "all_reduce_doubles": ("L4/collectives/one_rank_identities", Outcome.FAIL, "all_reduce"),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as shared:
        yield shared


def run_toy(
    worker: Worker, fault: str, only: str, timeout: float | None = None, ledger: Path | None = None
) -> dict[str, CaseResult]:
    options = {name: str(value) for name, value in (("fault", fault), ("ledger", ledger)) if value}
    source = BackendSource(factory=TOY, options=options)
    chosen = select(all_cases(), "0-4", only)
    assert chosen, f"no case matches {only}"
    with Runner(source, worker=worker, timeout=timeout) as runner:
        return {result.case_id: result for group in groups(chosen) for result in runner.run_group(group)}


@pytest.mark.slow
def test_a_right_backend_passes_everything_it_claims(worker: Worker) -> None:
    results = run_toy(worker, "", "L")
    wrong = {case_id: result for case_id, result in results.items() if not result.outcome.ok}
    assert not wrong
    passed = {case_id for case_id, result in results.items() if result.outcome is Outcome.PASS}
    assert {case for case, _, _ in FAULTS.values() if case in results} <= passed
    assert len(passed) > 280


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught_by_name(worker: Worker, fault: str, tmp_path: Path) -> None:
    case_id, outcome, words = FAULTS[fault]
    timeout = 2.0 if outcome is Outcome.HANG else None
    results = run_toy(worker, fault, case_id, timeout, tmp_path)
    assert results[case_id].outcome is outcome, results[case_id]
    assert words in results[case_id].message


WRONG_COLLECTIVES = {
    "all_reduce_sums": "all_reduce of bfloat16 (1,)",
    "all_gather_in_order": "all_gather of bfloat16 (1,) along 0",
    "reduce_scatter_parts": "rank 1: reduce_scatter",
    "indivisible_is_refused": "ValueError is due",
    "broadcast_from_each": "from rank 1",
    "send_and_receive": "torch.float32 (4, 5) and not torch.bfloat16",
    "barrier_waits": "rank 0 left the barrier",
    "all_to_all_transposes": "all_to_all of bfloat16",
}


def test_each_wrong_collective_is_caught_by_its_own_case(worker: Worker) -> None:
    chosen = ",".join(f"two_ranks_{name}" for name in WRONG_COLLECTIVES)
    results = run_toy(worker, "collectives_wrong", chosen)
    for name, words in WRONG_COLLECTIVES.items():
        result = results[f"L4/collectives/two_ranks_{name}"]
        assert result.outcome is Outcome.FAIL and words in result.message, result


@pytest.mark.parametrize(
    ("fault", "outcome", "words"),
    [
        ("rank_segfaults", Outcome.CRASH, "rank 1 died with SIGSEGV"),
        ("rank_hangs", Outcome.HANG, "rank 1 did not answer"),
    ],
)
def test_a_lost_rank_ends_its_case_and_no_other(worker: Worker, fault: str, outcome: Outcome, words: str) -> None:
    results = run_toy(worker, fault, "two_ranks_all_*,two_ranks_lost*")
    lost = results["L4/collectives/two_ranks_all_gather_in_order"]
    assert lost.outcome is outcome and words in lost.message, lost
    others = {case_id: result for case_id, result in results.items() if result is not lost}
    assert len(others) == 3 and all(result.outcome is Outcome.PASS for result in others.values()), others


def test_a_crash_hides_no_other_case_of_its_group(worker: Worker) -> None:
    results = run_toy(worker, "segfaults_bfloat16", "L1/attention/mixed*,L1/attention/decode*,L1/attention/gqa_3*")
    outcomes = {case_id: result.outcome for case_id, result in results.items()}
    assert {case_id for case_id, outcome in outcomes.items() if outcome is Outcome.CRASH} == {
        "L1/attention/mixed[bfloat16]",
        "L1/attention/decode[bfloat16]",
        "L1/attention/gqa_3[bfloat16]",
    }
    assert all(outcome is Outcome.PASS for case_id, outcome in outcomes.items() if "float32" in case_id)
    assert "about to read address 8" in results["L1/attention/mixed[bfloat16]"].message


def test_after_two_hangs_the_rest_of_a_group_is_not_tried(worker: Worker) -> None:
    results = run_toy(worker, "hangs_bfloat16", "L1/attention/gqa_*bfloat16*", timeout=1.0)
    assert {result.outcome for result in results.values()} == {Outcome.HANG}
    assert sum(result.message.startswith("not run") for result in results.values()) == len(results) - 2


@pytest.mark.parametrize(
    ("fault", "outcome", "words"),
    [
        ("raises_at_creation", Outcome.FAIL, "no toy today"),
        ("segfaults_at_creation", Outcome.CRASH, "SIGSEGV"),
    ],
)
def test_a_backend_that_cannot_be_made_is_told_once(worker: Worker, fault: str, outcome: Outcome, words: str) -> None:
    results = list(run_toy(worker, fault, "L0/,L2/memory").values())
    assert {result.outcome for result in results} == {outcome}
    assert words in results[0].message
    assert results[-1].message.startswith("not run")
