"""enginecore, vLLM and llama.cpp in turn on the same work, as bench/peers/README.md describes."""

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
        if report.keys() & {"output_tok_per_s", "single_stream_tok_per_s", "batch"}:
            return dict(report)
    raise SystemExit(f"{command[0]} reported no figures")


def ours(args: argparse.Namespace, quantization: str, speculation: str = "auto", *, stream: bool) -> float:
    """Output tokens a second: of all requests at once, or of one stream of 128 tokens while it decodes."""
    model = args.gguf if quantization == "gguf" else args.model
    engine = [model, "--device", "cpu", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32"]
    work = ["latency", "--batch-sizes", "1", "--input-len", "8", "--output-len", "128"] if stream else [
        "throughput", "--num-requests", str(args.num_requests)]  # fmt: skip
    command = [sys.executable, "-m", "enginecore", "bench", work[0], *engine, *work[1:]]
    report = run([*command, "--quantization", quantization, "--speculation", speculation, "--json"])
    return float(1000 / report["batch"]["1"]["tpot_ms"] if stream else report["output_tok_per_s"])


def beside_vllm(args: argparse.Namespace, rates: dict[str, dict[str, list[float]]]) -> None:
    """One turn of each: everything at once, then one stream."""
    theirs = [args.vllm_python, str(Path(__file__).with_name("vllm_offline.py")), args.model, str(WORKLOAD)]
    for name, quantization, speculation in (
        ("enginecore", "auto", "auto"), ("enginecore int8", "int8", "auto"),
        ("enginecore, no guesses", "auto", "off"), ("enginecore int8, no guesses", "int8", "off"),
    ):  # fmt: skip
        for kind, stream in (("output_tok_per_s", False), ("single_stream_tok_per_s", True)):
            rates[kind].setdefault(name, []).append(ours(args, quantization, speculation, stream=stream))
    report = run([*theirs, str(args.num_requests)], VLLM_CPU_KVCACHE_SPACE="4", VLLM_NO_USAGE_STATS="1",
                 HF_HUB_OFFLINE="1")  # fmt: skip
    for kind in ("output_tok_per_s", "single_stream_tok_per_s"):
        rates[kind].setdefault("vllm", []).append(report[kind])


def beside_llama(args: argparse.Namespace, rates: dict[str, dict[str, list[float]]]) -> None:
    """One turn of each: one stream of the same GGUF file, its blocks served as they are."""
    script = str(Path(__file__).with_name("llama_stream.py"))
    report = run([args.llama_python, script, args.gguf, str(os.cpu_count() or 1)])
    both = rates["gguf_single_stream_tok_per_s"]
    for name, speculation in (("enginecore", "auto"), ("enginecore, no guesses", "off")):
        both.setdefault(name, []).append(ours(args, "gguf", speculation, stream=True))
    both.setdefault("llama.cpp", []).append(report["single_stream_tok_per_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a directory of bfloat16 safetensors, for vLLM and us")
    parser.add_argument("--vllm-python", help="the Python of the environment that has vLLM")
    parser.add_argument("--gguf", help="a GGUF file, for llama.cpp and us")
    parser.add_argument("--llama-python", help="the Python of the environment that has llama-cpp-python")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not (args.model and args.vllm_python) and not (args.gguf and args.llama_python):
        parser.error("name --model and --vllm-python, or --gguf and --llama-python, or all four")
    rates: dict[str, dict[str, list[float]]] = {
        "output_tok_per_s": {}, "single_stream_tok_per_s": {}, "gguf_single_stream_tok_per_s": {},
    }  # fmt: skip
    for turn in range(args.rounds):
        if args.vllm_python:
            beside_vllm(args, rates)
        if args.llama_python:
            beside_llama(args, rates)
        for kind, of in rates.items():
            latest = ", ".join(f"{name} {values[-1]:.1f}" for name, values in of.items())
            print(f"round {turn + 1}, {kind}: {latest}", flush=True)
    result = {}
    for kind, of in rates.items():
        middle = {name: statistics.median(values) for name, values in of.items()}
        peers = [name for name in middle if not name.startswith("enginecore")]
        ratios = {f"{name} / {peer}": middle[name] / middle[peer]
                  for peer in peers for name in middle if name not in peers}  # fmt: skip
        result[kind] = {**of, "ratios": ratios}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
