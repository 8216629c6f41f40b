"""The stages of on_gpu.py. Each writes what it has found as soon as it has, so that a time limit loses little.

Shape suffixes: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB = 2**20


class Stage:
    """One stage: `note` keeps a finding, `guard` runs a part whose failure does not end the others."""

    def __init__(self, name: str, options: Any) -> None:
        self.name, self.device, self.tiny, self.work = name, options.device, options.tiny, Path(options.work)
        self.deadline = time.monotonic() + (options.seconds or 600)
        self.found: dict[str, Any] = {}

    def note(self, **values: Any) -> None:
        self.found.update(values)
        (self.work / f"{self.name}.json").write_text(json.dumps(self.found))

    def guard(self, what: str, part: Callable[[], Any]) -> Any:
        try:
            return part()
        except Exception as error:
            traceback.print_exc()
            failures = {**self.found.get("failures", {}), what: f"{type(error).__name__}: {error}"[:600]}
            self.note(failures=failures, error=f"{len(failures)} part(s) failed: {', '.join(failures)}")
            return None

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def make_backend(stage: Stage) -> Any:
    from enginecore.device.select import create_backend, select_device

    selected = select_device(stage.device)
    backend = create_backend(selected)
    backend.set_device(selected.index)
    return backend


def seconds_of(backend: Any, work: Callable[[], Any], least: float) -> float:
    """Seconds of one call: the best of three rounds of at least `least` seconds."""

    def spent(calls: int) -> float:
        backend.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        backend.synchronize()
        return time.perf_counter() - begun

    calls = 1
    spent(1)
    while spent(calls) < least and calls < 4096:
        calls *= 2
    return min(spent(calls) for _ in range(3)) / calls


def copy_rate(backend: Any, size: int, least: float) -> float:
    """GB/s of a copy on the device, reads and writes counted."""
    source = torch.ones(size // 4, device=backend.torch_device())
    target = torch.empty_like(source)
    return 2 * size / seconds_of(backend, lambda: target.copy_(source), least) / 1e9


# ---- machine


def machine(stage: Stage) -> None:
    """Versions, the device, what the backend claims, and the yardsticks."""
    import platform
    from importlib import metadata

    names = ("torch", "triton", "transformers", "enginecore", "flashinfer-python", "flash-attn")
    installed: dict[str, str] = {}
    for distribution in metadata.distributions():  # in the order of the path: the first is the one that is imported
        if distribution.name in names:
            installed.setdefault(distribution.name, distribution.version)
    stage.note(versions=installed, python=platform.python_version(), platform=platform.platform())
    backend = make_backend(stage)
    info = backend.memory.memory_info()
    stage.note(
        backend=type(backend).__name__, isa=list(backend.capabilities.isa), memory=dict(vars(info)),
        attention_reference=backend.attention.reference_reason(), process_base=backend.memory.process_used_bytes(),
    )  # fmt: skip
    device, least = backend.torch_device(), 0.002 if stage.tiny else 0.05
    stage.note(copy_gb_s=copy_rate(backend, (16 if stage.tiny else 2048) * MIB, least))
    side = 256 if stage.tiny else 8192
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    product = seconds_of(backend, lambda: a @ a, least)
    stage.note(product_tflop_s=2 * side**3 / product / 1e12)


# ---- kit

#: Processes that run the kit at once: most of its time goes into compiling kernels on the host.
WORKERS = max(2, (os.cpu_count() or 2) * 5 // 8)
#: Time kept for level 6, whose figures want the device for themselves.
ALONE = 25


def kit(stage: Stage) -> None:
    """Conformance, levels 0 to 6. Groups that were not reached in time are named as such."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    from enginecore.testing.cases import all_cases, select
    from enginecore.testing.report import Report
    from enginecore.testing.runner import Runner, groups
    from enginecore.testing.source import BackendSource

    class Resolved(BackendSource):
        """Found already: not probed again by each worker."""

        def resolved(self) -> Resolved:
            return self

    chosen = [c for c in all_cases() if c.op != "real_models"]
    if stage.tiny:
        chosen = select(chosen, "0,1", "contract,rms_norm/,silu_and_mul/")
    begun, results, skipped = time.monotonic(), [], []
    source = Resolved(device=BackendSource.of(stage.device).resolved().device)
    runners, mine = [], threading.local()

    def play(cases: list[Any], until: float) -> None:
        if stage.left < until:
            skipped.extend(case.id for case in cases)
            return
        if not hasattr(mine, "runner"):
            mine.runner = Runner(source)
            runners.append(mine.runner)
        results.extend(mine.runner.run_group(cases))
        failing = [r for r in results if not r.outcome.ok]
        stage.note(passed=sum(r.outcome.value == "pass" for r in results), failed=len(failing),
                   failures={r.case_id: f"{r.outcome.value}: {r.message}"[:400] for r in failing})  # fmt: skip

    # Cheap levels first; the largest groups are cut, so that no process works alone at the end.
    pieces = [
        group[i : i + 12] for group in groups([c for c in chosen if c.level < 6]) for i in range(0, len(group), 12)
    ]
    reserve = 0 if stage.tiny else ALONE
    with ThreadPoolExecutor(2 if stage.tiny else WORKERS) as pool:
        for future in [pool.submit(play, piece, reserve + 5) for piece in pieces]:
            stage.guard("a group of cases", future.result)
    for group in groups([c for c in chosen if c.level == 6]):
        stage.guard("level 6", lambda group=group: play(group, 3))
    report = Report(target=source.device, results=results, about=runners[0].about if runners else {},
                    seconds=time.monotonic() - begun)  # fmt: skip
    stage.note(report=report.to_dict(), not_reached=skipped)
    if skipped:
        stage.note(error=f"{len(skipped)} cases were not reached in time")
    for runner in runners:
        runner.close()


