"""llama.cpp as a peer, and schedulers without a model: what they are told, and that the benchmark
reads their answers right."""

from __future__ import annotations

import asyncio
import json
import pathlib
import shutil
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch

from nanovllm.cli.main import main
from nanovllm.data.errors import UsageError
from nanovllm.lab.bench import client, speculation, worker
from nanovllm.lab.bench.engines import SLOTS, EngineSettings, Server
from nanovllm.lab.bench.local import TINY, write_checkpoint
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.to_gguf import gguf_of, write_gguf
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import checkpoint_tensors
from tests.lab.bench.conftest import set_limits
from tests.lab.bench.peers import llama_cpp
from tests.oracle import make_checkpoint, reference_model
from tests.stand_ins import set_temporary_folder

PEERS = pathlib.Path(__file__).with_name("peers")


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> worker.LlamaSlots:
    """Three slots, and batches of at most eight tokens."""
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp)
    return worker.LlamaSlots("model.gguf", {"n_seq_max": 3, "n_batch": 8, "n_ctx": 300})


@pytest.fixture
def python(tmp_path: pathlib.Path) -> pathlib.Path:
    """The interpreter of an environment that has llama.cpp."""
    found = tmp_path / "llama" / "bin" / "python"
    found.parent.mkdir(parents=True)
    found.write_text(f'#!/bin/sh\nPYTHONPATH={PEERS} exec {sys.executable} "$@"\n')
    found.chmod(0o755)
    shutil.copy(PEERS / "llama-server", found.parent)
    return found


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(llama_cpp.next_token(tokens))
    return tokens


# ---------------------------------------------------------------- llama.cpp, offline


def test_slots_compute_every_request_whatever_shares_its_batches(slots: worker.LlamaSlots) -> None:
    requests = [
        {"prompt_token_ids": list(range(i, 2 * i + 3)), "max_tokens": 1 + i % 4} for i in range(10)
    ]
    timelines = slots.generate(requests)
    assert [len(line) for line in timelines] == [request["max_tokens"] for request in requests]
    for line in timelines:
        assert [count for _, count in line] == [1] * len(line) and line == sorted(line)
    # Prompts are computed in parts, beside tokens of other requests.
    assert max(slots.context.sizes) == 8
    held = [tokens for tokens in slots.context.sequences if tokens]
    assert len(held) == 3 and held == [tokens for tokens in slots.cached if tokens]
    for tokens in held:  # all but the last one, which no further token needs
        request = next(
            r for r in requests if tokens[: len(r["prompt_token_ids"])] == r["prompt_token_ids"]
        )
        assert tokens == expected(request["prompt_token_ids"], request["max_tokens"])[:-1]


def test_a_slot_keeps_the_prefix_of_its_last_prompt(slots: worker.LlamaSlots) -> None:
    prompt, context = list(range(20)), slots.context
    for other, computed in (
        (prompt, 20),
        (prompt, 1),
        ([*prompt[:12], 7, 7], 2),
        ([9, *prompt], 21),
    ):
        before = sum(context.sizes)
        slots.generate([{"prompt_token_ids": other, "max_tokens": 1}])
        assert sum(context.sizes) - before == computed
        assert context.sequences[0] == other


def test_a_batch_that_llama_cpp_refuses_is_an_error(slots: worker.LlamaSlots) -> None:
    slots.context.sequences[0].append(1)
    with pytest.raises(RuntimeError, match="llama_decode returned -1"):
        slots.step({0: [1, 2]})


# ---------------------------------------------------------------- llama.cpp's file


@pytest.mark.parametrize("variant", ["llama", "llama-mha-tied", "qwen3"])
def test_a_gguf_file_is_the_checkpoint(variant: str, tmp_path: pathlib.Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = make_checkpoint(tmp_path / "model", variant)
    write_gguf(folder, tmp_path / "model.gguf", "F32", "F32")
    # Of Qwen 3, transformers reads all but the size of heads.
    head_dim = ModelConfig.from_pretrained(folder).head_dim
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf", head_dim=head_dim)
    read = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    loaded = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=read)
    missing, unexpected = read.load_state_dict(loaded["tensors"], strict=False)
    assert (
        set(missing) <= {"lm_head.weight"}
        and not unexpected
        and bool(missing) == config.tie_word_embeddings
    )
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            read(ids).logits, reference_model(str(folder))(ids).logits, rtol=1e-4, atol=1e-4
        )


