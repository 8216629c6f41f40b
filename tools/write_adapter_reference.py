"""Write tests/data/adapters_float32.json: what the PEFT library generates with the tests' adapters on the small model.

    pip install peft
    .venv/bin/python -m tools.write_adapter_reference

In float32, greedily, for prompts of greedy_float32.json: two short ones, and one that fills blocks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from enginecore.models.store import resolve_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
TOKENS = 10


def main() -> None:
    from peft import PeftModel

    sys.path.insert(0, str(ROOT))
    from tests.lora.making import ADAPTERS, write_known

    path = Path(resolve_model("smollm2-135m").path)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    cases = json.loads((DATA / "greedy_float32.json").read_text())["cases"]
    known = sorted((case["prompt_token_ids"] for case in cases), key=len)
    prompts = [known[0], known[1], next(prompt for prompt in known if len(prompt) >= 40)[:40]]
    linears = [
        (name, module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and name != "lm_head"
    ]
    outputs = {"": [_generate(model, prompt) for prompt in prompts]}
    with tempfile.TemporaryDirectory() as folder:
        write_known(Path(folder), linears)
        for name in ADAPTERS:
            adapted = PeftModel.from_pretrained(model, Path(folder) / name)
            outputs[name] = [_generate(adapted, prompt) for prompt in prompts]
            model = adapted.unload()
    made_by = {library: version(library) for library in ("peft", "transformers", "torch")}
    text = json.dumps({"model": "smollm2-135m", "made_by": made_by, "prompts": prompts, "outputs": outputs})
    (DATA / "adapters_float32.json").write_text(text + "\n")


def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


if __name__ == "__main__":
    main()
