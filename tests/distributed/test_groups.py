"""Groups of ranks: collectives against one process, with and without shared memory; faults; what is
left behind."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.distributed import groups, process_groups, shared_collectives
from nanovllm.distributed.groups import Grid
from nanovllm.distributed.process_groups import ProcessGroupCoordinator
from nanovllm.distributed.shared_collectives import CollectiveError, SharedCollectives
from nanovllm.distributed.shared_memory import Segment, load_shared_memory_library
from nanovllm.lab.course.ranks import RankError, run_ranks
from tests.examples import examples
from tests.server_process import wait_for_shared_memory_to_go
from tests.stand_ins import set_constants, set_failure


def has_library() -> bool:
    try:
        return load_shared_memory_library() is not None
    except OSError:
        return False


needs_library = pytest.mark.skipif(not has_library(), reason="no compiler here")

# ----------------------------------------------------------------------------------------- the grid


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_rank_is_in_one_group_of_each_kind(data, pipeline, tensor):
    grid = Grid(data, pipeline, tensor)
    sizes = {
        "world": grid.world_size,
        "tp": tensor,
        "pp": pipeline,
        "dp": data,
        "ep": data * tensor,
    }
    for kind, size in sizes.items():
        members = grid.groups(kind)
        assert sorted(rank for ranks in members for rank in ranks) == list(range(grid.world_size))
        assert {len(ranks) for ranks in members} == {size}
        assert all(ranks == sorted(ranks) for ranks in members)
    stage = {rank: number for ranks in grid.groups("pp") for number, rank in enumerate(ranks)}
    for ranks in grid.groups("tp") + grid.groups("dp") + grid.groups("ep"):
        assert len({stage[rank] for rank in ranks}) == 1
    assert all(b - a == 1 for ranks in grid.groups("tp") for a, b in itertools.pairwise(ranks))


def test_a_grid_by_hand():
    grid = Grid(data=2, pipeline=2, tensor=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("ep") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_group_of_one_makes_no_call(monkeypatch):
    for name in (
        "all_reduce",
        "all_gather",
        "broadcast",
        "reduce_scatter",
        "all_to_all_single",
        "send",
        "recv",
        "isend",
        "irecv",
        "barrier",
        "monitored_barrier",
        "new_group",
        "init_process_group",
        "all_gather_object",
        "broadcast_object_list",
    ):
        set_failure(monkeypatch, dist, name, AssertionError(f"{name} was called"))
    process_groups.initialize_groups(Grid(), 0)
    for kind in groups.KINDS:
        group = groups.own_groups[kind]
        x = torch.arange(6.0).view(2, 3)
        for result in (
            group.all_reduce(x),
            group.all_gather(x),
            group.reduce_scatter(x),
            group.all_to_all(x, [2], [2]),
            group.broadcast_object(x),
            group.all_gather_object(x)[0],
        ):
            assert result is x
        group.barrier()
        assert group.is_first and group.is_last and group.shared is None
        assert group.calls == group.bytes_sent == Counter()
    process_groups.destroy_groups()


# -------------------------------------------------------------------------------------- collectives


def collectives_of(seed: int, shared: bool) -> list[Any]:
    """On every rank: every collective in every group, compared with what one process computes of
    all ranks' inputs."""
    problems: list[Any] = []
    sums = []
    for kind in groups.KINDS:
        group = groups.own_groups[kind]
        if (group.shared is not None) != (shared and group.world_size > 1):
            problems.append((kind, "shared memory", group.shared))
        n, me = group.world_size, group.rank_in_group
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int64,
            torch.int32,
        ):
            for shape in ((6 * n, 5), (2, n, 20_000), (0, 4 * n)):
                inputs = []
                for rank in group.ranks:
                    generator = torch.Generator().manual_seed(seed * 1000 + rank)
                    x = torch.randn(shape, generator=generator) * 100
                    inputs.append(x.to(dtype))
                dim = next(i for i, size in enumerate(shape) if size % n == 0 and size >= n)
                exact = torch.stack(inputs).double().sum(0)
                total = group.all_reduce(inputs[me].clone())
                bits = total.view(-1).view(torch.uint8).numpy().tobytes()
                sums.append((kind, group.ranks[0], hashlib.sha256(bits).hexdigest()))
                scattered = group.reduce_scatter(inputs[me].clone(), dim)
                expected = {
                    "all_reduce": (total, exact),
                    "reduce_scatter": (scattered, exact.chunk(n, dim)[me]),
                    "all_gather": (group.all_gather(inputs[me], dim), torch.cat(inputs, dim)),
                    "all_gather last": (group.all_gather(inputs[me]), torch.cat(inputs, -1)),
                    "transposed": (
                        group.all_gather(inputs[me].transpose(0, 1), 0),
                        torch.cat([x.transpose(0, 1) for x in inputs]),
                    ),
                }
                tolerance = {torch.bfloat16: 2e-2, torch.float16: 5e-3}.get(dtype, 1e-5)
                for name, (got, want) in expected.items():
                    close = torch.allclose(
                        got.double(), want.double(), rtol=tolerance, atol=100 * tolerance
                    )
                    exactly = "reduce" in name or torch.equal(got, want)
                    if got.dtype != dtype or got.shape != want.shape or not close or not exactly:
                        problems.append((kind, dtype, shape, name))
                if shared and n > 1 and dtype.is_floating_point:
                    wide = dtype if dtype == torch.float64 else torch.float32
                    ordered = inputs[0].to(wide)
                    for x in inputs[1:]:
                        ordered = ordered + x.to(wide)
                    if not torch.equal(total, ordered.to(dtype)):
                        problems.append(
                            (kind, dtype, shape, "not summed in the order of the ranks")
                        )
        strided = torch.ones(4, 6)[:, ::2]
        if not torch.equal(group.all_reduce(strided), torch.full((4, 3), float(n))):
            problems.append((kind, "strided"))
    return [problems, sums]


