"""`nanovllm chat`: talk with a model in the terminal, through an engine of our own or a server."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.cli.main import ServerError, UsageError, add_model_argument, engine_config, keys_of
from nanovllm.data.config import EngineConfig
from nanovllm.data.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine

Message = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add_model_argument(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("--url", help="talk to the server there instead of starting an engine")
    group.add_argument("--api-key", help="key for that server (with --url; default: NANOVLLM_API_KEY or VLLM_API_KEY)")
    group.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the chat")
    group.add_argument("--temperature", type=float, help="0: always the likeliest token (default: the model's)")
    group.add_argument("--max-tokens", type=int, help="longest answer (default: what the context leaves)")
    EngineConfig.add_arguments(parser)


class Answerer(Protocol):
    """Who answers a chat."""

    def stream(self, messages: list[Message]) -> AsyncIterator[str]:
        """The answer in pieces."""
        ...

    async def close(self) -> None:
        """Nothing more will be asked."""
        ...


class EngineAnswerer:
    """Answers with an engine of its own."""

    def __init__(self, engine: AsyncEngine, options: dict[str, Any]) -> None:
        self.engine = engine
        self.options = engine.limits.generation_defaults | {"max_tokens": None} | options
        self._num_requests = 0

    async def stream(self, messages: list[Message]) -> AsyncIterator[str]:
        """The answer in pieces."""
        text = self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        token_ids = self.engine.tokenizer.encode(text, add_special_tokens=False)
        self._num_requests += 1
        params = SamplingParams(**self.options)
        prompt = {"prompt_token_ids": token_ids}
        async for output in self.engine.generate(prompt, params, f"chat-{self._num_requests}"):
            yield output.outputs[0].text

    async def close(self) -> None:
        """End the engine."""
        await self.engine.shutdown()


class ServerAnswerer:
    """Answers through a server with OpenAI's API."""

    def __init__(self, url: str, api_key: str | None, model: str | None, options: dict[str, Any]) -> None:
        import httpx

        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.AsyncClient(base_url=base, headers=headers, timeout=httpx.Timeout(10, read=None))
        self.model = model
        self.options = options

    async def stream(self, messages: list[Message]) -> AsyncIterator[str]:
        """The answer in pieces."""
        import httpx

        try:
            if self.model is None:  # the first one that is served
                self.model = _checked(await self.client.get("/v1/models"))["data"][0]["id"]
            body = {"model": self.model, "messages": messages, "stream": True, **self.options}
            async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
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
            raise ServerError(f"the server at {self.client.base_url} cannot be reached: {reason}") from error

    async def close(self) -> None:
        """Close the connection."""
        await self.client.aclose()


def _checked(response: Any) -> Any:
    """The JSON of a response of an OpenAI-compatible server."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.status_code != 200 or not isinstance(body, dict):
        error = body.get("error") if isinstance(body, dict) else None
        reason = error.get("message") if isinstance(error, dict) else "it does not speak OpenAI's API"
        raise ServerError(f"the server answered with status {response.status_code}: {reason}")
    return body


def run(arguments: argparse.Namespace) -> int:
    """Read lines and answer them, until /exit or the end of the input."""
    _refuse_idle_flags(arguments)
    config = engine_config(arguments)
    options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    try:
        SamplingParams(**options)
    except ValueError as error:
        arguments.parser.error(str(error))
    # The loop stands still while somebody types; Ctrl-C during an answer cancels that answer only.
    with asyncio.Runner() as runner:
        answerer = runner.run(_open_answerer(config, arguments, options))
        try:
            Chat(runner, answerer, arguments.system_prompt).run()
        finally:
            runner.run(answerer.close())
    return 0


def _refuse_idle_flags(arguments: argparse.Namespace) -> None:
    """End the program with 2 if a flag would have no effect. A flag that repeats its default passes."""
    if arguments.url is None:
        if arguments.api_key is not None:
            arguments.parser.error("--api-key has no effect without --url, which names the server it is for")
        return
    for f in EngineConfig.flags():
        value = getattr(arguments, f.name)
        if f.name != "model" and value != f.default:
            flag = ("--no-" if value is False else "--") + f.name.replace("_", "-")
            arguments.parser.error(
                f"{flag} has no effect with --url: it is a setting of the server's engine, so leave it out here"
            )


async def _open_answerer(config: EngineConfig, arguments: argparse.Namespace, options: dict[str, Any]) -> Answerer:
    if arguments.url is not None:
        # The default is a model for an engine of our own; a server serves what it serves.
        model = config.model if config.model != EngineConfig.model else arguments.model_argument
        keys = keys_of(arguments, [] if arguments.api_key is None else [arguments.api_key])
        return ServerAnswerer(arguments.url, keys[0] if keys else None, model, options)
    from nanovllm.engine.async_engine import AsyncEngine

    return EngineAnswerer(await AsyncEngine.start(config), options)


class Chat:
    """A conversation in the terminal, or through a pipe, where only the answers are printed."""

    def __init__(self, runner: asyncio.Runner, answerer: Answerer, system_prompt: str | None) -> None:
        self.runner = runner
        self.answerer = answerer
        self.start: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages = list(self.start)
        self.interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Answer line after line."""
        if self.interactive:
            importlib.import_module("readline")  # lines can be edited and recalled
            print("Ctrl-C stops an answer, /reset starts again, /exit or Ctrl-D ends.")
        going_on = True
        while going_on:
            try:
                going_on = self._turn()
            except KeyboardInterrupt:  # not during an answer
                print("\n(/exit or Ctrl-D ends)")

    def _turn(self) -> bool:
        """Read a line and do what it says; False means that it was the last one."""
        try:
            line = input("\n> " if self.interactive else "").strip()
        except EOFError:
            return False
        if line == "/reset":
            self.messages = list(self.start)
        elif line and line != "/exit":
            self._answer(line)
        return line != "/exit"

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            self.runner.run(self._print(pieces))
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except (ServerError, ValueError) as error:
            if not self.interactive:
                raise UsageError(str(error)) from error
            print(f"error: {error}", file=sys.stderr)
            self.messages.pop()
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    async def _print(self, pieces: list[str]) -> None:
        answer = self.answerer.stream(self.messages)
        async for piece in answer:
            pieces.append(piece)
            print(piece, end="", flush=True)
