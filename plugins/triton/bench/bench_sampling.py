"""Sampling and the verification of drafts, beside torch's sort and the bytes of two reads of the logits.

    python plugins/triton/bench/bench_sampling.py [--vocabulary 128256]

One JSON object a line; "fraction" is of the bandwidth of a copy, measured in the same run, for two reads.
"""

from __future__ import annotations

import argparse
import json

import torch
from enginecore_triton.ops.rejection_sample import rejection_sample
from enginecore_triton.ops.sample import sample
from measure import copy_bandwidth, description, device, seconds

#: name -> temperature, top_k, top_p, min_p
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_k 20, top_p 0.9": (0.8, 20, 0.9, 0.0),
    "top_p 0.9": (0.8, 0, 0.9, 0.0),
    "min_p 0.05": (0.8, 0, 1.0, 0.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    args = parser.parse_args()
    where, vocabulary = device(), args.vocabulary
    shape, bandwidth = description(where), copy_bandwidth()
    for rows in args.rows:
        # As spread as a language model's: some tens of ids hold most of the mass.
        logits = torch.randn(rows, vocabulary, device=where) * 2.5
        uniform = torch.rand(rows, dtype=torch.float64, device=where)
        spent = seconds([lambda logits=logits: logits.sort(dim=-1, descending=True)])
        print(json.dumps({"op": "torch.sort", "rows": rows, "us": round(spent * 1e6, 1)}))
        for name, setting in SETTINGS.items():
            filters = [torch.full((rows,), value, device=where) for value in setting]
            spent = seconds([lambda logits=logits, f=filters, u=uniform: sample(logits, *f, u, device=shape)])
            figures = {"op": "sample", "rows": rows, "filters": name, "us": round(spent * 1e6, 1)}
            print(json.dumps({**figures, "fraction": round(2 * logits.nbytes / spent / bandwidth, 3)}))
        drafts = 4
        target = torch.softmax(torch.randn(rows * drafts, vocabulary, device=where), -1)
        ids, starts = target.argmax(-1), torch.arange(0, rows * drafts + 1, drafts, device=where)
        accept = torch.full((rows * drafts,), 0.5, dtype=torch.float64, device=where)
        arguments = (ids, starts, target, target, ids[:rows], accept, uniform, drafts + 1)
        spent = seconds([lambda a=arguments: rejection_sample(*a, device=shape)])
        print(json.dumps({"op": "rejection_sample", "rows": rows, "drafts": drafts, "us": round(spent * 1e6, 1)}))


if __name__ == "__main__":
    main()
