"""A producer on one machine and a consumer on another: KV crosses a cable, which is pulled in the
end."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.machines import ADDRESSES, Machines
from tests.oracle import reference_tokens

PROMPTS = [[5 + i * 7 % 300 for i in range(start, start + 43)] for start in (0, 50, 100, 150)]

PRODUCER = """
import json, os, select, sys
from tests.kv_engines import address, make_engine

engine = make_engine(sys.argv[1], "kv_producer", json.loads(sys.argv[2]))
print(json.dumps(address(engine)), flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    engine.step()
os._exit(0)
"""

CONSUMER = """
import json, os, sys
from tests.kv_engines import Fleet, ask, decode_first, make_engine

engine = make_engine(sys.argv[1], "kv_consumer", json.loads(sys.argv[2]))
fleet, place = Fleet([engine]), json.loads(sys.argv[3])
for line in sys.stdin:
    name, prompt, direction = json.loads(line)
    ask(engine, name, prompt, params=decode_first(place, direction))
    fleet.run_until(lambda: fleet.finished(name) is not None, 60)
    print(json.dumps([fleet.tokens(name), fleet.outputs[name][0].num_cached_tokens]), flush=True)
    fleet.run_until(lambda: engine.manager.pool.usage == 0 and not engine.has_work, 60)
os._exit(0)
"""


@pytest.mark.parametrize("connector", ["local", pytest.param("nixl", marks=pytest.mark.nightly)])
def test_two_machines(connector: str, tiny_model: pathlib.Path) -> None:
    if connector == "nixl":
        pytest.importorskip(
            "nixl_cu12",
            reason="nixl-cu12 is not installed: KV between machines by NIXL is not tested",
        )
    environment = os.environ | {"NANOVLLM_KV_SECRET": "s" * 32, "OMP_NUM_THREADS": "1"}

    def start(machines: Machines, machine: int, script: str, *words: str) -> subprocess.Popen[str]:
        # A consumer that has lost its cable gives up within seconds.
        settings = {
            "kv_connector": connector,
            "kv_ip": ADDRESSES[machine],
            "kv_connector_extra_config": {"timeout": 3.0, "prefill_timeout": 5.0},
        }
        variables = environment | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": machines.cables[machine]}
        command = [sys.executable, "-c", script, str(tiny_model), json.dumps(settings), *words]
        return machines.start(
            machine,
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with Machines() as machines:
        producer = start(machines, 0, PRODUCER)
        try:
            assert producer.stdout is not None
            place = producer.stdout.readline()
            consumer = start(machines, 1, CONSUMER, place)

            def complete(name: str, prompt: list[int], direction: str) -> int:
                """Ask the consumer; returns how many tokens' KV it has had from elsewhere."""
                assert consumer.stdin is not None and consumer.stdout is not None
                print(json.dumps([name, prompt, direction]), file=consumer.stdin, flush=True)
                tokens, num_cached = json.loads(consumer.stdout.readline())
                assert tokens == reference_tokens(str(tiny_model), prompt, 14)
                return num_cached

            try:
                assert complete("pull", PROMPTS[0], "pull") == len(PROMPTS[0]) - 1
                assert complete("push", PROMPTS[1], "push") == len(PROMPTS[1]) - 1
                machines.unplug()
                assert complete("pull without a cable", PROMPTS[2], "pull") == 0
                assert complete("push without a cable", PROMPTS[3], "push") == 0
            finally:
                consumer.kill()
                consumer.communicate()
        finally:
            producer.kill()
            producer.communicate()
