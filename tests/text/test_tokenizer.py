"""The tokenizer of the course model, files of other shapes, and chat templates."""

import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.text.token_decoder import BYTE_OF_CHARACTER
from nanovllm.text.tokenizer import Tokenizer
from tests.examples import examples


@pytest.fixture(scope="session")
def course_folder() -> Path:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def course_tokenizer(course_folder: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(course_folder)


@pytest.fixture(scope="session")
def course_reference(course_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(course_folder)


def llama_backend(adds_bos: bool = True) -> Backend:
    """A SentencePiece-style BPE with byte tokens, as Llama 2 has it: "▁" for spaces, "<0xE2>" for
    odd bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdehlot.é", "▁t", "he", "▁the", "lo", "ll"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "o"), ("l", "l")]
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in pieces[:3]]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return backend


THE = llama_backend().token_to_id("▁the")


def save(folder: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# --- The course model -----------------------------------------------------------------------------


def test_digits_are_tokens_of_their_own(course_tokenizer: Tokenizer) -> None:
    spelled = course_tokenizer.convert_ids_to_tokens(course_tokenizer.encode("12345 and 3.14"))
    assert spelled == ["1", "2", "3", "4", "5", "Ġand", "Ġ", "3", ".", "1", "4"]


@given(number=st.integers(min_value=0))
def test_every_number_is_split_into_digits(course_tokenizer: Tokenizer, number: int) -> None:
    assert course_tokenizer.convert_ids_to_tokens(course_tokenizer.encode(str(number))) == list(
        str(number)
    )


def test_named_tokens(course_tokenizer: Tokenizer) -> None:
    assert course_tokenizer.eos_token_id == 2
    assert course_tokenizer.all_special_ids == list(range(17))
    assert course_tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert course_tokenizer.decode([1, 4093, 2]) == "user"
    assert (
        course_tokenizer.decode([1, 4093, 2], skip_special_tokens=False)
        == "<|im_start|>user<|im_end|>"
    )


# The vocabulary was learnt from text in which six control characters and two planes of Unicode
# never came up: it has no token for these bytes, and drops them.
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    "0123456789 \n\té½²٣½😀👩‍🚀🇫🇷\u200d'sS.,"
)


@settings(max_examples=examples(300))
@given(text=TEXTS)
def test_course_tokenizer_matches_transformers_and_round_trips(
    course_tokenizer: Tokenizer, course_reference: Any, text: str
) -> None:
    token_ids = course_tokenizer.encode(text)
    assert token_ids == course_reference.encode(text)
    assert course_tokenizer.decode(token_ids) == course_reference.decode(
        token_ids, skip_special_tokens=True
    )
    expected = bytes(byte for byte in text.encode() if byte not in MISSING_BYTES).decode(
        errors="replace"
    )
    assert course_tokenizer.decode(token_ids, skip_special_tokens=False) == expected


def test_missing_bytes_are_the_known_ones(course_tokenizer: Tokenizer) -> None:
    vocabulary = course_tokenizer.backend.get_vocab()
    missing = {byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary}
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert missing - never_in_utf8 == MISSING_BYTES


def test_byte_alphabet_is_that_of_the_library() -> None:
    assert set(BYTE_OF_CHARACTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, [*range(0x200), 0x20AC, 0x1F600]):
        ((pieces, _),) = pre_tokenizer.pre_tokenize_str(character)
        assert bytes(BYTE_OF_CHARACTER[piece] for piece in pieces) == character.encode()


def test_token_bytes_join_to_the_text(course_tokenizer: Tokenizer) -> None:
    text = "Straße 42 — 👩‍🚀 naïve\n<|im_end|>"
    token_ids = course_tokenizer.encode(text)
    assert b"".join(map(course_tokenizer.token_bytes, token_ids)) == text.encode()
    assert course_tokenizer.token_bytes(49152) == b""


def test_bad_input_is_a_value_error(course_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        course_tokenizer.encode("half of an emoji: \ud83d")
    with pytest.raises(ValueError, match="string"):
        course_tokenizer.encode(7)  # type: ignore[arg-type]
    for token_id in (-1, 2**32):
        with pytest.raises(OverflowError):
            course_tokenizer.decode([token_id])
    assert course_tokenizer.decode([49152, 4093]) == "user"


@pytest.mark.started
def test_neither_torch_nor_transformers_is_imported(course_folder: Path) -> None:
    program = (
        "import sys; from nanovllm.text.tokenizer import Tokenizer; from "
        "nanovllm.text.detokenizer import StopChecker\nt = "
        f"Tokenizer.from_pretrained({str(course_folder)!r}); t.decode(t.encode('a "
        "b'))\nt.apply_chat_template([{'role': 'user', 'content': 'Hi'}])\nassert not "
        "{'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- Files of other shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
)
def test_llama_tokenizer_matches_transformers(
    tmp_path: Path, adds_bos: bool, config: dict[str, bool]
) -> None:
    save(
        tmp_path,
        llama_backend(adds_bos),
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>"},
        unk_token="<unk>",
        **config,
    )
    tokenizer, reference = (
        Tokenizer.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    for text in ("the hello", "  the  héllo €", "<s>the", "", " "):
        for special in (True, False):
            token_ids = tokenizer.encode(text, add_special_tokens=special)
            assert token_ids == reference.encode(text, add_special_tokens=special)
            assert (token_ids[:1] == [1]) == ((adds_bos and special) or text.startswith("<s>"))
            for skip in (True, False):
                decoded = tokenizer.decode(token_ids, skip_special_tokens=skip)
                assert decoded == reference.decode(token_ids, skip_special_tokens=skip)
    assert tokenizer.all_special_ids == sorted(reference.all_special_ids)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.backend.get_vocab_size() == len(reference)


def test_token_bytes_of_sentencepiece() -> None:
    tokenizer = Tokenizer(llama_backend())
    token_ids = tokenizer.encode("the é€", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in token_ids] == [
        b" the",
        b" ",
        "é".encode(),
        b"\xe2",
        b"\x82",
        b"\xac",
    ]


@pytest.mark.parametrize(
    "where", ["added_tokens_decoder", "additional_special_tokens", "special_tokens_map.json"]
)
def test_special_tokens_that_tokenizer_json_lacks(tmp_path: Path, where: str) -> None:
    new = {
        "content": "<|eot|>",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    config: dict[str, Any] = {"eos_token": "</s>"}
    size = llama_backend().get_vocab_size()
    if where == "added_tokens_decoder":
        config["added_tokens_decoder"] = {str(size): {**new, "special": True}}
    elif where == "additional_special_tokens":
        config["additional_special_tokens"] = ["<|eot|>"]
    else:
        (tmp_path / where).write_text(json.dumps({"eos_token": new}))
    save(tmp_path, llama_backend(), **config)
    tokenizer, reference = (
        Tokenizer.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    assert tokenizer.encode("the<|eot|>") == reference.encode("the<|eot|>") == [1, THE, size]
    assert (
        tokenizer.eos_token_id == reference.eos_token_id == (size if where.endswith("json") else 2)
    )
    assert tokenizer.backend.get_vocab_size() == len(reference) == size + 1
    assert size in tokenizer.all_special_ids


def test_limits_of_the_training_run_are_dropped(tmp_path: Path) -> None:
    backend = llama_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.from_pretrained(save(tmp_path, backend))
    assert tokenizer.encode("the the the", add_special_tokens=False) == [THE] * 3


def test_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    vocab = {character: index for index, character in enumerate(sorted(BYTE_OF_CHARACTER))}
    vocab |= {"th": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|endoftext|>",
        "chat_template": "{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    token_ids = tokenizer.encode("the é<|endoftext|>")
    assert token_ids[0] == 256 and token_ids[-1] == 257 == tokenizer.eos_token_id
    assert tokenizer.decode(token_ids) == "the é"
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == "<|endoftext|>"


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer file"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Tokenizer.from_pretrained(tmp_path)


# --- Chats ----------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello"}]
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n"
)


def test_course_template(course_tokenizer: Tokenizer) -> None:
    question = "<|im_start|>user\nHello<|im_end|>\n"
    assert (
        course_tokenizer.apply_chat_template(HELLO) == f"{SYSTEM}{question}<|im_start|>assistant\n"
    )
    assert (
        course_tokenizer.apply_chat_template(HELLO, add_generation_prompt=False)
        == SYSTEM + question
    )
    own_system = [{"role": "system", "content": "Be brief."}, *HELLO]
    rendered = course_tokenizer.apply_chat_template(own_system, add_generation_prompt=False)
    assert rendered == f"<|im_start|>system\nBe brief.<|im_end|>\n{question}"


def test_course_template_matches_transformers(
    course_tokenizer: Tokenizer, course_reference: Any
) -> None:
    answer = {"role": "assistant", "content": "The answer is "}
    for messages, options in (
        (HELLO, {"add_generation_prompt": True, "continue_final_message": False}),
        ([*HELLO, answer], {"add_generation_prompt": False, "continue_final_message": True}),
    ):
        rendered = course_tokenizer.apply_chat_template(messages, **options)
        assert rendered == course_reference.apply_chat_template(messages, tokenize=False, **options)
        token_ids = course_reference.apply_chat_template(messages, return_dict=False, **options)
        assert course_tokenizer.encode(rendered, add_special_tokens=False) == token_ids


def test_text_parts_are_joined(course_tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    rendered = course_tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    assert "<|im_start|>user\nOne\nTwo<|im_end|>" in rendered
    assert parts == [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {}]
)
def test_other_parts_are_refused_by_place_and_type(
    course_tokenizer: Tokenizer, part: dict[str, Any]
) -> None:
    messages = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(
        ValueError, match=r"messages\[1\]\.content\[1\] is of type " + repr(part.get("type"))
    ):
        course_tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].missing.name }}", "has no attribute 'missing'"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_a_template_objects_to(
    course_tokenizer: Tokenizer, template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        course_tokenizer.apply_chat_template(HELLO, chat_template=template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "2 seconds of CPU",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10**10 }}", "256 MiB of memory"),
        ("{{ '%1000000000d' % 1 }}", "256 MiB of memory"),
        (
            (
                "{% set ns = namespace(a='a') %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a "
                "%}{% endfor %}"
            ),
            "256",
        ),
    ],
)
def test_a_template_that_never_ends_is_ended(
    course_tokenizer: Tokenizer, template: str, message: str
) -> None:
    """From a thread, as the server calls it; and the next chat is rendered."""
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(course_tokenizer.apply_chat_template, HELLO, chat_template=template)
        good = pool.submit(course_tokenizer.apply_chat_template, HELLO)
        with pytest.raises(ValueError, match=f"the chat template failed: .*{message}"):
            bad.result(60)
        assert good.result(60).endswith("<|im_start|>assistant\n")


def test_chats_that_cannot_be_rendered(course_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        course_tokenizer.apply_chat_template([])
    with pytest.raises(ValueError, match="exclude"):
        course_tokenizer.apply_chat_template(
            HELLO, add_generation_prompt=True, continue_final_message=True
        )
    assert not Tokenizer(llama_backend()).chat_templates
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(llama_backend()).apply_chat_template(HELLO)


def test_additional_templates_are_chosen_as_by_transformers(tmp_path: Path) -> None:
    """From files of their own, which replace all templates of tokenizer_config.json."""
    save(
        tmp_path, llama_backend(), bos_token="<s>", chat_template="config {{ messages[0].content }}"
    )
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
        }
    ]
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()

    def rendered(tokenizer: Any, **options: Any) -> str:
        options |= {"tokenize": False} if not isinstance(tokenizer, Tokenizer) else {}
        try:
            return tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, **options)
        except ValueError as error:
            return type(error).__name__

    def compare() -> list[str]:
        own, reference = (
            Tokenizer.from_pretrained(tmp_path),
            AutoTokenizer.from_pretrained(tmp_path),
        )
        options = (
            {},
            {"chat_template": "rag"},
            {"tools": tools},
            {"tools": tools, "chat_template": "rag"},
        )
        found = [rendered(own, **each) for each in options]
        assert found == [rendered(reference, **each) for each in options]
        return found

    assert compare()[0] == "config Hello"
    (extra / "rag.jinja").write_text(
        "rag {{ bos_token }}{{ messages[0].content }}{{ tools | length if tools else '' }}"
    )
    assert compare() == ["ValueError", "rag <s>Hello", "ValueError", "rag <s>Hello1"]
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert compare() == ["file Hello", "rag <s>Hello", "file Hello", "rag <s>Hello1"]
    (extra / "tool_use.jinja").write_text("tools {{ tools | length }}")
    assert compare()[2:] == ["tools 1", "rag <s>Hello1"]
    (extra / "broken.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"broken\.jinja' is not valid UTF-8"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_model_without_a_default_template_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(name)
    save(tmp_path, llama_backend())
    with pytest.raises(ValueError, match="choose a chat_template of rag, tool_use"):
        Tokenizer.from_pretrained(tmp_path).apply_chat_template(HELLO)


def train_sentencepiece(folder: Path) -> Any:
    """Write a tiny tokenizer.model, and return the library's processor of it."""
    sentencepiece = pytest.importorskip(
        "sentencepiece", reason="pip install 'nanovllm[sentencepiece]'"
    )
    texts = ["the cat sat on the mat", "hello world, the café is open", "one two three", "été"] * 20
    model = io.BytesIO()
    options: dict[str, Any] = {
        "vocab_size": 300,
        "model_type": "bpe",
        "byte_fallback": True,
        "num_threads": 1,
    }
    options |= {"character_coverage": 0.99, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, **options
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_a_folder_with_only_a_sentencepiece_model(tmp_path: Path) -> None:
    reference = train_sentencepiece(tmp_path)
    tokenizer, converted = (
        Tokenizer.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    for text in ("hello the cat", "the café, été 日本 😀"):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert token_ids == converted.encode(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids) == reference.decode(token_ids) == text
    assert tokenizer.eos_token_id == reference.eos_id()


@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf"])
def test_a_sentencepiece_model_without_its_libraries_names_the_extra(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    # transformers asks once what is installed: other tests need the true answer.
    assert is_sentencepiece_available() and is_protobuf_available()
    monkeypatch.setitem(sys.modules, module, None)
    message = (
        rf"tokenizer\.model' is a SentencePiece model.*{module}.*pip install"
        r" 'nanovllm\[sentencepiece\]'"
    )
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # of tiktoken
    with pytest.raises(ValueError, match="none that can be converted"):
        Tokenizer.from_pretrained(tmp_path)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D{{ bos_token }}"},
        {"name": "short", "template": "S{{ mood }}"},
    ]
    save(tmp_path, llama_backend(), bos_token="<s>", chat_template=named)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_templates["default"] == "D{{ bos_token }}"
    assert tokenizer.apply_chat_template(HELLO) == "D<s>"
    assert tokenizer.apply_chat_template(HELLO, chat_template="short", mood="!") == "S!"
    assert tokenizer.apply_chat_template(HELLO, chat_template="{{ messages[0].role }}") == "user"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template(HELLO) == "from the file"
