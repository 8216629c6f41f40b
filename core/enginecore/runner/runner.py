"""The model runner: one step of the plan, on the device."""

from __future__ import annotations

import numpy as np
import torch

from enginecore.ops.dispatch import Ops
from enginecore.plan import NewRequest, StepPlan, StepResult
from enginecore.runner.adapters import RunnerAdapters
from enginecore.runner.batch import PersistentBatch, StepInputs
from enginecore.runner.grammar import Grammars, GrammarStore, missing_logits
from enginecore.runner.model import StepModel
from enginecore.runner.sampler import Sampler


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
    ) -> None:
        self._model = model
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

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan that is not empty; blocks until its tokens are known."""
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
            self.grammars.begin(plan.slots_N[inputs.sample_rows].tolist())
        result = self._model.execute(inputs.batch)
        if result.dtype == torch.int64:
            return self._take_chosen(plan, inputs, result)
        return self._sample(plan, inputs, result)

    def _enter(self, new: NewRequest) -> None:
        self._sampler.enter(new)
        self.grammars.enter(new)
        if self._adapters is not None:
            self._adapters.enter(new)
        params = new.request.params
        if params.logprobs is None and params.prompt_logprobs is None:
            self._wants_logprobs.discard(new.slot)
        else:
            self._wants_logprobs.add(new.slot)

    def _take_chosen(self, plan: StepPlan, inputs: StepInputs, ids_R: torch.Tensor) -> StepResult:
        """The model chose itself: there are tokens and no logits."""
        token_ids: list[int] = ids_R[: len(inputs.sample_rows)].tolist()
        self._remember(plan, inputs, token_ids)
        errors = {}
        if self._wants_logprobs:
            slots = plan.slots_N.tolist()
            refused = [row for row in inputs.sample_rows if slots[row] in self._wants_logprobs]
            errors = dict.fromkeys(refused, "this device gives tokens only, no log-probabilities")
        if self.grammars:
            rows = [(row, self._batch.request(int(plan.slots_N[row]))) for row in inputs.sample_rows]
            errors |= missing_logits(rows)
        return StepResult(token_ids, errors=errors, seconds=self._model.step_seconds())

    def reference_ops(self) -> list[str]:
        return sorted(self._ops.fallbacks)

    def _sample(self, plan: StepPlan, inputs: StepInputs, logits_RV: torch.Tensor) -> StepResult:
        rows = inputs.sample_rows
        prompt_logprobs = {}
        at = len(rows)
        for row, first, count in inputs.prompt_rows:
            slot = int(plan.slots_N[row])
            targets = self._batch.tokens_SL[slot, first : first + count].tolist()
            params = self._batch.request(slot).params
            prompt_logprobs[row] = self._sampler.prompt_logprobs(logits_RV[at : at + count], params, targets)
            at += count
        if not rows:
            return StepResult([], prompt_logprobs=prompt_logprobs, seconds=self._model.step_seconds(),
                              replayed=self._model.replayed)  # fmt: skip
        slots = plan.slots_N[rows].tolist()
        lengths = (plan.starts_N + plan.num_new_N)[rows]
        token_ids, logprobs, errors = self._sampler.sample(
            logits_RV[: len(rows)], slots, lengths, self._batch.num_prompt_S[slots], self._batch.tokens_SL
        )
        forced = self._sampler.forced(slots, lengths, token_ids, errors) if self.grammars else {}
        self._remember(plan, inputs, token_ids)
        for i, tokens in forced.items():
            self._batch.tokens_SL[slots[i], lengths[i] + 1 : lengths[i] + 1 + len(tokens)] = tokens
        return StepResult(
            token_ids,
            forced={rows[i]: tokens for i, tokens in forced.items()},
            logprobs={rows[i]: entry for i, entry in logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            errors={rows[i]: text for i, text in errors.items()},
            seconds=self._model.step_seconds(),
            replayed=self._model.replayed,
        )

    def _remember(self, plan: StepPlan, inputs: StepInputs, token_ids: list[int]) -> None:
        rows = np.array(inputs.sample_rows, np.int64)
        if len(rows):
            self._batch.append(plan.slots_N[rows], (plan.starts_N + plan.num_new_N)[rows], token_ids)
