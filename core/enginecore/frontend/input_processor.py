"""A prompt and sampling parameters to engine requests: tokenise, check against the model, resolve what is open.

Everything that can be wrong with a request is found here, before anything is scheduled, as a ParameterError that names
the field. Thread-safe: tokenising is the slow part and runs off the event loop.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Union

import msgspec

from enginecore.adapters import AdapterKey
from enginecore.config import EngineConfig
from enginecore.constraints import Thinking
from enginecore.errors import ParameterError
from enginecore.frontend.bad_words import banned_sequences
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.structured import GrammarChecker, grammar_of
from enginecore.request import INT64_MAX, INT64_MIN, EngineRequest, SamplingParams
from enginecore.scheduler.beam_search import num_candidates

#: A prompt: text, token ids, or vLLM's dicts {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = Union[str, "Sequence[int]", "dict[str, Any]"]

MAX_STOP_CHARS = 16384
MAX_CACHE_SALT_CHARS = 1024


class TokenizerLike(Protocol):
    """The part of `frontend.tokenizer.Tokenizer` that the frontend uses."""

    vocab_size: int
    eos_token_ids: list[int]

    @property
    def special_token_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a route asks of the answer beyond the sampling parameters: a checked grammar, a bound on thinking, and
    special tokens whose text is wanted although special tokens are not. `opened`: the prompt has begun the thinking.
    `prefix`: the answer's beginning that is in the prompt, for a parser that has to see it."""

    grammar: str | None = None
    thinking: Thinking | None = None
    shown_tokens: frozenset[int] = frozenset()
    opened: bool = False
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One prompt, checked and tokenised. `text` is the prompt as given, None when it came as ids or was truncated."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    bad_words_ids: list[list[int]]
    eos_token_ids: list[int]
    priority: int = 0
    cache_salt: str | None = None
    form: AnswerForm = AnswerForm()
    #: (tokens, seconds) of a prefix that is to stay cached.
    pin_prefix: tuple[int, float] | None = None
    adapter: AdapterKey | None = None

    @property
    def num_sequences(self) -> int:
        return self.params.best_of or self.params.n

    def engine_requests(self, internal_id: str, arrival_time: float) -> list[EngineRequest]:
        """One request for each candidate, or one for all that a beam search finds. Candidate i gets seed + i; only the
        first computes the prompt and its log-probabilities, the others fork from it."""
        params = self.params
        candidates = 1 if params.beam is not None else self.num_sequences
        if self.num_sequences > params.n and params.logprobs is None:
            params = msgspec.structs.replace(params, logprobs=0)
        if params.structured_outputs is not None:
            params = msgspec.structs.replace(params, structured_outputs=None)  # the grammar says it all
        plain = params
        if params.prompt_logprobs is not None and self.num_sequences > 1:
            plain = msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            EngineRequest(
                request_id=f"{internal_id}_{index}",
                prompt_token_ids=self.token_ids,
                params=plain if index else params,
                max_tokens=self.max_tokens,
                eos_token_ids=self.eos_token_ids,
                seed=None if params.seed is None else _wrap(params.seed + index),
                bad_words_ids=self.bad_words_ids,
                priority=self.priority,
                arrival_time=arrival_time,
                cache_salt=self.cache_salt,
                adapter=self.adapter,
                pin_prefix=self.pin_prefix,
                cached_prompt=params.prompt_logprobs is None and not params.skip_reading_prefix_cache,
                fork_of=f"{internal_id}_0" if index else None,
                grammar=self.form.grammar,
                thinking=self.form.thinking,
            )
            for index in range(candidates)
        ]