@pytest.mark.parametrize(
    "grid, shared",
    [
        (Grid(tensor=2), True),
        (Grid(tensor=2), False),
        (Grid(pipeline=3), True),
        (Grid(2, 1, 2), True),
        pytest.param(Grid(2, 2, 1), False, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_collectives_equal_one_process(grid, shared):
    shared = shared and has_library()
    results = run_ranks(
        collectives_of, grid, 7, shared, timeout=300, disable_custom_all_reduce=not shared
    )
    assert [problems for problems, _ in results] == [[]] * grid.world_size
    for kind in groups.KINDS:  # the same bits on every rank of a group
        for ranks in grid.groups(kind):
            of_kind = [[s for s in results[rank][1] if s[0] == kind] for rank in ranks]
            assert all(sums == of_kind[0] for sums in of_kind) and of_kind[0]


def other_traffic() -> dict[str, Any]:
    """On every rank: rows for every other rank, objects, and what was counted."""
    group = groups.get_tp_group()
    me, n = group.rank_in_group, group.world_size
    counts = [
        [(sender + 2 * receiver) % 3 * (sender != 1) for receiver in range(n)]
        for sender in range(n)
    ]
    rows = torch.tensor(
        [100 * me + receiver for receiver in range(n) for _ in range(counts[me][receiver])],
        dtype=torch.int64,
    )
    received = [counts[sender][me] for sender in range(n)]
    result: dict[str, Any] = {}
    for width, dtype in (
        (1, torch.int64),
        (3, torch.bfloat16),
        (2, torch.float8_e4m3fn),
        (5, torch.bool),
    ):
        x = rows[:, None].expand(-1, width).float().to(dtype)
        got = group.all_to_all(x, counts[me], received)
        want = [float(100 * sender + me) for sender in range(n) for _ in range(counts[sender][me])]
        result[f"all_to_all {dtype}"] = got.shape == (sum(received), width) and torch.equal(
            got.float(), torch.tensor(want)[:, None].expand(-1, width).float().to(dtype).float()
        )
    flat = group.all_to_all(rows, counts[me], received)
    result["flat"] = flat.tolist() == [
        100 * sender + me for sender in range(n) for _ in range(counts[sender][me])
    ]
    result["objects"] = group.all_gather_object({"rank": me}) == [{"rank": r} for r in range(n)]
    result["object"] = group.broadcast_object(("from", me), n - 1) == ("from", n - 1)
    group.barrier()
    with pytest.raises(ValueError, match="cannot be scattered equally"):
        group.reduce_scatter(torch.zeros(4 * n + 1))
    before, sent = Counter(group.calls), Counter(group.bytes_sent)
    group.all_reduce(torch.zeros(10, 3))
    group.all_reduce(torch.zeros(7, dtype=torch.float64))
    group.all_gather(torch.zeros(5, dtype=torch.bfloat16))
    assert group.calls - before == {"all_reduce": 2, "all_gather": 1}
    assert group.bytes_sent - sent == {"all_reduce": 120 + 56, "all_gather": 10}
    process = psutil.Process()
    listening = [
        c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]
    result["loopback only"] = all(ip in ("127.0.0.1", "::1") for ip in listening)
    return result


@pytest.mark.parametrize("size", [2, 3])
def test_rows_objects_and_counters(size):
    for result in run_ranks(other_traffic, Grid(tensor=size), timeout=200):
        assert all(result.values()), result
    wait_for_shared_memory_to_go()


# ------------------------------------------------------------------------ shared memory, in threads


@needs_library
@settings(max_examples=examples(40))
@given(data=st.data())
def test_shared_collectives_of_any_size_in_any_order(data):
    """Threads stand for ranks: sizes around the part's, several collectives in a row."""
    world = data.draw(st.integers(2, 4))
    part_bytes = data.draw(st.sampled_from([64, 128, 4096]))
    operations = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["all_reduce", "gather 0", "gather -1"]),
                st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32]),
                st.integers(1, 40),
                st.integers(0, 40),
            ),
            min_size=1,
            max_size=6,
        )
    )
    inputs = [
        [
            torch.randint(-50, 50, (rows, columns)).to(dtype)
            for _, dtype, rows, columns in operations
        ]
        for _ in range(world)
    ]
    first = Segment.create(world, 2 * world * part_bytes)
    segments = [first] + [Segment(first.handle, rank) for rank in range(1, world)]
    results: list[list[torch.Tensor]] = [[] for _ in range(world)]

    def run(rank: int) -> None:
        shared = SharedCollectives(segments[rank], list(range(world)), "test", 20)
        for (name, *_), x in zip(operations, inputs[rank], strict=True):
            if name == "all_reduce":
                x = x.clone()
                shared.all_reduce(x)
                results[rank].append(x)
            else:
                results[rank].append(shared.all_gather(x, int(name.split()[1])))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    with mock.patch.object(shared_collectives, "PART_BYTES", part_bytes):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, (name, *_) in enumerate(operations):
        every = [inputs[rank][number] for rank in range(world)]
        want = (
            sum(every[1:], every[0])
            if name == "all_reduce"
            else torch.cat(every, int(name.split()[1]))
        )
        assert all(torch.equal(results[rank][number], want) for rank in range(world))


