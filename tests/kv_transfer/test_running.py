"""The runner's half of KV transfer: each layer is saved as soon as it is computed, or all of them
after a step in which no layer called."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.assembly.runner import create_runner, runner_settings
from nanovllm.core.forward import Forward
from nanovllm.core.runner import ModelRunner
from nanovllm.core.runner_hooks import RunnerHookCalls
from nanovllm.core.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.data_parallel.lock_step import LOCK_STEP, LockStepRunner
from nanovllm.kv_transfer.connector import KV_TRANSFER, KVConnectorWorker
from nanovllm.kv_transfer.running import KVTransferRunner
from nanovllm.models.config import ModelConfig

LAYERS = range(3)  # of the tiny model


class Noted(KVConnectorWorker):
    """Notes what it is asked to do, among the layers that are computed."""

    def __init__(self, runner: ModelRunner, events: list[str]) -> None:
        self.kv_caches = runner.forward.kv_caches
        self.events = events

    def start_load_kv(self) -> None:
        self.events.append(f"load {self.metadata}")

    def save_kv_layer(self, layer: int, kv_cache: Tensor) -> None:
        assert kv_cache is self.kv_caches[layer]
        self.events.append(f"save {layer}")

    def get_finished(self, wait_seconds: float = 0.0) -> KVConnectorOutput:
        self.events.append("end")
        return KVConnectorOutput(finished_sending={"told"})


class Replayed(Forward):
    """Computes a step without calling the model's modules, as a CUDA graph does."""

    def run(self, *inputs: Any) -> Tensor:
        return torch.zeros(len(inputs[0]), self.model.config.hidden_size)


def runner_with(folder: pathlib.Path, events: list[str]) -> ModelRunner:
    config = EngineConfig(str(folder), dtype="float32", block_size=4, max_num_seqs=2)
    runner = create_runner(config, ModelConfig.from_pretrained(folder), folder)
    runner.features = [KVTransferRunner(lambda made: Noted(made, events))]
    runner.hooks = RunnerHookCalls(runner.features)
    for layer, module in runner.model.attention_layers.items():
        module.register_forward_pre_hook(
            lambda module, inputs, layer=layer: events.append(f"layer {layer}")
        )
    resolved = resolve(config, model_max_len=40, num_kv_blocks=8)
    runner.allocate(runner_settings(resolved), 8)
    return runner


def plan_of(**extras: object) -> SchedulerOutput:
    share = ScheduledRequest("A", 0, 3, [5, 6, 7], [0], SamplingParams(temperature=0), 3, 1)
    return SchedulerOutput([share], extras=extras)


def test_a_layer_is_saved_before_the_next_one_is_computed(tiny_model: pathlib.Path) -> None:
    events: list[str] = []
    result = runner_with(tiny_model, events).execute_model(plan_of(**{KV_TRANSFER: "orders"}))
    each = [event for layer in LAYERS for event in (f"layer {layer}", f"save {layer}")]
    assert events == ["load orders", *each, "end"], "once each, and in this order"
    assert result.extras == {KV_TRANSFER: KVConnectorOutput(finished_sending={"told"})}
    assert len(result.sampled["A"]) == 1


def test_layers_that_did_not_call_are_saved_after_the_step(tiny_model: pathlib.Path) -> None:
    events: list[str] = []
    runner = runner_with(tiny_model, events)
    caches = runner.forward.kv_caches
    runner.forward = Replayed(runner.model, runner.forward.backend)
    runner.forward.kv_caches = caches
    runner.execute_model(plan_of(**{KV_TRANSFER: "orders"}))
    assert events == ["load orders", *(f"save {layer}" for layer in LAYERS), "end"]


def test_a_step_without_orders_asks_nothing(tiny_model: pathlib.Path) -> None:
    events: list[str] = []
    runner = runner_with(tiny_model, events)
    assert runner.execute_model(plan_of()).extras == {}
    assert events == [f"layer {layer}" for layer in LAYERS]
    del events[:]
    idle = runner.execute_model(SchedulerOutput(extras={KV_TRANSFER: "orders"}))
    assert events == ["load orders", "end"], "a plan without requests has transfers alone"
    assert isinstance(idle, ModelRunnerOutput) and not idle.sampled


def test_a_dummy_batch_saves_nothing(tiny_model: pathlib.Path) -> None:
    """Its layers are computed because other engines need them."""
    events: list[str] = []
    runner = runner_with(tiny_model, events)
    lock_step = LockStepRunner()
    lock_step.allocated(runner)
    runner.hooks = RunnerHookCalls([lock_step, *runner.features])
    runner.execute_model(SchedulerOutput(extras={KV_TRANSFER: "orders", LOCK_STEP: False}))
    assert events == ["load orders", *(f"layer {layer}" for layer in LAYERS), "end"]


def test_a_step_that_breaks_off_leaves_no_orders(tiny_model: pathlib.Path) -> None:
    """The next step must not save by the orders of the one that failed."""
    events: list[str] = []
    runner = runner_with(tiny_model, events)
    broken = runner.forward

    class Broken(Forward):
        def __call__(self, batch: Any) -> Tensor:
            raise RuntimeError("no luck")

    runner.forward = Broken(runner.model, broken.backend)
    with pytest.raises(RuntimeError, match="no luck"):
        runner.execute_model(plan_of(**{KV_TRANSFER: "orders"}))
    runner.forget_requests()
    runner.forward = broken
    del events[:]
    runner.execute_model(plan_of())
    assert events == [f"layer {layer}" for layer in LAYERS]
