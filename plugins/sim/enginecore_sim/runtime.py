"""The model of the simulated device: scripted tokens computed through a real paged cache, and strict about its inputs.

    cache [num_blocks * block_size]   one uint64 a slot: the entry e_p of `tokens.py`; blocks start poisoned

A step writes the entries of its tokens by `slot_mapping`, continuing from what the cache holds for the token before,
and reads each wanted position's whole history through the block table. What the scheduler or the block pool gets wrong
therefore shows as wrong tokens, and what contradicts the contract outright raises InvalidBatchError. With output="hash"
none of this happens: such a step costs the host almost nothing and answers with tokens that mean nothing.

Time is modelled, not slept: `step_seconds` says how long the last step takes, and the engine's clock lets it pass.

Shape suffixes: T tokens of the step, S sequences, B block-table width, R rows of logits, V vocabulary, C candidates.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from enginecore.device import ModelRuntime, ModelSpec, RuntimeBatch, RuntimeMemory
from enginecore.errors import UnsupportedError

from enginecore_sim.models import model_shape, named_config
from enginecore_sim.options import SimOptions
from enginecore_sim.roofline import Roofline
from enginecore_sim.tokens import BASE, EXIT_PROMPT, NUM_CANDIDATES, RAISE_PROMPT

EXIT_CODE = 86
#: The logit of the best candidate; each next one is 2 less, every other token has 0.
TOP_LOGIT = 16.0

_POISON = np.uint64(0xDEADBEEFDEADBEEF)


class SimulatedFailure(RuntimeError):
    """The failure that a test asked for."""


class InvalidBatchError(RuntimeError):
    """The core handed over a batch that breaks the contract."""


def mix(values: np.ndarray) -> np.ndarray:
    """`tokens.mix` over an array of uint64."""
    mixed: np.ndarray = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


class SimRuntime(ModelRuntime):
    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._spec: ModelSpec | None = None
        self._cache: np.ndarray = np.empty(0, dtype=np.uint64)
        self._powers: np.ndarray = np.empty(0, dtype=np.uint64)
        self._steps = 0
        self._roofline: Roofline | None = None
        self._seconds = 0.0

    def model_config(self, name: str) -> dict[str, Any] | None:
        return named_config(name)

    def memory_plan(self, spec: ModelSpec) -> RuntimeMemory | None:
        """By arithmetic with a profile; None without, where the cache is sized by what is asked for."""
        if self._options.device is None:
            return None
        shape = model_shape(spec.name, spec.config, spec.dtype)
        rows = spec.max_num_batched_tokens * (2 * shape.head.inputs + shape.widest) * shape.itemsize
        return RuntimeMemory(
            weight_bytes=shape.weight_bytes,
            activation_bytes=rows + spec.max_num_seqs * spec.vocab_size * 4,
            block_bytes=spec.block_size * shape.kv_bytes_per_token,
        )

    def load(self, spec: ModelSpec, weights: Any) -> None:
        """Takes the sizes from `spec`; `weights` is not used. UnsupportedError when a profile cannot run the model."""
        self._spec = spec
        self._roofline = _roofline(self._options, spec)
        if self._options.output == "hash":
            return
        self._cache = np.full(spec.num_blocks * spec.block_size, _POISON, dtype=np.uint64)
        # Products of uint64 wrap modulo 2^64, which is the arithmetic that the token function asks for.
        self._powers = np.cumprod(np.full(spec.max_model_len + 1, BASE, dtype=np.uint64))

    def memory_bytes(self) -> int:
        """Modelled bytes of the cache and, with a profile, of the weights."""
        if self._spec is None:
            return 0
        slots = self._spec.num_blocks * self._spec.block_size
        if self._roofline is None:
            return slots * self._options.bytes_per_slot
        shape = self._roofline.shape
        return slots * shape.kv_bytes_per_token + shape.weight_bytes

    def step_seconds(self) -> float | None:
        options = self._options
        modelled = options.profile is not None or options.step_time_s > 0 or options.token_time_s > 0
        return self._seconds if modelled else None

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies entries, as a fork of a sequence asks for."""
        if self._spec is None or not len(self._cache):
            return
        cache_BK = self._cache.reshape(self._spec.num_blocks, self._spec.block_size)
        for source, target in pairs:
            cache_BK[target] = cache_BK[source]

    def export_block(self, block: int) -> bytes:
        """The block's entries; zeros with output="hash", which has none."""
        assert self._spec is not None
        size = self._spec.block_size
        entries = self._cache[block * size : (block + 1) * size]
        return entries.tobytes() if len(self._cache) else bytes(8 * size)

    def import_block(self, block: int, data: bytes) -> None:
        assert self._spec is not None
        if len(self._cache):
            size = self._spec.block_size
            self._cache[block * size : (block + 1) * size] = np.frombuffer(data, dtype=np.uint64)

    def execute(self, batch: RuntimeBatch) -> np.ndarray:
        """float32 logits [R, V], or int64 ids [R] with output="tokens" or "hash"."""
        if self._spec is None:
            raise InvalidBatchError("execute was called before load")
        self._steps += 1
        self._seconds = self._modelled(batch)
        self._fail_if_asked(batch)
        if self._options.output == "hash":
            return self._hashed(batch, self._spec)
        self._check(batch, self._spec)
        for i in self._in_order(batch):
            self._write(batch, i)
        readout_R = self._read(batch)
        offsets_C = np.arange(NUM_CANDIDATES, dtype=np.uint64)
        ids_RC: np.ndarray = (mix(readout_R[:, None] + offsets_C) % np.uint64(self._spec.vocab_size)).astype(np.int64)
        if self._options.output == "tokens":
            ids_R: np.ndarray = ids_RC[:, 0].copy()
            return ids_R
        logits_RV = np.zeros((len(ids_RC), self._spec.vocab_size), dtype=np.float32)
        for rank in reversed(range(NUM_CANDIDATES)):  # the better one wins where two candidates are the same token
            logits_RV[np.arange(len(ids_RC)), ids_RC[:, rank]] = TOP_LOGIT - 2 * rank
        return logits_RV

    def _fail_if_asked(self, batch: RuntimeBatch) -> None:
        by_token = self._options.output != "hash"
        if self._options.exit_at_step == self._steps or (by_token and _contains(batch, EXIT_PROMPT)):
            os._exit(EXIT_CODE)
        if self._options.raise_at_step == self._steps or (by_token and _contains(batch, RAISE_PROMPT)):
            raise SimulatedFailure(f"step {self._steps} was asked to fail")

    def _modelled(self, batch: RuntimeBatch) -> float:
        if self._roofline is None:
            return self._options.step_time_s + len(batch.token_ids) * self._options.token_time_s
        query_lens = np.diff(batch.query_start_loc)
        return self._roofline.step_seconds(query_lens, batch.seq_lens, len(batch.logits_indices))

    def _hashed(self, batch: RuntimeBatch, spec: ModelSpec) -> np.ndarray:
        last_R = batch.token_ids[batch.logits_indices].astype(np.uint64)
        positions_R = batch.positions[batch.logits_indices].astype(np.uint64)
        ids_R: np.ndarray = (mix(last_R + positions_R * np.uint64(BASE)) % np.uint64(spec.vocab_size)).astype(np.int64)
        return ids_R

    def _check(self, batch: RuntimeBatch, spec: ModelSpec) -> None:
        starts, lens = batch.query_start_loc, batch.seq_lens
        num_tokens = len(batch.token_ids)
        _require(starts[0] == 0 and starts[-1] == num_tokens, "query_start_loc does not span the step's tokens")
        _require(len(starts) == len(lens) + 1 == len(batch.block_table) + 1, "the sequences' arrays differ in length")
        _require(len(lens) <= spec.max_num_seqs, f"{len(lens)} sequences in a step of at most {spec.max_num_seqs}")
        _require(bool((lens <= spec.max_model_len).all()), f"a sequence is longer than {spec.max_model_len}")
        known_T = (batch.token_ids >= 0) & (batch.token_ids < spec.vocab_size)
        _require(bool(known_T.all()), "a token id is outside the vocabulary")
        query_lens = np.diff(starts)
        _require(bool((query_lens > 0).all()), "a sequence has no tokens in the step")
        sequence_T = np.repeat(np.arange(len(lens)), query_lens)
        positions_T = (lens - query_lens - starts[:-1])[sequence_T] + np.arange(num_tokens)
        _require(bool((positions_T >= 0).all()), "a sequence computes more tokens than its length")
        _require(np.array_equal(positions_T, batch.positions), "positions do not follow from seq_lens")
        blocks_T = batch.block_table[sequence_T, positions_T // spec.block_size].astype(np.int64)
        _require(bool(((blocks_T >= 0) & (blocks_T < spec.num_blocks)).all()), "a block id is out of range")
        slots_T, used_T = batch.slot_mapping, batch.slot_mapping != -1
        expected_T = blocks_T * spec.block_size + positions_T % spec.block_size
        _require(bool((slots_T == expected_T)[used_T].all()), "slot_mapping and block_table disagree")
        _require(len(np.unique(slots_T[used_T])) == int(used_T.sum()), "two tokens of a step share a slot")
        wanted = batch.logits_indices
        _require(bool(((wanted >= 0) & (wanted < num_tokens)).all()), "logits_indices point outside the step")

    def _slots(self, batch: RuntimeBatch, i: int, count: int) -> np.ndarray:
        """Slots of the first `count` positions of sequence i, by its block table."""
        assert self._spec is not None
        size = self._spec.block_size
        blocks = batch.block_table[i, : -(-count // size)].astype(np.int64)
        _require(bool(((blocks >= 0) & (blocks < self._spec.num_blocks)).all()), "a block id is out of range")
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[:count]

    def _in_order(self, batch: RuntimeBatch) -> list[int]:
        """Sequences in an order in which each comes after the one whose new blocks it continues from, if any."""
        starts = batch.seq_lens - np.diff(batch.query_start_loc)
        before = {i: int(self._slots(batch, i, int(start))[-1]) for i, start in enumerate(starts) if start > 0}
        if not np.isin(list(before.values()), batch.slot_mapping).any():
            return list(range(len(starts)))
        writer = {}
        for i in range(len(starts)):
            begin, end = batch.query_start_loc[i], batch.query_start_loc[i + 1]
            writer.update(dict.fromkeys(batch.slot_mapping[begin:end].tolist(), i))
        order: dict[int, None] = {}
        for i in range(len(starts)):
            chain = [i]
            while (parent := writer.get(before.get(chain[-1], -1))) is not None and parent not in chain:
                chain.append(parent)
            order.update(dict.fromkeys(reversed(chain)))
        return list(order)

    def _write(self, batch: RuntimeBatch, i: int) -> None:
        begin, end = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1])
        start = int(batch.seq_lens[i]) - (end - begin)
        entry = self._cache[self._slots(batch, i, start)[-1]] if start else np.uint64(0)
        terms = (batch.token_ids[begin:end].astype(np.uint64) + np.uint64(1)) * self._powers[
            start : start + end - begin
        ]
        entries, slots = entry + np.cumsum(terms, dtype=np.uint64), batch.slot_mapping[begin:end]
        used = slots != -1
        self._cache[slots[used]] = entries[used]

    def _read(self, batch: RuntimeBatch) -> np.ndarray:
        """The readout r_p of each wanted token, [R]."""
        readout_R = np.empty(len(batch.logits_indices), dtype=np.uint64)
        sequence_R = np.searchsorted(batch.query_start_loc, batch.logits_indices, side="right") - 1
        for i in np.unique(sequence_R):
            rows = np.flatnonzero(sequence_R == i)
            positions = batch.positions[batch.logits_indices[rows]].astype(np.int64)
            count = int(positions.max()) + 1
            entries = mix(self._cache[self._slots(batch, int(i), count)]) * self._powers[:count]
            readout_R[rows] = np.cumsum(entries, dtype=np.uint64)[positions]
        return readout_R


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvalidBatchError(what)


def _contains(batch: RuntimeBatch, pattern: tuple[int, ...]) -> bool:
    """Whether some sequence computes `pattern` in this step."""
    tokens = batch.token_ids
    if len(tokens) < len(pattern) or not np.isin(tokens, pattern).any():
        return False
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(pattern))
    hits = np.flatnonzero((windows == np.asarray(pattern)).all(axis=1))
    first = np.searchsorted(batch.query_start_loc, hits, side="right")
    last = np.searchsorted(batch.query_start_loc, hits + len(pattern) - 1, side="right")
    return bool((first == last).any())


def _roofline(options: SimOptions, spec: ModelSpec) -> Roofline | None:
    device = options.device
    if device is None:
        return None
    if spec.dtype not in device.flops:
        known = ", ".join(device.flops)
        raise UnsupportedError(f"sim profile {device.name} has no rate for {spec.dtype}; it has {known}")
    return Roofline(
        profile=device,
        shape=model_shape(spec.name, spec.config, spec.dtype),
        flops=device.flops[spec.dtype],
        num_devices=options.tensor_parallel,
        compute_efficiency=options.compute_efficiency,
        bandwidth_efficiency=options.bandwidth_efficiency,
    )
