"""L5: whole models through the engine against transformers in float32, however the work is cut up and shared out."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginecore.device import GraphSupport
from enginecore.testing import tiny_models
from enginecore.testing.case import Case, CaseContext, FalseClaim
from enginecore.testing.source import BackendSource

if TYPE_CHECKING:
    from enginecore.request import TokenLogprobs

#: Prompt lengths around block edges (16 tokens), the last four with a common beginning of 33 tokens.
LENGTHS = (1, 15, 16, 17, 31, 60, 64, 49, 81)
SHARED = 33
COUNT = 14

#: In float32 a token may differ from the oracle's where its two best are closer than this; in bfloat16 and float16 far
#: more may, and log-probabilities move by this much and a little.
NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.4}

Answer = list[tuple[int, "TokenLogprobs"]]


class Engine:
    """The engine of a case: the plugin under test, the model at `path`."""

    def __init__(self, ctx: CaseContext, path: str, **settings: Any) -> None:
        from enginecore.config import EngineArgs
        from enginecore.engine.client import InprocClient

        source = BackendSource(**ctx.options["source"])
        device = source.device
        if source.factory:
            from enginecore.testing import adhoc

            device = adhoc.install(source, Path(ctx.options["scratch"]) / "adhoc")
        dtypes = ctx.backend.capabilities.dtypes
        self.dtype = next((d for d in NEAR_TIE if d in dtypes), min(dtypes))
        sizes = ctx.backend.capabilities.block_sizes
        values = {"max_model_len": 128, "num_blocks": 128, "block_size": 16 if 16 in sizes else min(sizes), **settings}
        self._ctx = ctx
        self._client = InprocClient(
            EngineArgs(model=path, device=device, dtype=self.dtype, device_options=source.options, **values)
        )
        self._count = 0
        self.stats: Any = None

    def choice(self, setting: str) -> str:
        """What the engine decided about a setting when it was built, and why."""
        found = [(value, reason) for name, value, reason in self._client.ready.config.choices if name == setting]
        return "; ".join(f"{value} ({reason})" for value, reason in found) or "nothing is said of it"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.shutdown()

    def generate(self, prompts: Sequence[list[int]], count: int) -> tuple[list[Answer], list[int]]:
        """Greedy answers to `prompts`, all at once, and how many tokens of each came from the prefix cache."""
        from enginecore.request import EngineRequest, SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, logprobs=5, ignore_eos=True)
        names = {f"case-{self._count + i}": i for i in range(len(prompts))}
        self._count += len(prompts)
        for name, index in names.items():
            self._client.add(EngineRequest(name, list(prompts[index]), params, count))
        answers: list[Answer] = [[] for _ in prompts]
        cached = [0] * len(prompts)
        while self._client.has_work():
            step = self._client.step()
            self.stats = step.stats
            for output in step.outputs:
                self._ctx.check(output.error is None, f"the engine refused a request: {output.error}")
                index = names[output.request_id]
                answers[index] += zip(output.token_ids, output.logprobs or [], strict=True)
                cached[index] = max(cached[index], output.num_cached_tokens)
        return answers, cached


def compare(ctx: CaseContext, answer: Answer, steps: list[tiny_models.Step], dtype: str, what: str) -> None:
    """Tokens equal the oracle's up to the first near tie, and log-probabilities are close until there."""
    near = NEAR_TIE.get(dtype, NEAR_TIE["bfloat16"])
    allowed = ctx.profile.logprob_tolerance if dtype == "float32" else near
    ctx.check(len(answer) == len(steps), f"{what}: {len(answer)} tokens came back where {len(steps)} were asked for")
    for position, ((token, logprobs), step) in enumerate(zip(answer, steps, strict=True)):
        told = f"{what}, generated token {position}"
        for best, value in zip(logprobs.token_ids, logprobs.logprobs, strict=True):
            off = abs(value - float(step.logprobs_V[best]))
            ctx.check(
                off <= allowed, f"{told}: the log-probability of token {best} is {off:.2g} off ({allowed:.2g} allowed)"
            )
        if token != step.token:
            gap = float(step.logprobs_V[step.token] - step.logprobs_V[token])
            ctx.check(gap < near, f"{told}: {token} instead of {step.token}, which is {gap:.3g} likelier")
            return  # a tie broken the other way: from here on the texts differ by right


class Trial:
    """One tiny model: its directory, prompts and the oracle's answers, made once for all scenarios of a run."""

    def __init__(self, ctx: CaseContext, architecture: str) -> None:
        self.ctx = ctx
        self.path = Path(ctx.options["scratch"]) / architecture
        self.prompts = tiny_models.made_up_prompts(tiny_models.VOCAB, LENGTHS, SHARED)
        answers = self.path / "oracle.pickle"
        if not answers.exists():
            model = tiny_models.write_model(architecture, self.path)
            right = [tiny_models.greedy(model, prompt, COUNT) for prompt in self.prompts]
            answers.with_suffix(".part").write_bytes(pickle.dumps(right))
            answers.with_suffix(".part").replace(answers)
        self.right: list[list[tiny_models.Step]] = pickle.loads(answers.read_bytes())

    def run(self, engine: Engine, order: Sequence[int], what: str) -> list[int]:
        answers, cached = engine.generate([self.prompts[i] for i in order], COUNT)
        for index, answer in zip(order, answers, strict=True):
            compare(self.ctx, answer, self.right[index], engine.dtype, f"{what}, prompt of {LENGTHS[index]} tokens")
        return cached

    def engine(self, **settings: Any) -> Engine:
        return Engine(self.ctx, str(self.path), **settings)

    @property
    def everyone(self) -> range:
        return range(len(self.prompts))


