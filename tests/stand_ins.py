"""What tests put in the place of what they cannot have or wait for: another GPU, a machine
without a compiler, a delay of a minute, a process that fails.

These are the borders of the program. What lies inside is tested as it is."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError


def set_constants(patch: pytest.MonkeyPatch, module: ModuleType, **values: Any) -> None:
    """Give sizes and delays of a module, which are constants in capitals, other values."""
    for name, value in values.items():
        assert name.isupper() and not name.startswith("_"), f"{name} is no public constant"
        patch.setattr(module, name, value)


def set_gpu(patch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Have torch tell something else of the GPU: "version" and "is_built" are of torch itself, all
    other names of `torch.cuda`. An answer is a function, or a value that is given always."""
    import torch

    for name, answer in answers.items():
        if name == "version":
            patch.setattr(torch.version, "cuda", answer)
        else:
            place = torch.backends.cuda if name == "is_built" else torch.cuda
            function = answer if callable(answer) else lambda *_, always=answer, **__: always
            patch.setattr(place, name, function)


def set_installed(patch: pytest.MonkeyPatch, **is_installed: bool) -> None:
    """Say whether packages and programs are there; all others are as they are."""
    spec_of, path_of = importlib.util.find_spec, shutil.which

    def find_spec(name: str, *arguments: Any) -> Any:
        if name not in is_installed:
            return spec_of(name, *arguments)
        return ModuleType(name) if is_installed[name] else None

    def which(name: str, *arguments: Any, **options: Any) -> str | None:
        if name not in is_installed:
            return path_of(name, *arguments, **options)
        return f"/usr/bin/{name}" if is_installed[name] else None

    patch.setattr(importlib.util, "find_spec", find_spec)
    patch.setattr(shutil, "which", which)


def set_temporary_folder(patch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    """Have temporary files made in a folder of the test's own."""
    patch.setattr(tempfile, "tempdir", str(folder))


def set_program(patch: pytest.MonkeyPatch, owner: type, program: str) -> None:
    """Run another program in the processes that a class starts, such as one that fails."""
    patch.setattr(owner, "program", program)


def set_backend(
    patch: pytest.MonkeyPatch, make_backend: Any = None, make_graph: Any = None
) -> None:
    """Have runners compute attention with another backend, and record other graphs, as on a GPU.

    Args:
        make_backend, make_graph: called without arguments.
    """
    from nanovllm.assembly import model, runner

    if make_backend is not None:
        patch.setattr(model, "get_backend", lambda *_, **__: make_backend())
    if make_graph is not None:
        patch.setattr(
            runner, "graph_maker", lambda *arguments: None if arguments[2] else make_graph
        )


def set_kernels(patch: pytest.MonkeyPatch, operators: ModuleType, kernels: ModuleType) -> None:
    """Have operators of `nanovllm.ops` served by other kernels, whatever the device."""
    patch.setattr(operators, "_kernels", lambda device: kernels)


def refuse_reference(
    patch: pytest.MonkeyPatch, kernels: ModuleType, name: str = "reference", **allowed: Any
) -> None:
    """Take plain torch from kernels, except for some functions: a kernel that hands its work on
    would be compared with itself."""
    patch.setattr(kernels, name, SimpleNamespace(**allowed))


def set_hardware(patch: pytest.MonkeyPatch, hardware: Any) -> None:
    """Have kernels planned for this `Hardware`, whatever the device."""
    patch.setattr(type(hardware), "of", classmethod(lambda cls, device: hardware))


def set_asynchronous(patch: pytest.MonkeyPatch) -> None:
    """Have the sampler do on a CPU what it does where the host must not wait for the device."""
    from nanovllm.core import sampling

    patch.setattr(sampling, "is_asynchronous", lambda device: True)


def set_memory(patch: pytest.MonkeyPatch, available: int) -> None:
    """Have the machine so many bytes of free memory."""
    import psutil

    patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def set_hub(patch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    """Ask a function for models, in place of the hub of Hugging Face."""
    import huggingface_hub

    patch.setattr(huggingface_hub, "snapshot_download", download)


def set_failure(patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """Have a function fail, as on a full disk or without memory."""

    def fail(*_: object, **__: object) -> None:
        raise error

    patch.setattr(owner, name, fail)


def note_starts(patch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Have no server start its engine; returns the settings of each that would have."""
    from nanovllm.engine.async_engine import AsyncEngine

    seen: list[EngineConfig] = []

    async def start(config: EngineConfig, show_text: bool) -> None:
        seen.append(config)
        raise UsageError("it has started")

    patch.setattr(AsyncEngine, "start", start)
    return seen


def set_executor(patch: pytest.MonkeyPatch, create: Callable[..., Any]) -> None:
    """Have engines that are made from here on run their steps in another executor."""
    from nanovllm.assembly import engine as core

    patch.setattr(core, "create_executor", create)
