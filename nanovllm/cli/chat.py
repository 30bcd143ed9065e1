"""`nanovllm chat`: talk with a model in the terminal, through an engine of this process or through
a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import httpx

from nanovllm.assembly.flags import add_flags, read_flags, words_of
from nanovllm.data.checks import Amount, Keywords, Positive, did_you_mean
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import ServerError, UsageError
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.server.access import api_keys

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine

Message = dict[str, str]
# Streams the answer to a chat, in pieces of text.
Answer = Callable[[list[Message]], AsyncIterator[str]]
URL = r"https?://(\[[^\s/]+\]|[^\s/:]+)(:\d{1,5})?(/\S*)?"
COMMANDS = {
    "/help": "lists the commands",
    "/reset": "forgets the conversation",
    "/exit": "ends the chat",
}


class ChatOptions(TypedDict, total=False):
    """Options of an answer, under the names that servers know. The server or the model chooses
    those that are missing."""

    model: str
    temperature: float
    max_tokens: int
    chat_template: str


@dataclass
class ChatFlags(Keywords):
    """Flags of this command alone.

    Attributes:
        url: use the server at this URL instead of starting an engine
        api_key: key for that server (with --url; default: NANOVLLM_API_KEY or VLLM_API_KEY)
        system_prompt: system message at the beginning of the chat
        chat_template: name of one of the model's chat templates (default: default)
        temperature: sampling temperature; 0 always takes the most likely token (default: the
            model's)
        max_tokens: maximum number of tokens per answer (default: up to the context length)
    """

    url: str | None = None
    api_key: str | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    temperature: Amount | None = None
    max_tokens: Positive | None = None

    def options(self) -> ChatOptions:
        """Return the options that the user has set."""
        options: ChatOptions = {}
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="the same as --model")
    add_flags(ChatFlags, parser.add_argument_group("chat"))
    add_flags(EngineConfig, parser.add_argument_group("engine"))


def check_template(engine: AsyncEngine, name: str | None) -> None:
    """Check that the model has a chat template of this name.

    Raises:
        UsageError: it has not; lists the names.
    """
    known = engine.tokenizer.chat_templates
    if name is not None and name not in known:
        names = ", ".join(sorted(known)) or "none at all"
        raise UsageError(
            f"--chat-template must name a template of the model, got {name!r}; it has {names}"
        )


async def engine_answer(
    engine: AsyncEngine, options: ChatOptions, chat: list[Message]
) -> AsyncIterator[str]:
    """Answer with an engine of this process."""
    settings = engine.limits.generation_defaults | {"max_tokens": options.get("max_tokens")}
    if "temperature" in options:
        settings["temperature"] = options["temperature"]
    params = SamplingParams(**settings)
    text = engine.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, chat_template=options.get("chat_template")
    )
    prompt = {"prompt_token_ids": engine.tokenizer.encode(text, add_special_tokens=False)}
    async for output in engine.generate(prompt, params, f"chat-{len(chat)}"):
        yield output.outputs[0].text


@contextlib.contextmanager
def reaching(client: httpx.AsyncClient) -> Iterator[None]:
    """Turn the client's errors into a ServerError that names the server."""
    try:
        yield
    except (httpx.HTTPError, ExceptionGroup) as error:  # a group: a port above 65535
        reason = str(error) or type(error).__name__
        raise ServerError(
            f"the server at {client.base_url} cannot be reached: {reason}; check --url"
        ) from error


async def choose_model(client: httpx.AsyncClient, options: ChatOptions) -> None:
    """Check that the server can be reached; without a model's name, its first model answers."""
    with reaching(client):
        options.setdefault("model", _checked(await client.get("/v1/models"))["data"][0]["id"])


async def server_answer(
    client: httpx.AsyncClient, options: ChatOptions, chat: list[Message]
) -> AsyncIterator[str]:
    """Answer through a server that speaks OpenAI's API."""
    body = {"messages": chat, "stream": True, **options}
    with reaching(client):
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                _checked(response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise ServerError(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("content") or ""


def _checked(response: httpx.Response) -> Any:
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
    flags = read_flags(ChatFlags, arguments)
    config = read_flags(EngineConfig, arguments)
    url = flags.url
    key = flags.api_key
    prompt = flags.system_prompt
    idle = [word.partition("=")[0] for word in words_of(config) if not word.startswith("--model=")]
    if url is None and key is not None:
        raise UsageError("--api-key has no effect without --url, which names the server it is for")
    if url is not None and idle:
        raise UsageError(
            f"{idle[0]} has no effect with --url: it is a setting of the server's engine; do not "
            "set it here"
        )
    if url is not None and not re.fullmatch(URL, url):
        raise UsageError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
    options = flags.options()
    start = [{"role": "system", "content": prompt}] if prompt else []
    # The event loop runs only during an answer: Ctrl-C then cancels this answer, and nothing else.
    with asyncio.Runner() as runner:
        if url is not None:
            if config.model != EngineConfig.model:  # that is the default for an own engine
                options["model"] = config.model
            headers = [("Authorization", f"Bearer {key}") for key in api_keys([key])[:1]]
            base = url.rstrip("/").removesuffix("/v1")
            timeout = httpx.Timeout(10, read=None)
            client = httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout)
            runner.run(choose_model(client, options))
            return converse(runner, partial(server_answer, client, options), start)
        from nanovllm.engine.async_engine import AsyncEngine

        engine = runner.run(AsyncEngine.start(config))
        try:
            check_template(engine, flags.chat_template)
            converse(runner, partial(engine_answer, engine, options), start)
        finally:
            runner.run(engine.shutdown())


def converse(runner: asyncio.Runner, answer: Answer, start: list[Message]) -> None:
    """Answer line after line, in the terminal, or through a pipe, where only the answers are
    printed."""
    interactive = sys.stdin.isatty()
    messages = list(start)
    if interactive:
        import readline  # noqa: F401 (lines can be edited and recalled)

        print("Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands.")
    while True:
        try:
            line = input("\n> " if interactive else "").strip()
            if line == "/exit":
                return
            if line == "/reset":
                messages = list(start)
            elif line == "/help":
                print(*(f"{command:7} {what}" for command, what in COMMANDS.items()), sep="\n")
            elif interactive and re.fullmatch(r"/\w+", line):
                raise ValueError(
                    "there is no command "
                    f"{line}{did_you_mean(line, COMMANDS) or '; /help lists them'}"
                )
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


def reply(runner: asyncio.Runner, answer: Answer, chat: list[Message], line: str) -> None:
    """Print the answer to a line, and add both to the chat."""
    messages = [*chat, {"role": "user", "content": line}]
    pieces: list[str] = []

    async def show() -> None:
        async for piece in answer(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)

    try:
        runner.run(show())
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print(flush=True)
    chat[:] = [*messages, {"role": "assistant", "content": "".join(pieces)}]
