"""`LLM`: offline generation in this process, over a list of prompts."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from enginecore.adapters import AdapterInfo, AdapterKey
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.errors import ParameterError, RequestError
from enginecore.frontend.adapters import AdapterNames
from enginecore.frontend.beam_search import BeamSearchOutput, BeamSearchParams, beam_output
from enginecore.frontend.chat import ChatRenderer, load_template
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.fingerprint import fingerprint
from enginecore.frontend.generation_config import sampling_defaults
from enginecore.frontend.input_processor import AnswerForm, PreparedRequest, Prompt, grammar_tokenizer
from enginecore.frontend.llm_pooling import PoolingMethods
from enginecore.frontend.outputs import RequestOutput
from enginecore.frontend.pooling import processors
from enginecore.frontend.progress import GenerationProgress
from enginecore.frontend.tokenizer import Tokenizer
from enginecore.frontend.tools.plan import Plan, find_dialect
from enginecore.request import SamplingParams

Messages = list[dict[str, Any]]

#: vLLM's names of settings that have another name here.
_VLLM_NAMES = {
    "gpu_memory_utilization": "memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
}


class LLM(PoolingMethods):
    """An engine in this process. Keyword arguments are the fields of `EngineArgs`; vLLM's names of the same settings
    work.

    Use it as a context manager or call `shutdown()`; a forgotten one is shut down when it is collected or at exit.
    """

    def __init__(
        self, model: str = EngineArgs().model, *, device: str = "auto", dtype: str = "auto", **settings: Any
    ) -> None:
        for theirs, ours in _VLLM_NAMES.items():
            if theirs in settings:
                settings[ours] = settings.pop(theirs)
        args = EngineArgs(model=model, device=device, dtype=dtype, **settings)
        self._client = InprocClient(args)
        # Not a bound method: the finalizer must not keep the LLM alive.
        self._follows_grammars = False
        self._follows_grammars = False
        self._finalizer = weakref.finalize(self, self._client.shutdown)
        try:
            self.config = self._client.ready.config
            self._adapters = AdapterNames(self._client.ready.adapters)
            self._tokenizer = Tokenizer.load(self.config.model_path)
            self._table = TokenTable(self._tokenizer)
            self._input, self._output = processors(self.config, self._tokenizer, self._table)
            self._defaults = sampling_defaults(args.generation_config, self.config.model_path)
            template = load_template(args.chat_template) or self._tokenizer.chat_template
            self._renderer = ChatRenderer(template, self._tokenizer.special_tokens)
            self._dialect = find_dialect(template, self._tokenizer)
        except BaseException:
            self.shutdown()
            raise

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What can change a result, with its `id`."""
        return fingerprint(
            self._client.ready,
            tokenizer=self._tokenizer,
            chat_template=self._renderer.source,
            defaults=self._defaults,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; results come in the order of the prompts.

        A prompt is text, a list of token ids, or vLLM's dict form. `sampling_params` is one for all or one each;
        without it the model's own defaults apply. `adapter` names a loaded adapter for all, or one (or None) each.
        Raises ValueError naming the index of a prompt that is refused, before anything runs. A `max_tokens` beyond the
        context left is cut to it.
        """
        items = _as_list(prompts)
        params = self._params_for(sampling_params, len(items))
        if priority is not None and len(priority) != len(items):
            raise ParameterError(f"{len(items)} prompts, but {len(priority)} priorities", param="priority")
        adapters = self._adapters_for(adapter, len(items))
        return self._run(items, params, priority, bool(use_tqdm), add_special_tokens=True, adapters=adapters)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, rendered with the model's chat template."""
        single = not messages or isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if single else list(messages)
        renderer = self._renderer
        if chat_template is not None:
            renderer = ChatRenderer(load_template(chat_template), self._tokenizer.special_tokens)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with _naming(index, "conversation"):
                prompts.append(
                    renderer.render(
                        conversation,
                        tools=tools,
                        add_generation_prompt=add_generation_prompt and not continue_final_message,
                        continue_final_message=continue_final_message,
                        template_kwargs=chat_template_kwargs,
                    )
                )
        params = self._params_for(sampling_params, len(prompts))
        adapters = self._adapters_for(adapter, len(prompts))
        return self._run(prompts, params, None, bool(use_tqdm), add_special_tokens=False, adapters=adapters)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool | Callable[..., Any] = False
    ) -> list[BeamSearchOutput]:
        """The best answers to each prompt by their log-probabilities, best first; see `BeamSearchParams`.

        A prompt is as in `generate`. All beams of all prompts are one batch, and share what they have in common.
        """
        items = _as_list(prompts)
        wanted = [params.sampling_params()] * len(items)
        outputs = self._run(items, wanted, None, bool(use_tqdm), add_special_tokens=True)
        return [beam_output(output, self._prompt_text(output)) for output in outputs]

    def _prompt_text(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._tokenizer.decode(output.prompt_token_ids)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """API defaults with the model's generation_config on top."""
        return SamplingParams(**self._defaults)

    def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        """Load the low-rank adapter in a folder under a name (`enable_lora`; docs/lora.md). `in_place` replaces one of
        that name. Raises ParameterError, ModelError or UnsupportedError with all reasons."""
        info: AdapterInfo = self._client.call("load_adapter", name, path, in_place)
        self._adapters.add(info)
        return info

    def unload_adapter(self, name: str) -> None:
        """Let go of an adapter."""
        self._client.call("unload_adapter", name)
        self._adapters.remove(name)

    def _adapters_for(self, adapter: str | Sequence[str | None] | None, count: int) -> list[AdapterKey | None]:
        if adapter is None or isinstance(adapter, str):
            return [self._adapters.key(adapter)] * count
        if len(adapter) != count:
            raise ParameterError(f"{count} prompts, but {len(adapter)} adapters", param="adapter")
        return [self._adapters.key(name) for name in adapter]

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._client.call("reset_prefix_cache")

    def shutdown(self) -> None:
        """Release the model and its memory. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ParameterError(f"{count} prompts, but {len(params)} sampling_params", param="sampling_params")
        return list(params)

    def _run(self, prompts: Sequence[Prompt], params: list[SamplingParams], priority: Sequence[int] | None,
             show_progress: bool, *, add_special_tokens: bool,
             adapters: list[AdapterKey | None] | None = None) -> list[RequestOutput]:  # fmt: skip
        """Check everything, then add everything, then step until all have ended."""
        if not self._finalizer.alive:
            raise RuntimeError("this LLM has been shut down")
        prepared: list[PreparedRequest] = []
        for index, prompt in enumerate(prompts):
            with _naming(index, "prompt"):
                prepared.append(
                    self._input.process(
                        prompt,
                        params[index],
                        priority=priority[index] if priority is not None else 0,
                        add_special_tokens=add_special_tokens,
                        form=self._form(prompt, params[index]),
                        adapter=adapters[index] if adapters is not None else None,
                    )
                )
        return self._drive(prepared, show_progress)

    def _drive(self, prepared: Sequence[Any], show_progress: bool) -> list[Any]:
        """Add prompts that are checked, then step until all have ended; their outputs, in order."""
        if not self._finalizer.alive:
            raise RuntimeError("this LLM has been shut down")
        with GenerationProgress(len(prepared), enabled=show_progress) as progress:
            sink = _Results(len(prepared), progress)
            internal_ids = []
            try:
                for index, request in enumerate(prepared):
                    internal_ids.append(self._input.internal_id())
                    for engine_request in self._output.add(
                        request, request_id=str(index), internal_id=internal_ids[-1], sink=sink, kind="final", key=index
                    ):
                        if engine_request.grammar is not None and not self._follows_grammars:
                            self._follows_grammars = True
                            self._client.tell("use_tokenizer", *grammar_tokenizer(self._tokenizer))
                        self._client.add(engine_request)
                while self._output.num_requests and sink.error is None:
                    for engine_id, reason in self._output.process(self._client.step()).items():
                        self._client.abort([engine_id], reason)
                if sink.error is not None:
                    raise sink.error
            finally:
                self._clean_up(internal_ids)
        return sink.results()

    def _form(self, prompt: Prompt, params: SamplingParams) -> AnswerForm | None:
        """The bound on thinking, and a structured answer after it."""
        if params.thinking_token_budget is None:
            return None
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt") or prompt.get("prompt_token_ids") or ""
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        plan = Plan(self._dialect, structure=params.structured_outputs, thinking_budget=params.thinking_token_budget)
        return plan.form(text, self._input.grammars)

    def _clean_up(self, internal_ids: list[str]) -> None:
        """After an error or an interrupt nothing of this call may be left in the engine."""
        left = self._output.abort(internal_ids)
        if left:
            self._client.abort(left)


class _Results:
    """Collects final outputs by prompt index."""

    def __init__(self, count: int, progress: GenerationProgress) -> None:
        self._outputs: list[RequestOutput | None] = [None] * count
        self._progress = progress
        self.error: Exception | None = None

    def put(self, key: int, output: RequestOutput) -> None:
        self._outputs[key] = output
        self._progress.done(output)

    def fail(self, key: int, error: Exception) -> None:
        if isinstance(error, RequestError):
            error = ParameterError(f"prompt {key}: {error}", param="prompt")
        self.error = self.error or error

    def results(self) -> list[RequestOutput]:
        outputs = [output for output in self._outputs if output is not None]
        assert len(outputs) == len(self._outputs), "a prompt ended without an output"
        return outputs


class _naming:
    """Adds the index of the prompt to a ParameterError raised inside."""

    def __init__(self, index: int, noun: str) -> None:
        self._index, self._noun = index, noun

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, ParameterError):
            raise ParameterError(
                f"{self._noun} {self._index}: {error.message}", param=error.param, code=error.code, fix=error.fix
            ) from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of prompts, as a list. A flat list of ints is one prompt of token ids."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if prompts and all(type(item) is int for item in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]
