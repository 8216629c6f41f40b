"""What Python beside the compute threads costs them: the same requests through the engine alone, and streamed over HTTP
by a server whose API process shares the processors with the engine's, as does the client.

    python bench/bench_beside_python.py [--model smollm2-135m] [--requests 32] [--in-flight 16] [--rounds 3] [--json]

Output tokens a second of both, in turns, and their ratio: 1 means that HTTP, detokenisation, JSON and the client took
nothing from the compute threads. Batches are the same size: the engine alone may run as many sequences as there are
requests in flight.
"""

from __future__ import annotations

import argparse
import json
import statistics

import msgspec
from enginecore.cli.bench_client import Load
from enginecore.cli.bench_serve import Site, measure_serving
from enginecore.cli.bench_throughput import measure_throughput
from enginecore.cli.bench_workload import load_workload
from enginecore.cli.local_server import local_server
from enginecore.config import EngineArgs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    engine = EngineArgs(model=options.model, device=options.device, max_model_len=2048, kv_cache_memory=2**30)
    alone = msgspec.structs.replace(engine, max_num_seqs=options.in_flight)
    items = load_workload(None, options.requests)
    rounds = []
    for _ in range(options.rounds):
        offline = measure_throughput(alone, items, 1)["output_tok_per_s"]
        with local_server(engine) as server:
            site, load = Site(server.url, server.api_key), Load(concurrency=options.in_flight)
            served = measure_serving(engine, site, [load], items, 1)["output_tok_per_s"]
        rounds.append({"engine_alone": offline, "served": served, "ratio": served / offline})
    ratio = statistics.median(one["ratio"] for one in rounds)
    if options.json:
        print(json.dumps({"ratio": ratio, "rounds": rounds}, indent=1))
        return
    for one in rounds:
        print(
            f"engine alone {one['engine_alone']:.1f} tok/s, served {one['served']:.1f} tok/s, ratio {one['ratio']:.3f}"
        )
    print(f"median ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