@needs_library
def test_sums_keep_infinities_and_nans(monkeypatch):
    set_constants(monkeypatch, shared_collectives, PART_BYTES=64)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.0e38, 1e-45, -0.0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        first = Segment.create(2, 4 * 64)
        inputs = [special.to(dtype), special.flip(0).to(dtype)]
        outputs = [x.clone() for x in inputs]

        def run(segment: Segment, x: torch.Tensor) -> None:
            SharedCollectives(segment, [0, 1], "test", 20).all_reduce(x)

        thread = threading.Thread(target=run, args=(Segment(first.handle, 1), outputs[1]))
        thread.start()
        run(first, outputs[0])
        thread.join()
        want = (inputs[0].float() + inputs[1].float()).to(dtype)
        for out in outputs:
            torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------- faults


def fail_on_rank_1(fault: str, patience: float = 600.0) -> str:
    """On every rank: rank 1 dies, stops, or does something else; what the others are told, which
    wait for so many seconds."""
    import os
    import signal
    import time

    group = groups.get_tp_group()
    group.all_reduce(torch.ones(4))
    pids = group.all_gather_object(os.getpid())
    group.barrier()
    if group.shared is not None:
        group.shared.timeout = patience
    if group.rank == 1:
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "skips":
            group.all_gather(torch.ones(3))
        if fault == "other size":
            group.all_reduce(torch.ones(5))
        if fault == "leaves":
            return "left"
        if fault == "stays away":
            time.sleep(2 * patience + 2)
            return "stayed away"
    if fault == "stops" and group.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
    try:
        for _ in range(3):
            group.all_reduce(torch.ones(4))
            time.sleep(0.1)  # the stop may come late
    except CollectiveError as error:
        try:
            group.all_reduce(torch.ones(4))
        except CollectiveError:
            return str(error)
        return "a broken group went on"
    finally:
        if fault == "stops" and group.rank == 0:
            time.sleep(1)
            os.kill(pids[1], signal.SIGCONT)
    return "no error"


