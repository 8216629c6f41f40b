"""Models for pooling against transformers' own forward pass and sentence-transformers', on tiny random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enginecore.device import Backend, BackendContext
from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.pooling import inspect_pooling, load_pooling
from enginecore.models.sentence import pooling_model
from enginecore.models.store import resolve_model
from enginecore.ops.dispatch import Ops
from enginecore.ops.torch_backend import TorchBackend
from enginecore.pooling import Pooled, PoolingModel, PoolingParams
from enginecore.request import EngineRequest, SamplingParams
from enginecore.runner.pooling import Dense, Pooler, PoolingRunner
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

COMMON = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
BERT = {**COMMON, "num_attention_heads": 4, "max_position_embeddings": 40}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": {**BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "electra": {**BERT, "embedding_size": 16},
    "distilbert": {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "pad_token_id": 0,
                   "max_position_embeddings": 40},
    "albert": {**BERT, "embedding_size": 16, "num_hidden_groups": 1},
    "modernbert": {**BERT, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
                   "global_attn_every_n_layers": 2, "local_attention": 6},
    "mpnet": {**BERT, "pad_token_id": 1},
    "deberta-v2": BERT,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
    "llama": {**COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40},
    "qwen2": {**COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40},
}  # fmt: skip
DECODERS = ("llama", "qwen2", "gpt2")
#: Those that compute their attention themselves: windows to both sides, positions in the attention.
OWN_ATTENTION = ("modernbert", "mpnet", "deberta-v2")
TEXTS = [[2, 9, 4, 33, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [5], [2, 60, 61, 3], [2, 3]]


def save(kind: str, folder: Path, *, labels: int = 0) -> Any:
    """A model with random weights in `folder`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    if labels:
        config.num_labels = labels
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModel.from_config(config)
    for name, parameter in model.named_parameters():
        if "bias" in name:  # which the library makes zeros
            parameter.data.normal_(0, 0.1)
    model.eval().save_pretrained(folder)
    return model


def runner_of(
    folder: Path, model: PoolingModel | None = None, backend: Backend | None = None
) -> tuple[PoolingRunner, PoolingModel]:
    files = resolve_model(str(folder))
    model = model or pooling_model(files, "pooling", {})
    assert model is not None
    backend = backend or TorchBackend(BackendContext(device="torch"))
    assert backend.attention is not None
    classifier = "classify" in model.tasks
    found = inspect_pooling(files, "float32", classifier=classifier)
    ops = Ops(backend.ops, dtype="float32")
    net = load_pooling(files, found, backend=backend, ops=ops, classifier=classifier, quantization=None)
    caches: list[torch.Tensor] = []
    for spec in net.shape.kv_specs(8):  # one, or none where the model has its own attention
        (cache,) = backend.memory.allocate_kv(backend.attention.kv_cache_layout(spec), 16, 1)
        caches = [cache.fill_(float("nan"))] * len(net.shape.calls)  # a slot read before it is written shows
    dense = [Dense(folder / part, torch.device("cpu")) for part in model.dense]
    return PoolingRunner(net, Pooler(model, dense), backend, caches, 8), model


def run(runner: PoolingRunner, texts: list[list[int]], params: PoolingParams, second: int | None = None) -> list[Any]:
    requests = [
        EngineRequest(str(i), ids, SamplingParams(max_tokens=0), 0, pooling=params, second_from=second)
        for i, ids in enumerate(texts)
    ]
    answers = runner.execute(requests)
    assert all(isinstance(answer, Pooled) for answer in answers), answers
    return [
        np.frombuffer(answer.data, "<f4").reshape(answer.shape) for answer in answers if not isinstance(answer, str)
    ]


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = save(kind, tmp_path)
    runner, model = runner_of(tmp_path)
    assert model.pooling_type == ("lasttoken" if kind in DECODERS else "mean")
    assert bool(runner._caches) == (kind not in OWN_ATTENTION)
    states = run(runner, TEXTS, PoolingParams(task="token_embed"))
    vectors = run(runner, TEXTS, PoolingParams())
    for ids, found, vector in zip(TEXTS, states, vectors, strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids])).last_hidden_state[0]
        assert np.allclose(found, expected.numpy(), atol=1e-5), kind
        pooled = (
            expected.mean(0) if model.pooling_type == "mean" else torch.nn.functional.normalize(expected[-1], dim=0)
        )
        assert np.allclose(vector, pooled.numpy(), atol=1e-5), kind


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("xlm-roberta", "qwen2")])
def test_heads_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = save(kind, tmp_path, labels=3)
    runner, model = runner_of(tmp_path)
    assert model.tasks == ("classify",) and len(model.labels) == 3 and model.activation == "softmax"
    pairs = kind in ("bert", "electra", "albert")  # they tell the two texts of a pair apart
    texts = TEXTS[:1] if pairs else TEXTS
    for activate in (False, None):
        found = run(runner, texts, PoolingParams(task="classify", activate=activate), second=5 if pairs else None)
        for ids, answer in zip(texts, found, strict=True):
            kinds = {"token_type_ids": torch.tensor([[0] * 5 + [1] * (len(ids) - 5)])} if pairs else {}
            with torch.inference_mode():
                logits = oracle(torch.tensor([ids]), **kinds).logits[0]
            expected = logits if activate is False else logits.softmax(-1)
            assert np.allclose(answer, expected.numpy(), atol=1e-5), kind


