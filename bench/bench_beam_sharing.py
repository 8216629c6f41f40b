"""KV memory that beams of the real small model save by sharing, beside what `bench kv-policies` draws.

    python bench/bench_beam_sharing.py

Four prompts of 64 tokens from the built-in workload, 160 new tokens. The share of blocks saved is one minus blocks in
use over blocks that the beams' tables have in all, summed over steps.
"""

from __future__ import annotations

from enginecore.cli.bench_kv_published import WIDTHS
from enginecore.cli.bench_kv_sharing import saved
from enginecore.cli.bench_workload import load_workload
from enginecore.config import EngineArgs
from enginecore.engine.build import build_engine
from enginecore.frontend.tokenizer import Tokenizer
from enginecore.request import BeamOptions, EngineRequest, SamplingParams

PROMPT, NEW = 64, 160


def main() -> None:
    args = EngineArgs(model="smollm2-135m", device="cpu", dtype="bfloat16", max_model_len=512, num_blocks=512)
    engine, ready = build_engine(args)
    encode = Tokenizer.load(ready.config.model_path).encode
    texts = (item.prompt for item in load_workload(None, 32))
    prompts = [ids for ids in (encode(text) for text in texts if isinstance(text, str)) if len(ids) >= PROMPT][:4]
    for width in WIDTHS:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, beam=BeamOptions(width))
            engine.add(EngineRequest(f"{width}-{i}", prompt[:PROMPT], params, NEW))
        used, held, scheduler = 0, 0, engine.scheduler
        while engine.has_work():
            engine.step()
            used += scheduler.pool.num_blocks - scheduler.pool.num_free
            held += int(scheduler.running.num_blocks_S[scheduler.running.order].sum())
        drawn = saved(f"{PROMPT}:{NEW}", width, beams=True, num_requests=20)
        print(f"{width} beams: real {1 - used / held:.1%}, drawn {drawn:.1%}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
