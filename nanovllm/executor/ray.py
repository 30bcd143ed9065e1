"""An executor whose ranks are actors of Ray, for models that outgrow one machine: Ray finds the
machines and starts the processes."""

import contextlib
import dataclasses
import os
import shutil
import socket
import tempfile
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nanovllm.executor.base import ExecutorError
from nanovllm.executor.reception import Card, Invitation, Reception, connect, use_network_of
from nanovllm.executor.remote import RemoteExecutor, RemoteRank
from nanovllm.executor.uniproc import WorkerSetup
from nanovllm.executor.worker import run_worker

try:
    import ray
except ImportError as error:
    raise ValueError(
        "distributed_executor_backend 'ray' needs Ray, which is not installed: "
        "pip install 'nanovllm[ray]'"
    ) from error
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# How long to wait until a cluster has room for all ranks; a cluster that grows on demand has to
# start machines first.
PLACEMENT_SECONDS = 300.0
# How long a rank that is known to live may take to connect.
CONNECT_SECONDS = 60.0
# How long Ray may take to say why an actor is gone.
FATE_SECONDS = 5.0
# Nothing large travels through Ray, which would take a third of the memory by default.
OBJECT_STORE_BYTES = 128 * 2**20
# For a Ray that this program starts. Ray replaces 127.0.0.1 by an address that other machines can
# reach, unless the first variable tells it to stay on this machine. A busy machine may need longer
# than the default 15 s to start an agent, without which Ray fails.
OWN_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",
}


class RankActor:
    """Runs one rank in a process of Ray's."""

    def open_meeting_place(self) -> str:
        """On rank 0: start the store at which the ranks meet, and return its address. The store
        listens on this node's address only."""
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(  # type: ignore[attr-defined,unused-ignore]
                host_name=address,
                port=port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        return f"tcp://{address}:{port}"

    def run(self, rank: int, invitation: Invitation, threads: int) -> None:
        """Connect to the executor, and run the rank from beginning to end."""
        torch.set_num_threads(threads or torch.get_num_threads())
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        use_network_of(address)
        # Ray shows each actor one GPU, as its first.
        with connect(invitation, address, Card(rank)) as connection:
            run_worker(connection.recv(), connection)


class RayRank(RemoteRank):
    """A rank in an actor, as the executor knows it.

    Attributes:
        run: the call of `RankActor.run`, to ask how it ended.
    """

    run: "ray.ObjectRef[None]"

    def how_it_ended(self) -> str:
        """How the actor has ended, in Ray's words; "" while it lives."""
        if self.is_gone:
            try:
                ray.get(self.run, timeout=FATE_SECONDS)
            except ray.exceptions.RayError as error:
                return f"has ended: {' '.join(str(error).split())}"
        return super().how_it_ended()


def start_ray(num_cpus: int, folder: str) -> None:
    """Start Ray for this program alone, on the loopback interface.

    Raises:
        ExecutorError: Ray does not start.
    """
    os.environ.update(OWN_RAY | os.environ)
    # Ray has read the variable when this process imported it, so the constant is set, too.
    ray_constants.ENABLE_RAY_CLUSTER = False
    for is_last in (False, True):
        try:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            return
        # Ray has no class for this error, and leaves the processes that it has started.
        except Exception as error:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    if any(folder in word for word in child.cmdline()):
                        child.kill()
            # Ray waits at most 30 s for its dozen of processes. On a busy machine the second start
            # is faster.
            if is_last:
                raise ExecutorError(f"Ray could not start: {error}") from error


def find_room(num_ranks: int, with_gpu: bool) -> PlacementGroup:
    """Reserve a CPU, and with `with_gpu` a GPU, for each rank, on as few machines as possible;
    returns the placement group.

    Raises:
        ValueError: the cluster does not have enough of them, or they are in use.
    """
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if with_gpu else {})
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for kind in bundle:
        if there.get(kind, 0) < num_ranks:
            raise ValueError(
                f"{num_ranks} ranks need {num_ranks} {kind}s, but Ray's cluster has "
                f"{there.get(kind, 0):g}: lower tensor_parallel_size x pipeline_parallel_size, or "
                "add machines"
            )
    group: PlacementGroup = placement_group([bundle] * num_ranks, strategy="PACK")
    if not group.wait(PLACEMENT_SECONDS):
        remove_placement_group(group)
        available = ray.available_resources()  # type: ignore[no-untyped-call]
        raise ValueError(
            f"Ray's cluster could not place {num_ranks} ranks within {PLACEMENT_SECONDS:g} "
            f"seconds; available: {available}"
        )
    return group


class RayExecutor(RemoteExecutor):
    """Starts an actor for each rank, in a placement group. Starts Ray, too, unless the program has
    started it already or RAY_ADDRESS names a cluster.

    Attributes:
        folder: the files of the Ray that this program has started; "" if it has started none.
        threads: torch's threads on each rank; 0 leaves torch's default.
    """

    folder = ""
    threads = 0

    def _start_ranks(self, setup: WorkerSetup) -> None:
        size = self.grid.world_size
        if not ray.is_initialized():
            self._join_cluster()
        device = self.config.device
        if device == "auto":
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"  # type: ignore[no-untyped-call]
        setup.config = dataclasses.replace(self.config, device=device)
        group = find_room(size, device == "cuda")
        # Its actors end with it. If Ray has ended already, there is nothing to give back.
        self.supervisor.resources.callback(
            lambda: remove_placement_group(group) if ray.is_initialized() else None
        )
        actor_class: Any = ray.remote(num_cpus=1, num_gpus=int(device == "cuda"))(RankActor)
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(size)]
        actors = [actor_class.options(scheduling_strategy=place).remote() for place in places]
        reception = Reception(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        try:
            setup.init_method = ray.get(actors[0].open_meeting_place.remote())
            ray.get([actor.__ray_ready__.remote() for actor in actors])
        except ray.exceptions.RayError as error:
            raise ExecutorError(f"Ray could not start the ranks: {error}") from error
        runs = [
            actor.run.remote(rank, reception.invitation, self.threads)
            for rank, actor in enumerate(actors)
        ]
        arrived = reception.wait_for(range(size), CONNECT_SECONDS)
        for run, (card, connection) in zip(runs, arrived, strict=True):
            rank = RayRank(card.rank, self.grid, connection=connection, where=card.where)
            rank.run = run
            self.supervisor.add(rank)

    def _join_cluster(self) -> None:
        """Join the cluster that RAY_ADDRESS names; without one, start Ray for this program
        alone."""
        if os.environ.get("RAY_ADDRESS"):
            self.supervisor.resources.callback(ray.shutdown)
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
            return
        self.threads = max(1, torch.get_num_threads() // self.grid.world_size)
        # Ray adds long names of sockets.
        short = None if len(tempfile.gettempdir()) < 20 else "/tmp"
        self.folder = tempfile.mkdtemp(prefix="nanovllm-", dir=short)
        self.supervisor.resources.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.supervisor.resources.callback(ray.shutdown)  # callbacks run in reverse order
        start_ray(self.grid.world_size, self.folder)
