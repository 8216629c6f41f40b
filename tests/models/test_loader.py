"""Loading end to end: the real model against reference answers, and what loading costs in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.errors import ModelError
from enginecore.models.loader import load_model
from enginecore.models.store import resolve_model
from enginecore.ops.dispatch import Ops
from safetensors.torch import save_file

from tests.models.tiny import make_tiny, write_tiny
from tests.models.torch_backend import Paged, TorchBackend

ROOT = Path(__file__).resolve().parents[2]

#: Loads the model named on the command line and prints by how much memory grew at the peak, over the model's bytes.
_MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from enginecore.models.inspect import inspect_meta
from enginecore.models.loader import load_model
from enginecore.models.store import resolve_model
from enginecore.device import Impl, OpTable
from enginecore.ops.reference import pack_linear
from tests.models.torch_backend import TorchBackend
torch.set_num_threads(2)

class PackingOps(OpTable):  # as devices with a layout of their own do: for a moment a weight is there twice
    def get(self, op):
        return Impl(lambda weight, bias: pack_linear(weight.clone(), bias)) if op == "pack_linear" else None

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

files = resolve_model(sys.argv[2])
inspect_meta(files, sys.argv[3], skeleton=sys.argv[4] != "unfused")
import gguf.quants, transformers.core_model_loading
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
model = load_model(files, backend=TorchBackend(PackingOps()), dtype=sys.argv[3], fuse=sys.argv[4] != "unfused")
print((status("VmHWM") - before) / model.weight_bytes)
"""


def peak_over_weights(path: str, dtype: str, how: str) -> float:
    command = [sys.executable, "-c", _MEASURE, str(ROOT), path, dtype, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("how", ["fused", "unfused"])
def test_peak_memory_of_safetensors_stays_near_the_model(how: str, tmp_path: Path) -> None:
    """Stored in another dtype than it is served in, so that every tensor is converted."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert peak_over_weights(str(tmp_path), "float32", how) < 1.2


@pytest.mark.model
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("how", ["fused", "unfused"])
def test_peak_memory_of_gguf_stays_near_the_model(how: str, smollm2: str) -> None:
    assert peak_over_weights(smollm2, "float32", how) < 1.2


@pytest.mark.model
@pytest.mark.parametrize("fuse", [True, False])
def test_the_real_model_answers_as_the_reference(
    fuse: bool, smollm2: str, greedy_reference: list[dict[str, Any]]
) -> None:
    backend = TorchBackend()
    model = load_model(resolve_model(smollm2), backend=backend, dtype="float32", fuse=fuse)
    assert model.fused == fuse
    assert (model.vocab_size, model.hidden_size, model.max_positions) == (49152, 576, 8192)
    for case in greedy_reference[0], greedy_reference[16]:
        paged = Paged(model, backend, num_blocks=64, block_size=16)
        tokens = case["prompt_token_ids"]
        for expected, top in zip(case["output_token_ids"][:3], case["top5"], strict=False):
            logprobs = paged.step({"a": tokens})[-1].log_softmax(-1)
            assert int(logprobs.argmax()) == expected
            for token, logprob in top:
                assert logprobs[token].item() == pytest.approx(logprob, abs=1e-3)
            tokens = [expected]


def test_a_backend_without_ops_gets_the_references(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    backend = TorchBackend()
    ops = Ops(backend.ops, dtype="float32")
    load_model(resolve_model(str(tmp_path)), backend=backend, dtype="float32", ops=ops)
    expected = {"pack_linear", "rms_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul"}
    assert set(ops.fallbacks) == expected


def test_a_backend_that_runs_whole_models_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    backend = TorchBackend()
    backend.attention = None
    with pytest.raises(ModelError, match="runs whole models by itself"):
        load_model(resolve_model(str(tmp_path)), backend=backend, dtype="float32")


def test_weights_kept_in_float32_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = write_tiny(tmp_path, "gemma3")
    monkeypatch.setattr(type(oracle), "_keep_in_fp32_modules_strict", ["input_layernorm"])
    model = load_model(resolve_model(str(tmp_path)), backend=TorchBackend(), dtype="bfloat16")
    layer = model._implementation._model.model.layers[0]  # type: ignore[attr-defined]
    assert layer.input_layernorm.weight.dtype == torch.float32
    assert layer.post_attention_layernorm.weight.dtype == torch.bfloat16


def test_tiny_models_of_one_seed_are_equal() -> None:
    first, second = make_tiny("llama").state_dict(), make_tiny("llama").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


_REMOTE = """
import sys
from enginecore.models.loader import load_model
from enginecore.models.store import resolve_model
sys.path.insert(0, sys.argv[1])
from tests.models.torch_backend import TorchBackend
files = resolve_model(sys.argv[2], trust_remote_code=True)
model = load_model(files, backend=TorchBackend(), dtype="float32")
print(model.shape.model_class, model.fused)
"""


def test_a_model_with_code_of_its_own_runs_unfused_once_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    write_tiny(folder, "llama")
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-thing'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own-thing", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", _REMOTE, str(ROOT), str(folder)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub")}  # the library copies the code there
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["OwnForCausalLM", "False"]
