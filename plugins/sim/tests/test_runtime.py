"""The simulated model against its definition, and against the bugs it is there to show."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from batches import VOCAB, Part, batch, spec
from enginecore.device import RuntimeBatch
from enginecore_sim import EXIT_PROMPT, RAISE_PROMPT, candidates, expected_tokens
from enginecore_sim.options import SimOptions
from enginecore_sim.runtime import EXIT_CODE, InvalidBatchError, SimRuntime, SimulatedFailure
from enginecore_sim.tokens import BASE, MASK, mix
from hypothesis import given, settings
from hypothesis import strategies as st

PROMPT = [(7 * i + 3) % VOCAB for i in range(40)]
BLOCKS = [5, 2, 9, 30]


def loaded(block_size: int = 16, **options: object) -> SimRuntime:
    runtime = SimRuntime(SimOptions.of(options))
    runtime.load(spec(block_size=block_size), None)
    return runtime


def greedy(runtime: SimRuntime, step: RuntimeBatch) -> list[int]:
    return [int(row.argmax()) for row in runtime.execute(step)]


def decode(runtime: SimRuntime, tokens: list[int], blocks: list[int], n: int) -> list[int]:
    out: list[int] = []
    for _ in range(n):
        sequence = tokens + out
        out += greedy(runtime, batch([Part(sequence, blocks, len(sequence) - 1, len(sequence))]))
    return out


def test_definition_by_hand() -> None:
    first = 6 * BASE & MASK
    assert candidates([5], VOCAB)[0] == mix(mix(first) * BASE) % VOCAB
    assert expected_tokens([5], 2, vocab_size=VOCAB)[1] == candidates([5, candidates([5], VOCAB)[0]], VOCAB)[0]


def test_expected_tokens_ends_at_eos() -> None:
    answer = expected_tokens(PROMPT, 8, vocab_size=VOCAB)
    assert expected_tokens(PROMPT, 8, vocab_size=VOCAB, eos_token_ids=[answer[2]]) == answer[:3]


@settings(max_examples=25, deadline=None)
@given(block_size=st.sampled_from([8, 16, 32, 128]), cuts=st.lists(st.integers(1, 39), max_size=4, unique=True))
def test_any_chunking_and_block_size_gives_the_expected_tokens(block_size: int, cuts: list[int]) -> None:
    runtime = loaded(block_size)
    edges = [0, *sorted(cuts), len(PROMPT)]
    for start, end in pairwise(edges):
        token = greedy(runtime, batch([Part(PROMPT, [5, 2, 9, 30, 7, 1, 3], start, end)], block_size))[0]
    assert token == expected_tokens(PROMPT, 1, vocab_size=VOCAB)[0]


def test_decode_and_the_tokens_output() -> None:
    runtime = loaded()
    first = greedy(runtime, batch([Part(PROMPT, BLOCKS, 0, 40)]))
    assert first + decode(runtime, PROMPT + first, BLOCKS, 7) == expected_tokens(PROMPT, 8, vocab_size=VOCAB)
    ids = loaded(output="tokens").execute(batch([Part(PROMPT, BLOCKS, 0, 40)]))
    assert ids.dtype == np.int64 and ids.tolist() == first


def test_logits_rank_the_candidates_and_every_prompt_position_can_be_read() -> None:
    logits = loaded().execute(batch([Part(PROMPT, BLOCKS, 0, 40, wanted=(0, 17, 39))]))
    assert logits.dtype == np.float32 and logits.shape == (3, VOCAB)
    for row, end in zip(logits, (1, 18, 40), strict=True):
        best = candidates(PROMPT[:end], VOCAB)
        assert np.argsort(-row, kind="stable")[: len(best)].tolist() == best


def test_neighbours_do_not_matter() -> None:
    runtime, other = loaded(), [9, 8, 7]
    runtime.execute(batch([Part(PROMPT, BLOCKS, 0, 30), Part(other, [1], 0, 2)]))
    step = batch([Part(other, [1], 2, 3), Part(PROMPT, BLOCKS, 30, 40)])
    want = [expected_tokens(tokens, 1, vocab_size=VOCAB)[0] for tokens in (other, PROMPT)]
    assert greedy(runtime, step) == want


def test_a_sequence_may_continue_blocks_that_another_writes_in_the_same_step() -> None:
    runtime = loaded()
    longer = [*PROMPT[:32], 1, 2]
    step = batch([Part(longer, [5, 2, 7], 32, 34), Part(PROMPT, BLOCKS, 0, 40)])
    assert greedy(runtime, step) == [expected_tokens(tokens, 1, vocab_size=VOCAB)[0] for tokens in (longer, PROMPT)]


@pytest.mark.parametrize(
    ("blocks", "why"),
    [([2, 5, 9, 30], "swapped"), ([5, 2, 8, 30], "never written"), ([6, 2, 9, 30], "another sequence's")],
)
def test_a_wrong_block_gives_wrong_tokens(blocks: list[int], why: str) -> None:
    runtime = loaded()
    runtime.execute(batch([Part(PROMPT, BLOCKS, 0, 39), Part([4] * 16, [6], 0, 16)]))
    step = batch([Part(PROMPT, blocks, 39, 40)])
    assert greedy(runtime, step) != expected_tokens(PROMPT, 1, vocab_size=VOCAB), why


def test_a_copied_block_continues_as_the_first_one_does() -> None:
    runtime, tokens = loaded(), list(range(5, 25))
    runtime.execute(batch([Part(tokens, [3, 8], 0, 20)]))
    runtime.copy_blocks([(8, 11)])
    want = decode(runtime, tokens, [3, 8], 6)
    assert decode(runtime, tokens, [3, 11], 6) == want


def test_a_block_that_was_given_away_too_early_gives_wrong_tokens() -> None:
    runtime = loaded()
    runtime.execute(batch([Part(PROMPT, BLOCKS, 0, 39)]))
    runtime.execute(batch([Part([4] * 16, [2], 0, 16)]))
    assert greedy(runtime, batch([Part(PROMPT, BLOCKS, 39, 40)])) != expected_tokens(PROMPT, 1, vocab_size=VOCAB)


def test_padding_slots_are_not_written() -> None:
    runtime = loaded()
    step = batch([Part(PROMPT, BLOCKS, 0, 40)])
    runtime.execute(replace(step, slot_mapping=np.full(40, -1)))
    assert greedy(runtime, batch([Part(PROMPT, BLOCKS, 39, 40)])) != expected_tokens(PROMPT, 1, vocab_size=VOCAB)


def broken_batches() -> dict[str, RuntimeBatch]:
    good = batch([Part(PROMPT, BLOCKS, 0, 40)])
    shared = batch([Part(PROMPT, [5], 0, 8), Part(PROMPT, [5], 0, 8)])
    return {
        "query_start_loc": replace(good, query_start_loc=np.array([0, 39])),
        "differ in length": replace(good, seq_lens=np.array([40, 1])),
        "longer than": batch([Part([1] * 300, list(range(19)), 299, 300)]),
        "outside the vocabulary": replace(good, token_ids=np.full(40, VOCAB)),
        "positions": replace(good, positions=good.positions + 1),
        "disagree": replace(good, slot_mapping=good.slot_mapping + 1),
        "share a slot": shared,
        "block id": batch([Part(PROMPT, [5, 2, 32], 0, 40)]),
        "logits_indices": replace(good, logits_indices=np.array([40])),
    }


@pytest.mark.parametrize("what", broken_batches())
def test_a_batch_that_breaks_the_contract_is_refused(what: str) -> None:
    with pytest.raises(InvalidBatchError, match=what):
        loaded().execute(broken_batches()[what])


def test_execute_before_load() -> None:
    with pytest.raises(InvalidBatchError, match="before load"):
        SimRuntime(SimOptions()).execute(batch([Part(PROMPT, BLOCKS, 0, 1)]))


def test_failures_by_step_and_by_token() -> None:
    runtime = loaded(raise_at_step=2)
    runtime.execute(batch([Part(PROMPT, BLOCKS, 0, 20)]))
    with pytest.raises(SimulatedFailure, match="step 2"):
        runtime.execute(batch([Part(PROMPT, BLOCKS, 20, 40)]))
    with pytest.raises(SimulatedFailure):
        loaded().execute(batch([Part([9, 9, *RAISE_PROMPT, 9], [1], 0, 11)]))
    first, second = list(RAISE_PROMPT[:4]), list(RAISE_PROMPT[4:])  # the pattern over two sequences is no pattern
    loaded().execute(batch([Part(first, [1], 0, 4), Part(second, [2], 0, 4)]))


def test_exit_prompt_ends_the_process() -> None:
    code = (
        f"import sys; sys.path.append({str(__file__).rsplit('/', 1)[0]!r})\n"
        "from batches import *; from enginecore_sim.runtime import *\n"
        "runtime = SimRuntime(SimOptions()); runtime.load(spec(), None)\n"
        f"runtime.execute(batch([Part({list(EXIT_PROMPT)}, [1], 0, {len(EXIT_PROMPT)})]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == EXIT_CODE
