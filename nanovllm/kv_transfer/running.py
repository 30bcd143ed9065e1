"""The runner's half of KV transfer: runs the transfers of a step around its forward pass.

Built by notebooks/31_pd_disaggregation.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.core.runner_hooks import LaunchedStep, RunnerHooks, Wait
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.kv_transfer.connector import KV_TRANSFER, KVConnectorWorker

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner


class KVTransferRunner(RunnerHooks):
    """Calls a rank's half of the KV connector.

    Args:
        create_connector: makes it, from a runner that has its caches.

    Attributes:
        connector: this rank's half.
    """

    connector: KVConnectorWorker

    def __init__(self, create_connector: Callable[[ModelRunner], KVConnectorWorker]) -> None:
        self._create_connector = create_connector
        self._layers: list[int] = []  # that the connector saves
        self._unsaved: set[int] = set()  # layers that this step has yet to save

    def allocated(self, runner: ModelRunner) -> None:
        """Make the connector. Let the model's attention modules call it, if it saves layers."""
        connector = self._create_connector(runner)
        self.connector = connector
        connector.notify = runner.notify
        if type(connector).save_kv_layer is KVConnectorWorker.save_kv_layer:
            return
        for layer, module in runner.forward.model.attention_layers.items():
            self._layers.append(layer)
            module.register_forward_hook(partial(self._layer_is_computed, layer))

    def _layer_is_computed(
        self, layer: int, module: nn.Module, inputs: object, output: Tensor
    ) -> None:
        if layer in self._unsaved:
            self._save(layer)

    def _save(self, layer: int) -> None:
        self._unsaved.remove(layer)
        self.connector.save_kv_layer(layer, self.connector.kv_caches[layer])

    def before_step(self, plan: SchedulerOutput) -> None:
        """Begin the step's loads."""
        if KV_TRANSFER in plan.extras:
            self.connector.begin_step(plan.extras[KV_TRANSFER])
            # An empty plan writes no KV, not even where other engines need a dummy batch.
            self._unsaved = set() if plan.empty else set(self._layers)

    def after_step(self, step: LaunchedStep, wait: Wait) -> Wait:
        """Begin the saves that no layer has begun, since a CUDA graph runs no Python code between
        layers. Find out what has ended."""
        if KV_TRANSFER not in step.plan.extras:
            return wait
        for layer in sorted(self._unsaved):
            self._save(layer)
        output = self.connector.end_step(is_idle=step.plan.empty)

        def wait_for_transfers() -> ModelRunnerOutput:
            result = wait()
            result.extras[KV_TRANSFER] = output
            return result

        return wait_for_transfers

    def forget_requests(self) -> None:
        """Stop all transfers."""
        self._unsaved.clear()
        self.connector.metadata = None
        self.connector.forget_requests()

    def close(self) -> None:
        """Leave the engines with which this rank shares KV."""
        if "connector" in vars(self):
            self.connector.close()
