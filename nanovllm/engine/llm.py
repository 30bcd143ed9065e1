"""Offline inference: `LLM(model).generate(prompts)` runs the whole engine in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanovllm.assembly.core import create_core, create_trace
from nanovllm.assembly.executor import follow_rank_0
from nanovllm.assembly.requests import Preparation
from nanovllm.data.checks import check_keywords
from nanovllm.data.config import EngineConfig
from nanovllm.data.json import JsonObject
from nanovllm.data.outputs import OutputCollector, RequestOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.text.input_processor import InputProcessor
from nanovllm.text.processor import OutputProcessor, RequestState
from nanovllm.text.prompts import Message, Prompt, encode_chats, pair_prompts
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.trace.trace import Trace

logger = logging.getLogger("nanovllm")

# Settings that have another name here.
NAMES_IN_NANO_VLLM = {"kvcache_block_size": "block_size", "num_kvcache_blocks": "num_kv_blocks"}


class LLMEngine:
    """An engine that takes prompts and returns text, step by step."""

    def __init__(self, config: EngineConfig, trace: Trace | None = None) -> None:
        self.config = config
        self.core = create_core(config, trace)
        self.tokenizer = Tokenizer.of(config)
        limits = self.core.limits
        prepare = Preparation(self.tokenizer, limits).prepare
        self.input_processor = InputProcessor(self.tokenizer, limits, config.seed, prepare)
        self.output_processor = OutputProcessor(self.tokenizer, RequestState)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> None:
        """Queue a request.

        Raises:
            ValueError: a bad prompt, or an id in use; nothing is queued then.
        """
        text, requests = self.input_processor.process(request_id, prompt, params, priority)
        self.output_processor.add(request_id, text, requests)
        try:
            for request in requests:
                self.core.add_request(request)
        except ValueError:
            self.abort_request(request_id)
            raise

    def abort_request(self, request_id: str) -> None:
        """End a request; it gets no further output."""
        for sequence_id in self.output_processor.remove(request_id):
            self.core.abort_request(sequence_id)

    @property
    def has_unfinished(self) -> bool:
        """True while a request has not ended."""
        return self.core.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Run one step; each output has the new text and tokens of one completion.

        After an error, no request is left; see `EngineCore.step`.
        """
        try:
            news, stopped = self.output_processor.process(self.core.step())
        except BaseException:
            for request_id in list(self.output_processor.requests):
                self.abort_request(request_id)
            raise
        for sequence_id in stopped:
            self.core.abort_request(sequence_id, reason="stop")
        return [output for _, output in news]


class LLM:
    """Loads a model, and completes prompts with it.

    Under torchrun, with as many processes as `tensor_parallel_size` x `pipeline_parallel_size`,
    only rank 0 continues with the program. On the other ranks the constructor does not return: they
    compute for rank 0, and exit with 0 when it ends.

    Args:
        model: course model, local folder, GGUF file, or hub id.
        trace: True keeps a record of every step in `self.trace`; a path writes it to a file. With
            `data_parallel_size`, `self.trace` has the first engine's steps, and each engine writes
            its own file, see `trace_path`.
        trust_remote_code: accepted, since vLLM has it, and of no effect: code in a model's folder
        is never run. **options: any field of `EngineConfig`.

    Raises:
        TypeError, ValueError: an unknown option, or one with a wrong value; the message names the
        fix.
    """

    def __init__(
        self,
        model: str = EngineConfig.model,
        trace: bool | str | os.PathLike[str] = False,
        *,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        elsewhere = {
            name: f"SamplingParams({name}=...)" for name in SamplingParams.__dataclass_fields__
        }
        check_keywords("LLM", options, EngineConfig, elsewhere | NAMES_IN_NANO_VLLM)
        if trust_remote_code:
            logger.warning(
                "trust_remote_code does nothing: nanovllm never runs code from a model's folder"
            )
        if trace and not isinstance(trace, bool):
            options["trace"] = os.fspath(trace)
        config = EngineConfig(model=model, **options)
        follow_rank_0(config)
        record = create_trace() if trace is True else None
        self.engine = LLMEngine(config, record)
        self._num_requests = 0

    @property
    def trace(self) -> Trace | None:
        """The record of all steps so far, if `trace` was given."""
        return self.engine.core.trace

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, or vLLM's defaults; see
        `EngineConfig.generation_config`."""
        return SamplingParams(**self.engine.core.limits.generation_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one prompt or a list: text, token ids, or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all prompts, or one per prompt; by default what the checkpoint
                recommends.

        Returns:
            Finished outputs, in the order of the prompts.

        Raises:
            ValueError: a bad prompt, or lists of different lengths. All requests of the call are
                ended.
        """
        request_ids: list[str] = []
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        try:
            for prompt, params, level in pair_prompts(prompts, default, priority):
                request_id = str(self._num_requests)
                self._num_requests += 1
                self.engine.add_request(request_id, prompt, params, level)
                request_ids.append(request_id)
            return self._run(request_ids, use_tqdm)
        except BaseException:
            for request_id in request_ids:
                self.engine.abort_request(request_id)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations with the model's chat template. See `generate`.

        Args:
            chat_template_kwargs: further variables for the template, such as `enable_thinking`.

        Raises:
            ValueError: see `generate` and `Tokenizer.apply_chat_template`.
            TypeError: a variable that is an argument here.
        """
        prompts = encode_chats(
            messages,
            self.engine.tokenizer,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        gathered: dict[str, OutputCollector] = {
            request_id: OutputCollector() for request_id in request_ids
        }
        with tqdm(
            total=len(request_ids),
            desc="Processed prompts",
            disable=not use_tqdm,
            dynamic_ncols=True,
        ) as bar:
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    if output.request_id in gathered:
                        gathered[output.request_id].add(output)
                        bar.update(int(output.finished))
        return [gathered[request_id].result() for request_id in request_ids]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.engine.core.reset_prefix_cache()
