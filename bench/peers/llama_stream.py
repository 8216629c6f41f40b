"""One greedy stream of llama.cpp; run it with the Python that has llama-cpp-python. Prints one line of JSON.

usage: llama_stream.py FILE.gguf THREADS
"""

import json
import sys
import time

TOKENS = 128


def main(path: str, threads: int) -> dict[str, float]:
    from llama_cpp import Llama

    engine = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    prompt = list(range(1, 9))  # eight tokens, as `bench latency --input-len 8` has

    def decode(count: int) -> float:
        """Seconds of `count` tokens after the first."""
        tokens = engine.generate(prompt, temp=0.0, reset=True)
        next(tokens)
        begun = time.perf_counter()
        for _ in range(count):
            next(tokens)
        return time.perf_counter() - begun

    decode(8)
    return {"single_stream_tok_per_s": (TOKENS - 1) / decode(TOKENS - 1)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
