"""One request in the scheduler's hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginecore.kvcache import BlockTable, root_hash
from enginecore.request import EngineRequest, TokenLogprobs

if TYPE_CHECKING:
    from enginecore.scheduler.beams import BeamGroup


class Family:
    """Sequences of one prompt. One of them computes it; those in `pending` wait for that, in no queue, then fork."""

    __slots__ = ("members", "pending")

    def __init__(self, first: Sequence) -> None:
        self.members = [first]
        self.pending: list[Sequence] = []


def needs_known_tokens(request: EngineRequest) -> bool:
    """Whether a step of this request can only be prepared when all its tokens are known to the host: they are counted,
    compared or followed there."""
    return request.is_followed or any(len(words) > 1 for words in request.bad_words_ids)


class Sequence:
    """Everything about a request that is not hot. While it runs, its tokens live in the running table's row `slot`;
    while it waits, in `token_ids`."""

    __slots__ = (
        "admitted",
        "arrival",
        "cancelled",
        "family",
        "group",
        "lifted",
        "needs_known_tokens",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "prompt_logprobs",
        "request",
        "request_id",
        "seed",
        "slot",
        "table",
        "tenant",
        "token_ids",
    )

    def __init__(self, request: EngineRequest, arrival: int, seed: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        self.seed = seed
        self.slot = -1
        self.token_ids: list[int] = request.prompt_token_ids
        self.num_prompt = len(request.prompt_token_ids)
        #: Prompt tokens found in the prefix cache when the request was first `admitted`.
        self.num_cached = 0
        self.admitted = False
        self.num_preemptions = 0
        self.cancelled = False
        self.needs_known_tokens = needs_known_tokens(request)
        #: How far lower tiers have been asked for its prefix since it last ran (`tiering.py`).
        self.lifted = 0
        #: The sequences that share its prompt, when it has such.
        self.family: Family | None = None
        #: The beam search that it is a part of, when it is.
        self.group: BeamGroup | None = None
        #: Whose account its work goes on.
        self.tenant: str = request.tenant or request.cache_salt or ""
        self.table = BlockTable(root_hash(request.cache_salt, request.adapter), tenant=self.tenant)
        #: None when not asked for or already delivered; else what has been collected so far.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if request.params.prompt_logprobs is not None else None
        )

    @property
    def reads_cache(self) -> bool:
        """A request that wants prompt log-probabilities must compute every prompt position."""
        return self.request.cached_prompt and self.prompt_logprobs is None