# ---- models


def model_folder(stage: Stage) -> Path:
    """A Llama-shaped model of random weights (1.1 B parameters, spread so that tokens differ clearly), made once."""
    import transformers

    folder = stage.work / "model"
    if (folder / "config.json").exists():
        return folder
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size")  # fmt: skip
    sizes = dict(zip(names, (64, 128, 2, 4, 2, 512) if stage.tiny else (2048, 8192, 16, 32, 8, 32768), strict=True))
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False
    )
    device = make_device(stage)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.3 / math.sqrt(parameter.shape[-1]), generator=generator)
    part = stage.work / "model.part"
    model.save_pretrained(part)
    part.rename(folder)
    return folder


def make_device(stage: Stage) -> Any:
    """torch's device without a backend: for transformers."""
    return "cpu" if stage.device == "cpu" else "cuda"


def open_engine(stage: Stage, dtype: str, **settings: Any) -> Any:
    from enginecore.config import EngineArgs
    from enginecore.engine.client import InprocClient

    values: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "memory_utilization": 0.35, **settings}
    return InprocClient(EngineArgs(model=str(model_folder(stage)), device=stage.device, dtype=dtype, **values))


def prompts_of(stage: Stage, count: int, length: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    vocab = 512 if stage.tiny else 32768
    return torch.randint(3, vocab, (count, length), generator=generator).tolist()


def submit(client: Any, prompts: list[list[int]], count: int, name: str) -> None:
    from enginecore.request import EngineRequest, SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        client.add(EngineRequest(f"{name}{i}", prompt, params, count))


def drain(client: Any, answers: dict[str, list[int]]) -> None:
    while client.has_work():
        for output in client.step().outputs:
            if output.error:
                raise RuntimeError(output.error)
            answers.setdefault(output.request_id, []).extend(output.token_ids)


def parity(stage: Stage) -> None:
    """Greedy tokens of the engine against transformers' own generate, both in float32."""
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = False
    count = 8 if stage.tiny else 32
    prompts = [prompt[: 5 + 37 * i] for i, prompt in enumerate(prompts_of(stage, 4 if stage.tiny else 8, 300))]
    folder = model_folder(stage)
    stage.note(parameters=sum(f.stat().st_size for f in folder.glob("*.safetensors")) // 2)
    client = open_engine(stage, "float32")
    stage.note(ledger=client.ready.ledger, choices=[list(c) for c in client.ready.config.choices])
    answers: dict[str, list[int]] = {}
    for name in ("first", "again"):  # the second time with prompts from the prefix cache
        submit(client, prompts, count, name)
        drain(client, answers)
    stats = client.step().stats
    stage.note(reference_ops=stats.reference_ops, graph_replays=stats.graph_replays, eager_steps=stats.eager_steps)
    client.shutdown()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(make_device(stage)).eval()
    different, near_ties = 0, 0
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=make_device(stage))
        with torch.inference_mode():
            told = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
                output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        right = told.sequences[0, len(prompt) :].tolist()
        for name in ("first", "again"):
            gap = first_gap(answers[f"{name}{i}"], right, told.logits)
            near_ties += gap is not None and gap < 1e-3
            different += gap is not None and gap >= 1e-3
        stage.note(compared=2 * (i + 1), different=different, near_ties=near_ties)


def first_gap(answer: list[int], right: list[int], logits: Any) -> float | None:
    """How much likelier transformers' token is where the answers part, as a difference of logits; None when equal."""
    for position, (a, b) in enumerate(zip(answer, right, strict=True)):
        if a != b:
            row = logits[position][0].float()
            return float(row[b] - row[a])
    return None


def steps(stage: Stage) -> None:
    """Seconds of a decode step with and without graphs, and how full the KV cache's blocks are."""
    counts = (1, 4) if stage.tiny else (1, 32, 256)
    for eager in (True, False):
        key = "eager" if eager else "graphs"
        client = stage.guard(key, lambda eager=eager: open_engine(
            stage, "bfloat16", max_num_seqs=counts[-1], enforce_eager=eager))  # fmt: skip
        if client is None:
            continue
        times: dict[str, float] = {}
        for count in counts:
            submit(client, prompts_of(stage, count, 100), 70, f"{key}-{count}-")
            spent: list[float] = []
            while client.has_work():
                begun = time.perf_counter()
                step = client.step()
                if step.stats.num_waiting == 0 and len(step.outputs) == count:
                    spent.append(time.perf_counter() - begun)
                if len(spent) == 40:
                    memory = client.call("memory")
                    stage.note(kv_utilisation=memory["tokens_held"] / max(1, memory["slots_held"]))
            times[str(count)] = 1e3 * statistics.median(spent[len(spent) // 4 :])
            stage.note(**{f"{key}_ms": times})
        stage.note(**{f"{key}_replays": client.step().stats.graph_replays})
        if not eager:
            stage.note(ledger=client.ready.ledger)
        client.shutdown()
    if "eager_ms" in stage.found and stage.found.get("graphs_replays"):
        stage.note(graph_ratio=stage.found["graphs_ms"]["1"] / stage.found["eager_ms"]["1"])


def throughput(stage: Stage) -> None:
    """Tokens a second beside transformers' generate, in bfloat16: prompts of 128 tokens, answers of 64."""
    import transformers

    counts, length, answer = ((1, 4), 16, 8) if stage.tiny else ((1, 32, 256), 128, 64)
    rows: dict[str, dict[str, float]] = {str(count): {} for count in counts}
    client = open_engine(stage, "bfloat16", max_num_seqs=counts[-1], max_num_batched_tokens=8192)
    submit(client, prompts_of(stage, 2, length, seed=9), 4, "warm")
    drain(client, {})
    for count in counts:
        submit(client, prompts_of(stage, count, length, seed=count), answer, f"r{count}-")
        begun = time.perf_counter()
        drain(client, {})
        rows[str(count)]["enginecore"] = count * answer / (time.perf_counter() - begun)
        stage.note(batches=rows)
    client.shutdown()
    folder = model_folder(stage)
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(make_device(stage)).eval()
    )
    for count in counts:
        ids = torch.tensor(prompts_of(stage, count, length, seed=count), device=make_device(stage))
        for new in (2, answer):  # the first warms up
            begun = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new,
                                     min_new_tokens=new, eos_token_id=None, pad_token_id=0)  # fmt: skip
            out.cpu()
        rows[str(count)]["transformers"] = count * answer / (time.perf_counter() - begun)
        stage.note(batches=rows)


def attention(stage: Stage) -> None:
    from gpu_attention import decode_share, prefill_ratio, provider_table

    backend = make_backend(stage)
    stage.guard("decode", lambda: decode_share(stage, backend))
    stage.guard("prefill", lambda: prefill_ratio(stage, backend))
    stage.guard("providers", lambda: provider_table(stage, backend))


RUN: dict[str, Callable[[Stage], None]] = {
    "machine": machine, "kit": kit, "parity": parity, "attention": attention, "steps": steps, "throughput": throughput,
}  # fmt: skip


def run(name: str, options: Any) -> int:
    """The exit code: 0, or 1 with the reason under "error"."""
    stage = Stage(name, options)
    stage.note()
    stage.guard(name, lambda: RUN[name](stage))
    return 1 if "error" in stage.found else 0
