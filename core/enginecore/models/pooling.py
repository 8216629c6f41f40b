"""Models for pooling: transformers' encoders and decoders without a head for text, or with one for classification.

All texts of a step lie in one row, as in the bridge, so nothing is padded. Where a model's attention cannot be replaced
or is of a kind that backends do not have, the library's own computes it, for texts of one length at a time. A head for
classification is the library's own code: it is run on one text's states at a time, in place of those that it would have
computed.

Shape suffixes: T tokens of the step, N texts of one length, L tokens of one text, E hidden size, C labels.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from enginecore.device.attention import AttentionMetadata, AttentionParams
from enginecore.device.backend import Backend
from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.bridge import IMPLEMENTATION, AttentionCall, PagedStep, Step, attention_forward
from enginecore.models.checkpoint import Checkpoint
from enginecore.models.inspect import ModelShape, make_config, max_positions, one_line
from enginecore.models.materialize import Materializer, materialize
from enginecore.models.store import ModelFiles
from enginecore.ops.dispatch import Ops
from enginecore.ops.torch_backend import attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRACE_TOKENS = 5
#: Texts of this length are tried when a model computes its attention itself, whose memory grows with the square.
_LONGEST_TRIED = 1024
#: How far the two ways of calling a model may differ, as a part of the largest number.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}

#: Heads of a checkpoint that a model without them has no place for, and buffers that are computed.
_HEADS = re.compile(
    r"^(lm_head|cls|pooler|\w+\.pooler|classifier|score|vocab_\w+|qa_outputs|discriminator_predictions|"
    r"generator_\w+|predictions|head)\.|^decoder\.(weight|bias)$|position_ids$|token_type_ids$"
)


@dataclass(frozen=True)
class Inspected:
    """A model for pooling on meta and what was found out about it. `offset` is the position of a text's first token.
    `own_attention` says why the library's own attention has to compute it, None where the backend's does."""

    model: PreTrainedModel
    shape: ModelShape
    offset: int
    own_attention: str | None = None


class PoolingNet:
    """A loaded model. `weight_bytes` is what its weights hold on the device."""

    def __init__(self, found: Inspected, backend: Backend, weight_bytes: int) -> None:
        assert backend.attention is not None
        self.shape, self.weight_bytes = found.shape, weight_bytes
        self._model, self._offset, self._attention = found.model, found.offset, backend.attention
        self._base = _base(found.model)
        self._params: list[AttentionParams | None] = [None] * len(found.shape.calls)

    def states(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        segments_T: torch.Tensor,
        metadata: AttentionMetadata,
        caches: list[torch.Tensor],
    ) -> torch.Tensor:
        """The last hidden states [T, E] of a step's texts. `segments_T` is 1 for tokens of a pair's second text;
        `caches` has one tensor for each attention call, and calls of one shape may share theirs."""
        step = PagedStep(self._attention, metadata, caches, self._params, self.shape.calls)
        return call_base(self._base, input_ids_T, positions_T + self._offset, segments_T, step)

    def logits(self, states_LE: torch.Tensor, input_ids_L: torch.Tensor) -> torch.Tensor:
        """float32 [C]: what the model's head makes of one text's states."""
        with _in_place_of_base(self._model, _Computed(self._base, states_LE.unsqueeze(0))):
            output = self._model(input_ids=input_ids_L.unsqueeze(0))
        return output.logits[0].float()


class OwnAttentionNet(PoolingNet):
    """A model that computes its attention itself, with torch's operations on the backend's device."""

    def states(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        segments_T: torch.Tensor,
        metadata: AttentionMetadata,
        caches: list[torch.Tensor],
    ) -> torch.Tensor:
        starts = metadata.query_start_loc.tolist()
        by_length: dict[int, list[int]] = {}
        for start, end in pairwise(starts):
            by_length.setdefault(end - start, []).append(start)
        out_TE = input_ids_T.new_empty((starts[-1], self.shape.hidden_size), dtype=getattr(torch, self.shape.dtype))
        for length, firsts in by_length.items():
            at_NL = torch.tensor(firsts, device=out_TE.device).unsqueeze(1) + torch.arange(length, device=out_TE.device)
            segments = {"token_type_ids": segments_T[at_NL]} if _has_segments(self._base) else {}
            output = self._base(input_ids=input_ids_T[at_NL], **segments)
            out_TE[at_NL.flatten()] = output.last_hidden_state.flatten(0, 1).to(out_TE.dtype)
        return out_TE


def inspect_pooling(files: ModelFiles, dtype: str, *, classifier: bool) -> Inspected:
    """The model of `files` on meta, and its shape. Raises ModelError and UnsupportedError, with every reason."""
    config = make_config(files)
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(files, ["encoder-decoder models are not supported"])
    if files.config.get("quantization_config"):
        raise _unsupported(files, ["quantised checkpoints are not supported for pooling"])

    def build(implementation: str | None) -> PreTrainedModel:
        try:
            return _build(config, getattr(torch, dtype), files.trust_remote_code, implementation, classifier=classifier)
        except Exception as error:  # the library raises many kinds
            raise ModelError(f"transformers cannot build model {files.name!r}: {one_line(error)}") from error

    calls: list[AttentionCall] = []
    model = build(IMPLEMENTATION)
    if getattr(model, "_supports_attention_backend", False):
        calls, reasons = _trace(_base(model))
        obstacle = "; ".join(reasons) or None
    else:
        obstacle = f"{type(model).__name__} does not let its attention be replaced"
    if obstacle is not None:
        model, calls = build(None), []
    text = config.get_text_config()
    offset = _first_position(_base(model))
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    shape = ModelShape(
        model_type=config.model_type,
        model_class=type(model).__name__,
        dtype=dtype,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        max_positions=max_positions(text) - offset,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(parameter.numel() * parameter.itemsize for parameter in parameters),
        calls=tuple(calls),
    )
    return Inspected(model, shape, offset, obstacle)


def load_pooling(files: ModelFiles, found: Inspected, *, backend: Backend, ops: Ops, classifier: bool,
                 quantization: str | None) -> PoolingNet:  # fmt: skip
    """Read the weights. `found` must not be used afterwards. Raises ModelError when a file does not fit the model."""
    if found.own_attention is not None:
        ops.note_reference("attention", found.own_attention)
    checkpoint = Checkpoint(files, found.model, None if classifier else _HEADS)
    pack, schemes = ops.get("pack_linear", found.shape.dtype), backend.capabilities.quantizations
    weights = Materializer(checkpoint, backend.torch_device(), pack, quantization, schemes)
    materialize(found.model, weights)
    net = (PoolingNet if found.own_attention is None else OwnAttentionNet)(found, backend, weights.bytes)
    check_alone(files, found, net, backend.torch_device(), classifier=classifier)
    return net


def _has_segments(base: nn.Module) -> bool:
    """Whether the model tells two texts apart. Where there are no such embeddings, segments would be other tokens."""
    known = "token_type_ids" in inspect.signature(base.forward).parameters
    return known and bool(getattr(base.config, "type_vocab_size", 0))


@torch.inference_mode()  # type: ignore[untyped-decorator]
def check_alone(
    files: ModelFiles, found: Inspected, net: PoolingNet, device: torch.device, *, classifier: bool
) -> None:
    """A short text must get from the library's own call what it gets here, where positions, segments and states are
    handed over: architectures differ in what these mean. UnsupportedError when it does not."""
    model, shape = found.model, found.shape
    ids = [token for token in range(3, shape.vocab_size) if token != getattr(model.config, "pad_token_id", None)]
    ids_L = torch.tensor(ids[:_TRACE_TOKENS], device=device)
    if found.own_attention is None:
        theirs = model(input_ids=ids_L.unsqueeze(0), enginecore_step=_Dense(shape.calls))
        positions_L, none_L = torch.arange(len(ids_L), device=device), torch.zeros_like(ids_L)
        ours = call_base(_base(model), ids_L, positions_L + found.offset, none_L, _Dense(shape.calls))
    else:
        theirs = model(input_ids=ids_L.unsqueeze(0))
        ours = _base(model)(input_ids=ids_L.unsqueeze(0)).last_hidden_state[0]
    _check_longest(files, found, ids_L)
    if classifier:
        right, ours = theirs.logits[0].float(), net.logits(ours, ids_L)
    else:
        right, ours = theirs.last_hidden_state[0].float(), ours.float()
    off = float((ours - right).abs().max() / right.abs().max().clamp(min=1e-6))
    if not off <= _TOLERANCE[shape.dtype]:  # NaN, too
        raise _unsupported(
            files, [f"{type(model).__name__} gives a text other numbers ({off:.2g} off) when it is called in parts"]
        )


def _check_longest(files: ModelFiles, found: Inspected, ids_L: torch.Tensor) -> None:
    """The last position that there is to be must be there: a step that fails ends the engine."""
    base, last = _base(found.model), found.shape.max_positions - 1
    try:
        if found.own_attention is None:
            at_1 = torch.tensor([last + found.offset], device=ids_L.device)
            call_base(base, ids_L[:1], at_1, torch.zeros_like(at_1), _Dense(found.shape.calls))
        elif last < _LONGEST_TRIED:
            base(input_ids=ids_L[:1].expand(1, last + 1))
    except (IndexError, RuntimeError) as error:
        reason = f"{type(base).__name__} cannot read a text of {last + 1} tokens: {one_line(error)}"
        raise _unsupported(files, [reason]) from error


def call_base(
    base: nn.Module, input_ids_T: torch.Tensor, positions_T: torch.Tensor, segments_T: torch.Tensor, step: Step
) -> torch.Tensor:
    """The last hidden states [T, E] of a model without its head."""
    known = inspect.signature(base.forward).parameters
    optional: dict[str, Any] = {"position_ids": positions_T.unsqueeze(0), "use_cache": False}
    if _has_segments(base):
        optional["token_type_ids"] = segments_T.unsqueeze(0)
    given = {name: value for name, value in optional.items() if name in known}
    output = base(input_ids=input_ids_T.unsqueeze(0), enginecore_step=step, **given)
    states_TE: torch.Tensor = output.last_hidden_state[0]
    return states_TE


def _build(
    config: Any, dtype: torch.dtype, trust_remote_code: bool, implementation: str | None, *, classifier: bool
) -> PreTrainedModel:
    from transformers import AutoModel, AutoModelForSequenceClassification
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
    settings = {"dtype": dtype, "attn_implementation": implementation, "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        if classifier:
            model = AutoModelForSequenceClassification.from_config(config, **settings)
        else:
            model = AutoModel.from_config(config, **settings)
            if getattr(model, "pooler", None) is not None:  # of no use here, and many checkpoints do not have it
                model.pooler = None
    return model.eval().requires_grad_(False)


def _base(model: PreTrainedModel) -> nn.Module:
    """The part that gives hidden states."""
    found: nn.Module = model.base_model
    return found


class _Dense:
    """Attention of one text by itself; takes the place of a step."""

    def __init__(self, calls: tuple[AttentionCall, ...]) -> None:
        self._calls = iter(calls)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        sinks = options.get("s_aux")
        params = next(self._calls).params(None if sinks is None else sinks.detach().float())
        query_THD, key_TKD, value_TKD = (states[0].transpose(0, 1).float() for states in (query, key, value))
        out_THD: torch.Tensor = attend(query_THD, key_TKD, value_TKD, params).to(query.dtype)
        return out_THD.unsqueeze(0)

    def attend_latent(self, module: nn.Module, query_THW: torch.Tensor, rows_TW: torch.Tensor) -> torch.Tensor:
        raise ModelError("attention over latents is not supported for pooling")


class _Trace:
    """Records attention calls; takes the place of a step."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.reasons: list[str] = []

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        name, head_size, scale = type(module).__name__, query.shape[3], options.get("scaling")
        causal = options.get("is_causal") is not False and getattr(module, "is_causal", True) is not False
        window = options.get("sliding_window")
        if key.shape[2] != query.shape[2] or value.shape[3] != key.shape[3]:
            self.reasons.append(f"{name} attends across texts, or to values of another size than its keys")
        if window is not None and not causal:
            self.reasons.append("windows to both sides of a token are not supported")
        self.calls.append(
            AttentionCall(
                layer=len(self.calls),
                call=0,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=head_size,
                scale=float(head_size**-0.5 if scale is None else scale),
                sliding_window=window,
                soft_cap=options.get("softcap"),
                has_sinks=options.get("s_aux") is not None,
                causal=causal,
            )
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def attend_latent(self, module: nn.Module, query_THW: torch.Tensor, rows_TW: torch.Tensor) -> torch.Tensor:
        raise ModelError("attention over latents is not supported for pooling")


def _trace(base: nn.Module) -> tuple[list[AttentionCall], list[str]]:
    """The attention calls of one forward pass on meta, and what is in the way."""
    step = _Trace()
    ids_T = torch.zeros(_TRACE_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            states_TE = call_base(base, ids_T, ids_T, ids_T, step)
    except Exception as error:
        return [], [f"{type(base).__name__} could not be traced: {one_line(error)}"]
    if states_TE.shape[0] != _TRACE_TOKENS:
        step.reasons.append(f"{type(base).__name__} does not give a state for each token")
    if not step.calls:
        step.reasons.append("no attention call was seen")
    return step.calls, list(dict.fromkeys(step.reasons))


def _first_position(base: nn.Module) -> int:
    """Models after RoBERTa count positions from behind the padding token's id, which their embeddings then keep."""
    padding = getattr(getattr(base, "embeddings", None), "padding_idx", None)
    return padding + 1 if type(padding) is int else 0


class _Computed(nn.Module):  # type: ignore[misc]
    """Stands where a classifier expects its base model, and gives states that are there already."""

    def __init__(self, base: nn.Module, states_1LE: torch.Tensor) -> None:
        super().__init__()
        self._pooler, self._states_1LE = getattr(base, "pooler", None), states_1LE
        self._activation = getattr(base, "pooler_activation", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        pooled = None
        if self._pooler is not None and self._activation is not None:  # as ALBERT has it, without a module for both
            pooled = self._activation(self._pooler(self._states_1LE[:, 0]))
        elif self._pooler is not None:
            pooled = self._pooler(self._states_1LE)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self._states_1LE, pooler_output=pooled)


@contextmanager
def _in_place_of_base(model: PreTrainedModel, stand_in: nn.Module) -> Iterator[None]:
    name, base = model.base_model_prefix, _base(model)
    setattr(model, name, stand_in)
    try:
        yield
    finally:
        setattr(model, name, base)


def _unsupported(files: ModelFiles, reasons: list[str]) -> UnsupportedError:
    return UnsupportedError(f"model {files.name!r} cannot be served for pooling", reasons=tuple(reasons))
