"""When Triton cannot run: an error that names the alternative for who asked for it, a fallback that
is logged for others."""

from __future__ import annotations

import logging

import pytest
import torch

from nanovllm.attention.backends import get_backend
from nanovllm.ops.support import why_no_triton
from tests.stand_ins import set_gpu, set_installed

pytest.importorskip("triton")
GPU = torch.device("cuda")
COMPILERS = ("gcc", "clang", "cc")


@pytest.fixture(autouse=True)
def an_ampere_card(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, version="12.8", get_device_capability=(8, 0))
    set_installed(monkeypatch, triton=True, **dict.fromkeys(COMPILERS, True))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)


def test_nothing_is_in_the_way() -> None:
    assert why_no_triton(GPU, 128) is None
    assert get_backend("auto", GPU, 128).name == "triton"
    assert get_backend("auto", torch.device("cpu"), 128).name == "cpu"


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [
        ("old card", "compute capability 7.5; at least 8.0 (Ampere) is required"),
        ("no package", "'triton' is not installed"),
        ("no compiler", "install gcc, or set CC"),
        ("interpreter", "unset it"),
        ("large heads", "at most 256 are supported"),
    ],
)
def test_an_error_for_who_asked_and_a_fallback_for_others(
    obstacle: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head_dim = 512 if obstacle == "large heads" else 64
    if obstacle == "old card":
        set_gpu(monkeypatch, get_device_capability=(7, 5))
    elif obstacle == "no package":
        set_installed(monkeypatch, triton=False)
    elif obstacle == "no compiler":
        set_installed(monkeypatch, **dict.fromkeys(COMPILERS, False))
    elif obstacle == "interpreter":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="use 'auto' or 'torch'") as caught:
        get_backend("triton", GPU, head_dim)
    assert words in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert get_backend("auto", GPU, head_dim).name == "torch"
    [record] = caplog.records
    assert words in record.getMessage() and "'torch'" in record.getMessage()
    assert get_backend("torch", GPU, head_dim).name == "torch"


def test_on_a_cpu_it_takes_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        get_backend("triton", cpu, 64)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_triton(cpu, 64) is None