@pytest.mark.parametrize(
    "size, fault",
    [
        (2, "dies"),
        (3, "dies"),
        (2, "skips"),
        (2, "other size"),
        (2, "leaves"),
        (3, "stops"),
        (2, "stays away"),
    ],
)
@needs_library
def test_a_rank_that_fails_in_a_collective_is_named(size, fault):
    results = run_ranks(
        fail_on_rank_1,
        Grid(tensor=size),
        fault,
        # Who dies or leaves is missed at once; only for the others somebody waits until it is over.
        # A machine that stands still for a while is not the reason.
        600 if fault in ("dies", "leaves") else 5,
        timeout=120,
        return_failures=True,
    )
    said = {
        "dies": "has died",
        "skips": "rank 1 is in another collective, all_gather of 12 bytes",
        "other size": "rank 1 is in another collective, all_reduce of 20 bytes",
        "leaves": "rank 1: it has left",
        "stops": "rank 1 did not join within 5 s",
        "stays away": "rank 1 did not join within 5 s",
    }[fault]
    for rank in set(range(size)) - {1}:
        message = results[rank]
        assert said in message and "rank 1" in message and f"group tp, rank {rank}" in message
    if fault == "dies":
        assert isinstance(results[1], RankError) and "rank 1 died" in str(results[1])


def test_a_rank_that_dies_is_noticed_over_gloo_too():
    results = run_ranks(
        fail_on_rank_1,
        Grid(tensor=2),
        "dies",
        collective_timeout=60,
        return_failures=True,
        disable_custom_all_reduce=True,
    )
    assert "all_reduce of group tp (ranks [0, 1]), rank 0" in results[0]


def late_barrier() -> str:
    import time

    group = groups.get_tp_group()
    if group.rank == 1:
        time.sleep(12)
        return ""
    try:
        group.barrier()
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_barrier_names_who_is_missing():
    message = run_ranks(late_barrier, Grid(tensor=2), collective_timeout=5, return_failures=True)[0]
    assert "barrier of group tp" in message and "1" in message.split("barrier", 2)[-1]


def sum_with_gloo_on_all() -> tuple[bool, float]:
    group = groups.get_tp_group()
    return group.shared is None, float(group.all_reduce(torch.ones(1)))


def test_without_a_compiler_sums_go_over_gloo(monkeypatch):
    monkeypatch.setenv("NANOVLLM_NATIVE", "0")
    assert run_ranks(sum_with_gloo_on_all, Grid(tensor=2)) == [(True, 2.0)] * 2


def share_only_on_rank_0() -> tuple[bool, float]:
    """One rank cannot map the segment: then nobody uses it."""
    tp = groups.get_tp_group()
    group = ProcessGroupCoordinator("half", [0, 1], tp.rank, *[tp.cpu_group] * 2)

    def load() -> None:
        if group.rank == 1:
            raise OSError("no compiler here")

    with mock.patch.object(shared_collectives, "load_shared_memory_library", load):
        group.share_memory(5)
    return group.shared is None, float(group.all_reduce(torch.ones(1)))


def test_all_ranks_share_memory_or_none():
    assert run_ranks(share_only_on_rank_0, Grid(tensor=2)) == [(True, 2.0)] * 2


def test_failures_of_ranks_are_told():
    def fail() -> None:
        if groups.get_world_group().rank == 1:
            raise KeyError("something of rank 1")
        groups.get_world_group().barrier()

    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*something of rank 1|rank 0 failed"):
        run_ranks(fail, Grid(tensor=2))
    with pytest.raises(RankError, match=r"has not ended after 1 s"):
        run_ranks(lambda: __import__("time").sleep(60), Grid(), timeout=1)
