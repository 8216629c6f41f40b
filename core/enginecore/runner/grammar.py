"""Answers that follow a grammar: which tokens may come next, and which must come.

llguidance follows each answer with a matcher: a lexer built from derivatives of regular expressions under an Earley
parser, walked along a trie of the vocabulary. A grammar is compiled once, in a thread, and copied for each sequence, so
that n choices and sequences that come back after a preemption (their tokens are fed again) cost little.

A step's masks are filled in threads while the model computes the step's logits; filling lets go of the interpreter's
lock. Where the grammar leaves one way to go on, the forced tokens are not computed one by one: they join the sequence
with the token that led to them, and the next step computes all of them at once, as a small chunk of a prompt.

Does that change the distribution? Where the text is forced, sampling under the mask can only choose how it is cut into
tokens, among ways that the model has hardly ever seen but one: the tokenizer's own. Forced tokens are that one, and
only as far as it is certain: a last piece that could be the start of a longer token stays open, so the first free
character is never cut off from the token that the model would have chosen. A sequence's random numbers depend on
positions alone, so with and without fast-forward a seed gives the same answer wherever sampling under the mask would
have chosen the tokenizer's tokens itself; where it would not, the answer's text is spelled as in the training data.

Shape suffixes: R logits rows, G rows with a grammar, W 32-bit words and B bytes of a mask, V vocabulary.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import llguidance
import numpy as np
import torch
from llguidance.numpy import fill_next_token_bitmask_par

from enginecore.plan import NewRequest
from enginecore.request import EngineRequest

#: Compiled grammars that are kept. One holds some kilobytes, or what its lexer has come to need: at most
#: `max_lexer_states` times 2 kB.
MAX_COMPILED = 64
#: What a grammar may cost. Lexer fuel bounds the time: 1,000,000 is some 20 ms to compile, 200,000 some 15 ms a mask.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False
)
NO_TOKENIZER = "this engine was given no tokenizer, so it cannot follow a grammar"
TOKENS_ONLY = "this device gives tokens only, so it cannot follow a grammar"


class GrammarStore:
    """Compiled grammars by their text. Thread-safe; threads start with the first grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._source: tuple[str, list[int]] | None = None
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._problem = NO_TOKENIZER
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._pending: dict[str, Future[str | None]] = {}
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def use_tokenizer(self, serialized: str, eos_token_ids: list[int]) -> None:
        """The tokenizer (the `tokenizers` library's JSON) and the tokens that end an answer. Must come first."""
        self._source = (serialized, eos_token_ids)

    def warm_up(self) -> None:
        """Build the trie of the vocabulary, some tenths of a second that hold the interpreter's lock. Done by the first
        compilation otherwise."""
        with self._building:
            if self._tokenizer is not None or self._source is None or not self._source[1]:
                return
            serialized, eos = self._source
            try:
                own = llguidance.LLTokenizer(serialized, eos_token=eos)
                if own.vocab_size < self._vocab_size:  # a model with padding rows
                    own = llguidance.LLTokenizer(serialized, n_vocab=self._vocab_size, eos_token=eos)
                self._tokenizer = own
            except Exception as error:  # the library is another language's
                self._problem = f"this model's tokenizer cannot follow a grammar: {error}"

    @property
    def mask_words(self) -> int:
        """W: 32-bit words of one mask."""
        size = self._vocab_size if self._tokenizer is None else self._tokenizer.vocab_size
        return (size + 31) // 32

    def compile(self, grammar: str) -> Future[str | None]:
        """Compile in a thread. The result is None, or why the grammar cannot be used."""
        with self._lock:
            if grammar in self._compiled:
                done: Future[str | None] = Future()
                done.set_result(None)
                return done
            if grammar not in self._pending:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(2, thread_name_prefix="enginecore-grammar")
                self._pending[grammar] = self._pool.submit(self._compile, grammar)
            return self._pending[grammar]

    def _compile(self, grammar: str) -> str | None:
        try:
            return problem_of(self._build(grammar))
        except LookupError as error:
            return str(error)
        finally:
            with self._lock:
                self._pending.pop(grammar, None)

    def _build(self, grammar: str) -> llguidance.LLMatcher:
        self.warm_up()
        if self._tokenizer is None:
            raise LookupError(self._problem)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # shows that something is possible, and warms up what the copies share
        if not matcher.is_error():
            with self._lock:
                self._compiled[grammar] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return matcher

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the start of the grammar, which `compile` has found sound; recompiled if it is not kept."""
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None:
                self._compiled.move_to_end(grammar)
        return (kept or self._build(grammar)).deep_copy()

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def problem_of(matcher: llguidance.LLMatcher) -> str | None:
    """Why a matcher cannot go on, in one line."""
    if not matcher.is_error():
        return None
    line = (matcher.get_error().strip() or "unknown problem").splitlines()[0]
    return "nothing satisfies it" if line.startswith("NoExtension") else line


@dataclass(slots=True)
class _State:
    """One slot's matcher. `fast`: forced tokens may be emitted unsampled. `forced_first`: so must this one."""

    matcher: llguidance.LLMatcher
    request: EngineRequest
    max_total: int
    stops: frozenset[int]
    fast: bool
    forced_first: int | None = None


