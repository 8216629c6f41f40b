"""One step of a pooling model: texts in, a vector, vectors of tokens or the head's classes of each out.

Nothing is kept between steps, so keys and values need no cache of their own: a scratch cache holds those of the step's
tokens for one attention call and is written over by the next. Texts are whole in a step, side by side, without padding.

Shape suffixes: T tokens of the step, L tokens of one text, S texts, E hidden size, D dimensions of a vector, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from enginecore.device import AttentionMetadata, Backend
from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.pooling import PoolingNet
from enginecore.models.safetensors_loader import SafetensorsFile
from enginecore.models.store import read_json
from enginecore.pooling import Pooled, PoolingModel, PoolingParams
from enginecore.request import EngineRequest

NOT_FINITE = "the model gave numbers that are not finite for this text"

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x, "sigmoid": torch.sigmoid, "softmax": lambda x: torch.softmax(x, -1),
}  # fmt: skip


class Pooler:
    """From the hidden states of one text to what is asked for, in float32 and by the model's own settings."""

    def __init__(self, model: PoolingModel, dense: Sequence[Dense]) -> None:
        self._model, self._dense = model, dense

    def vector(self, states_LE: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """[D]: pooled, through the dense layers, cut where that is asked for, at unit length if that is so."""
        x_D = pool(states_LE.float(), self._model.pooling_type)
        for layer in self._dense:
            x_D = layer(x_D)
        if params.dimensions is not None:
            x_D = x_D[: params.dimensions]
        wanted = self._model.normalize if params.normalize is None else params.normalize
        return F.normalize(x_D, dim=-1) if wanted else x_D

    def tokens(self, states_LE: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """[L, E]: the states of the tokens themselves."""
        return F.normalize(states_LE.float(), dim=-1) if params.normalize else states_LE.float()

    def classes(self, logits_C: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """[C]: probabilities, or the logits where the model or the request wants them."""
        return logits_C if params.activate is False else _ACTIVATIONS[self._model.activation](logits_C)


def pool(states_LE: torch.Tensor, how: str) -> torch.Tensor:
    """One vector [E] of a text's states."""
    if how == "cls":
        return states_LE[0]
    if how == "lasttoken":
        return states_LE[-1]
    if how == "max":
        return states_LE.amax(0)
    if how == "mean_sqrt_len_tokens":
        return states_LE.sum(0) / len(states_LE) ** 0.5
    return states_LE.mean(0)


class Dense:
    """A layer of sentence-transformers after pooling, in `folder`: linear, with an activation of torch's."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        config = read_json(folder / "config.json")
        name = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
        activations = {"Tanh": torch.tanh, "Identity": lambda x: x, "ReLU": torch.relu, "GELU": F.gelu, "Sigmoid":
                       torch.sigmoid}  # fmt: skip
        if name not in activations or config.get("use_residual"):
            raise UnsupportedError(f"{folder} cannot be used", reasons=(f"a dense layer with {name} or a residual",))
        if not (folder / "model.safetensors").is_file():
            raise ModelError(f"{folder} has no model.safetensors")
        file = SafetensorsFile(str(folder / "model.safetensors"))
        self._activation = activations[name]
        self._weight_DE = _read(file, "linear.weight", device)
        self._bias_D = _read(file, "linear.bias", device) if "linear.bias" in file.shapes else None

    def __call__(self, x_E: torch.Tensor) -> torch.Tensor:
        return self._activation(F.linear(x_E, self._weight_DE, self._bias_D))


def _read(file: SafetensorsFile, name: str, device: torch.device) -> torch.Tensor:
    if name not in file.shapes:
        raise ModelError(f"{file.path}: tensor {name!r} is missing")
    out = torch.empty(file.shapes[name], dtype=torch.float32)
    file.read_into(name, out)
    return out.to(device)


class PoolingRunner:
    """Runs steps on a backend. `caches` has one scratch cache for each attention call, of which those of one shape are
    the same tensor; it holds the tokens of the largest step in blocks of `block_size`."""

    def __init__(
        self, net: PoolingNet, pooler: Pooler, backend: Backend, caches: list[torch.Tensor], block_size: int
    ) -> None:
        assert backend.attention is not None
        self._net, self._pooler, self._caches, self._block_size = net, pooler, caches, block_size
        self._attention, self._device = backend.attention, backend.torch_device()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def execute(self, requests: Sequence[EngineRequest]) -> list[Pooled | str]:
        """What becomes of each request: its numbers, or why there are none."""
        lengths = np.array([len(request.prompt_token_ids) for request in requests], np.int64)
        ids_T = self._to_device(np.concatenate([np.array(each.prompt_token_ids, np.int64) for each in requests]))
        positions, metadata = self._lay_out(lengths)
        segments = np.zeros(int(lengths.sum()), np.int64)
        ends = np.cumsum(lengths)
        for request, end, length in zip(requests, ends.tolist(), lengths.tolist(), strict=True):
            if request.second_from is not None:
                segments[end - length + request.second_from : end] = 1
        states_TE = self._net.states(
            ids_T, self._to_device(positions), self._to_device(segments), metadata, self._caches
        )
        found = [
            self._answer(request, states_TE[end - length : end], ids_T[end - length : end])
            for request, end, length in zip(requests, ends.tolist(), lengths.tolist(), strict=True)
        ]
        return _to_host(found)

    def _answer(self, request: EngineRequest, states_LE: torch.Tensor, ids_L: torch.Tensor) -> torch.Tensor:
        params = request.pooling
        assert params is not None
        if params.task == "classify":
            return self._pooler.classes(self._net.logits(states_LE, ids_L), params)
        return (self._pooler.tokens if params.task == "token_embed" else self._pooler.vector)(states_LE, params)

    def _lay_out(self, lengths_S: np.ndarray) -> tuple[np.ndarray, AttentionMetadata]:
        """(positions [T], where each text stands in the scratch cache): each begins with a block of its own."""
        blocks_S = -(-lengths_S // self._block_size)
        first_S = np.cumsum(blocks_S) - blocks_S
        starts = np.concatenate([[0], np.cumsum(lengths_S)])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths_S)
        width = int(blocks_S.max())
        table = np.minimum(first_S[:, None] + np.arange(width), first_S[:, None] + blocks_S[:, None] - 1)
        common = AttentionMetadata(
            query_start_loc=self._to_device(starts.astype(np.int32)),
            seq_lens=self._to_device(lengths_S.astype(np.int32)),
            block_table=self._to_device(table.astype(np.int32)),
            slot_mapping=self._to_device(np.repeat(first_S * self._block_size, lengths_S) + positions),
            max_query_len=int(lengths_S.max()),
            max_seq_len=int(lengths_S.max()),
        )
        return positions, self._attention.build_metadata(common)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _to_host(found: list[torch.Tensor]) -> list[Pooled | str]:
    """One copy for all of them."""
    flat = torch.cat([tensor.flatten() for tensor in found]).cpu().numpy().astype("<f4")
    answers: list[Pooled | str] = []
    start = 0
    for tensor in found:
        part = flat[start : start + tensor.numel()]
        start += tensor.numel()
        answers.append(Pooled(part.tobytes(), list(tensor.shape)) if np.isfinite(part).all() else NOT_FINITE)
    return answers
