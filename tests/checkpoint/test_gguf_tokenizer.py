"""Tokenizers of GGUF files: transformers, SentencePiece and llama.cpp's steps give the same ids."""

import json
from pathlib import Path

import gguf
import pytest
import regex
import sentencepiece
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from nanovllm.checkpoint.files import ModelFileError
from nanovllm.checkpoint.gguf_file import GgufFile
from nanovllm.checkpoint.gguf_tokenizer import load_tokenizer
from nanovllm.text.tokenizer import Tokenizer
from tests.checkpoint.gguf_models import (
    ALPHABET,
    TEXTS,
    add_byte_level,
    converted,
    finish,
    write_model,
)


def trained_merges() -> list[str]:
    """Merges learned from these texts, across words too, so that a wrong split shows."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 300, initial_alphabet=ALPHABET, show_progress=False
    )
    lines = TEXTS + ["123 12 1 12345 0000", "we'LL it's 'RE \n\n \t\t    ", "a.b;;--\n (x)"] * 3
    tokenizer.train_from_iterator(lines, trainer)
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def tokenizer_file(path: Path, split: str, merges: list[str], **flags: bool) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    add_byte_level(writer, split, merges, unmerged=("zqj",))
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    finish(writer)
    return path


def saved_tokenizer(path: Path) -> Tokenizer:
    load_tokenizer(GgufFile(path)).save_pretrained(path.parent / "saved", save_jinja_files=False)
    return Tokenizer.from_pretrained(path.parent / "saved")


# As llama.cpp applies them, each to the pieces that those before have left.
DEFAULT_STEPS = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
]


def pieces(text: str, steps: list[str]) -> list[str]:
    """The words of a text: matches, and what is between them."""
    found = [text]
    for step in steps:
        found = [part for piece in found for part in regex.split(f"({step})", piece) if part]
    return found


def test_the_default_split_is_that_of_llama_cpp(tmp_path: Path) -> None:
    merges = trained_merges()
    tokenizer = saved_tokenizer(tokenizer_file(tmp_path / "model.gguf", "default", merges))
    backend = Backend(
        models.BPE(
            vocab=tokenizer.backend.get_vocab(),
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in [*TEXTS, "a1234567b 89 $x+=y~|z^ 'tis  we've\n\n  ...٣٤٥٦ _-_"]:
        ids = [i for piece in pieces(text, DEFAULT_STEPS) for i in backend.encode(piece).ids]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("split", ["gpt-2", "qwen2", "llama-bpe", "deepseek-r1-qwen"])
def test_byte_level_ids_are_those_of_transformers(split: str, tmp_path: Path) -> None:
    merges = trained_merges()
    tokenizer = saved_tokenizer(tokenizer_file(tmp_path / "model.gguf", split, merges))
    vocab = tokenizer.backend.get_vocab()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if split == "llama-bpe":
        # Llama 3's own conversion, with this vocabulary.
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
        pattern = Regex(TikTokenConverter(vocab_file="unused").pattern)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        made = {"gpt-2": GPT2Tokenizer}.get(split, Qwen2Tokenizer)(vocab=vocab, merges=pairs)
        backend = made.backend_tokenizer
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [0] * (split == "llama-bpe") + ids
    # Llama 3 looks whole words up first.
    number = vocab["zqj"]
    assert (tokenizer.encode("zqj")[-1] == number) == (split == "llama-bpe")
    assert tokenizer.encode("<|end|>x", add_special_tokens=False)[0] == 1
    assert tokenizer.eos_token_id == 1
    assert tokenizer.chat_templates == {"default": "{{ messages[0]['content'] }}"}


def test_flags_of_the_file_add_or_leave_out_special_tokens(tmp_path: Path) -> None:
    path = tokenizer_file(
        tmp_path / "model.gguf", "qwen2", ["1 2"], add_bos_token=True, add_eos_token=True
    )
    ids = saved_tokenizer(path).encode("a")
    assert ids[0] == 0 and ids[-1] == 1 and len(ids) == 3
    path = tokenizer_file(tmp_path / "llama.gguf", "llama-bpe", ["1 2"], add_bos_token=False)
    assert len(saved_tokenizer(path).encode("a")) == 1


def test_a_split_that_is_not_known_exactly_is_refused(tmp_path: Path) -> None:
    known = "gpt-2, smollm, llama-bpe, llama3, llama-v3, qwen2, deepseek-r1-qwen, default"
    with pytest.raises(ModelFileError, match=f"'tekken' is not supported; supported are {known}$"):
        saved_tokenizer(tokenizer_file(tmp_path / "model.gguf", "tekken", ["1 2"]))


def test_a_tokenizer_that_is_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", rows_missing=1)
    with pytest.raises(ModelFileError, match="has 259 tokens, and its embedding only 258 rows"):
        converted(path)


def test_sentencepiece_ids_and_texts_are_its_own(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(Path(gguf.__file__).read_text() + Path(__file__).read_text())
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    ids = range(oracle.get_piece_size())
    types = [
        gguf.TokenType.UNKNOWN
        if oracle.is_unknown(i)
        else gguf.TokenType.CONTROL
        if oracle.is_control(i)
        else gguf.TokenType.BYTE
        if oracle.is_byte(i)
        else gguf.TokenType.NORMAL
        for i in ids
    ]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(256)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([oracle.id_to_piece(i) for i in ids])
    writer.add_token_scores([oracle.get_score(i) for i in ids])
    writer.add_token_types(types)
    writer.add_bos_token_id(oracle.bos_id())
    writer.add_eos_token_id(oracle.eos_id())
    writer.add_unk_token_id(oracle.unk_id())
    finish(writer)
    tokenizer = saved_tokenizer(tmp_path / "model.gguf")
    for text in TEXTS[:-1]:
        expected = oracle.encode(text)
        assert tokenizer.encode(text) == [oracle.bos_id(), *expected], text
        assert tokenizer.decode(expected) == oracle.decode(expected) == text
    assert tokenizer.encode("</s>", add_special_tokens=False) == [oracle.eos_id()]


def test_the_saved_tokenizer_is_one_for_transformers_too(tmp_path: Path) -> None:
    folder = converted(write_model(tmp_path / "model.gguf"))
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text)
