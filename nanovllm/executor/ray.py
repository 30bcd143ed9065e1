"""The ranks as actors of Ray, for those who outgrow one machine: Ray finds the machines, and starts the processes there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import queue
import shutil
import socket
import tempfile
import threading
import time
import weakref
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.life_signs import Mouth
from nanovllm.executor.base import ExecutorError
from nanovllm.executor.remote import RemoteExecutor, RemoteRank, interface_of, uninterrupted
from nanovllm.executor.worker import WorkerSetup, run_worker
from nanovllm.models.config import ModelConfig

try:
    import ray
except ImportError as error:
    raise ValueError(
        "distributed_executor_backend 'ray' needs Ray, which is not installed: pip install 'nanovllm[ray]'"
    ) from error
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# So long may it take until a cluster has room for all ranks; one that grows on demand has to start machines first.
PLACEMENT_SECONDS = 300.0
# Nothing large travels through Ray, whose own choice is a third of the memory.
OBJECT_STORE_BYTES = 128 * 2**20
# For a Ray of our own. It replaces 127.0.0.1 by an address that others can reach, unless told, in these words, that it is to
# stay on this machine. A busy machine may need longer than the usual 15 s to start an agent, without which Ray gives up.
OWN_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",
}


class RankActor:
    """A rank in an actor: its worker runs in a thread as it would in a process of its own, and talks through two queues."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def whereabouts(self) -> tuple[str, int]:
        """The address of this machine, and this process."""
        return ray.util.get_node_ip_address(), os.getpid()

    def open_meeting_place(self) -> str:
        """On rank 0: where the ranks find one another. It listens on one address only."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
            )
        return f"tcp://{address}:{port}"

    def start(self, setup: WorkerSetup) -> None:
        """Let the rank begin."""
        if (interface := interface_of(ray.util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        mouth = Mouth(self._said.put)
        mouth.start()
        arguments = (setup, self._orders.get, mouth)
        threading.Thread(target=run_worker, args=arguments, name="rank", daemon=True).start()

    def order(self, order: bytes) -> None:
        """Queue an order."""
        self._orders.put(order)

    @ray.method(concurrency_group="listeners")
    def listen(self) -> list[Any]:
        """Everything the rank has said since the last time; waits until there is something, at the latest a sign of life."""
        said = [self._said.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                said.append(self._said.get_nowait())
        return said


class RayRank(RemoteRank):
    """A rank in an actor.

    Attributes:
        actor: its handle.
        ear: the call that returns once the rank has said something.
        fate: how the actor has ended, as Ray tells it.
    """

    actor: Any
    ear: Any
    fate = ""

    def listen(self) -> None:
        """Take in what has come, and go on listening."""
        try:
            for message in ray.get(self.ear):
                self.take(message)
            self.ear = self.actor.listen.remote()
        except ray.exceptions.RayError as error:
            self.is_gone, self.fate = True, " ".join(str(error).split())

    def end(self) -> str:
        """How the actor has ended."""
        return f"has ended: {self.fate}" if self.is_gone else ""


class Lease:
    """What we have of Ray, and give back: its processes, if we have started them, and room for the ranks."""

    def __init__(self) -> None:
        self.is_ours = not ray.is_initialized()
        self.group: PlacementGroup | None = None
        self.actors: list[Any] = []
        self.folder = ""

    def start_ray(self, num_cpus: int) -> None:
        """Join the cluster that RAY_ADDRESS names; without one, start Ray for this program alone, on the loopback interface.

        Raises:
            ExecutorError: it does not start.
        """
        if os.environ.get("RAY_ADDRESS"):
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
            return
        for name, value in OWN_RAY.items():
            os.environ.setdefault(name, value)
        # As that variable says it; this process has read it already, when Ray was imported.
        ray_constants.ENABLE_RAY_CLUSTER = False
        short = None if len(tempfile.gettempdir()) < 20 else "/tmp"  # sockets with long names follow
        self.folder = tempfile.mkdtemp(prefix="nanovllm-", dir=short)
        try:
            self._start_own(num_cpus)
        except ExecutorError:
            # Ray waits no longer than 30 s for its dozen of processes. On a busy machine the second time is faster.
            self._start_own(num_cpus)

    def _start_own(self, num_cpus: int) -> None:
        try:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=self.folder,
            )
        except Exception as error:  # Ray has no name for it, and leaves what it has started
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    if any(self.folder in word for word in child.cmdline()):
                        child.kill()
            raise ExecutorError(f"Ray could not start: {error}") from error

    def find_room(self, num_ranks: int, with_gpu: bool) -> PlacementGroup:
        """Reserve a CPU, and with `with_gpu` a GPU, for each rank, on as few machines as possible.

        Raises:
            ValueError: the cluster has not so much, or not free.
        """
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if with_gpu else {})
        there = ray.cluster_resources()
        for kind in bundle:
            if there.get(kind, 0) < num_ranks:
                raise ValueError(
                    f"{num_ranks} ranks need {num_ranks} {kind}s, and Ray's cluster has {there.get(kind, 0):g}: "
                    "lower tensor_parallel_size x pipeline_parallel_size, or add machines"
                )
        self.group = placement_group([bundle] * num_ranks, strategy="PACK")
        if not self.group.wait(PLACEMENT_SECONDS):
            raise ValueError(
                f"Ray's cluster had no room for {num_ranks} ranks within {PLACEMENT_SECONDS:g} seconds; "
                f"free are {ray.available_resources()}"
            )
        return self.group

    def give_back(self) -> None:
        """End the actors, and Ray if it is ours."""
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)
            if self.group is not None:
                remove_placement_group(self.group)
            if self.is_ours:
                ray.shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class RayExecutor(RemoteExecutor):
    """Starts an actor for each rank, in a placement group; also Ray itself, unless the program has, or RAY_ADDRESS names a
    cluster.

    Raises:
        ValueError: Ray is not installed, or has not enough CPUs or GPUs; what a rank refuses.
        ExecutorError: a rank could not start.
    """

    ranks: list[RayRank]  # type: ignore[assignment]

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        super().__init__(config)
        self.ranks = [RayRank(rank, self.grid) for rank in range(self.grid.world_size)]
        self._lease = Lease()
        self._finalizer = weakref.finalize(self, self._lease.give_back)
        try:
            if self._lease.is_ours:
                self._lease.start_ray(self.grid.world_size)
            self._start_actors(config, model_config, folder)
            self._start()
        except BaseException:
            self._end()
            raise

    def _start_actors(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        device = config.device
        if device == "auto":
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        group = self._lease.find_room(len(self.ranks), device == "cuda")
        actor_class: Any = ray.remote(concurrency_groups={"listeners": 1})(RankActor)  # type: ignore[call-overload]
        for rank in self.ranks:
            rank.actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(device == "cuda"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank.rank),
            ).remote()
            self._lease.actors.append(rank.actor)
        try:
            for rank in self.ranks:
                address, process = ray.get(rank.actor.whereabouts.remote())
                rank.where = f"process {process} on {address}"
            address = ray.get(self.ranks[0].actor.open_meeting_place.remote())
        except ray.exceptions.RayError as error:
            raise ExecutorError(f"Ray could not start the ranks: {error}") from error
        threads = max(1, torch.get_num_threads() // len(self.ranks)) if self._lease.folder else 1
        config = dataclasses.replace(config, device=device)
        for rank in self.ranks:
            # Ray shows each actor one GPU, so that each calls its own the first.
            rank.actor.start.remote(WorkerSetup(config, model_config, folder, rank.rank, 0, address, threads))
            rank.ear = rank.actor.listen.remote()

    def close(self) -> None:
        """End all ranks, and Ray if it is ours."""
        if self.is_broken:
            return
        with contextlib.suppress(ExecutorError):
            self._order("shutdown")
            time.sleep(0.1)
        self._reason = "the ranks have been shut down"
        self._end()

    def _send(self, order: bytes) -> None:
        for rank in self.ranks:
            rank.actor.order.remote(order)

    def _listen(self, timeout: float) -> None:
        by_ear = {rank.ear: rank for rank in self.ranks if not rank.is_gone}
        ray.wait(list(by_ear), num_returns=1, timeout=timeout)
        # All that have spoken, not only the first: nobody must seem silent because another one talks much.
        ready, _ = ray.wait(list(by_ear), num_returns=len(by_ear), timeout=0)
        with uninterrupted():
            for ear in ready:
                by_ear[ear].listen()

    def _end(self) -> None:
        self.is_broken = True
        self._finalizer()