def test_a_gguf_file_is_written_once_for_the_same_weights(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    folder = make_checkpoint(tmp_path / "model")
    first = gguf_of(folder, "bfloat16")
    assert first.parent == tmp_path / "home" / "models" and first.read_bytes()[:4] == b"GGUF"
    written = first.stat().st_mtime_ns
    assert gguf_of(folder, "bfloat16") == first and first.stat().st_mtime_ns == written
    assert gguf_of(folder, "float16") != first
    (folder / "model.safetensors").touch()
    assert gguf_of(folder, "bfloat16") != first
    with pytest.raises(UsageError, match=r"runs LlamaForCausalLM.*no MixtralForCausalLM"):
        gguf_of(make_checkpoint(tmp_path / "mixtral", "mixtral"), "bfloat16")


def test_a_gguf_file_is_quantized_as_nanovllm_would_load_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    folder = make_checkpoint(tmp_path / "model")
    path = gguf_of(folder, "bfloat16", "w4a8", quantize_head=True)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = (
        "blk.0.attn_q.weight",
        "blk.1.ffn_down.weight",
        "token_embd.weight",
        "output_norm.weight",
    )
    assert [found[name].tensor_type.name for name in names] == ["Q4_0", "Q4_0", "Q8_0", "F32"]
    down = found["blk.1.ffn_down.weight"]
    [weight] = [
        t for name, t in checkpoint_tensors(folder) if name == "model.layers.1.mlp.down_proj.weight"
    ]
    error = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type)) - weight.float()
    assert 0 < error.norm() < 0.15 * weight.float().norm()
    assert (
        gguf_of(folder, "bfloat16", "w8a8")
        != gguf_of(folder, "bfloat16", "w8a8", quantize_head=True)
        != path
    )


# ---------------------------------------------------------------- llama.cpp, told and asked


