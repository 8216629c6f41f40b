"""enginecore and vLLM in turn on the same work, as bench/peers/README.md describes."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = ROOT / "core" / "enginecore" / "cli" / "data" / "sharegpt_like.json"


def run(command: list[str], **environment: str) -> dict[str, Any]:
    """The JSON object with figures that begins a line of what `command` prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    for match in re.finditer(r"^\{", done.stdout, re.MULTILINE):
        try:
            report, _ = json.JSONDecoder().raw_decode(done.stdout, match.start())
        except ValueError:
            continue
        if "output_tok_per_s" in report or "batch" in report:
            return dict(report)
    raise SystemExit(f"{command[0]} reported no figures")


def ours(args: argparse.Namespace, quantization: str, *, stream: bool) -> float:
    """Output tokens a second: of all requests at once, or of one stream of 128 tokens while it decodes."""
    engine = [args.model, "--device", "cpu", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32"]
    work = ["latency", "--batch-sizes", "1", "--input-len", "8", "--output-len", "128"] if stream else [
        "throughput", "--num-requests", str(args.num_requests)]  # fmt: skip
    command = [sys.executable, "-m", "enginecore", "bench", work[0], *engine, *work[1:]]
    report = run([*command, "--quantization", quantization, "--json"])
    return float(1000 / report["batch"]["1"]["tpot_ms"] if stream else report["output_tok_per_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a directory of bfloat16 safetensors")
    parser.add_argument("--vllm-python", required=True, help="the Python of the environment that has vLLM")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    theirs = [args.vllm_python, str(Path(__file__).with_name("vllm_offline.py")), args.model, str(WORKLOAD)]
    all_at_once: dict[str, list[float]] = {"enginecore": [], "enginecore int8": [], "vllm": []}
    one_stream: dict[str, list[float]] = {"enginecore": [], "enginecore int8": [], "vllm": []}
    for turn in range(args.rounds):
        for name, quantization in (("enginecore", "auto"), ("enginecore int8", "int8")):
            all_at_once[name].append(ours(args, quantization, stream=False))
            one_stream[name].append(ours(args, quantization, stream=True))
        report = run([*theirs, str(args.num_requests)], VLLM_CPU_KVCACHE_SPACE="4", VLLM_NO_USAGE_STATS="1",
                     HF_HUB_OFFLINE="1")  # fmt: skip
        all_at_once["vllm"].append(report["output_tok_per_s"])
        one_stream["vllm"].append(report["single_stream_tok_per_s"])
        for kind, rates in (("all at once", all_at_once), ("one stream", one_stream)):
            latest = ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
            print(f"round {turn + 1}, {kind}: {latest}", flush=True)
    result = {}
    for kind, rates in (("output_tok_per_s", all_at_once), ("single_stream_tok_per_s", one_stream)):
        middle = {name: statistics.median(values) for name, values in rates.items()}
        result[kind] = {**rates, "ratios": {name: middle[name] / middle["vllm"] for name in middle if name != "vllm"}}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
