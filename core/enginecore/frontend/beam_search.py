"""What `LLM.beam_search` takes and gives, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

from enginecore.errors import ParameterError
from enginecore.frontend.outputs import CompletionOutput, LogprobDict, RequestOutput
from enginecore.request import BeamOptions, SamplingParams


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search; the rules and the meaning of each setting are those of transformers' `generate(num_beams=k)`.

    `beam_width` answers come back, or the best `num_return_sequences` of them. Answers are ranked by the sum of their
    tokens' log-probabilities divided by (number of tokens) ** `length_penalty`, so a larger penalty favours longer
    ones. `early_stopping` True ends as soon as `beam_width` answers are finished, False when the best open beam as it
    stands cannot beat them, "never" when no open beam could even at its greatest length. `temperature` is there for
    callers of vLLM; a search does not sample, so it must be 0 or 1. Raises ParameterError that names the field.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    num_return_sequences: int | None = None
    temperature: float = 0.0
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            raise ParameterError("a beam search needs max_tokens", param="max_tokens")
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same as the engine takes it."""
        beam = BeamOptions(self.beam_width, self.length_penalty, self.early_stopping)
        return SamplingParams(
            beam=beam,
            n=self.beam_width if self.num_return_sequences is None else self.num_return_sequences,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=self.logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer. `tokens` and `text` begin with the prompt's; `completion` is the answer alone."""

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[LogprobDict] | None
    completion: CompletionOutput = field(repr=False)


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_output(output: RequestOutput, prompt_text: str) -> BeamSearchOutput:
    """From the engine's shape to this one."""
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=output.prompt_token_ids + choice.token_ids,
                text=prompt_text + choice.text,
                cum_logprob=choice.cumulative_logprob or 0.0,
                score=choice.score or 0.0,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=choice.logprobs,
                completion=choice,
            )
            for choice in output.outputs
        ]
    )
