"""`nanovllm chat`: talk with a model in the terminal, through an engine of this process or through a server."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from nanovllm.data.config import EngineConfig
from nanovllm.data.flags import UsageError
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.server.access import api_keys
from nanovllm.server.commandline import ServerError, add_model_argument, engine_config

Message = dict[str, str]
# Streams the answer to a chat in pieces of text.
Answer = Callable[[list[Message]], AsyncIterator[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add_model_argument(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("--url", help="talk to the server there instead of starting an engine")
    group.add_argument("--api-key", help="key for that server (with --url; default: NANOVLLM_API_KEY or VLLM_API_KEY)")
    group.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the chat")
    group.add_argument("--temperature", type=float, help="0: always the likeliest token (default: the model's)")
    group.add_argument("--max-tokens", type=int, help="longest answer (default: what the context leaves)")
    EngineConfig.add_arguments(parser.add_argument_group("engine"))


@asynccontextmanager
async def engine_answers(config: EngineConfig, options: dict[str, Any]) -> AsyncIterator[Answer]:
    """Start an engine, and answer with it."""
    from nanovllm.engine.async_engine import AsyncEngine

    engine = await AsyncEngine.start(config)
    params = engine.limits.generation_defaults | {"max_tokens": None} | options
    numbers = itertools.count()

    async def stream(messages: list[Message]) -> AsyncIterator[str]:
        text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        prompt = {"prompt_token_ids": engine.tokenizer.encode(text, add_special_tokens=False)}
        async for output in engine.generate(prompt, SamplingParams(**params), f"chat-{next(numbers)}"):
            yield output.outputs[0].text

    try:
        yield stream
    finally:
        await engine.shutdown()


@asynccontextmanager
async def server_answers(
    url: str, api_key: str | None, model: str | None, options: dict[str, Any]
) -> AsyncIterator[Answer]:
    """Answer through a server that speaks OpenAI's API. Without a model's name, its first model answers."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=httpx.Timeout(10, read=None)) as client:

        async def stream(messages: list[Message]) -> AsyncIterator[str]:
            nonlocal model
            try:
                model = model or _checked(await client.get("/v1/models"))["data"][0]["id"]
                body = {"model": model, "messages": messages, "stream": True, **options}
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code != 200:
                        await response.aread()
                        _checked(response)
                    async for line in response.aiter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            chunk = json.loads(line.removeprefix("data: "))
                            if "error" in chunk:
                                raise ServerError(chunk["error"]["message"])
                            for choice in chunk["choices"]:
                                yield choice["delta"].get("content") or ""
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
                raise ServerError(f"the server at {client.base_url} cannot be reached: {reason}") from error

        yield stream


def _checked(response: Any) -> Any:
    """The JSON of a server's response."""
    try:
        body = response.json()
        if response.status_code == 200:
            return body
        reason = body["error"]["message"]
    except (ValueError, LookupError, TypeError):
        reason = "it does not speak OpenAI's API"
    raise ServerError(f"the server answered with status {response.status_code}: {reason}")


def run(arguments: argparse.Namespace) -> None:
    """Read lines and answer them, until /exit or the end of the input.

    Raises:
        UsageError: flags that make no sense, or have no effect.
    """
    url, key, prompt = arguments.url, arguments.api_key, arguments.system_prompt
    config = engine_config(arguments)
    idle = [word.partition("=")[0] for word in config.words() if not word.startswith("--model=")]
    if url is None and key is not None:
        raise UsageError("--api-key has no effect without --url, which names the server it is for")
    if url is not None and idle:
        raise UsageError(f"{idle[0]} has no effect with --url: it is a setting of the server's engine; leave it out")
    options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    try:
        SamplingParams(**options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if url is None:
        answers = engine_answers(config, options)
    else:  # the default model is one for an own engine; a server answers with the model that it serves
        model = config.model if config.model != EngineConfig.model else arguments.model_argument
        answers = server_answers(url, next(iter(api_keys([key])), None), model, options)
    # The event loop runs only during an answer: Ctrl-C then cancels this answer, and nothing else.
    with asyncio.Runner() as runner:
        answer = runner.run(answers.__aenter__())
        try:
            converse(runner, answer, [{"role": "system", "content": prompt}] if prompt else [])
        finally:
            runner.run(answers.__aexit__(None, None, None))


def converse(runner: asyncio.Runner, answer: Answer, start: list[Message]) -> None:
    """Answer line after line, in the terminal, or through a pipe, where only the answers are printed."""
    interactive, messages = sys.stdin.isatty(), list(start)
    if interactive:
        importlib.import_module("readline")  # lines can be edited and recalled
        print("Ctrl-C stops an answer, /reset starts again, /exit or Ctrl-D ends.")
    while True:
        try:
            line = input("\n> " if interactive else "").strip()
            if line == "/exit":
                return
            if line == "/reset":
                messages = list(start)
            elif line:
                reply(runner, answer, messages, line)
        except EOFError:
            return
        except KeyboardInterrupt:  # outside an answer
            print("\n(/exit or Ctrl-D ends)")
        except (ServerError, ValueError) as error:
            if not interactive:
                raise UsageError(str(error)) from error
            print(f"error: {error}", file=sys.stderr)


def reply(runner: asyncio.Runner, answer: Answer, messages: list[Message], line: str) -> None:
    """Print the answer to a line, and add both to the chat."""
    messages.append({"role": "user", "content": line})
    pieces: list[str] = []

    async def show() -> None:
        async for piece in answer(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)

    try:
        runner.run(show())
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except (ServerError, ValueError):
        messages.pop()
        raise
    print(flush=True)
    messages.append({"role": "assistant", "content": "".join(pieces)})