class InputProcessor:
    """Checks requests against one model. `clamp` of `process` says what happens to a max_tokens beyond the room
    left."""

    def __init__(self, config: EngineConfig, tokenizer: TokenizerLike, table: TokenTable) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.table = table
        self.grammars = GrammarChecker()
        self._prefix = os.urandom(4).hex()
        self._count = itertools.count()

    def internal_id(self) -> str:
        """An id that no other request has, whatever ids the clients send."""
        return f"{self._prefix}-{next(self._count):x}"

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        clamp: bool = True,
        param: str = "prompt",
        form: AnswerForm | None = None,
        adapter: AdapterKey | None = None,
    ) -> PreparedRequest:
        """Check and tokenise. `param` is what errors call the prompt's field. Raises ParameterError."""
        self._check_params(params)
        self._check_scheduling(priority, cache_salt)
        text, ids = split_prompt(prompt, param)
        if ids is None:
            assert text is not None
            ids = self.tokenize(text, add_special_tokens=add_special_tokens, param=param,
                                whole=params.truncate_prompt_tokens is None)  # fmt: skip
        else:
            self._check_ids(ids, params, param)
        truncated = self._truncate(ids, params)
        if len(truncated) < len(ids):
            text, ids = None, truncated
        form = form or AnswerForm()
        if params.structured_outputs is not None and form.grammar is None:
            form = replace(form, grammar=grammar_of(params.structured_outputs, self.grammars))
        if form.grammar is not None and params.beam is not None:
            raise ParameterError("a beam search cannot follow a grammar", param="use_beam_search")
        if form.grammar is not None and not self.tokenizer.eos_token_ids:
            raise ParameterError("a grammar needs a model with an end-of-text token", param="structured_outputs")
        return PreparedRequest(
            form=form,
            text=text,
            token_ids=ids,
            params=params,
            max_tokens=self._resolve_max_tokens(len(ids), params, clamp, param),
            bad_words_ids=banned_sequences(self.tokenizer, self.table, params.bad_words or []),
            eos_token_ids=list(self.tokenizer.eos_token_ids),
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", whole: bool = True
    ) -> list[int]:
        """Token ids of a text. With `whole`, a text that cannot fit the context is refused before it is tokenised."""
        if not text:
            raise ParameterError(f"{param} must not be empty", param=param)
        limit = self.config.max_model_len
        if whole and len(text) > limit and len(text) > limit * self.table.longest():
            least = -(-len(text) // self.table.longest())
            raise too_long(limit, f"the prompt has {len(text)} characters, which is at least {least} tokens", param)
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise ParameterError(f"{param} holds a lone surrogate, which is not valid text", param=param) from error
        if not ids:
            raise ParameterError(f"{param} has no tokens", param=param)
        return ids

    def _check_ids(self, ids: list[int], params: SamplingParams, param: str) -> None:
        if not ids:
            raise ParameterError(f"{param} must not be empty", param=param)
        limit = self.config.max_model_len
        if params.truncate_prompt_tokens is None and len(ids) > limit:
            raise too_long(limit, f"the prompt has {len(ids)} tokens and {_wanted(params)} requested", param)
        for token in ids:
            if type(token) is not int:
                raise ParameterError(f"{param} must hold token ids, got {token!r}", param=param)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            shown = bad if abs(bad) < 10**20 else "of over 20 digits"
            raise ParameterError(
                f"{param} holds token id {shown}; the vocabulary has ids 0 to {self.config.vocab_size - 1}", param=param
            )

    def _truncate(self, ids: list[int], params: SamplingParams) -> list[int]:
        """The last k tokens; -1 keeps as many as leave room for max_tokens (at least one)."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep == -1:
            keep = max(1, self.config.max_model_len - max(params.max_tokens or 1, 1))
        return ids[-keep:]

    def _resolve_max_tokens(self, prompt_tokens: int, params: SamplingParams, clamp: bool, param: str) -> int:
        limit, asked = self.config.max_model_len, params.max_tokens
        room = limit - prompt_tokens
        if room < (0 if asked == 0 else 1):
            raise too_long(limit, f"the prompt has {prompt_tokens} tokens and {_wanted(params)} requested", param)
        if asked is not None and asked > room and not clamp:
            raise too_long(
                limit, f"the prompt has {prompt_tokens} tokens and {asked} output tokens are requested", "max_tokens"
            )
        tokens = room if asked is None else min(asked, room)
        if params.min_tokens > tokens:
            raise ParameterError(
                f"min_tokens is {params.min_tokens}, but only {tokens} tokens can be generated", param="min_tokens"
            )
        return tokens

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocab(self.config.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.config.max_logprobs:
                raise ParameterError(f"{name} may be at most {self.config.max_logprobs}, got {value}", param=name)
        if params.beam is not None:
            stops = {*(params.stop_token_ids or ()), *self.tokenizer.eos_token_ids}
            if num_candidates(params.beam.width, len(stops)) > self.config.vocab_size:
                raise ParameterError(
                    f"beam_width {params.beam.width} with {len(stops)} stop tokens is too much for a vocabulary of "
                    f"{self.config.vocab_size}",
                    param="beam_width",
                )
        if params.stop_list and not params.detokenize:
            raise ParameterError("stop strings need detokenize to be true", param="stop")
        for name, strings in (("stop", params.stop_list), ("bad_words", params.bad_words or [])):
            if sum(map(len, strings)) > MAX_STOP_CHARS:
                raise ParameterError(f"{name} may hold at most {MAX_STOP_CHARS} characters in all", param=name)

    def _check_scheduling(self, priority: int, cache_salt: str | None) -> None:
        if type(priority) is not int or not INT64_MIN <= priority <= INT64_MAX:
            raise ParameterError("priority must be a signed 64-bit integer", param="priority")
        if priority and self.config.scheduling_policy != "priority":
            raise ParameterError(
                f"priority has no effect under the {self.config.scheduling_policy} policy",
                param="priority",
                fix="start with --scheduling-policy priority",
            )
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ParameterError("cache_salt must be a non-empty string", param="cache_salt")
        if cache_salt is not None and len(cache_salt) > MAX_CACHE_SALT_CHARS:
            raise ParameterError(f"cache_salt may have at most {MAX_CACHE_SALT_CHARS} characters", param="cache_salt")


def grammar_tokenizer(tokenizer: Any) -> tuple[str, list[int]]:
    """What an engine needs to follow grammars: the tokenizer's JSON and the tokens that end an answer."""
    return tokenizer.serialized(), list(tokenizer.eos_token_ids)


def split_prompt(prompt: Prompt, param: str) -> tuple[str | None, list[int] | None]:
    """(text, None) or (None, ids)."""
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        elif "prompt" in prompt:
            prompt = prompt["prompt"]
        else:
            raise ParameterError(f'{param} must have the key "prompt" or "prompt_token_ids"', param=param)
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, (list, tuple)):
        return None, list(prompt)
    raise ParameterError(f"{param} must be text or a list of token ids, got {type(prompt).__name__}", param=param)


def _wanted(params: SamplingParams) -> str:
    return "at least 1 output token is" if params.max_tokens is None else f"{params.max_tokens} output tokens are"


def too_long(limit: int, detail: str, param: str) -> ParameterError:
    return ParameterError(
        f"the model's maximum context length is {limit} tokens, but {detail}",
        param=param,
        code="context_length_exceeded",
    )


def _wrap(seed: int) -> int:
    """Keep seed + i within a signed 64-bit number."""
    return (seed + 2**63) % 2**64 - 2**63
