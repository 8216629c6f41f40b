"""`LLM` over pooling models against the libraries that the models come from: a real encoder, a decoder, a scorer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enginecore import LLM
from enginecore.errors import ParameterError
from enginecore.models.store import resolve_model
from enginecore.pooling import PoolingParams

from tests.models.test_pooling import save, tokenizer

library = pytest.importorskip("sentence_transformers")

TEXTS = ["Hello world", "A cat sits on the mat, and it is not amused.", "Où est la gare?", "x " * 100, "日本語 😀"]
LONG = "The quick brown fox jumps over the lazy dog. " * 60
QUIET: dict[str, Any] = {"use_tqdm": False}


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    with LLM("all-minilm-l6-v2", device="cpu", max_num_batched_tokens=256, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle() -> Any:
    return library.SentenceTransformer(resolve_model("all-minilm-l6-v2").path, device="cpu")


def vectors(outputs: list[Any]) -> np.ndarray:
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def test_vectors_are_those_of_the_model_s_own_library(minilm: LLM, oracle: Any) -> None:
    assert minilm.config.pooling is not None and minilm.config.dtype == "float32"
    assert minilm.config.max_model_len == oracle.max_seq_length == 256
    found, expected = vectors(minilm.embed(TEXTS, **QUIET)), oracle.encode(TEXTS)
    assert np.abs(found - expected).max() < 1e-5
    assert np.allclose((found * expected).sum(-1), 1, atol=1e-5)
    cut = vectors(minilm.embed(LONG, truncate_prompt_tokens=-1, **QUIET))
    assert np.abs(cut - oracle.encode([LONG])).max() < 1e-5, "both keep the first 256 tokens"


def test_a_text_s_vector_does_not_depend_on_the_others(minilm: LLM) -> None:
    """More texts than rows and more tokens than a step has: several steps, and results in the order of the texts."""
    many = [f"{text} {i}" for i in range(8) for text in TEXTS]
    alone = np.concatenate([vectors(minilm.embed(text, **QUIET)) for text in many[::7]])
    assert np.array_equal(vectors(minilm.embed(many, **QUIET))[::7], alone)
    ids = minilm.get_tokenizer().encode(TEXTS[1])
    assert np.array_equal(vectors(minilm.embed([ids], **QUIET)), vectors(minilm.embed(TEXTS[1], **QUIET)))


def test_tokens_and_scores(minilm: LLM, oracle: Any) -> None:
    (output,) = minilm.encode(TEXTS[1], PoolingParams(task="token_embed"), **QUIET)
    expected = oracle.encode(TEXTS[1], output_value="token_embeddings").numpy()
    assert output.outputs.data.shape == (len(output.prompt_token_ids), 384)
    assert np.allclose(output.outputs.data, expected, atol=1e-5)
    scores = [each.outputs.score for each in minilm.score(TEXTS[0], TEXTS, **QUIET)]
    assert np.allclose(scores, oracle.similarity(oracle.encode(TEXTS[:1]), oracle.encode(TEXTS))[0], atol=1e-5)


def test_refusals_name_the_text_and_the_way_out(minilm: LLM) -> None:
    for call, told in (
        (lambda: minilm.embed(["fine", LONG]), r"256 tokens.*truncate_prompt_tokens"),
        (lambda: minilm.embed(["fine", ""]), "prompt 1 must not be empty"),
        (lambda: minilm.embed("a", PoolingParams(dimensions=128)), "matryoshka"),
        (lambda: minilm.embed("a", PoolingParams(dimensions=385)), "at most"),
        (lambda: minilm.embed("a", truncate_prompt_tokens=2), "leaves no room"),
        (lambda: minilm.classify("a"), "no classification head"),
        (lambda: minilm.generate("a", **QUIET), "generates no text"),
    ):
        with pytest.raises(ParameterError, match=told):
            call()


@pytest.mark.model
def test_a_decoder_s_vector_is_its_last_token_s_state(smollm2: str) -> None:
    texts = TEXTS[:3]
    with LLM("smollm2-135m", device="cpu", dtype="float32", runner="pooling", max_model_len=128) as llm:
        assert llm.config.pooling is not None and llm.config.pooling.pooling_type == "lasttoken"
        outputs = llm.embed(texts, **QUIET)
        with pytest.raises(ParameterError, match="generates no text"):
            llm.generate("Hello", **QUIET)
    model = plain_decoder(smollm2)
    for output in outputs:
        with torch.inference_mode():
            state = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(state, dim=0).numpy()
        assert np.abs(output.outputs.data - expected).max() < 1e-3
        assert float(output.outputs.data @ expected) > 1 - 1e-5


def plain_decoder(path: str) -> Any:
    """transformers' own model with the file's weights, in float32."""
    from enginecore.models.gguf_weights import GGUFTensors
    from enginecore.models.inspect import make_config
    from transformers import AutoModel, initialization

    config = make_config(resolve_model(path))
    with initialization.no_init_weights():
        model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager")
    weights = GGUFTensors(path)
    for name, tensor in model.state_dict().items():
        weights.read_into(f"model.{name}", tensor)
    return model.eval()


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_pairs_are_scored_as_by_the_cross_encoder(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, labels=1)
    tokenizer(tmp_path)
    query, texts = "w5 w6", ["w7 w8 w9", "w10", " ".join(f"w{i}" for i in range(4, 60))]
    expected = library.CrossEncoder(str(tmp_path), device="cpu", max_length=40).predict(
        [(query, text) for text in texts]
    )
    with LLM(str(tmp_path), device="cpu") as llm:
        scores = [each.outputs.score for each in llm.score(query, texts, truncate_prompt_tokens=-1, **QUIET)]
        assert np.allclose(scores, expected, atol=1e-5)
        with pytest.raises(ParameterError, match="gives no vectors"):
            llm.embed("w5", **QUIET)
        with pytest.raises(ParameterError, match=r"text_2\[2\]|maximum context length"):
            llm.score(query, texts, **QUIET)
