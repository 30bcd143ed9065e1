"""The core knows no feature, needs no library, and has no hook that nothing uses."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from nanovllm.core.hooks import SchedulerHookCalls, SchedulerHooks
from nanovllm.core.runner_hooks import RunnerHookCalls, RunnerHooks
from tests.house import PACKAGE

CORE = PACKAGE / "core"
# Names of features, also inside other names.
FEATURES = re.compile(
    r"connector|draft|speculat|grammar|pipeline|stage(?!d)|wave|graph|lora|(?<![a-z])ranks?(?![a-z])",
    re.IGNORECASE,
)
# Imports that find nothing but the standard library, msgspec and the package; then a simulation of
# requests that share a prefix, in a pool so small that some are preempted.
ALONE = """
import importlib.abc, sys

class OnlyThese(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {"nanovllm", "msgspec", *sys.stdlib_module_names}:
            raise ImportError(f"the core imports {name}")

sys.meta_path.insert(0, OnlyThese())

from nanovllm.core.queues import Queues
from nanovllm.core.scheduler import Scheduler, SchedulerSettings
from nanovllm.core.request import Request
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken
from nanovllm.core.kv_cache_manager import KVCacheManager

settings = SchedulerSettings(token_budget=16, max_num_seqs=4, max_request_tokens=40)
scheduler = Scheduler(settings, Queues(), KVCacheManager(12, 4))
for i in range(6):
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    scheduler.add_request(Request(EngineRequest(f"r{i}", [*range(9), i], params), i))
told = {}
while scheduler.has_unfinished:
    plan = scheduler.schedule()
    assert not plan.empty, plan.blocked_by
    sampled = {r.request_id: [SampledToken(7)] for r in plan.requests if r.samples}
    for output in scheduler.update_from_output(plan, ModelRunnerOutput(sampled)):
        told.setdefault(output.request_id, []).extend(output.new_token_ids)
    scheduler.check_invariants()
assert told == {f"r{i}": [7] * 10 for i in range(6)}, told
print(scheduler.num_preemptions > 0, scheduler.num_hit_tokens > 0)
"""


def test_the_scheduler_needs_only_the_standard_library_and_msgspec() -> None:
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    assert run.stdout.split() == ["True", "True"], "requests were preempted, and prefixes shared"


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda path: path.stem)
def test_the_core_names_no_feature(path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    found = [f"{number}: {line.strip()}" for number, line in lines if FEATURES.search(line)]
    if path.stem == "sampling":  # the rank of a token among the likeliest ones
        found = [line for line in found if FEATURES.search(re.sub(r"ranks?\b", "", line))]
    # A module's heading says which lecture builds it.
    assert [line for line in found if "Built by notebooks/" not in line] == []


def users_of_hooks(base: type) -> dict[str, set[str]]:
    """For each hook, the classes of the package that override it."""
    hooks = [name for name in vars(base) if not name.startswith("_")]
    users: dict[str, set[str]] = {name: set() for name in hooks if name != "concerns_decodes"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and base.__name__ in map(ast.unparse, node.bases):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and member.name in users:
                        users[member.name].add(node.name)
    return users


@pytest.mark.parametrize(
    ("base", "calls"),
    [(SchedulerHooks, SchedulerHookCalls), (RunnerHooks, RunnerHookCalls)],
    ids=["scheduler", "runner"],
)
def test_every_hook_is_called_for_and_its_users_are_on_the_page(base: type, calls: type) -> None:
    """nanovllm/core/README.md has a row for each hook, in their order, with the features that use
    it."""
    users = users_of_hooks(base)
    assert [hook for hook, features in users.items() if not features] == [], "nothing uses it"
    assert vars(calls([])).keys() - {"concerns_decodes"} == users.keys()
    page = (CORE / "README.md").read_text(encoding="utf-8")
    page = page[page.index(f"| hook of `{base.__name__}`") :]
    page = page[: page.index("\n\n")]
    rows = re.findall(r"^\| `(\w+)\([^)]*\)` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    told = {hook: set(re.findall(r"`(\w+)`", features)) for hook, features in rows if hook in users}
    assert list(told.items()) == list(users.items())
