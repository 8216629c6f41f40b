"""Pooling: what a model that gives vectors or classes is asked for, and what it answers. Plain data, no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from enginecore.errors import ParameterError

#: embed: a vector of the text; token_embed: one of each token; classify: what the model's head says of the text.
POOLING_TASKS = ("embed", "token_embed", "classify")
#: How the states of a text's tokens become one vector, by sentence-transformers' names.
POOLING_TYPES = ("mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens")
#: What becomes of a head's logits.
ACTIVATIONS = ("softmax", "sigmoid", "none")

MAX_DIMENSIONS = 2**20


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What to make of a text. `dimensions` keeps the first entries of a vector, at unit length again if the model's
    vectors have it. `normalize` and `activate` (the head's softmax or sigmoid): None does as the model says. Raises
    ParameterError that names the field; what the model cannot do is told by `PoolingModel.check`."""

    task: str = "embed"
    dimensions: int | None = None
    normalize: bool | None = None
    activate: bool | None = None

    def __post_init__(self) -> None:
        if self.task not in POOLING_TASKS:
            raise ParameterError(f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}", param="task")
        size = self.dimensions
        if size is not None and (type(size) is not int or not 1 <= size <= MAX_DIMENSIONS):
            raise ParameterError(
                f"dimensions must be an integer from 1 to {MAX_DIMENSIONS}, got {str(size)[:24]}", param="dimensions"
            )


class PoolingModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a pooling model gives and how, as its files and the operator say.

    An embedding model has `dimensions` and pools by `pooling_type`, then applies its `dense` layers (folders of their
    weights, in order) and, with `normalize`, scales to unit length. A classifier has `labels` and an `activation`; with
    one label it scores pairs of texts. `matryoshka` lists the lengths to which a vector may be cut: None for none,
    empty for any. `max_tokens` is the longest text its authors meant, 0 if unknown. `prefix` stands before every
    text of which a vector is made, then all is lower-cased if `lowercase`.
    """

    tasks: tuple[str, ...]
    dimensions: int = 0
    pooling_type: str = "mean"
    dense: tuple[str, ...] = ()
    normalize: bool = False
    labels: tuple[str, ...] = ()
    activation: str = "none"
    matryoshka: tuple[int, ...] | None = None
    lowercase: bool = False
    prefix: str = ""
    max_tokens: int = 0

    @property
    def scores_pairs(self) -> bool:
        """Whether a pair of texts is read together and gets one score. Else their vectors are compared."""
        return len(self.labels) == 1

    def check(self, params: PoolingParams) -> None:
        """Refuse what the model cannot do. Raises ParameterError with the way out."""
        if params.task not in self.tasks:
            raise ParameterError(_no_task(params.task), param="task", code="unsupported_task")
        size = params.dimensions
        if size is None or (size == self.dimensions and params.task == "embed"):
            return
        if params.task != "embed":
            raise ParameterError(f"dimensions has no meaning for the task {params.task}", param="dimensions")
        if size > self.dimensions:
            raise ParameterError(
                f"dimensions is {size}, but the model's vectors have {self.dimensions}; ask for at most that many",
                param="dimensions",
            )
        if self.matryoshka is None:
            raise ParameterError(
                f"the model was not trained for vectors of fewer than {self.dimensions} dimensions; leave dimensions "
                "out, or start with --pooler-config '{\"matryoshka\": true}' if you know better",
                param="dimensions",
            )
        if self.matryoshka and size not in self.matryoshka:
            told = ", ".join(map(str, self.matryoshka))
            raise ParameterError(f"dimensions must be one of {told}, got {size}", param="dimensions")


def _no_task(task: str) -> str:
    if task == "classify":
        return "the model has no classification head: it gives vectors, at /v1/embeddings"
    return "the model classifies and gives no vectors: ask at /classify, /v1/score or /v1/rerank"


class Pooled(msgspec.Struct, array_like=True):
    """Numbers of one text: float32, little-endian, row by row. `shape` is [entries], or [tokens, entries]."""

    data: bytes
    shape: list[int]


def check_pooler_config(config: dict[str, Any]) -> None:
    """Refuse an operator's settings of pooling that mean nothing. Raises ParameterError."""
    kinds: dict[str, Any] = {
        "pooling_type": POOLING_TYPES, "normalize": (True, False), "activation": ACTIVATIONS, "matryoshka": None,
    }  # fmt: skip
    for name, value in config.items():
        if name not in kinds:
            raise ParameterError(
                f"pooler_config has no setting {name!r}; there are {', '.join(kinds)}", param="pooler_config"
            )
        allowed = kinds[name]
        if allowed is not None and value not in allowed:
            told = ", ".join(str(each) for each in allowed)
            raise ParameterError(f"pooler_config: {name} must be one of {told}, got {value!r}", param="pooler_config")
    lengths = config.get("matryoshka", True)
    sizes = lengths if isinstance(lengths, list) else []
    sound = lengths is True or lengths is False or isinstance(lengths, list)
    if not sound or not all(type(size) is int and size > 0 for size in sizes):
        raise ParameterError(
            "pooler_config: matryoshka must be true, false or a list of numbers of dimensions", param="pooler_config"
        )
