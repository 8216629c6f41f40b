"""The whole engine over the CUDA backend and the Triton kernels, on a machine without a GPU.

    TRITON_INTERPRET=1 python interpreted_engine.py FOLDER       writes FOLDER/result.json

The backend is the real one; its runtime is a device of books over host tensors, and Triton interprets the kernels. A
process of its own, because the interpreter must be asked for before Triton is imported and the plugin that is installed
for it stays. `create` is what that plugin calls.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from enginecore.device import BackendContext
from enginecore.testing.fake_runtime import FakeRuntime
from enginecore_cuda.backend import CudaBackend
from enginecore_cuda.capabilities import Gpu

MIB = 2**20
H200 = Gpu(name="NVIDIA H200", capability=(9, 0), multiprocessors=4)
PROMPT_LENGTHS, COUNT = (1, 37), 4
#: The last one is what `create` makes a backend of.
GPUS = [H200]


def create(total: int = 1024 * MIB) -> CudaBackend:
    # Interpreted kernels are not torch's operations: a recording would not hold them.
    return CudaBackend(BackendContext(device="cuda"), FakeRuntime(total, graphs=False), GPUS[-1])


def write_model(folder: Path, **sizes: Any) -> Any:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = transformers.LlamaConfig(**values | sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.3 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def generate(folder: Path, prompts: list[list[int]], count: int = COUNT, **settings: Any) -> dict[str, Any]:
    """Greedy answers of the engine with the log-probability of each token, and what it says of itself."""
    from enginecore.config import EngineArgs
    from enginecore.engine.client import InprocClient
    from enginecore.request import EngineRequest, SamplingParams
    from enginecore.testing import adhoc
    from enginecore.testing.source import BackendSource

    device = adhoc.install(BackendSource(factory=f"{__name__}:create"), folder / "plugin")
    args = {"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 4, "strict_ops": True, **settings}
    client = InprocClient(EngineArgs(model=str(folder), device=device, **args))
    answers: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
        client.add(EngineRequest(str(i), prompt, params, count))
    stats: Any = None
    while client.has_work():
        step = client.step()
        stats = step.stats
        for output in step.outputs:
            assert output.error is None, output.error
            answers[int(output.request_id)] += output.token_ids
            logprobs[int(output.request_id)] += [entry.logprobs[0] for entry in output.logprobs or ()]
    ready = client.ready
    told = {
        "answers": answers,
        "logprobs": logprobs,
        "reference_ops": stats.reference_ops,
        "replays": stats.graph_replays,
        "ledger": ready.ledger,
        "choices": [list(choice) for choice in ready.config.choices],
        "num_blocks": ready.config.num_blocks,
    }
    client.shutdown()
    return told


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], count: int = COUNT) -> tuple[list[list[int]], list[list[float]]]:
    """What transformers' model answers, and the log-probability of each token."""
    answers: list[list[int]] = []
    logprobs: list[list[float]] = []
    for prompt in prompts:
        tokens, found = list(prompt), []
        for _ in range(count):
            scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            found.append(float(scores.max()))
        answers.append(tokens[len(prompt) :])
        logprobs.append(found)
    return answers, logprobs


def main(folder: Path) -> None:
    model, prompts = write_model(folder), random_prompts(PROMPT_LENGTHS)
    result = {"expected": greedy(model, prompts)[0], "engine": generate(folder, prompts)}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
