"""Converts text to token ids and back, and chats to text: a thin layer over `tokenizers` and
transformers' templates.

Imports neither torch nor, for a model with a tokenizer.json, transformers, so that a server can
answer before either is loaded. Another process renders templates, see `chat_template`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from nanovllm.checkpoint.files import NAMED_TOKENS, ModelFileError, TokenizerConfigFile, read_json
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.json import JsonObject
from nanovllm.text.chat_template import PROCESS, HelperProcessError
from nanovllm.text.token_decoder import TokenDecoder

Named = Mapping[str, str]  # name -> text
# The first byte of a SentencePiece model, a protocol buffer. Other files named tokenizer.model are
# text of tiktoken.
SENTENCEPIECE_START = b"\n"


class Tokenizer:
    """A model's tokenizer and its chat templates.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work.
        special_tokens: name to text, such as {"eos_token": "</s>"}; templates see these as
            variables.
        chat_templates: name to Jinja source; "default" is used unless another is requested.
        all_special_ids: ids that `decode` skips by default, in ascending order.
        special_ids: the same, to look up ids.
        token_decoder: how tokens become text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Named | None = None,
        chat_templates: Named | None = None,
    ) -> None:
        self.backend = backend
        # Some files contain the training run's limits; the engine checks lengths itself.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.token_decoder = TokenDecoder(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self.all_special_ids = sorted(index for index, token in added.items() if token.special)
        self.special_ids = frozenset(self.all_special_ids)

    @classmethod
    def of(cls, config: EngineConfig) -> Tokenizer:
        """The tokenizer that the settings name, or else the model's."""
        if config.tokenizer is None:
            return cls.from_pretrained(resolve_model(config.model, config.revision))
        # The model's revision means nothing there.
        return cls.from_pretrained(resolve_model(config.tokenizer))

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a model folder in Hugging Face format.

        Whether `encode` adds a beginning or end token is up to the post-processor in
        tokenizer.json; as in transformers 5, `add_bos_token` and `add_eos_token` of
        tokenizer_config.json count only for folders without that file.

        Raises:
            ValueError: the folder has no tokenizer, or one that cannot be read.
        """
        folder = Path(path)
        config = _read_fields(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # written before transformers 4.34
            config |= _read_fields(folder / "special_tokens_map.json")
        templates = _read_chat_templates(folder, config)
        if not (folder / "tokenizer.json").is_file():
            backend, special_tokens = _load_with_transformers(folder)
            return cls(backend, special_tokens, templates)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(
                f"'{folder / 'tokenizer.json'}' is not a tokenizer file: {error}"
            ) from error
        special_tokens = {name: config[name] for name in NAMED_TOKENS if config.get(name)}
        _register_added_tokens(backend, config, special_tokens.values())
        return cls(backend, special_tokens, templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, with the special tokens that the post-processor adds (often a
        beginning token).

        Special tokens that are spelled out in the text become special tokens; rendered chats rely
        on this.

        Raises:
            ValueError: the text is not valid Unicode (JSON can smuggle in half of a surrogate
                pair).
        """
        try:
            # Unlike `encode`, `encode_batch` releases the interpreter lock, so that other threads
            # run meanwhile.
            return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise ValueError(
                "prompt must be a string of valid Unicode, without unpaired surrogates"
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Bytes that are no UTF-8 become U+FFFD; ids beyond the vocabulary
        become nothing.

        Unlike transformers, never removes spaces before punctuation, even if tokenizer_config.json
        asks for it: text would change after it was streamed.

        Raises:
            OverflowError: an id is negative or does not fit in 32 bits.
        """
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @functools.cache  # noqa: B019  (a process has one tokenizer)
    def decode_token(self, token_id: int) -> str:
        """The text of one token, special or not. Cached, since log-probabilities name the same
        tokens again and again."""
        return self.decode([token_id], skip_special_tokens=False)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of each token ("Ġthe", "▁the", "<0x0A>"); None beyond the
        vocabulary."""
        return [self.backend.id_to_token(index) for index in token_ids]

    @functools.cache  # noqa: B019
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text (b" the"); they may be part of a character.

        Empty for ids beyond the vocabulary. Cached.
        """
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self.token_decoder.token_bytes(token)

    @functools.cache  # noqa: B019
    def ascii_text(self, token_id: int) -> str | None:
        """The text of a token whose bytes are ASCII characters; None for any other. Cached."""
        spelled = self.token_bytes(token_id)
        return spelled.decode("ascii") if spelled.isascii() else None

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text; None if there is none. `generation_config.json` may
        name several."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a chat to the text that the model was trained on. Encode it with
        `add_special_tokens=False`.

        Args:
            messages: each with "role" and "content"; content is a string, or OpenAI's list of parts
                of type "text", which are joined by line breaks.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: leave the last message open, to be continued by the model.
            chat_template: Jinja source, or the name of one of the model's templates, instead of the
                default. As in transformers, the default for `tools` is the template "tool_use", if
                there is one.
            kwargs: further variables for the template, such as `enable_thinking`.

        Raises:
            ValueError: no messages, no template, a part that is not text, both ways to end the
                text, an error of the template itself (with its message), or a template that takes
                too much time or memory.
        """
        if not messages:
            raise ValueError("messages is empty; a chat needs at least one message")
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        template = self._choose_template(chat_template, kwargs.get("tools") is not None)
        plain_messages = [_with_plain_content(message, i) for i, message in enumerate(messages)]
        variables = {
            **self.special_tokens,
            **kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        try:
            return PROCESS.ask(template, plain_messages, variables)
        except HelperProcessError:  # no fault of the template
            raise
        except Exception as error:
            # Including a variable of a type that cannot be sent to the process.
            raise ValueError(f"the chat template failed: {error}") from error

    def _choose_template(self, wanted: str | None, has_tools: bool) -> str:
        """The Jinja source of a template, as `get_chat_template` of transformers chooses it.

        Raises:
            ValueError: no template is wanted, and none is the default.
        """
        if wanted:
            return self.chat_templates.get(wanted, wanted)
        name = "tool_use" if has_tools and "tool_use" in self.chat_templates else "default"
        if name in self.chat_templates:
            return self.chat_templates[name]
        if self.chat_templates:
            names = ", ".join(sorted(self.chat_templates))
            raise ValueError(
                "none of the model's chat templates is the default: choose a chat_template of "
                f"{names}"
            )
        raise ValueError(
            "the model has no chat template; pass one as chat_template, or complete plain text"
        )


def _read_fields(path: Path) -> JsonObject:
    """The fields of a file that `TokenizerConfigFile` describes."""
    return TokenizerConfigFile.read(read_json(path), str(path))


def _read_chat_templates(folder: Path, config: JsonObject) -> dict[str, str]:
    """Templates by name. As in transformers, those in files of their own replace all those of
    tokenizer_config.json."""
    files = {
        file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        files.setdefault("default", folder / "chat_template.jinja")
    templates: dict[str, str] = {}
    for name, file in files.items():
        try:
            templates[name] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(f"'{file}' is not valid UTF-8: {error}") from error
    return templates or config.get("chat_template", {})


def _check_sentencepiece(folder: Path) -> None:
    """Check that a SentencePiece model in the folder can be read.

    Raises:
        ValueError: a library is missing; the message names the extra that has it.
    """
    for file in sorted(folder.glob("*.model")):
        with file.open("rb") as opened:
            is_sentencepiece = opened.read(1) == SENTENCEPIECE_START
        missing = [name for name in ("sentencepiece", "google.protobuf") if not _is_installed(name)]
        if is_sentencepiece and missing:
            raise ValueError(
                f"'{file}' is a SentencePiece model, and {missing[0]} is not installed: "
                "pip install 'nanovllm[sentencepiece]'"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the package around it is missing
        return False


def _register_added_tokens(
    backend: tokenizers.Tokenizer, config: JsonObject, named_tokens: Iterable[str]
) -> None:
    """Make the special tokens of tokenizer_config.json known to the tokenizer, as transformers
    does.

    They are usually in tokenizer.json too. Otherwise, they would be tokenized letter by letter in
    chats."""
    known = backend.get_added_tokens_decoder()
    added = sorted(config.get("added_tokens_decoder", {}).items())
    backend.add_tokens([AddedToken(**fields) for index, fields in added if index not in known])
    tokens = [
        *named_tokens,
        *(config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()),
    ]
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    missing = [
        AddedToken(token, special=True, normalized=False)
        for token in tokens
        if token not in special
    ]
    backend.add_special_tokens(missing)


def _load_with_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer that transformers makes of other files (tokenizer.model; vocab.json with
    merges.txt)."""
    _check_sentencepiece(folder)
    from transformers import AutoTokenizer

    try:
        # Without False, transformers asks on the terminal whether it may run code from the folder.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # the library raises any exception, depending on the files
        raise ValueError(
            f"the folder '{folder}' has no tokenizer.json, and none that can be converted: {error}"
        ) from error
    return backend, {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name in NAMED_TOKENS
    }


def _with_plain_content(message: Mapping[str, object], position: int) -> JsonObject:
    """The message with its content as one string, as templates of text models expect."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for i, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"messages[{position}].content[{i}] is of type {part.get('type')!r}; only parts of "
                "type 'text', with a string as 'text', are supported"
            )
    return {**message, "content": "\n".join(part["text"] for part in content)}