def test_a_model_that_would_be_called_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions from 0 on are wrong for RoBERTa: what is found out when it is loaded, not by whoever reads vectors."""
    save("roberta", tmp_path)
    runner_of(tmp_path)
    monkeypatch.setattr("enginecore.models.pooling._first_position", lambda base: 1)
    with pytest.raises(UnsupportedError, match="other numbers"):
        runner_of(tmp_path)
    monkeypatch.setattr("enginecore.models.pooling._first_position", lambda base: 0)
    save("mpnet", tmp_path)  # the last two of 40 positions are not there
    with pytest.raises(UnsupportedError, match="cannot read a text of 40 tokens"):
        runner_of(tmp_path)


def test_strict_ops_refuse_a_model_s_own_attention(tmp_path: Path) -> None:
    save("mpnet", tmp_path)
    backend, files = TorchBackend(BackendContext(device="torch")), resolve_model(str(tmp_path))
    found = inspect_pooling(files, "float32", classifier=False)
    assert "does not let its attention be replaced" in str(found.own_attention)
    ops = Ops(backend.ops, strict=True)
    with pytest.raises(UnsupportedError, match="attention"):
        load_pooling(files, found, backend=backend, ops=ops, classifier=False, quantization=None)


def test_a_checkpoint_with_a_head_for_text_or_without_a_pooler(tmp_path: Path) -> None:
    """What a vector has no use for is left in the file; what it needs is missed."""
    from safetensors.torch import load_file, save_file

    oracle = save("bert", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.startswith("pooler.")]:
        del weights[name]
    renamed = {f"bert.{name}": tensor for name, tensor in weights.items()}
    renamed |= {"cls.predictions.bias": torch.zeros(64), "bert.pooler.dense.bias": torch.zeros(32)}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    runner, _ = runner_of(tmp_path)
    (found,) = run(runner, TEXTS[:1], PoolingParams())
    with torch.inference_mode():
        expected = oracle(torch.tensor(TEXTS[:1])).last_hidden_state[0].mean(0)
    assert np.allclose(found, expected.numpy(), atol=1e-5)
    del renamed["bert.embeddings.LayerNorm.weight"]
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="LayerNorm"):
        runner_of(tmp_path)


def test_other_ways_of_pooling(tmp_path: Path) -> None:
    oracle = save("bert", tmp_path)
    with torch.inference_mode():
        states = oracle(torch.tensor(TEXTS[:1])).last_hidden_state[0]
    expected = {
        "cls": states[0], "lasttoken": states[-1], "max": states.amax(0), "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
    }  # fmt: skip
    base = pooling_model(resolve_model(str(tmp_path)), "auto", {})
    assert base is not None and base.matryoshka is None
    for how, vector in expected.items():
        runner, _ = runner_of(tmp_path, pooling_model(resolve_model(str(tmp_path)), "auto", {"pooling_type": how}))
        (found,) = run(runner, TEXTS[:1], PoolingParams())
        assert np.allclose(found, vector.numpy(), atol=1e-5), how
        (short,) = run(runner, TEXTS[:1], PoolingParams(dimensions=6, normalize=True))
        assert np.allclose(short, torch.nn.functional.normalize(vector[:6], dim=0).numpy(), atol=1e-5), how


def test_numbers_that_are_not_finite_are_an_error_of_their_text(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("bert", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][60] = float("inf")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    runner, _ = runner_of(tmp_path)
    requests = [
        EngineRequest(str(i), ids, SamplingParams(max_tokens=0), 0, pooling=PoolingParams())
        for i, ids in enumerate(TEXTS)
    ]
    assert [isinstance(answer, str) for answer in runner.execute(requests)] == [False, False, True, False]


def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    """Transformer, Pooling, Dense and Normalize, as the library itself saves and computes them."""
    library = pytest.importorskip("sentence_transformers")
    save("bert", tmp_path / "bert")
    tokenizer(tmp_path / "bert")
    prompts = {"prompts": {"query": "w9 "}, "default_prompt_name": "query"}
    made = library.SentenceTransformer(modules=_modules(tmp_path / "bert"), device="cpu", **prompts)
    made.save(str(tmp_path / "whole"))
    model = pooling_model(resolve_model(str(tmp_path / "whole")), "auto", {})
    assert model is not None
    assert (model.pooling_type, model.dimensions, model.normalize, len(model.dense)) == ("cls", 12, True, 1)
    assert model.max_tokens == 20 and model.prefix == "w9 "
    runner, _ = runner_of(tmp_path / "whole")
    texts = ["w5 w6 w7", "w60 w8"]
    ids = [[2, 9, *(int(word[1:]) for word in text.split()), 3] for text in texts]
    assert np.allclose(run(runner, ids, PoolingParams()), made.encode(texts), atol=1e-5)


def _modules(folder: Path) -> list[Any]:
    from sentence_transformers.sentence_transformer import modules as models

    transformer = models.Transformer(str(folder), max_seq_length=20)
    torch.manual_seed(1)
    return [transformer, models.Pooling(32, "cls"), models.Dense(32, 12), models.Normalize()]


def tokenizer(folder: Path) -> None:
    """Word w7 is token 7; a text stands between 2 and 3, as does a pair with 3 in between."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="w2 $A w3", pair="w2 $A w3 $B:1 w3:1", special_tokens=[("w2", 2), ("w3", 3)]
    )
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", cls_token="w2", sep_token="w3",
                            model_input_names=["input_ids", "token_type_ids", "attention_mask"]
                            ).save_pretrained(folder)  # fmt: skip


