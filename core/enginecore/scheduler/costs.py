"""Is it cheaper to bring blocks up from a lower tier, or to compute them again? By measurement, as both go on."""

from __future__ import annotations

#: Steps with fewer tokens say little of what one token of a prompt costs.
MIN_TOKENS = 64
#: Weight of the newest measurement in a running mean.
NEWEST = 0.2
#: When the answer is to compute, every so many times the other way is taken all the same: what was measured when the
#: machine was busy must not hold for ever.
TRY_AGAIN = 16


class Costs:
    """Seconds of a prompt's token, against seconds of a block that is moved."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.seconds_per_token: float | None = None
        self._refused = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens."""
        if num_tokens < MIN_TOKENS or seconds <= 0:
            return
        sample, before = seconds / num_tokens, self.seconds_per_token
        self.seconds_per_token = sample if before is None else (1 - NEWEST) * before + NEWEST * sample

    def worth_moving(self, *seconds_per_block: float | None) -> bool:
        """Whether a block is worth all these moves; what is not measured yet is tried."""
        if self.seconds_per_token is None or None in seconds_per_block:
            return True
        moved = sum(seconds for seconds in seconds_per_block if seconds is not None)
        if moved < self.seconds_per_token * self._block_size:
            return True
        self._refused += 1
        return self._refused % TRY_AGAIN == 0
