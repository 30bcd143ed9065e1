"""Places where KV blocks are kept: what was put comes back, whole, or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.kv_transfer.stores import folder as folder_store
from nanovllm.kv_transfer.stores import sealed
from nanovllm.kv_transfer.stores.folder import LOW_WATER, FolderStore
from nanovllm.kv_transfer.stores.sealed import HEADER_BYTES, SealedStore
from nanovllm.kv_transfer.stores.servers import MooncakeStore, RedisStore
from nanovllm.kv_transfer.stores.store import HostStore, KVStore
from tests.examples import examples
from tests.kv_servers import mooncake_master, on_own_loopback, redis_server
from tests.server_process import wait_until
from tests.stand_ins import set_constants

SIZE = 4096
FILE = HEADER_BYTES + SIZE
STATEFUL = settings(
    max_examples=examples(40), stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def payload(number: int) -> bytes:
    """What stands under `key(number)`, always."""
    return random.Random(number).randbytes(SIZE)


def put(store: KVStore, *numbers: int) -> None:
    store.put([key(n) for n in numbers], [memoryview(payload(n)) for n in numbers])


def get(store: KVStore, *numbers: int) -> list[bool]:
    """What was found, and is what it should be."""
    buffers = [memoryview(bytearray(SIZE)) for _ in numbers]
    found = store.get([key(n) for n in numbers], buffers)
    for number, buffer, there in zip(numbers, buffers, found, strict=True):
        assert not there or buffer == payload(number), f"entry {number} has another's bytes"
    return found


def contains(store: KVStore, *numbers: int) -> int:
    return store.contains([key(n) for n in numbers])


def remove(store: KVStore, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    while isinstance(store, HostStore):
        store.evict(keys)
        store = store.lower
    if isinstance(store, SealedStore):
        store._ask(store._delete, keys)


def check_basics(store: KVStore) -> None:
    """What every store does, if it is empty and has room for a few entries."""
    assert (
        contains(store) == 0
        and get(store) == []
        and contains(store, 1) == 0
        and get(store, 1) == [False]
    )
    put(store, 1, 2, 4)
    put(store, 2, 5)  # one of them again
    assert contains(store, 1, 2, 3, 4) == 2, "a gap ends the count"
    assert contains(store, 3, 1) == 0 and contains(store, 5, 4, 2, 1) == 4
    assert get(store, 3, 1, 5, 2) == [False, True, True, True]
    remove(store, 2, 3)
    assert contains(store, 1, 2) == 1 and get(store, 2, 4) == [False, True]
    assert store.stats.stored == 4 and store.stats.hits == 4 and store.stats.misses == 3
    assert store.stats.damaged == store.stats.failed == 0


def test_basics_of_host_memory() -> None:
    check_basics(HostStore(8 * SIZE, SIZE))


def test_basics_of_a_folder(tmp_path: pathlib.Path) -> None:
    check_basics(FolderStore(tmp_path / "a" / "b", 8 * FILE))


def test_two_tiers_pass_entries_on(tmp_path: pathlib.Path) -> None:
    lower = FolderStore(tmp_path, 100 * FILE)
    store = HostStore(2 * SIZE, SIZE, lower=lower)
    put(store, 1, 2)
    assert lower.stats.stored == 0, "nothing has fallen yet"
    put(store, 3)
    assert key(3) in store and key(1) in store and key(2) not in store, (
        "the end of a chain goes first"
    )
    assert contains(lower, 2) == 1 and contains(store, 1, 2, 3) == 3
    assert get(store, 2) == [True]
    assert key(2) in store and contains(lower, 2) == 1, "it has come back, and stays below"
    stored = lower.stats.stored
    put(store, 4, 5)
    assert contains(lower, 2) == 1 and contains(store, 1, 2, 3, 4, 5) == 5
    assert lower.stats.stored == stored + 1, "only one of the two that fell was new below"
    remove(store, *range(6))
    assert contains(store, 1) + contains(store, 5) == 0
    store.close()


def test_three_tiers(tmp_path: pathlib.Path) -> None:
    store = HostStore(
        SIZE, SIZE, lower=HostStore(SIZE, SIZE, lower=FolderStore(tmp_path, 9 * FILE))
    )
    for number in range(8):
        put(store, number)
    assert contains(store, *range(8)) == 8 and get(store, *range(8)) == [True] * 8


def test_sizes_that_do_not_fit(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = FolderStore(tmp_path, FILE - 1)
    put(folder, 1)
    assert contains(folder, 1) == 0 and folder.stats.failed == 1 and "do not fit" in caplog.text


# ---------------------------------------------------------------- the same as a dictionary


class StoreMachine(RuleBasedStateMachine):
    """Random calls; a dictionary in order of use says what must be there."""

    store: KVStore
    model: OrderedDict[int, None]

    def use(self, *numbers: int) -> None:
        """The first counts as used last."""
        for number in reversed(numbers):
            if number in self.model:
                self.model.move_to_end(number)

    def take(self, number: int) -> None:
        """One entry is put that was not there."""
        raise NotImplementedError

    def found(self, numbers: list[int]) -> list[bool]:
        found = [number in self.model for number in numbers]
        self.use(*numbers)
        return found

    @rule(numbers=st.lists(st.integers(0, 9), max_size=5, unique=True))
    def put(self, numbers: list[int]) -> None:
        put(self.store, *numbers)
        for number in reversed(numbers):
            if number in self.model:
                self.use(number)
            else:
                self.take(number)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=5, unique=True))
    def get(self, numbers: list[int]) -> None:
        assert get(self.store, *numbers) == self.found(numbers)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=5, unique=True))
    def contains(self, numbers: list[int]) -> None:
        there = [number in self.model for number in numbers]
        count = there.index(False) if False in there else len(there)
        assert contains(self.store, *numbers) == count
        self.use(*numbers[:count])

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        remove(self.store, number)
        self.model.pop(number, None)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class HostMachine(StoreMachine):
    @initialize(slots=st.integers(1, 6))
    def start(self, slots: int) -> None:
        self.store, self.model, self.slots = HostStore(slots * SIZE + 7, SIZE), OrderedDict(), slots

    def take(self, number: int) -> None:
        self.model[number] = None
        if len(self.model) > self.slots:
            self.model.popitem(last=False)


class FolderMachine(StoreMachine):
    """What is in the folder survives."""

    @initialize(files=st.integers(1, 6))
    def start(self, files: int) -> None:
        self.folder = tempfile.mkdtemp()
        self.files, self.model = files, OrderedDict()
        self.store = FolderStore(self.folder, files * FILE + 7)

    def take(self, number: int) -> None:
        bound, room = self.files * FILE + 7, len(self.model) * FILE + FILE
        if room > bound:
            goal = min(bound - FILE, int(LOW_WATER * bound))
            while len(self.model) * FILE > goal:
                self.model.popitem(last=False)
        self.model[number] = None

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = FolderStore(self.folder, self.files * FILE + 7)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            sizes = [file.stat().st_size for file in pathlib.Path(self.folder).glob("[!.]*")]
            assert sizes == [FILE] * len(self.model)
            super().teardown()
            shutil.rmtree(self.folder)


class TieredMachine(StoreMachine):
    """A dictionary a tier."""

    @initialize(above=st.integers(1, 3), below=st.integers(2, 5))
    def start(self, above: int, below: int) -> None:
        self.store = HostStore(above * SIZE, SIZE, lower=HostStore(below * SIZE, SIZE))
        self.slots, self.tiers = (
            (above, below),
            (OrderedDict[int, None](), OrderedDict[int, None]()),
        )

    def take_into(self, tier: int, number: int) -> None:
        entries = self.tiers[tier]
        if number in entries:
            entries.move_to_end(number)
            return
        if len(entries) == self.slots[tier]:
            if tier == 0:
                self.take_into(1, next(iter(entries)))
            entries.popitem(last=False)
        entries[number] = None

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def put(self, numbers: list[int]) -> None:
        put(self.store, *numbers)
        for number in reversed(numbers):
            self.take_into(0, number)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def get(self, numbers: list[int]) -> None:
        above, below = self.tiers
        found = [number in above or number in below for number in numbers]
        risen = [number for number in numbers if number not in above and number in below]
        for tier, used in ((above, numbers), (below, risen)):
            for number in reversed(used):
                if number in tier:
                    tier.move_to_end(number)
        assert get(self.store, *numbers) == found
        for number in reversed(risen):
            self.take_into(0, number)

    @rule(number=st.integers(0, 9))
    def contains(self, number: int) -> None:
        for tier in self.tiers:
            if number in tier:
                tier.move_to_end(number)
                assert contains(self.store, number) == 1
                return
        assert contains(self.store, number) == 0

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        remove(self.store, number)
        above, below = self.tiers
        if number in above:
            self.take_into(1, number)  # what is evicted above goes below
            del above[number]
        below.pop(number, None)


TestHostMachine = HostMachine.TestCase
TestFolderMachine = FolderMachine.TestCase
TestTieredMachine = TieredMachine.TestCase
TestHostMachine.settings = TestFolderMachine.settings = TestTieredMachine.settings = STATEFUL


# ---------------------------------------------------------------- many threads, many processes


def worry(store: KVStore, seed: int, rounds: int = 300) -> None:
    """Put, ask for and remove entries at random; whatever comes must be right."""
    dice = random.Random(seed)
    for _ in range(rounds):
        numbers = dice.sample(range(20), 3)
        action = dice.choice([put, get, get, contains])
        action(store, *numbers)
        if dice.random() < 0.05:
            remove(store, numbers[0])


@pytest.mark.parametrize("kind", ["host", "tiers", "folder"])
def test_many_threads(kind: str, tmp_path: pathlib.Path) -> None:
    folder = FolderStore(tmp_path, 8 * FILE) if kind != "host" else None
    store = (
        folder
        if folder is not None and kind == "folder"
        else HostStore(4 * SIZE, SIZE, lower=folder)
    )
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            worry(store, seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert store.stats.damaged == 0 and store.stats.hits > 0
    check_folder(tmp_path, 8 * FILE)


def check_folder(folder: pathlib.Path, bound: int) -> None:
    """Every file is an intact entry, all together are within the bound, and the books say so."""
    files = list(folder.glob("[!.]*"))
    total = sum(file.stat().st_size for file in files)
    assert total <= bound and all(len(file.name) == 64 for file in files)
    if (folder / ".size").exists():
        assert int.from_bytes((folder / ".size").read_bytes(), "little") == total
    store = FolderStore(folder, bound)
    for file in files:
        assert store.get([bytes.fromhex(file.name)], [memoryview(bytearray(SIZE))]) == [True]


def start_worrier(folder: pathlib.Path, *arguments: int) -> subprocess.Popen[bytes]:
    program = (
        "import sys, pathlib; from tests.kv_transfer.test_kv_stores import *\n"
        "folder, *numbers = sys.argv[1:]\n"
        "worry(FolderStore(folder, 8 * FILE), *map(int, numbers))"
    )
    command = [sys.executable, "-c", program, str(folder), *map(str, arguments)]
    return subprocess.Popen(command, cwd=pathlib.Path(__file__).parents[2])


def test_two_processes_share_a_folder(tmp_path: pathlib.Path) -> None:
    store = FolderStore(tmp_path, 8 * FILE)
    processes = [start_worrier(tmp_path, seed, 400) for seed in range(2)]
    worry(store, seed=2, rounds=400)
    assert [process.wait(120) for process in processes] == [0, 0]
    assert store.stats.damaged == 0
    check_folder(tmp_path, 8 * FILE)


def test_killed_while_it_writes(tmp_path: pathlib.Path) -> None:
    """Whenever a process dies, what it has finished is whole, and what it had begun is gone with
    the next round."""
    for seed in range(6):
        process = start_worrier(tmp_path, seed, 10**9)
        # Kill it in the midst of a file, if that can be caught, at different moments.
        wait_until(lambda: len(list(tmp_path.glob("[!.]*"))) > 3, 60)
        for _ in range(20_000):
            if any(tmp_path.glob("*.tmp")):
                break
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        store = FolderStore(tmp_path, 8 * FILE)
        assert not list(tmp_path.glob("*.tmp"))
        check_folder(tmp_path, 8 * FILE)
        store.close()


def test_a_process_that_stops_while_it_writes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on: they read, and write nothing. What it leaves behind when it dies is removed."""
    set_constants(monkeypatch, folder_store, LOCK_SECONDS=0.1)
    store, stopped = (FolderStore(tmp_path, 3 * FILE) for _ in range(2))
    put(store, 1)
    with stopped._alone():
        (tmp_path / ".new.tmp").write_bytes(b"x" * FILE)
        put(store, 1, 2)
        assert (
            store.stats.failed == 1
            and contains(store, 1) == 1
            and get(store, 1, 2) == [True, False]
        )
    put(store, 2)
    assert get(store, 1, 2) == [True, True] and not list(tmp_path.glob("*.tmp"))
    (tmp_path / ".new.tmp").write_bytes(b"x" * FILE)
    FolderStore(tmp_path, 3 * FILE)
    assert not list(tmp_path.glob("*.tmp"))


