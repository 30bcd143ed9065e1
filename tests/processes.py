"""Processes that tests start: forked from one server process that has imported torch and the engine."""

from __future__ import annotations

from nanovllm.lab.course.ranks import CONTEXT, PRELOADED

# A new interpreter takes two seconds to import them. Takes effect when the first process starts, hence after collection.
CONTEXT.set_forkserver_preload([*PRELOADED, "nanovllm", "tests.kv_engines", "nanovllm.kv_transfer.pd.disaggregated"])
