"""Builds a tokenizer, with its chat template, from the metadata of a GGUF file.

The files name a way to split text into words (`tokenizer.ggml.pre`) but do not describe it. Each
is built here as the tokenizer.json of the models with that name has it.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from nanovllm.checkpoint.gguf_file import GgufFile

_FIELD = "tokenizer.ggml."
# Llama 3 and Qwen 2 differ in the digits of a word: up to three, and one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Applied one after another, each to the pieces that those before have left.
_DEFAULT_PATTERNS = (
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9]{3}",
)
_LLAMA3 = "llama-bpe"
_QWEN2 = "qwen2"
# A converter of llama.cpp that did not recognize a tokenizer wrote "default".
_DEFAULT = "default"
# name in the file → of the split
_SPLITS = {
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    _LLAMA3: _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    _QWEN2: _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    _DEFAULT: _DEFAULT,
}
# The search for merges of a token of n characters takes n**2 steps.
_LONGEST_TOKEN = 1024
_SPACE = "▁"
# name of an id in the file → of a token in tokenizer_config.json
_NAMED = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}


def load_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a file: a byte-level BPE ("gpt2") or SentencePiece's ("llama").

    Raises:
        ModelFileError: the file has another tokenizer, or another way to split words, or a value
            is missing or wrong.
    """
    kind = file.get(f"{_FIELD}model", str)
    tokens = file.get(f"{_FIELD}tokens", list)
    types = file.get(f"{_FIELD}token_type", list, [TokenType.NORMAL] * len(tokens))
    if not tokens or len(types) != len(tokens) or not all(isinstance(t, str) for t in tokens):
        raise file.error(f"{_FIELD}tokens must be strings, each with a token_type")
    if kind not in ("gpt2", "llama"):
        raise file.error(
            f"its tokenizer {kind!r} is not supported; supported are gpt2 (byte-level BPE) and "
            "llama (SentencePiece)"
        )
    named = _named_tokens(file, tokens)
    build = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        tokenizer = build(file, tokens, types)
        _add_tokens(tokenizer, tokens, types)
        _add_ends(file, tokenizer, kind, named)
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise file.error(f"its tokenizer cannot be built: {error}") from error
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=file.get(f"{file.get('general.architecture', str)}.context_length", int),
        chat_template=_chat_template(file),
        **named,
    )


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """The spelling of the tokens with a role, such as {"eos_token": "</s>"}."""
    named = {}
    for key, name in _NAMED.items():
        field = f"{_FIELD}{key}_token_id"
        if field not in file.metadata:
            continue
        index = file.get(field, int)
        if not 0 <= index < len(tokens):
            raise file.error(f"{field} must be from 0 to {len(tokens) - 1}, got {index}")
        named[name] = tokens[index]
    return named


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """The chat template, or several by name, if the file has any."""
    field = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{field}."): file.get(name, str)
        for name in file.metadata
        if name.startswith(f"{field}.")
    }
    default = file.get(field, str) if field in file.metadata else None
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """A byte-level BPE, whose merges are in the file."""
    split = _split_name(file)
    merges = [tuple(merge.split(" ")) for merge in file.get(f"{_FIELD}merges", list)]
    if any(len(merge) != 2 for merge in merges):
        raise file.error(f"{_FIELD}merges must be pairs of tokens")
    # Unused tokens only fill the embedding up to a round size.
    vocab = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != TokenType.UNUSED
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == _LLAMA3))
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_name(file: GgufFile) -> str:
    """The way in which a file splits text into words."""
    name = file.get(f"{_FIELD}pre", str)
    if name not in _SPLITS:
        raise file.error(
            f"its pre-tokenizer {name!r} is not supported; supported are {', '.join(_SPLITS)}"
        )
    return _SPLITS[name]


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """Return the splitter of text into words. "smollm" is GPT-2's, after every digit has
    been split off: the model never saw two digits in one token, although the vocabulary would allow
    it."""
    if split in ("gpt-2", "smollm"):
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        return gpt2 if split == "gpt-2" else pre_tokenizers.Sequence([digits, gpt2])
    words = _WORDS.format(digits="{1,3}" if split == _LLAMA3 else "")
    patterns = _DEFAULT_PATTERNS if split == _DEFAULT else (words,)
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """A BPE of SentencePiece: pieces are merged in the order of their scores, and characters
    without a piece are spelled in bytes."""
    if file.metadata.get(f"{_FIELD}precompiled_charsmap"):
        raise file.error(f"{_FIELD}precompiled_charsmap is not supported")
    scores = file.get(f"{_FIELD}scores", list)
    if len(scores) != len(tokens) or max(map(len, tokens)) > _LONGEST_TOKEN:
        raise file.error(
            f"{_FIELD}tokens must each have a score, and at most {_LONGEST_TOKEN} characters"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    skipped = {token for token, kind in zip(tokens, types, strict=True) if kind != TokenType.NORMAL}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)), skipped)
    unknown = [
        token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    back: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if file.get(f"{_FIELD}add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        back.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Have the tokens found that are spelled out in text: control tokens, which are special, and
    those that the model's makers defined."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    found = [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (*special, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(found)


def _add_ends(file: GgufFile, tokenizer: Tokenizer, kind: str, named: dict[str, str]) -> None:
    """Have encoded text begin and end with the tokens that the file asks for. llama.cpp's
    defaults are a beginning for SentencePiece and Llama 3, and no end."""
    begins = kind == "llama" or _split_name(file) == _LLAMA3
    wanted = {
        "bos": file.get(f"{_FIELD}add_bos_token", bool, begins),
        "eos": file.get(f"{_FIELD}add_eos_token", bool, False),
    }
    around: dict[str, list[str]] = {}
    for key, is_wanted in wanted.items():
        if is_wanted and f"{key}_token" not in named:
            raise file.error(f"{_FIELD}{key}_token_id is missing")
        around[key] = [named[f"{key}_token"]] if is_wanted else []
    ends = [*around["bos"], *around["eos"]]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*around["bos"], "$A", *around["eos"]],
            pair=[*around["bos"], "$A", *around["eos"], *around["bos"], "$B", *around["eos"]],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends],
        )