def test_llama_cpp_gets_the_same_threads_and_limits(
    python: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_temporary_folder(monkeypatch, tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    options = {"max_model_len": 128, "block_size": 32, "enable_prefix_caching": False}
    settings = EngineSettings("llamacpp", tmp_path / "m.gguf", options, 2, str(python))
    assert settings.engine_options() == {
        "n_seq_max": SLOTS,
        "n_ctx": SLOTS * 128,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_threads": 2,
        "n_threads_batch": 2,
    }
    assert (
        "PYTHONPATH" not in settings.environment()
        and settings.environment()["OMP_NUM_THREADS"] == "2"
    )
    settings.options |= {"max_num_batched_tokens": 128, "max_num_seqs": 4}
    program, *words = Server(settings)._command()
    assert program == str(python.with_name("llama-server"))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    del flags["--port"]
    assert flags == {
        "--host": "127.0.0.1",
        "--model": str(tmp_path / "m.gguf"),
        "-np": "4",
        "-c": "512",
        "-b": "128",
        "-ub": "128",
        "-t": "2",
        "-tb": "2",
    }


@pytest.mark.parametrize("benchmark", ["latency", "serve"])
def test_llama_cpp_is_measured_beside_nanovllm(
    benchmark: str, python: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where GGUF files go; the engines find the compiled kernels where they are.
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    set_limits(monkeypatch)
    engines = (
        ["nanovllm", "llamacpp"] if benchmark == "latency" else ["nanovllm", "llamacpp", "watched"]
    )
    words = [
        "bench",
        benchmark,
        "--model",
        str(make_checkpoint(tmp_path / "model")),
        "--engine",
        ",".join(engines),
    ]
    words += [
        "--llamacpp-python",
        str(python),
        "--input-len",
        "12",
        "--output-len",
        "5",
        "--repeats",
        "2",
    ]
    words += [
        "--batch-size" if benchmark == "latency" else "--num-prompts",
        "3",
        "--dtype",
        "float32",
    ]
    assert (
        main(
            [
                *words,
                "--threads",
                "1",
                "--kv-cache-memory",
                "8MiB",
                "--json",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    data = json.loads((tmp_path / "r.json").read_text())
    speed, _, starts, ratios = data["tables"].values()
    assert [row["engine"] for row in speed] == [row["engine"] for row in starts] == engines
    assert all(rate > 0 for row in speed for rate in row["tokens/s"])
    assert {row["against"] for row in ratios} == set(engines[1:])
    assert all(len(row["ratio"]) == 2 for row in ratios if row["figure"] == "tokens/s")
    assert any(fact.startswith(f"llamacpp: {SLOTS} slots, which") for fact in data["facts"])
    assert ("llamacpp: llamacpp b1-fake" in data["facts"]) == (benchmark == "serve")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latency", "--engine", "llamacpp"], "needs --llamacpp-python"),
        (
            ["serve", "--engine", "llamacpp", "--llamacpp-python", sys.executable],
            "needs llama-server to serve",
        ),
        (["latency", "--engine", "watched"], "has no offline use"),
        (["scheduler", "--vllm-python", "/nowhere"], "got /nowhere"),
    ],
)
def test_a_peer_that_is_missing_is_named(
    words: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_checkpoint(tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))
    capsys.readouterr()
    assert main(["bench", *words, "--model", str(folder)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


# ---------------------------------------------------------------- a client that watches


@pytest.mark.parametrize("status", ["200 OK", "200 and over", "404 Not Found"])
async def test_a_talk_is_watched_from_its_beginning_to_its_end(status: str) -> None:
    sent: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        sent.append("header")
        writer.write(f"HTTP/1.1 {status}\r\n\r\nheader\n".encode())
        await writer.drain()
        if status == "200 OK":
            await reader.read()  # until the client goes
            sent.append("gone")
        writer.close()

    async def talk() -> str:
        assert sent == ["header"]
        await asyncio.sleep(0.2)
        return "done"

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if status == "200 OK":
            assert await client.watched(url, talk()) == "done"
            async with asyncio.timeout(30):
                while sent != ["header", "gone"]:
                    await asyncio.sleep(0.01)
        elif status == "200 and over":
            with pytest.raises(client.ServerError, match="/trace ended"):
                await client.watched(url, talk())
        else:
            words = talk()
            with pytest.raises(httpx.HTTPStatusError, match="404"):
                await client.watched(url, words)
            words.close()


# ---------------------------------------------------------------- schedulers


def orders(count: int, length: int, steps: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [i] * length, "max_tokens": steps} for i in range(count)]


@pytest.mark.parametrize(("count", "length"), [(1, 8), (5, 40)])
def test_the_scheduler_alone_decodes_all_requests_in_every_timed_step(
    count: int, length: int
) -> None:
    plans: list[Any] = []

    def make(*arguments: Any) -> Any:
        scheduler, stub = worker.nanovllm_scheduler(*arguments)
        return scheduler, lambda plan: plans.append(plan) or stub(plan)

    requests = orders(count, length, 7)
    requests[-1]["prompt_token_ids"] += [1, 2]
    (times,) = worker.run_scheduler(make, "", requests)
    assert [plan.num_tokens for plan in plans] == [count * length + 2] + [count] * 6
    assert len(times) == 4 and np.array(times).shape == (4, 2) and np.array(times).min() > 0


def test_vllms_scheduler_is_made_as_its_engine_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of its modules: vLLM is not installed here."""
    made: list[Any] = []

    class Scheduler:
        def __init__(
            self,
            vllm_config: Any,
            kv_cache_config: Any,
            structured_output_manager: Any,
            block_size: int,
        ):
            self.config, self.requests = vllm_config, list[Any]()
            assert kv_cache_config.num_blocks == vllm_config.cache_config.num_gpu_blocks
            made.append(self)

        def add_request(self, request: Any) -> None:
            self.requests.append(request)

        def schedule(self) -> Any:
            return SimpleNamespace(
                num_scheduled_tokens={request.request_id: 1 for request in self.requests}
            )

        def update_from_output(self, plan: Any, output: Any) -> None:
            assert output.req_ids == list(plan.num_scheduled_tokens) == list(output.req_id_to_index)
            for request, tokens in zip(self.requests, output.sampled_token_ids, strict=True):
                request.output += tokens

    class Request:
        def __init__(
            self,
            request_id: str,
            prompt_token_ids: list[int],
            sampling_params: Any,
            block_hasher: Any,
        ):
            self.request_id, self.prompt_token_ids, self.output = (
                request_id,
                prompt_token_ids,
                list[int](),
            )

    class EngineArgs(SimpleNamespace):
        def __init__(self, model: str, **options: Any) -> None:
            super().__init__(model=model, **options)

        def create_engine_config(self) -> Any:
            return SimpleNamespace(
                args=self, cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256")
            )

    def named(*names: str) -> Any:
        return lambda *values, **more: SimpleNamespace(
            **dict(zip(names, values, strict=False)), **more
        )

    core = dict(
        StructuredOutputManager=named("config"),
        get_hash_fn_by_name=lambda name: hash,
        init_none_hash=lambda f: None,
        get_request_block_hasher=named("block_size", "function"),
        Request=Request,
        ModelRunnerOutput=named("req_ids", "req_id_to_index"),
    )
    spec = type(
        "FullAttentionSpec", (SimpleNamespace,), {"__init__": lambda self, block_size, dtype: None}
    )
    cache = dict(
        FullAttentionSpec=spec, KVCacheGroupSpec=named("layers", "spec"), KVCacheConfig=named()
    )
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"EngineArgs": EngineArgs, "SamplingParams": named()},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.engine": {},
        "vllm.v1.engine.core": core,
        "vllm.v1.kv_cache_interface": cache,
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    (times,) = worker.run_scheduler(worker.vllm_scheduler, "/model", orders(3, 20, 6))
    assert len(times) == 3
    (scheduler,) = made
    args = scheduler.config.args
    assert (args.model, args.max_num_seqs, args.max_num_batched_tokens, args.max_model_len) == (
        "/model",
        3,
        78,
        26,
    )
    assert scheduler.config.cache_config.num_gpu_blocks == 3 * 2 + 1  # vLLM's null block
    assert [request.prompt_token_ids for request in scheduler.requests] == [
        [0] * 20,
        [1] * 20,
        [2] * 20,
    ]
    assert all(request.output == [7] * 6 for request in scheduler.requests)


def test_the_dry_run_of_bench_scheduler(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], forked_parts: None
) -> None:
    words = [
        "bench",
        "scheduler",
        "--dry-run",
        "--threads",
        "1",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(words) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    tables = data["tables"]
    assert (
        data["dry_run"] is True and [row["status"] for row in tables.pop("Parts")] == ["done"] * 2
    )
    alone, parts = tables.values()
    assert [(row["tokens per request"], row["running"]) for row in alone] == [
        (8, 1),
        (8, 3),
        (40, 1),
        (40, 3),
    ]
    for row in alone:
        both = np.array(row["both"])
        assert (both > 0).all() and np.allclose(row["both, per request"], both / row["running"])
    assert [row["running"] for row in parts] == [1, 3]
    names = {
        "scheduler",
        "batch building",
        "sampling",
        "message to the front end",
        "output processing",
        "rest",
    }
    for row in parts:
        assert min(row[name][0] for name in names) > 0
        assert np.allclose(np.sum([row[name] for name in names], axis=0), row["together"])
    assert "NOT A MEASUREMENT" in capsys.readouterr().out


def test_the_dry_run_of_bench_speculation(tmp_path: pathlib.Path, forked_parts: None) -> None:
    words = [
        "bench",
        "speculation",
        "--dry-run",
        "--threads",
        "1",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(words) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert [row["status"] for row in data["tables"]["Parts"]] == ["done", "done", "skipped"]
    rows = data["tables"]["Drafts, greedy answers"]
    cases = [("chat", 1), ("code", 1), ("summary", 1), ("copy", 1), ("chat", 8), ("chat", 32)]
    assert [(row["questions"], row["concurrent requests"]) for row in rows[::2]] == cases * 2
    assert [row["drafts"] for row in rows] == ["none", "ngram"] * 6 + ["none", "draft_model"] * 6
    assert all(row["tokens/s"][0] > 0 and row["speed ÷ none"]["median"] > 0 for row in rows)


class PeerAlone:
    """In the place of vLLM: the last of a question's 4 tokens comes after half a second."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        assert (settings.name, settings.python) == ("vllm", "its python")

    def __enter__(self) -> PeerAlone:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wake(self) -> None:
        self.is_awake = True

    def rest(self) -> None:
        self.is_awake = False

    def ask(self, requests: Any) -> Any:
        assert self.is_awake
        drafts = self.settings.engine_options()["speculative_config"]
        assert drafts is None or drafts["method"] == "ngram"
        assert all(request.prompt_token_ids and request.max_tokens == 4 for request in requests)
        return [[(0.25, 3), (0.5, 1)] for _ in requests]


def test_vllm_answers_the_same_questions(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "OfflineEngine", PeerAlone)
    folder = write_checkpoint(tmp_path, TINY)
    rows = list(
        speculation.measure(
            Setting(True, str(folder), repeats=1, peers={"vllm": "its python"}), "ngram"
        )
    )
    assert [row["drafts"] for row in rows] == ["none", "ngram", "vLLM, none", "vLLM, ngram"] * 6
    assert [row["tokens/s"] for row in rows if row["drafts"] == "vLLM, ngram"] == [[8.0]] * 6