# ---------------------------------------------------------------- what is damaged


def test_every_flipped_bit_is_noticed(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FolderStore(tmp_path, 100 * FILE)
    put(store, 1)
    file = tmp_path / key(1).hex()
    whole = file.read_bytes()
    places = [
        *range(8 * HEADER_BYTES),
        *random.Random(0).sample(range(8 * HEADER_BYTES, 8 * FILE), 200),
    ]
    for count, bit in enumerate(places, start=1):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert get(store, 1) == [False] and not file.exists(), f"bit {bit}"
        assert store.stats.damaged == count
    assert caplog.text.count("is damaged") == 1, "one warning a minute"
    put(store, 1)
    assert get(store, 1) == [True], "and then it is written again"


@pytest.mark.parametrize("change", ["truncated", "longer", "another entry's", "empty", "headless"])
def test_files_that_are_not_what_their_name_says(tmp_path: pathlib.Path, change: str) -> None:
    store = FolderStore(tmp_path, 100 * FILE)
    put(store, 1, 2)
    file = tmp_path / key(1).hex()
    whole = file.read_bytes()
    other = (tmp_path / key(2).hex()).read_bytes()
    file.write_bytes(
        {
            "truncated": whole[:-1],
            "longer": whole + b"x",
            "another entry's": other,
            "empty": b"",
            "headless": whole[HEADER_BYTES:],
        }[change]
    )
    assert contains(store, 1) == 1, "nobody has looked inside yet"
    assert get(store, 2, 1) == [True, False] and contains(store, 1) == 0
    assert store.stats.damaged == 1


def test_a_symbolic_link_is_not_followed(tmp_path: pathlib.Path) -> None:
    store, elsewhere = FolderStore(tmp_path / "pool", 100 * FILE), tmp_path / "secret"
    elsewhere.write_bytes(b"x")
    (store.path / key(1).hex()).symlink_to(elsewhere)
    assert get(store, 1) == [False] and elsewhere.read_bytes() == b"x"
    assert store.path.stat().st_mode & 0o077 == 0, "a pool holds what people have said"


def test_a_full_disk_costs_the_entry_and_nothing_else(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The longest file that this process may write stands for a disk that is full."""
    store = FolderStore(tmp_path, 100 * FILE)
    put(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
        for _ in range(3):
            put(store, 2, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert get(store, 1, 2, 3) == [True, False, False]
    assert store.stats.failed == 6 and caplog.text.count("keeps no KV blocks") == 1
    check_folder(tmp_path, 100 * FILE)
    put(store, 2)
    assert get(store, 2) == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system can be mounted by root only")
def test_a_disk_that_is_really_full(tmp_path: pathlib.Path) -> None:
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"mode=700,size={3 * FILE // 4096 * 4096}",
        "tmpfs",
        str(tmp_path),
    ]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        store = FolderStore(tmp_path, 100 * FILE)
        for number in range(6):
            put(store, number)
        assert (
            get(store, *range(6)).count(True) + store.stats.failed == 6 and store.stats.failed >= 3
        )
        remove(store, *range(6))
        put(store, 7)
        assert get(store, 7) == [True]
        store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_vanishes(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FolderStore(tmp_path / "pool", 100 * FILE)
    put(store, 1)
    shutil.rmtree(tmp_path / "pool")
    assert contains(store, 1) == 0 and get(store, 1) == [False]
    put(store, 2)
    remove(store, 2)
    assert store.stats.failed == 1 and "keeps no KV blocks" in caplog.text


def test_a_folder_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="name a folder that does not exist yet"):
        FolderStore(tmp_path / "file", 100 * FILE)


def test_a_smaller_bound_is_kept_at_once(tmp_path: pathlib.Path) -> None:
    put(FolderStore(tmp_path, 100 * FILE), *range(20))
    store = FolderStore(tmp_path, 10 * FILE)
    check_folder(tmp_path, 10 * FILE)
    assert contains(store, *range(20)) == int(LOW_WATER * 10), (
        "the beginning of the chain is what is kept"
    )


# ---------------------------------------------------------------- Redis


@pytest.fixture
def redis_pool(tmp_path: pathlib.Path) -> Iterator[tuple[Any, RedisStore]]:
    with redis_server(tmp_path) as server:
        store = RedisStore(f"redis://:unused@127.0.0.1:{server.ports[0]}/0")
        yield server, store
        store.close()


def client_of(server: Any) -> Any:
    """A client of the test's own."""
    import redis  # an extra

    return redis.Redis(port=server.ports[0])


def test_redis(redis_pool: tuple[Any, RedisStore], caplog: pytest.LogCaptureFixture) -> None:
    server, store = redis_pool
    check_basics(store)
    numbers = range(10, 60)  # several round trips
    put(store, *numbers)
    assert contains(store, *numbers) == 50 and get(store, *numbers) == [True] * 50
    other = RedisStore(f"redis://127.0.0.1:{server.ports[0]}/0", namespace="another:")
    assert contains(other, 10) == 0
    assert not caplog.text


def test_damaged_in_redis(redis_pool: tuple[Any, RedisStore]) -> None:
    server, store = redis_pool
    put(store, 1, 2, 3, 4)
    client = client_of(server)
    names = [b"nanovllm:" + key(n) for n in range(5)]
    client.set(names[1], client.get(names[2]))  # another entry's
    client.setrange(names[2], HEADER_BYTES + 9, b"poison")
    client.set(names[3], client.get(names[3])[:-1])
    assert get(store, 1, 2, 3, 4) == [False, False, False, True]
    assert store.stats.damaged == 3 and client.exists(*names) == 1


def test_redis_makes_room(tmp_path: pathlib.Path) -> None:
    with redis_server(tmp_path, megabytes=4) as server:
        store = RedisStore(f"redis://127.0.0.1:{server.ports[0]}")
        for start in range(0, 2000, 50):
            put(store, *range(start, start + 50))
        assert 100 < sum(get(store, *range(2000))) < 1500  # which ones, Redis chooses by samples
        assert store.stats.failed == 0
        client_of(server).config_set("maxmemory-policy", "noeviction")
        put(store, *range(3000, 4000))
        assert store.stats.failed > 0, "and the engine lives"


def test_redis_goes_and_comes_back(
    redis_pool: tuple[Any, RedisStore],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_constants(monkeypatch, sealed, RETRY_SECONDS=1.0)
    server, store = redis_pool
    put(store, 1)
    server.kill()
    for _ in range(50):
        put(store, 2)
        assert contains(store, 1) == 0 and get(store, 1) == [False]
    assert caplog.text.count("keeps no KV blocks") == 1 and "unused" not in caplog.text, (
        "one warning, no password"
    )
    server.start()

    def stores() -> bool:
        put(store, 3)
        return get(store, 3) == [True]

    wait_until(stores, 30, "the store finds the server again")


def test_a_redis_server_that_hangs_is_rarely_asked(redis_pool: tuple[Any, RedisStore]) -> None:
    server, store = redis_pool
    put(store, 1)
    clock = 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: clock)
        unanswered: list[float] = []
        original = store._client.connection_pool.get_connection

        def get_connection(*arguments: Any, **options: Any) -> Any:
            unanswered.append(clock - 1000)
            return original(*arguments, **options)

        patch.setattr(store._client.connection_pool, "get_connection", get_connection)
        server.processes[0].send_signal(signal.SIGSTOP)
        for _ in range(100):
            assert contains(store, 1) == 0
            clock += 1
        assert unanswered == list(range(0, 100, 10))
        server.processes[0].send_signal(signal.SIGCONT)
        clock += 60
        assert contains(store, 1) == 1 and get(store, 1) == [True]


def test_a_redis_server_without_a_bound(
    redis_pool: tuple[Any, RedisStore], caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = redis_pool
    client_of(server).config_set("maxmemory", 0)
    RedisStore(f"redis://127.0.0.1:{server.ports[0]}")
    assert "--maxmemory-policy allkeys-lru" in caplog.text


def test_urls_that_are_none() -> None:
    with pytest.raises(ValueError, match="redis://"):
        RedisStore("http://127.0.0.1:1")


# ---------------------------------------------------------------- Mooncake


def story_of_mooncake(folder: str) -> None:
    """Two engines and a master: what one puts, the other gets; damage is found; the master goes and
    comes back."""
    logging.basicConfig(level=logging.WARNING)
    with mooncake_master(pathlib.Path(folder)) as server:
        address = f"127.0.0.1:{server.ports[0]}"
        options = {
            "master_server_address": address,
            "listen_on_all_interfaces": True,
            "global_segment_size": 64 << 20,
        }
        writer = MooncakeStore(SIZE, KVTransferConfig(kv_connector_extra_config=options))
        reader = MooncakeStore(
            SIZE, KVTransferConfig(kv_connector_extra_config=options), only_to_look=True
        )
        check_basics(writer)
        numbers = range(10, 60)
        put(writer, *numbers)
        assert contains(reader, *numbers) == 50 and get(reader, *numbers) == [True] * 50

        writer._slots[0] = 0  # what another program might have put under this name
        writer._slots[1, :-1] = 0
        codes = writer._transfer(writer._store.batch_put_from, [key(70), key(71)])
        assert codes == [0, 0] and get(reader, 70, 71, 11) == [False, False, True]
        assert reader.stats.damaged == 2 and contains(reader, 70) == 0

        server.kill()
        put(writer, 80)
        assert contains(reader, 10) == 0 and get(reader, 10) == [False] and writer.stats.failed == 1
        server.start()

        def stores() -> bool:
            put(writer, 81)
            return get(reader, 81) == [True]

        wait_until(stores, 90, "the stores find the master again")
        reader.close()
        writer.close()


@pytest.mark.nightly
def test_mooncake(tmp_path: pathlib.Path) -> None:
    on_own_loopback("tests.kv_transfer.test_kv_stores", "story_of_mooncake", str(tmp_path))


def test_mooncake_settings() -> None:
    for extra, message in (
        ({}, '"listen_on_all_interfaces": true'),
        ({"global_segment_size": "1GB"}, "global_segment_size must be a int"),
        ({"master": "127.0.0.1"}, "master_server_address"),
    ):
        with pytest.raises(ValueError, match=message):
            MooncakeStore(SIZE, KVTransferConfig(kv_connector_extra_config=extra))


# ---------------------------------------------------------------- memory


def test_host_memory_is_there_before_it_is_used() -> None:
    pages_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    store = HostStore(64 << 20, 1 << 20)
    made = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    data = np.ones(1 << 20, np.uint8)
    for number in range(64):
        store.put([key(number)], [memoryview(data)])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert used - made < (made - pages_before) / 4 or made - pages_before < 100
