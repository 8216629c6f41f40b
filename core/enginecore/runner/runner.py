"""The model runner: one step of the plan, on the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from enginecore.ops.dispatch import Ops
from enginecore.plan import NewRequest, StepPlan, StepResult
from enginecore.request import TokenLogprobs
from enginecore.runner.adapters import RunnerAdapters
from enginecore.runner.batch import PersistentBatch, StepInputs
from enginecore.runner.grammar import Grammars, GrammarStore, missing_logits
from enginecore.runner.graphs import GraphedModel
from enginecore.runner.model import LateTokens, PagedModel, StepModel
from enginecore.runner.sampler import Draw, Sampler
from enginecore.runner.speculation import Speculation, collapse
from enginecore.runner.transfers import Transfers


@dataclass
class Submitted:
    """A step that the device has. R: what is sampled, each after `lengths_R` tokens of its sequence."""

    plan: StepPlan
    inputs: StepInputs
    slots_R: np.ndarray
    lengths_R: np.ndarray
    entries_R: np.ndarray
    seconds: float | None
    replayed: bool
    begun: float
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    draw: Draw | None = None
    #: Tokens that the model chose itself.
    chosen_R: torch.Tensor | None = None


class ModelRunner:
    """Keeps the persistent batch, runs the model, samples. The only place where a plan meets tensors."""

    def __init__(
        self,
        model: StepModel,
        *,
        device: torch.device,
        ops: Ops,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        adapters: RunnerAdapters | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._speculation = speculation
        self._model, self._device = model, device
        #: The last token that was sampled in each slot, where steps are planned ahead.
        self._last_S: torch.Tensor | None = None
        self._adapters = adapters
        self._ops = ops
        self._batch = PersistentBatch(max_num_seqs, max_model_len, block_size)
        #: Slots whose request asks for log-probabilities, of the prompt or the answer.
        self._wants_logprobs: set[int] = set()
        self.grammars = Grammars(GrammarStore(vocab_size), device)
        self._sampler = Sampler(max_num_seqs, vocab_size, device, ops, self.grammars)

    @property
    def model(self) -> StepModel:
        return self._model

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan that is not empty; blocks until its tokens are known."""
        result: StepResult = self.collect(self.submit(plan))
        return result

    def look_ahead(self, transfers: Transfers) -> None:
        """From now on the next step may be submitted before a step is collected; the tokens in between stay on the
        device. Before the first step, and only where our layers run the model."""
        paged = self._model.paged if isinstance(self._model, GraphedModel) else self._model
        assert isinstance(paged, PagedModel)
        paged.transfers = self._sampler.transfers = transfers
        if self._adapters is not None:
            self._adapters.transfers = transfers
        self._last_S = torch.zeros(len(self._batch.requests), dtype=torch.int64, device=self._device)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def submit(self, plan: StepPlan) -> Submitted:
        """Give a plan that is not empty to the device. Every plan is submitted after the one before it; it is collected
        before the second after it is submitted."""
        begun = time.perf_counter()
        self._batch.apply(plan)
        if self._adapters is not None:
            self._adapters.place(plan)
        for new in plan.new:
            self._enter(new)
        if plan.copies:
            self._model.copy_blocks(plan.copies)
        inputs = self._batch.inputs(plan)
        if self._adapters is not None:
            self._adapters.begin(plan, inputs.batch.logits_indices)
        if self.grammars:
            self.grammars.begin(plan.slots_N[inputs.rows_R].tolist())
        late = self._late(inputs)
        result = self._model.execute(inputs.batch) if late is None else self._model.execute(inputs.batch, late)
        slots, lengths = plan.slots_N[inputs.rows_R], inputs.lengths_R
        submitted = Submitted(plan, inputs, slots, lengths, self._batch.expect(slots, lengths),
                              seconds=self._model.step_seconds(), replayed=self._model.replayed,
                              begun=begun)  # fmt: skip
        if result.dtype == torch.int64:
            submitted.chosen_R = result
        else:
            self._sample(submitted, result)
        return submitted

    def _late(self, inputs: StepInputs) -> LateTokens | None:
        if inputs.late is None:
            return None
        assert self._last_S is not None, "a step needs a token that is not known"
        index, slots = self._sampler.transfers.send(*inputs.late)
        return LateTokens(index, slots, self._last_S)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def collect(self, submitted: Submitted) -> StepResult:
        """What came of a step, in the order of submission; blocks until its tokens are known."""
        if submitted.chosen_R is not None:
            return self._take_chosen(submitted, submitted.chosen_R)
        rows, slots = submitted.inputs.rows_R.tolist(), submitted.slots_R
        result = StepResult([], prompt_logprobs=submitted.prompt_logprobs, seconds=submitted.seconds,
                            replayed=submitted.replayed)  # fmt: skip
        if submitted.draw is None:
            return result
        token_ids, logprobs, errors = self._sampler.settle(submitted.draw)
        mine = self._batch.append(slots, submitted.lengths_R, token_ids, submitted.entries_R)
        forced = {}
        if self.grammars:
            forced = self._sampler.forced(np.where(mine, slots, -1).tolist(), submitted.lengths_R, token_ids, errors)
        for i, tokens in forced.items():
            at = submitted.lengths_R[i] + 1
            self._batch.tokens_SL[slots[i], at : at + len(tokens)] = tokens
        result = replace(result, token_ids=token_ids, forced=forced, logprobs=logprobs, errors=errors)
        result = collapse(result, submitted.plan, rows)
        if self._speculation is not None:
            seconds = time.perf_counter() - submitted.begun
            result = self._speculation.look_on(result, submitted.plan, self._batch.tokens_SL, seconds)
        return result

    def _enter(self, new: NewRequest) -> None:
        self._sampler.enter(new)
        self.grammars.enter(new)
        if self._speculation is not None:
            self._speculation.enter(new.slot, new.request)
        if self._adapters is not None:
            self._adapters.enter(new)
        params = new.request.params
        if params.logprobs is None and params.prompt_logprobs is None:
            self._wants_logprobs.discard(new.slot)
        else:
            self._wants_logprobs.add(new.slot)

    def _take_chosen(self, submitted: Submitted, ids_R: torch.Tensor) -> StepResult:
        """The model chose itself: there are tokens and no logits."""
        plan, inputs = submitted.plan, submitted.inputs
        token_ids: list[int] = ids_R[: len(inputs.sample_rows)].tolist()
        self._batch.append(submitted.slots_R, submitted.lengths_R, token_ids, submitted.entries_R)
        errors = {}
        if self._wants_logprobs:
            slots = plan.slots_N.tolist()
            refused = [row for row in inputs.sample_rows if slots[row] in self._wants_logprobs]
            errors = dict.fromkeys(refused, "this device gives tokens only, no log-probabilities")
        if self.grammars:
            rows = [(row, self._batch.request(int(plan.slots_N[row]))) for row in inputs.sample_rows]
            errors |= missing_logits(rows)
        return StepResult(token_ids, errors=errors, seconds=submitted.seconds)

    def reference_ops(self) -> list[str]:
        return sorted(self._ops.fallbacks)

    def _sample(self, submitted: Submitted, logits_RV: torch.Tensor) -> None:
        rows, plan = submitted.inputs.rows_R, submitted.plan
        at = len(rows)
        for row, first, count in submitted.inputs.prompt_rows:
            slot = int(plan.slots_N[row])
            targets = self._batch.tokens_SL[slot, first : first + count].tolist()
            params = self._batch.request(slot).params
            submitted.prompt_logprobs[row] = self._sampler.prompt_logprobs(logits_RV[at : at + count], params, targets)
            at += count
        if not len(rows):
            return
        slots = submitted.slots_R.tolist()
        submitted.draw = self._sampler.draw(
            logits_RV[: len(rows)], slots, submitted.lengths_R, self._batch.num_prompt_S[slots], self._batch.tokens_SL
        )
        if self._last_S is not None:
            self._last_S.index_copy_(0, self._sampler.transfers.send(submitted.slots_R)[0], submitted.draw.ids_R)
