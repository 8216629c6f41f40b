"""What was published about paging against contiguous memory, to be printed beside what a simulation gives.

All figures are from Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023); the place is named with each.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Table 1: OPT-13B on one A100 with 40 GB leaves 12 GB for the KV cache, which are 15.7 thousand slots.
NUM_SLOTS = 15_700
#: Section 7.2 and the whole evaluation: blocks of 16. OPT's context is 2,048.
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
#: Figures 14 to 16: samples and beams.
WIDTHS = (2, 4, 6)


@dataclass(frozen=True)
class Published:
    """A range, or one value twice. `why` says what would make a figure of ours differ."""

    what: str
    low: float
    high: float
    unit: str
    place: str
    why: str


_LENGTHS = (
    "the spread of lengths is not published: ours are log-normal around the published means, and what is shared weighs "
    "as much as prompts are long beside answers"
)
_PEAKED = (
    "how long beams stay together depends on how peaked the model's predictions are and how they depend on each other: "
    "ours are drawn from those of a small model, independently at each step, which brings beams together sooner"
)
_DEVICE = (
    "the simulated device reaches its peaks and waits for no host: reading the weights is most of its step, so a "
    "larger batch pays more; the published range is over three models, of which this is the smallest"
)
_TRACES = "the published systems ran real traces; ours are the same policies under our scheduler, on drawn lengths"

_BATCH, _RATE, _USE, _SHARING = (
    "section 6.2, figure 13a",
    "section 6.2, figure 12",
    "figure 2",
    "section 6.3, figure 15",
)

#: By dataset and figure.
PUBLISHED: dict[str, dict[str, Published]] = {
    "sharegpt": {
        "batched_to_oracle": Published("batched requests, of oracle's", 2.2, 2.2, "x", _BATCH, _TRACES),
        "batched_to_max": Published("batched requests, of max's", 4.3, 4.3, "x", _BATCH, _TRACES),
        "rate_to_oracle": Published("sustained rate, of oracle's", 1.7, 2.7, "x", _RATE, _DEVICE),
        "rate_to_max": Published("sustained rate, of max's", 2.7, 8.0, "x", _RATE, _DEVICE),
        "used_by_max": Published("memory that holds tokens, max", 20.4, 20.4, "%", _USE, _TRACES),
        "used_by_oracle": Published("memory that holds tokens, oracle", 38.2, 38.2, "%", _USE, _TRACES),
        "used_by_paged": Published("memory that holds tokens, paged", 96.3, 96.3, "%", _USE, _TRACES),
        "waste_of_paged": Published("slots held without a token, paged", 0.0, 4.0, "%", "section 6.2", _LENGTHS),
        "saved_by_sampling": Published("saved by sharing, samples", 16.2, 30.5, "%", _SHARING, _LENGTHS),
        "saved_by_beams": Published("saved by sharing, beams", 44.3, 66.3, "%", _SHARING, _PEAKED),
    },
    "alpaca": {
        "saved_by_sampling": Published("saved by sharing, samples", 6.1, 9.8, "%", _SHARING, _LENGTHS),
        "saved_by_beams": Published("saved by sharing, beams", 37.6, 55.2, "%", _SHARING, _PEAKED),
    },
}
