"""The methods of enginecore.v1.Inference. They check and run requests with what the HTTP routes are made of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator

from enginecore.adapters import AdapterKey
from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.output_processor import OutputKind
from enginecore.frontend.outputs import RequestOutput
from enginecore.request import SamplingParams
from enginecore.server.grpc import convert, embedding
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc.calls import Call
from enginecore.server.grpc.enginecore_pb2_grpc import InferenceServicer
from enginecore.server.kinds import check_generates, check_pools
from enginecore.server.pooled import pool_texts
from enginecore.server.protocol import TokenizeRequest
from enginecore.server.sampling import num_rows
from enginecore.server.state import ServerState
from enginecore.server.tokens import decode_ids, encode_prompt


class Inference(InferenceServicer):
    """Cancelling a call, or its deadline's passing, takes the request out of the engine."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        """The whole answer."""
        params, outputs, model = await self._start(request, call, "final")
        answer = pb.GenerateResponse(request_id=call.request_id, model=model)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                self._add_choices(answer, output, params)
                answer.usage.CopyFrom(convert.usage_of(output))
                if params.prompt_logprobs is not None:
                    found = convert.prompt_logprobs_of(self._state.llm.table, output, params.prompt_logprobs)
                    answer.prompt_logprobs.extend(found)
        return answer

    async def GenerateStream(self, request: pb.GenerateRequest, call: Call) -> AsyncIterator[pb.GenerateResponse]:
        """News as they come, merged when the client is slow."""
        params, outputs, model = await self._start(request, call, "delta")
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                news = pb.GenerateResponse(request_id=call.request_id, model=model)
                self._add_choices(news, output, params)
                if output.finished:
                    news.usage.CopyFrom(convert.usage_of(output))
                yield news

    def _add_choices(self, answer: pb.GenerateResponse, output: RequestOutput, params: SamplingParams) -> None:
        table = self._state.llm.table
        answer.choices.extend(convert.choice_of(table, choice, params.logprobs) for choice in output.outputs)

    async def _start(
        self, request: pb.GenerateRequest, call: Call, kind: OutputKind
    ) -> tuple[SamplingParams, AsyncGenerator[RequestOutput, None], str]:
        """Check a request: its parameters, what runs it, and the name of the model that answers. Errors name the
        field."""
        check_generates(self._state)
        state, adapter = self._state, call.choose_adapter(request.model)
        params, asked = await state.llm.off_loop(convert.sampling_of, state, request, stream=kind == "delta")
        model = adapter[0] if adapter is not None else state.model_name
        call.tally.asked(params, model)
        prepare = functools.partial(self._prepare, request, params, adapter, clamp=not asked)
        return params, self._run(call, params, prepare, kind), model

    async def _run(
        self, call: Call, params: SamplingParams, prepare: functools.partial[PreparedRequest], kind: OutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        llm = self._state.llm
        with self._state.reserve(num_rows(params)) as submitted:
            prompt = await llm.off_loop(prepare)
            stream = llm.stream([prompt], request_id=call.request_id, kind=kind, submitted=submitted)
            async with contextlib.aclosing(stream):
                async for news in stream:
                    for key, output in news:
                        call.tally.update(key, output)
                        yield output

    def _prepare(
        self, request: pb.GenerateRequest, params: SamplingParams, adapter: AdapterKey | None, *, clamp: bool
    ) -> PreparedRequest:
        """Render, tokenise and check; runs in a thread."""
        kind, special = request.WhichOneof("prompt"), request.add_special_tokens
        special = special if request.HasField("add_special_tokens") else kind != "chat"
        process = functools.partial(
            self._state.llm.input.process,
            params=params,
            priority=request.priority,
            cache_salt=request.cache_salt or None,
            adapter=adapter,
            add_special_tokens=special,
            clamp=clamp,
        )
        if kind == "text":
            return process(request.text, param="text")
        if kind == "token_ids":
            return process(list(request.token_ids.ids), param="token_ids")
        if kind is None:
            raise ParameterError("give text, token_ids or chat", param="prompt")
        text = self._state.llm.renderer.render(
            convert.messages_of(request.chat),
            tools=None,
            add_generation_prompt=convert.generation_prompt(request.chat),
            continue_final_message=request.chat.continue_final_message,
            template_kwargs=None,
        )
        return process(text, param="chat")

    async def Embed(self, request: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:
        """Vectors, in the order of the request."""
        state = self._state
        check_pools(state)
        state.check_model(request.model or None)
        prepare, count = embedding.texts_of(state, request)
        outputs = await pool_texts(state, call.tally, call.request_id, prepare, count)
        return await state.llm.off_loop(embedding.answer_of, state, call.request_id, outputs)

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        """Token ids of a text or of a rendered conversation."""
        self._state.adapter_of(request.model or None)
        ids = await self._state.llm.off_loop(self._tokenize, request)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._state.llm.config.max_model_len)

    def _tokenize(self, request: pb.TokenizeRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise ParameterError("give text or chat", param="prompt")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        body = TokenizeRequest(prompt=request.text, add_special_tokens=special)
        if kind == "chat":
            chat = request.chat
            body = TokenizeRequest(
                messages=convert.messages_of(chat),
                add_special_tokens=special,
                add_generation_prompt=convert.generation_prompt(chat),
                continue_final_message=chat.continue_final_message,
            )
        return encode_prompt(self._state, body)

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        """The text of token ids, special tokens included."""
        self._state.adapter_of(request.model or None)
        text = await self._state.llm.off_loop(decode_ids, self._state, list(request.token_ids), "token_ids")
        return pb.DetokenizeResponse(text=text)
