"""Write tests/data/beams_float32.json: beam searches of transformers on the small model, in float32.

    .venv/bin/python tools/write_beam_reference.py

Prompts are those of greedy_float32.json. Some searches end answers at frequent tokens too, so that beams finish early.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from enginecore.models.store import resolve_model
from transformers import AutoModelForCausalLM

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
#: (case of greedy_float32.json, beams, answers, new tokens, length_penalty, early_stopping, stop tokens beside EOS)
SEARCHES: list[tuple[int, int, int, int, float, bool | str, list[int]]] = [
    (0, 4, 4, 24, 1.0, False, []),
    (1, 2, 1, 40, 1.0, True, []),
    (2, 5, 5, 20, 0.0, "never", [28, 30]),
    (3, 4, 3, 24, 2.0, "never", [28, 30]),
    (4, 3, 3, 24, -1.0, False, [28, 30]),
    (5, 4, 4, 24, 1.0, True, [28, 30]),
    (6, 8, 8, 16, 0.6, False, [28, 30, 198]),
    (7, 1, 1, 16, 1.0, False, []),
    (8, 4, 2, 32, 1.0, "never", [198]),
    (9, 6, 6, 12, 1.5, True, [28, 30, 198]),
]
EOS = 2


def main() -> None:
    path = Path(resolve_model("smollm2-135m").path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    prompts = json.loads((DATA / "greedy_float32.json").read_text())["cases"]
    cases = []
    for index, width, count, new, penalty, early, stops in SEARCHES:
        prompt = prompts[index]["prompt_token_ids"]
        eos = [EOS, *stops]
        output: Any = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            num_beams=width, num_return_sequences=count, max_new_tokens=new, length_penalty=penalty,
            early_stopping=early, eos_token_id=eos, pad_token_id=EOS, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        answers = [_cut(row[len(prompt) :], eos) for row in output.sequences.tolist()]
        cases.append(
            {
                "prompt_token_ids": prompt, "beam_width": width, "num_return_sequences": count, "max_tokens": new,
                "length_penalty": penalty, "early_stopping": early, "stop_token_ids": stops,
                "answers": answers, "scores": output.sequences_scores.tolist() if width > 1 else None,
            }
        )  # fmt: skip
    text = json.dumps({"model": "smollm2-135m", "cases": cases})
    (DATA / "beams_float32.json").write_text(text + "\n")


def _cut(tokens: list[int], eos: list[int]) -> list[int]:
    """Without what fills up the rows of shorter answers."""
    for place, token in enumerate(tokens):
        if token in eos:
            return tokens[: place + 1]
    return tokens


if __name__ == "__main__":
    main()
