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

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = ROOT / "core" / "enginecore" / "cli" / "data" / "sharegpt_like.json"


def run(command: list[str], **environment: str) -> float:
    """Output tokens per second that `command` reports: in a JSON object that begins a line of its standard output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    for match in re.finditer(r"^\{", done.stdout, re.MULTILINE):
        try:
            report, _ = json.JSONDecoder().raw_decode(done.stdout, match.start())
        except ValueError:
            continue
        if "output_tok_per_s" in report:
            rate: float = report["output_tok_per_s"]
            return rate
    raise SystemExit(f"{command[0]} reported no output_tok_per_s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a directory of bfloat16 safetensors")
    parser.add_argument("--vllm-python", required=True, help="the Python of the environment that has vLLM")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    count = str(args.num_requests)
    ours = [sys.executable, "-m", "enginecore", "bench", "throughput", args.model, "--dtype", "bfloat16", "--json"]
    ours += ["--max-model-len", "2048", "--max-num-seqs", "32", "--num-requests", count]
    theirs = [args.vllm_python, str(Path(__file__).with_name("vllm_offline.py")), args.model, str(WORKLOAD), count]
    rates: dict[str, list[float]] = {"enginecore": [], "vllm": []}
    for turn in range(args.rounds):
        rates["enginecore"].append(run(ours))
        rates["vllm"].append(run(theirs, VLLM_CPU_KVCACHE_SPACE="4", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1"))
        print(
            f"round {turn + 1}: " + ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items()), flush=True
        )
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(json.dumps({"output_tok_per_s": rates, "ratio": middle["enginecore"] / middle["vllm"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