class Grammars:
    """The matchers of the slots, and the masks of a step. False when no slot has one."""

    def __init__(self, store: GrammarStore, device: torch.device) -> None:
        self.store = store
        self._device = device
        self._states: dict[int, _State] = {}
        self._executor: llguidance.LLExecutor | None = None
        self._filler: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None
        self._words_GW = np.zeros((0, 0), np.int32)
        self._slots: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._states)

    def __contains__(self, slot: int) -> bool:
        return slot in self._states

    def enter(self, new: NewRequest) -> None:
        """A sequence enters a slot, perhaps with answer tokens that it had before a preemption."""
        self._states.pop(new.slot, None)
        request, params = new.request, new.request.params
        if request.grammar is None:
            return
        matcher = self.store.matcher(request.grammar)
        matcher.consume_tokens(new.token_ids[new.num_prompt :])
        # What changes or reports the logits of each token needs them.
        fast = not (params.allowed_token_ids or request.bad_words_ids or params.logit_bias or params.min_tokens)
        state = _State(
            matcher,
            request,
            new.num_prompt + request.max_tokens,
            frozenset([*(params.stop_token_ids or ()), *request.eos_token_ids]),
            fast and params.logprobs is None,
        )
        if state.fast and not problem_of(matcher):
            state.forced_first = next(iter(matcher.compute_ff_tokens()), None)
        self._states[new.slot] = state

    # ---- a step --------------------------------------------------------------------------------------------------

    def begin(self, slots: list[int]) -> None:
        """Start to fill the masks of those of `slots` that have a grammar: call it before the model runs."""
        self._slots = [slot for slot in slots if slot in self._states]
        if not self._slots:
            return
        if self._executor is None or self._filler is None:
            self._executor = llguidance.LLExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))
            self._filler = ThreadPoolExecutor(1, thread_name_prefix="enginecore-masks")
        self._words_GW = np.zeros((len(self._slots), self.store.mask_words), np.int32)
        self._filling = self._filler.submit(self._fill, self._executor)

    def _fill(self, executor: llguidance.LLExecutor) -> None:
        todo = []
        for row, slot in enumerate(self._slots):
            state = self._states[slot]
            if state.forced_first is None:
                todo.append((state.matcher, row))
            else:
                self._words_GW[row, state.forced_first >> 5] = _bit(state.forced_first)
        if todo:
            fill_next_token_bitmask_par(executor, todo, self._words_GW)

    def apply(self, logits_RV: torch.Tensor, slots: list[int]) -> tuple[frozenset[int], dict[int, str]]:
        """Ban what the grammars do not allow, in place. Returns the rows of `slots` that can only end now, and those
        whose grammar cannot go on, with the reason."""
        rows = [row for row, slot in enumerate(slots) if slot in self._states]
        if not rows:
            return frozenset(), {}
        assert self._filling is not None and len(rows) == len(self._slots)
        self._filling.result()
        # Eight tokens a byte cross to the device, and become one byte each there.
        bytes_GB = torch.from_numpy(self._words_GW.view(np.uint8)).to(self._device)
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        banned_GV = (bytes_GB.unsqueeze(2) >> shifts & 1).flatten(1)[:, : logits_RV.shape[1]] == 0
        if len(rows) == len(logits_RV):
            logits_RV.masked_fill_(banned_GV, float("-inf"))
        else:
            rows_G = torch.tensor(rows, device=self._device)
            logits_RV[rows_G] = logits_RV[rows_G].masked_fill(banned_GV, float("-inf"))
        ending, problems = [], {}
        for row, words_W in zip(rows, self._words_GW, strict=True):
            state = self._states[slots[row]]
            problem = problem_of(state.matcher)
            if problem is not None:
                problems[row] = f"the grammar cannot be followed any further: {problem}"
            elif state.request.params.min_tokens and self._only_ends(state, words_W):
                ending.append(row)
        return frozenset(ending), problems

    @staticmethod
    def _only_ends(state: _State, words_W: np.ndarray) -> bool:
        others_W = words_W.copy()
        for token in state.request.eos_token_ids:
            others_W[token >> 5] &= ~_bit(token)
        return not others_W.any()

    def advance(
        self, slots: list[int], lengths: np.ndarray, token_ids: list[int], errors: dict[int, str]
    ) -> dict[int, list[int]]:
        """Follow the chosen tokens. Returns the tokens that must come after them, by row; adds rows to `errors`.

        `lengths` are the sequences' tokens before the chosen ones. Forced tokens end with a stop token or the end of
        the sequence's room; where the grammar is complete they are the token that ends the answer.
        """
        forced = {}
        for row, slot in enumerate(slots):
            state = self._states.get(slot)
            if state is None or row in errors:
                continue
            token, state.forced_first = token_ids[row], None
            if not state.matcher.consume_token(token):
                if token not in state.stops:
                    errors[row] = f"the grammar cannot be followed: {problem_of(state.matcher)}"
                continue
            room = state.max_total - int(lengths[row]) - 1
            if state.fast and token not in state.stops and room > 0:
                tokens = self._forced(state, room)
                if tokens:
                    forced[row] = tokens
        return forced

    @staticmethod
    def _forced(state: _State, room: int) -> list[int]:
        matcher = state.matcher
        tokens: list[int] = matcher.compute_ff_tokens()[:room]
        for count, token in enumerate(tokens):
            if token in state.stops:
                tokens = tokens[: count + 1]
                break
        if tokens:
            matcher.consume_tokens(tokens)
        if len(tokens) < room and matcher.is_stopped() and not matcher.is_error():
            tokens = [*tokens, state.request.eos_token_ids[0]]
        return tokens


def _bit(token: int) -> np.int32:
    """The word of a mask that has only this token's bit."""
    word: np.int32 = np.array([1 << (token & 31)], np.uint32).view(np.int32)[0]
    return word


def missing_logits(requests: list[tuple[int, EngineRequest]]) -> dict[int, str]:
    """Errors of the rows whose requests have a grammar, on a device that chooses tokens itself."""
    return {row: TOKENS_ONLY for row, request in requests if request.grammar is not None}
