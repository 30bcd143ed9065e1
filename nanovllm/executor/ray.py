"""An executor whose ranks are actors of Ray, for models that outgrow one machine: Ray finds the machines and starts the processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket
import tempfile
import threading
import weakref
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.life_signs import Mouth
from nanovllm.executor.base import ExecutorError
from nanovllm.executor.remote import Reception, RemoteExecutor, RemoteRank, connect, interface_of
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

# How long to wait until a cluster has room for all ranks; a cluster that grows on demand has to start machines first.
PLACEMENT_SECONDS = 300.0
# How long Ray may take to say why an actor is gone.
FATE_SECONDS = 5.0
# Nothing large travels through Ray, which would take a third of the memory by default.
OBJECT_STORE_BYTES = 128 * 2**20
# For a Ray that this program starts. Ray replaces 127.0.0.1 by an address that other machines can reach, unless the first variable
# tells it to stay on this machine. A busy machine may need longer than the default 15 s to start an agent, without which Ray fails.
OWN_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",
}


class RankActor:
    """A rank in an actor: a thread of it runs the worker."""

    def whereabouts(self) -> tuple[str, int]:
        """This machine's address, and the number of this process."""
        return ray.util.get_node_ip_address(), os.getpid()

    def open_meeting_place(self) -> str:
        """On rank 0: the address where the ranks meet. It listens on one address only."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
            )
        return f"tcp://{address}:{port}"

    def start(self, setup: WorkerSetup, invitation: tuple[str, int, str]) -> None:
        """Start the rank, which connects to the executor."""
        if (interface := interface_of(ray.util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

        def run() -> None:
            connection = connect(invitation, setup.rank)
            run_worker(setup, connection, Mouth(connection.send))
            connection.close()

        threading.Thread(target=run, name="rank", daemon=True).start()


class RayRank(RemoteRank):
    """A rank in an actor.

    Attributes:
        actor: its handle.
    """

    actor: Any

    def end(self) -> str:
        """How the actor has ended, in Ray's words; "" while it lives."""
        if self.is_gone:
            try:
                ray.get(self.actor.whereabouts.remote(), timeout=FATE_SECONDS)
            except ray.exceptions.RayError as error:
                return f"has ended: {' '.join(str(error).split())}"
        return super().end()


class Lease:
    """What this program uses of Ray and has to give back: room for the ranks, and Ray's processes if it has started them."""

    def __init__(self) -> None:
        self.is_ours = not ray.is_initialized()
        self.group: PlacementGroup | None = None
        self.actors: list[Any] = []
        self.folder = ""

    def start_ray(self, num_cpus: int) -> None:
        """Join the cluster that RAY_ADDRESS names; without one, start Ray for this program alone, on the loopback interface.

        Raises:
            ExecutorError: Ray does not start.
        """
        if os.environ.get("RAY_ADDRESS"):
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
            return
        for name, value in OWN_RAY.items():
            os.environ.setdefault(name, value)
        # The same as the variable says, which this process has read already when it imported Ray.
        ray_constants.ENABLE_RAY_CLUSTER = False
        short = None if len(tempfile.gettempdir()) < 20 else "/tmp"  # Ray adds long names of sockets
        self.folder = tempfile.mkdtemp(prefix="nanovllm-", dir=short)
        try:
            self._start_own(num_cpus)
        except ExecutorError:
            # Ray waits at most 30 s for its dozen of processes. On a busy machine the second start is faster.
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
        except Exception as error:  # Ray has no class for this error, and leaves the processes that it has started
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    if any(self.folder in word for word in child.cmdline()):
                        child.kill()
            raise ExecutorError(f"Ray could not start: {error}") from error

    def find_room(self, num_ranks: int, with_gpu: bool) -> PlacementGroup:
        """Reserve a CPU, and with `with_gpu` a GPU, for each rank, on as few machines as possible.

        Raises:
            ValueError: the cluster does not have enough of them, or they are in use.
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
        """End the actors, and Ray if this program has started it."""
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
        ValueError: Ray is not installed, or does not have enough CPUs or GPUs; or what a rank refuses.
        ExecutorError: a rank could not start.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        super().__init__(config)
        self._lease = Lease()
        self._finalizer = weakref.finalize(self, self._lease.give_back)
        try:
            if self._lease.is_ours:
                self._lease.start_ray(self.grid.world_size)
            self._start_actors(config, model_config, folder)
            self._start()
        except BaseException:
            self._end("the ranks could not start")
            raise

    def _kill(self) -> None:
        self._finalizer()

    def _start_actors(self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path) -> None:
        device = config.device
        if device == "auto":
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        group = self._lease.find_room(self.grid.world_size, device == "cuda")
        actor_class: Any = ray.remote(RankActor)
        for rank in range(self.grid.world_size):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=int(device == "cuda"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            ).remote()
            self._lease.actors.append(actor)
        try:
            places = ray.get([actor.whereabouts.remote() for actor in self._lease.actors])
            address = ray.get(self._lease.actors[0].open_meeting_place.remote())
        except ray.exceptions.RayError as error:
            raise ExecutorError(f"Ray could not start the ranks: {error}") from error
        threads = max(1, torch.get_num_threads() // self.grid.world_size) if self._lease.folder else 1
        config = dataclasses.replace(config, device=device)
        reception = Reception(ray.util.get_node_ip_address())
        for rank, actor in enumerate(self._lease.actors):
            # Ray shows each actor one GPU, which the actor calls its first.
            setup = WorkerSetup(config, model_config, folder, rank, 0, address, threads)
            actor.start.remote(setup, reception.invitation)
        connections = reception.wait_for(list(range(self.grid.world_size)))
        for rank, (machine, process) in enumerate(places):
            ray_rank = RayRank(rank, self.grid, connections[rank], f"process {process} on {machine}")
            ray_rank.actor = self._lease.actors[rank]
            self.ranks.append(ray_rank)
