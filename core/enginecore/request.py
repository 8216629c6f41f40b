"""What crosses between the frontend and the engine: sampling parameters, requests and outputs. Plain data, no torch."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from enginecore.constraints import StructuredOutputsParams, Thinking, structured_outputs_of
from enginecore.errors import ParameterError
from enginecore.pooling import Pooled, PoolingParams

#: Seeds and other integers of a request must fit a signed 64-bit number.
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1

#: Below this temperature sampling is greedy: dividing logits by it would overflow float32.
GREEDY_TEMPERATURE = 1e-2

MAX_STOP_STRINGS = 64
MAX_N = 128
MAX_BEAM_WIDTH = 64


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(f"{name} must be a number, got {value!r}", param=name)
    if not math.isfinite(value):
        raise ParameterError(f"{name} must be finite, got {value}", param=name)
    if value < low or value > high or (low_open and value == low):
        bounds = f"{'(' if low_open else '['}{low}, {high}]"
        raise ParameterError(f"{name} must be in {bounds}, got {value}", param=name)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or value > high:
        shown = value if abs(value) < 10**20 else "a number of over 20 digits"
        raise ParameterError(f"{name} must be between {low} and {high}, got {shown}", param=name)


def _token_list(name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise ParameterError(f"{name} must be a list of token ids, got {type(value).__name__}", param=name)
    for token in value:
        _integer(name, token, 0, INT32_MAX)


class BeamOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Beam search with `width` beams, by the rules of transformers' `generate`: answers are ranked by the sum of their
    tokens' log-probabilities divided by (number of tokens) ** `length_penalty`; `early_stopping` (True, False or
    "never") says when the search ends once `width` answers are finished.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.width, 1, MAX_BEAM_WIDTH)
        _number("length_penalty", self.length_penalty, -100, 100)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ParameterError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}', param="early_stopping"
            )


#: What a beam search takes no account of, with the values that ask for nothing.
_NOT_FOR_BEAMS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "top_k": (0, -1),
    "top_p": (1,), "seed": (None,), "stop": (None, []), "bad_words": (None, []), "min_tokens": (0,),
    "logit_bias": (None, {}), "allowed_token_ids": (None,), "prompt_logprobs": (None,), "best_of": (None,),
    "structured_outputs": (None,), "thinking_token_budget": (None,),
}  # fmt: skip


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Names and defaults follow vLLM's where both have the thing.

    temperature 0 (or below 0.01) is greedy. top_k 0 or -1 is off. `seed` makes a request reproducible whatever else
    runs. `stop` strings are matched on the decoded text; `stop_token_ids` on tokens. `logprobs=k` returns the k best
    log-probabilities and the chosen one's at each position, as raw log-softmax of the model's logits.
    `skip_reading_prefix_cache` computes the whole prompt anew; others may still reuse it.
    `structured_outputs` makes the answer follow a schema or grammar (a dict of its fields will do);
    `thinking_token_budget` ends a reasoning model's thinking after that many tokens.
    `beam` searches the n best answers instead of sampling them; temperature must then be 0 or 1, which mean the same.
    Raises ParameterError (a ValueError) that names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    best_of: int | None = None
    skip_reading_prefix_cache: bool | None = None
    beam: BeamOptions | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, 1e6, low_open=True)
        _number("temperature", self.temperature, 0, 1e6)
        _number("top_p", self.top_p, 0, 1, low_open=True)
        _integer("top_k", self.top_k, -1, INT32_MAX)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, INT64_MIN, INT64_MAX)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, INT32_MAX)
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, INT32_MAX)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, INT32_MAX)
            if self.truncate_prompt_tokens == 0:
                raise ParameterError(
                    "truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens"
                )
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        if not isinstance(self.skip_reading_prefix_cache, (bool, type(None))):
            raise ParameterError("skip_reading_prefix_cache must be true or false", param="skip_reading_prefix_cache")
        self._check_lists()
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0, INT32_MAX)
        if isinstance(self.structured_outputs, dict):
            msgspec.structs.force_setattr(self, "structured_outputs", structured_outputs_of(self.structured_outputs))
        if self.beam is not None:
            self._check_beam(self.beam)

    def _check_beam(self, beam: BeamOptions) -> None:
        if self.n > beam.width:
            raise ParameterError(f"n ({self.n}) is greater than beam_width ({beam.width})", param="n")
        for name, neutral in _NOT_FOR_BEAMS.items():
            value = getattr(self, name)
            if value not in neutral:
                raise ParameterError(f"{name} has no place in a beam search; leave it out", param=name)
        if self.temperature not in (0, 1):
            raise ParameterError(
                f"a beam search does not sample: temperature must be 0 or 1, got {self.temperature}",
                param="temperature",
            )
        if self.max_tokens == 0:
            raise ParameterError("a beam search needs max_tokens of at least 1", param="max_tokens")

    def _check_lists(self) -> None:
        for name, values in (("stop", self.stop_list), ("bad_words", self.bad_words or [])):
            if not isinstance(values, list):
                raise ParameterError(f"{name} must be a list of strings, got {type(values).__name__}", param=name)
            if len(values) > MAX_STOP_STRINGS:
                raise ParameterError(
                    f"{name} may hold at most {MAX_STOP_STRINGS} strings, got {len(values)}", param=name
                )
            for text in values:
                if not isinstance(text, str):
                    raise ParameterError(f"{name} must hold strings, got {text!r}", param=name)
                if not text or (name == "bad_words" and not text.strip()):
                    raise ParameterError(f"{name} must not hold an empty string", param=name)
        if self.stop_token_ids is not None:
            _token_list("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _token_list("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ParameterError("logit_bias must map token ids to numbers", param="logit_bias")
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0, INT32_MAX)
                _number("logit_bias", bias, -100, 100)

    @property
    def stop_list(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise ParameterError(
                        f"{name} holds token id {token}; the vocabulary has ids 0 to {vocab_size - 1}", param=name
                    )


class EngineRequest(msgspec.Struct, array_like=True):
    """One sequence to generate, as the engine takes it: everything resolved, every id unique.

    `seed` is set when the choice must be reproducible, else the engine draws one. `bad_words_ids` are the token
    sequences of `params.bad_words`. `max_tokens` is final: prompt plus it fits max_model_len.
    `cached_prompt` False makes the request ignore prefix-cache hits (it still fills the cache).
    `fork_of` names a request with the same prompt, added before: the prompt is computed once and its blocks are shared.
    `pin_prefix` (tokens, seconds) keeps the full blocks of that many first tokens cached for that long from when they
    are computed; every request that names it begins the time anew. `tenant` is whose account the work goes on (None:
    the cache salt's). `grammar` is llguidance's text of what the answer must look like, `thinking` the bound on it.
    With `pooling` no token is generated: the answer is numbers. `second_from` is then where the second text of a pair
    begins.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: list[int] = []
    seed: int | None = None
    bad_words_ids: list[list[int]] = []
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    adapter: tuple[str, int] | None = None
    cached_prompt: bool = True
    fork_of: str | None = None
    pin_prefix: tuple[int, float] | None = None
    tenant: str | None = None
    grammar: str | None = None
    thinking: Thinking | None = None
    pooling: PoolingParams | None = None
    second_from: int | None = None

    @property
    def is_followed(self) -> bool:
        """Whether something counts or follows the chosen tokens one by one to decide what may come next."""
        params = self.params
        return bool(
            self.grammar is not None
            or self.thinking is not None
            or params.beam is not None
            or params.repetition_penalty != 1.0
            or params.frequency_penalty
            or params.presence_penalty
        )


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the best k in order. `rank` counts from 1."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class BeamAnswer(msgspec.Struct, array_like=True):
    """One finished answer of a beam search. `score` is what it was ranked by."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: str
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None


#: Finish reasons that the engine gives: "stop" (a stop token; `stop_reason` holds it, None for EOS), "length",
#: "abort" (asked for by the client) and "error" (`error` says why).
class EngineOutput(msgspec.Struct, array_like=True, gc=False):
    """News about one request after a step. `prompt_logprobs` comes once, with the first token, its first entry None.

    One is made for each token, and none can be part of a cycle: the garbage collector need not track them.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    #: The answers of a beam search, best first; its only output has them.
    beams: list[BeamAnswer] | None = None
    #: What a pooling model says of the text; its only output has it.
    pooled: Pooled | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and counters of the engine, sent with outputs and after aborts. Counters only grow.

    `grammar_fast_forward` counts tokens that a grammar forced and that were not computed one by one.
    `num_drafted` tokens were guessed and computed, `num_accepted` of them kept.
    `num_forks` sequences took over `forked_tokens` computed tokens from a sibling (n, best_of, beams); `copied_tokens`
    were matched inside a cached block, which was copied.
    `adapter_steps` had rows with an adapter; `adapter_swaps` adapters were put into a slot of the device.
    Steps are `graph_replays`, `eager_steps`, or `lost_steps` that found the device's memory exhausted; `steps_ahead` of
    them were planned while the one before was on the device.
    `lifted_tokens` came up from host memory into the device's cache, `fetched_tokens` from disk into host memory;
    `num_swaps` preempted sequences left their blocks in a lower tier to come back from. `host_blocks` and `disk_blocks`
    are blocks in those tiers now."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    kv_tokens_held: int = 0
    kv_slots_held: int = 0
    num_steps: int = 0
    reference_ops: list[str] = []
    num_forks: int = 0
    forked_tokens: int = 0
    copied_tokens: int = 0
    graph_replays: int = 0
    grammar_fast_forward: int = 0
    eager_steps: int = 0
    lost_steps: int = 0
    lifted_tokens: int = 0
    fetched_tokens: int = 0
    num_swaps: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    adapter_steps: int = 0
    adapter_swaps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    steps_ahead: int = 0


class StepOutputs(msgspec.Struct, array_like=True):
    """Everything that one engine step has to say."""

    outputs: list[EngineOutput]
    stats: EngineStats