def alone(trial: Trial) -> None:
    with trial.engine() as engine:
        for index in (0, 3, 5, 8):
            trial.run(engine, [index], "alone")


def together(trial: Trial) -> None:
    """All at once, then again in other orders and companies, without a prefix cache."""
    with trial.engine(enable_prefix_caching=False) as engine:
        for order in (trial.everyone, trial.ctx.permutation(len(trial.prompts)), [7, 0, 4]):
            cached = trial.run(engine, list(order), f"in the order {list(order)}")
            trial.ctx.check(not any(cached), "tokens came from a prefix cache that is switched off")
        _check_replayed(trial, engine)


def _check_replayed(trial: Trial, engine: Engine) -> None:
    """A device that claims graphs replays the steps of a model that is known to be captured."""
    backend = trial.ctx.backend
    claimed = backend.graphs is not None and backend.capabilities.graph_support is not GraphSupport.NEVER
    if claimed and trial.path.name == "llama" and not engine.stats.graph_replays:
        raise FalseClaim(f"graphs are claimed, and no step was replayed: {engine.choice('graphs')}")


def prefix_cached(trial: Trial) -> None:
    with trial.engine() as engine:
        trial.run(engine, list(trial.everyone), "first time")
        cached = trial.run(engine, list(reversed(trial.everyone)), "with its prompt cached")
        trial.ctx.check(sum(cached) > 0, "the second run of the same prompts found nothing in the prefix cache")


def chunked(trial: Trial) -> None:
    for tokens in (8, 21):
        with trial.engine(max_num_batched_tokens=tokens, max_num_seqs=4) as engine:
            trial.run(engine, list(trial.everyone), f"in steps of {tokens} tokens")


def preempted(trial: Trial) -> None:
    """So few blocks that running sequences lose theirs, and are computed again when they resume."""
    with trial.engine(num_blocks=8, enable_prefix_caching=False) as engine:
        short = [1, 2, 1, 2, 1, 2, 1, 2]
        trial.run(engine, [*short, 5, 0, 8], "with preemption")
        trial.ctx.check(engine.stats.num_preemptions > 0, "the pool was to be too small, but nothing was preempted")
        free, total = engine.stats.num_free_blocks, engine.stats.num_blocks
        trial.ctx.check(free == total, f"{total - free} blocks are still taken after every request has ended")


#: The architectures that go through every scenario; the others skip the plainest.
FULLY = ("llama", "qwen3_qk_norm", "gemma2_soft_cap")

SCENARIOS: dict[str, Callable[[Trial], None]] = {
    "alone": alone, "together": together, "prefix_cached": prefix_cached, "chunked": chunked, "preempted": preempted,
}  # fmt: skip


def tiny(architecture: str, scenario: str) -> Case:
    def run(ctx: CaseContext) -> None:
        if ctx.backend.attention is None:
            ctx.unsupported("the backend runs whole models through its runtime: there is no oracle for its weights")
        require(ctx, architecture)
        SCENARIOS[scenario](Trial(ctx, architecture))

    return Case(5, "tiny_models", f"{architecture}_{scenario}", run, seconds=120)


def require(ctx: CaseContext, architecture: str) -> None:
    """Say that the device does not claim what the architecture needs, before the engine refuses it."""
    needs = {"window": "sliding_window", "soft_cap": "soft_cap", "sinks": "sinks"}
    features = {feature for word, feature in needs.items() if word in architecture}
    features |= {"sliding_window"} if "gemma2" in architecture or "gpt_oss" in architecture else set()
    missing = sorted(features - ctx.backend.capabilities.features)
    head_size = int(tiny_models.ARCHITECTURES[architecture][1].get("head_dim", 16))
    if missing:
        ctx.unsupported("features not supported: " + ", ".join(missing))
    if not ctx.backend.capabilities.supports_head_size(head_size):
        ctx.unsupported(f"head size {head_size} is not supported")


def real_models(ctx: CaseContext) -> None:
    """The models that were asked for by name, at full size."""
    names: list[str] = ctx.options.get("models") or []
    if not names:
        ctx.unsupported("no real model was asked for (--model NAME)")
    from enginecore.models.store import resolve_model

    for name in names:
        files = resolve_model(name)
        model = tiny_models.load_oracle(files.path, files.kind)
        prompts = tiny_models.made_up_prompts(int(files.config["vocab_size"]), (1, 17, 64, 90), SHARED)
        right = [tiny_models.greedy(model, prompt, COUNT) for prompt in prompts]
        del model
        with Engine(ctx, name, max_model_len=256) as engine:
            for turn in ("first time", "with its prompt cached"):
                answers, _ = engine.generate(prompts, COUNT)
                for prompt, answer, steps in zip(prompts, answers, right, strict=True):
                    compare(ctx, answer, steps, engine.dtype, f"{name}, {turn}, prompt of {len(prompt)} tokens")


def cases() -> list[Case]:
    found = [
        tiny(architecture, scenario)
        for architecture in tiny_models.ARCHITECTURES
        for scenario in SCENARIOS
        if scenario not in ("alone", "together") or architecture in FULLY
    ]
    return [*found, Case(5, "real_models", "greedy", real_models, seconds=900)]
