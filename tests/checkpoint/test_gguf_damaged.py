"""Damaged GGUF files, and those from untrusted sources: each gives a message or a model."""

import os
import random
import resource
import shutil
import struct
from pathlib import Path

import pytest

from nanovllm.checkpoint.files import ModelFileError
from nanovllm.checkpoint.gguf_file import GgufFile
from nanovllm.checkpoint.gguf_tokenizer import load_tokenizer
from tests.checkpoint.gguf_models import Kind, converted, write_model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_model(tmp_path_factory.mktemp("small") / "model.gguf", kind=Kind.Q4_0)
    return path.read_bytes()


def refused(found: bytes, folder: Path) -> str:
    path = folder / "bad.gguf"
    path.write_bytes(found)
    with pytest.raises(ModelFileError, match=r"bad\.gguf") as caught:
        GgufFile(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cut_file_is_refused_wherever_it_is_cut(small: bytes, tmp_path: Path) -> None:
    lengths = [*range(0, 3000, 7), *range(3000, len(small), 9973), len(small) - 1]
    for length in lengths:
        refused(small[:length], tmp_path)


def test_counts_and_lengths_beyond_the_file_are_refused(small: bytes, tmp_path: Path) -> None:
    huge = struct.pack("<Q", 2**62)
    assert "does not begin with" in refused(b"GGML" + small[4:], tmp_path)
    assert "version is 1;" in refused(small[:4] + struct.pack("<I", 1) + small[8:], tmp_path)
    assert "tensors; at most" in refused(small[:8] + huge + small[16:], tmp_path)
    assert "metadata fields; at most" in refused(small[:16] + huge + small[24:], tmp_path)
    assert "ends too early" in refused(small[:24] + huge + small[32:], tmp_path)
    for name in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"):
        place = small.index(name + b"\t") + len(name) + 8
        assert "it has a list of 4611686018427387904 elements" in refused(
            small[:place] + huge + small[place + 8 :], tmp_path
        )
    name = b"blk.0.attn_q.weight"
    sizes = small.index(name) + len(name) + 4
    assert "is not all there" in refused(small[:sizes] + huge + small[sizes + 8 :], tmp_path)
    offset = sizes + 2 * 8 + 4
    assert "is not all there" in refused(small[:offset] + huge + small[offset + 8 :], tmp_path)


def test_a_header_that_would_fill_the_memory_is_refused(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(small[:24] + struct.pack("<Q", 200 << 20) + small[32:])
    os.truncate(path, 300 << 20)  # takes no disk space
    with pytest.raises(ModelFileError, match=r"bad\.gguf': its metadata has more than 100 MiB"):
        GgufFile(path)


def test_changed_bytes_give_a_message_or_a_model(small: bytes, tmp_path: Path) -> None:
    rng = random.Random(0)
    end = small.index(b"blk.1.ffn_norm.weight")
    messages = 0
    for _ in range(60):
        changed = bytearray(small)
        changed[rng.randrange(end)] = rng.randrange(256)
        path = tmp_path / "changed.gguf"
        path.write_bytes(changed)
        shutil.rmtree(tmp_path / "changed", ignore_errors=True)
        try:
            converted(path)
        except ValueError as error:
            assert "changed.gguf" in str(error)
            messages += 1
    assert messages > 3


def test_a_length_anywhere_takes_neither_memory_nor_time(small: bytes, tmp_path: Path) -> None:
    """Each place of the header in turn holds a length that is too large, and two that lie."""
    end = small.index(b"blk.1.ffn_norm.weight") + 60
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusals = 0
    for place in range(4, end, 11):
        for value in (2**63 + 7, 2**31 - 1, 2**20):
            path = tmp_path / "changed.gguf"
            path.write_bytes(small[:place] + struct.pack("<Q", value) + small[place + 8 :])
            try:
                load_tokenizer(GgufFile(path))
            except ModelFileError as error:
                assert "\n" not in str(error)
                assert len(str(error)) < 1000 + len(str(path))
                refusals += 1
    assert refusals > 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
