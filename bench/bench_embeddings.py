"""Texts a second of an embedding model, beside sentence-transformers on the same texts, and how far the vectors differ.

python bench/bench_embeddings.py --device cpu --threads 2 [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from enginecore import LLM
from sentence_transformers import SentenceTransformer

TEXT = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="all-minilm-l6-v2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    texts = [
        " ".join(rng.choice(TEXT.split(), size=size)) for size in rng.integers(5, 120, size=options.texts).tolist()
    ]
    torch.set_num_threads(options.threads)
    best: dict[str, float] = {}
    with LLM(options.model, device=options.device, dtype=options.dtype, num_threads=options.threads) as llm:
        theirs = SentenceTransformer(llm.config.model_path, device="cpu")
        for _ in range(options.rounds):
            begun = time.perf_counter()
            ours_ND = np.stack([output.outputs.data for output in llm.embed(texts, use_tqdm=False)])
            best["enginecore"] = min(best.get("enginecore", 1e9), time.perf_counter() - begun)
            begun = time.perf_counter()
            theirs_ND = theirs.encode(texts, batch_size=32)
            best["sentence-transformers"] = min(best.get("sentence-transformers", 1e9), time.perf_counter() - begun)
        tokens = sum(len(llm.get_tokenizer().encode(text)) for text in texts)
        print(f"{options.texts} texts, {tokens} tokens, {llm.config.dtype}, {options.threads} threads")
    for name, seconds in best.items():
        print(f"{name:>22} {options.texts / seconds:8.1f} texts/s {tokens / seconds:10.0f} tokens/s")
    print(f"ratio {best['sentence-transformers'] / best['enginecore']:.2f}")
    cosines_N = (ours_ND * theirs_ND).sum(-1) / np.linalg.norm(ours_ND, axis=-1) / np.linalg.norm(theirs_ND, axis=-1)
    print(f"largest difference {np.abs(ours_ND - theirs_ND).max():.1e}, smallest cosine {cosines_N.min():.6f}")


if __name__ == "__main__":
    main()
