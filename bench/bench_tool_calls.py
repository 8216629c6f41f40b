"""Are calls that a request forces valid against their schema? Asks a running server (any with OpenAI's API) for one
call of each tool of tests/data/tool_schemas.json, at temperature 1, and checks the arguments with jsonschema_rs.

    enginecore serve smollm2-135m &
    python bench/bench_tool_calls.py --url http://127.0.0.1:8000 --model smollm2-135m

A call is cut when max_tokens ended it (`finish_reason` "length"): it is counted apart, nobody is told that it is whole.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

TOOLS = Path(__file__).parents[1] / "tests" / "data" / "tool_schemas.json"


def judge(tool: dict[str, Any], answer: dict[str, Any]) -> tuple[str, str]:
    """("valid", "invalid" or "cut", what is wrong)."""
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "length":
        return "cut", ""
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] != "tool_calls" or len(calls) != 1:
        return "invalid", f"finish_reason {choice['finish_reason']!r}, {len(calls)} calls"
    function = calls[0]["function"]
    if function["name"] != tool["function"]["name"]:
        return "invalid", f"calls {function['name']!r}"
    schema = tool["function"].get("parameters") or {"type": "object"}
    try:
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(function["arguments"]))
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return "invalid", f"{error} in {function['arguments'][:200]}"
    return "valid", ""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--concurrency", type=int, default=16)
    options.add_argument("--max-tokens", type=int, default=600)
    options.add_argument("--seeds", type=int, default=1)
    args = options.parse_args()
    tools = json.loads(TOOLS.read_text(encoding="utf-8"))
    client = httpx.Client(base_url=args.url, timeout=600)

    def ask(job: tuple[int, dict[str, Any]]) -> tuple[str, str, int]:
        seed, tool = job
        wish = f"{tool['function']['description']}, please. Make up what is open."
        body = {
            "model": args.model, "temperature": 1, "seed": seed, "max_tokens": args.max_tokens, "tools": [tool],
            "tool_choice": "required", "parallel_tool_calls": False,
            "messages": [{"role": "user", "content": wish}],
        }  # fmt: skip
        reply = client.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            return "refused", reply.text[:300], 0
        answer = reply.json()
        return (*judge(tool, answer), answer["usage"]["completion_tokens"])

    begun = time.perf_counter()
    jobs = [(seed, tool) for seed in range(args.seeds) for tool in tools]
    with ThreadPoolExecutor(args.concurrency) as pool:
        results = list(pool.map(ask, jobs))
    seconds = time.perf_counter() - begun
    for (seed, tool), (verdict, problem, _) in zip(jobs, results, strict=True):
        if verdict != "valid":
            print(f"{verdict}: {tool['function']['name']} (seed {seed}) {problem}")
    counts = Counter(verdict for verdict, _, _ in results)
    whole = len(results) - counts["cut"]
    rate = counts["valid"] / whole if whole else 0.0
    tokens = sum(count for _, _, count in results)
    print(f"{dict(counts)}; {rate:.1%} of whole calls are valid; {tokens} tokens in {seconds:.1f} s")


if __name__ == "__main__":
    main()
