"""Members stand where a reader looks for them, whatever lecture added them.

The module of each class in `ORDER` has its members in the order of the table. A new member that
stands elsewhere fails the test; `#| extend MODULE after=MEMBER` in its lecture's cell gives it its
place (nanovllm/lab/README.md).
"""

from __future__ import annotations

import ast

import pytest

from tests.house import PACKAGE

# For each class: what its parts are, and the members of each part, in order.
ORDER: dict[str, dict[str, str]] = {
    "core.queues:Queues": {
        "state": "__init__ num_seated next_in_line",
        "intake": "add move clear is_in_flight",
        "invariants": "check_invariants",
    },
    "core.scheduler:Scheduler": {
        "state": "__init__",
        "intake": "add_request has_unfinished finish abort_request forget_requests",
        "step": "schedule continue_running admit share _why_not _admit_waiting _run_waiting "
        "_admit_swapped _schedule",
        "results": "update_from_output _update _append_tokens _cache_completed_block took stats",
        "memory": "_preempt",
        "invariants": "check_invariants",
    },
    "core.runner:ModelRunner": {
        "state": "__init__ model allocate make_buffers _make_caches _cache_shapes bytes_per_block",
        "intake": "prepare_inputs _write_tokens _write_sequences",
        "step": "execute_model launch _launch",
        "results": "_sampling_rows _sample",
        "errors": "_remove forget_requests",
        "control": "close",
    },
    "core.engine:EngineCore": {
        "state": "__init__ stats has_unfinished has_work is_idle",
        "intake": "add_request abort_request",
        "step": "step _step _launch",
        "results": "take_results _now _drain_if_idle",
        "errors": "_all_or_nothing _start_over",
        "control": "reset_prefix_cache watch unwatch close",
    },
    "engine.process:EngineLoop": {
        "state": "__init__",
        "step": "run _take_commands _obey",
        "results": "_note _send_report",
    },
    "engine.group:DataParallelCore": {
        "state": "has_work is_idle first_scheduled idle_seconds __init__ _start limits stats "
        "has_unfinished sources",
        "intake": "add_request abort_request",
        "step": "step _start_wave",
        "results": "_take_reports take_report",
        "errors": "check_health",
        "control": "reset_prefix_cache close wait_for_pause",
    },
    "features.data_parallel.router:EngineRouter": {
        "state": "__init__",
        "intake": "choose _block_hashes _match _remember",
        "control": "forget",
    },
    "executor.remote:RemoteExecutor": {
        "state": "program __init__ _start_all _start_ranks _start_rank",
        "step": "collective_rpc launch _order _send",
        "results": "_answer",
        "memory": "transfer_has_ended forget_ends",
        "errors": "check_health forget_requests",
        "control": "close",
    },
    "kv_transfer.connector:KVConnectorScheduler": {
        "state": "sources __init__ has_work has_news idle_seconds information",
        "intake": "check_request get_num_new_matched_tokens update_state_after_alloc decline",
        "step": "build_connector_meta",
        "results": "update_connector_output take_output",
        "memory": "request_finished revoke is_sending choose_victim",
        "errors": "forget_requests",
        "control": "close",
    },
    "kv_transfer.connector:KVConnectorWorker": {
        "state": "metadata model backend token_budget __init__ empty_kv_cache "
        "get_handshake_metadata",
        "step": "start_load_kv save_kv_layer wait_for_save",
        "results": "get_finished begin_step end_step",
        "errors": "forget_requests",
        "control": "close",
    },
    "kv_transfer.pd.consumer:ConsumerSide": {
        "state": "__init__",
        "intake": "get_num_new_matched_tokens _others _decline _settle update_state_after_alloc "
        "_claim _producer",
        "step": "_happens _move_if_ready hear_producer _prefilled",
        "results": "update_connector_output _received take_output _end",
        "memory": "request_finished _fetches_of give_up_youngest",
        "errors": "forget_requests",
        "control": "close",
    },
    "kv_transfer.pd.producer:ProducerSide": {
        "state": "__init__",
        "intake": "hear_consumer _why_not revoke decline",
        "step": "push _push is_sending request_finished _order_finished",
        "results": "take_output",
        "errors": "forget_requests",
        "control": "close",
    },
    "kv_transfer.stores.offloading:OffloadingScheduler": {
        "state": "__init__ _open_shared _keys",
        "intake": "get_num_new_matched_tokens update_state_after_alloc",
        "step": "build_connector_meta _new_blocks",
        "results": "update_connector_output",
        "memory": "request_finished",
        "errors": "forget_requests",
        "control": "close",
    },
    "engine.llm:LLM": {
        "state": "__init__ trace get_tokenizer get_default_sampling_params",
        "step": "generate chat _run",
        "control": "reset_prefix_cache",
    },
    "router.app:RouterApp": {
        "state": "__init__",
        "intake": "answer _first_of",
        "step": "_decode _ask _transfer _address _prefill",
        "control": "overview health",
    },
    "router.backends:Backend": {
        "state": "__init__ is_healthy at_work",
        "step": "ask fetch release _send",
        "errors": (
            "note_failure _note_problem look_after follow_load check _find_problem _read_load"
        ),
    },
}

# The parts that a class may have, in the order in which a reader looks for them.
PARTS = ["state", "intake", "step", "results", "memory", "invariants", "errors", "control"]


def members_of(module: str, name: str) -> list[str]:
    """The names that the body of a class binds, in order; an accessor counts once."""
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    names = []
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return list(dict.fromkeys(names))


@pytest.mark.parametrize("name", ORDER)
def test_members_stand_in_reading_order(name: str) -> None:
    parts = ORDER[name]
    assert list(parts) == sorted(parts, key=PARTS.index)
    wanted = " ".join(parts.values()).split()
    assert members_of(*name.split(":")) == wanted, (
        f"{name}: move the member, or put it into ORDER at its place"
    )