@pytest.mark.parametrize(
    ("files", "error", "told"),
    [
        ({"1_Pooling/config.json": '{"pooling_mode": ["cls", "mean"]}'}, UnsupportedError, "cls and mean"),
        ({"1_Pooling/config.json": '{"pooling_mode": "weightedmean"}'}, UnsupportedError, "weightedmean"),
        ({"modules.json": '[{"type": "a.WordWeights", "path": "x"}]'}, UnsupportedError, "WordWeights"),
        ({"modules.json": '[{"type": "a.Transformer", "path": ""}]'}, ModelError, "Pooling"),
        ({"modules.json": '[{"type": "a.Pooling", "path": "../x"}]'}, ModelError, "outside"),
        ({"modules.json": "{}"}, ModelError, "list"),
    ],
)
def test_modules_that_cannot_be_followed(
    files: dict[str, str], error: type[Exception], told: str, tmp_path: Path
) -> None:
    save("bert", tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text('[{"type": "a.Pooling", "path": "1_Pooling"}]')
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=told):
        pooling_model(resolve_model(str(tmp_path)), "auto", {})


def test_what_a_model_is_for_is_told_by_its_files(tmp_path: Path) -> None:
    save("bert", tmp_path / "a")
    save("llama", tmp_path / "b", labels=1)
    bert, scorer = (resolve_model(str(tmp_path / name)) for name in "ab")
    found = pooling_model(scorer, "auto", {})
    assert found is not None and found.scores_pairs and found.activation == "sigmoid"
    assert pooling_model(bert, "generate", {}) is None
    text = replace(bert, path=str(tmp_path), config={**scorer.config, "architectures": ["LlamaForCausalLM"]})
    assert pooling_model(text, "auto", {}) is None
    embedder = pooling_model(text, "pooling", {"matryoshka": [16, 8]})
    assert embedder is not None and embedder.pooling_type == "lasttoken" and embedder.matryoshka == (8, 16)
    identity = replace(
        scorer, config={**scorer.config, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}
    )
    plain = pooling_model(identity, "auto", {})
    assert plain is not None and plain.activation == "none"
