"""The film of lecture 31: two engines, and a fetch between them, recorded event by event."""

from __future__ import annotations

import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from figures_parallel import arrow
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from reel import Reel, told

from nanovllm.assembly.engine import Engine
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.kv_transfer.pd.consumer import ConsumerSide
from nanovllm.kv_transfer.pd.control import Producer
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, mark_style, request_color

PROMPT = [3 + 7 * i % 300 for i in range(22)]
NUM_BLOCKS = 16
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


class Fetching:
    """A producer and a consumer, and the record of what they do for one request.

    Attributes:
        record: after each event its name, who tells whom what (or None), and both sides.
    """

    def __init__(self, folder: str) -> None:
        self.record: list[dict[str, Any]] = []
        self.producer, self.consumer = (
            self._engine(folder, role) for role in ("kv_producer", "kv_consumer")
        )
        # Before, each has served another request, so that the free blocks of the two lie elsewhere.
        for engine, count in ((self.producer, 26), (self.consumer, 14)):
            engine.add_request(_ask("other", [5 + 3 * i for i in range(count)], 1))
            self.until(engine, lambda engine=engine: not engine.has_unfinished)
            engine.reset_prefix_cache()
        self.table: list[int] = []  # the producer's, also when it has given the blocks back
        self.num_tokens = 0

    def _engine(self, folder: str, role: str) -> Engine:
        transfer = {"kv_connector": "local", "kv_role": role}
        options = {
            "dtype": "float32",
            "device": "cpu",
            "num_kv_blocks": NUM_BLOCKS,
            "block_size": 4,
            "max_num_seqs": 4,
        }
        budget = 10 if role == "kv_producer" else 64
        config = EngineConfig(
            folder,
            load_format="dummy",
            kv_transfer_config=transfer,
            max_num_batched_tokens=budget,
            **options,
        )
        return Engine(config)

    def until(self, engine: Engine, condition: Callable[[], bool]) -> list[Any]:
        """Let one of the engines make steps; returns what it has said."""
        said, deadline = [], time.monotonic() + 60
        while not condition():
            said += engine.step()
            assert time.monotonic() < deadline, "it never came to that"
        return said

    def note(self, event: str, who: str = "", whom: str = "", text: str = "") -> None:
        """Record an event and what is to be seen after it."""
        there, here = self._blocks(self.producer), self._blocks(self.consumer)
        arrived = [self._arrived(*pair) for pair in zip(self.table, here["table"], strict=False)]
        fetches = list(self.consumer.peers.connector.fetches.values())
        here |= {
            "arrived": arrived,
            "stage": (
                fetches[0].stage if fetches else "asked" if event in ("Claim", "Prefill") else ""
            ),
            "tokens": self.num_tokens,
        }
        self.record.append(
            {"event": event, "message": [who, whom, text], "producer": there, "consumer": here}
        )

    def _blocks(self, engine: Engine) -> dict[str, Any]:
        manager, requests = engine.manager, engine.scheduler.queues.requests
        name = next(iter([*requests, *manager.held]), None)
        table = list(manager.tables.get(name) or manager.held.get(name) or [])
        if engine is self.producer:
            self.table = table or self.table
        num_computed = (
            requests[name].num_computed_tokens if name in requests else len(PROMPT) if table else 0
        )
        cached = [
            block
            for block, name in enumerate(manager.pool.block_hashes)
            if name and not manager.pool.ref_counts[block]
        ]
        return {
            "table": table,
            "computed": num_computed,
            "held": name in manager.held,
            "cached": cached,
        }

    def _arrived(self, there: int, here: int) -> int:
        """How many tokens of a consumer's block have the producer's keys and values, in all
        layers."""
        pairs = zip(self.producer.runner.kv_caches, self.consumer.runner.kv_caches, strict=True)
        same = [
            ((a[there] == b[here]) & (a[there] != 0)).all(-1).flatten(0, 1).all(0) for a, b in pairs
        ]
        return sum(all(bool(layer[token]) for layer in same) for token in range(4))

    def watched(self) -> ExitStack:
        """Note what the consumer tells the producer, and the stages of its fetch."""
        tell, happens, patches = Producer.tell, ConsumerSide._happens, ExitStack()

        def told_producer(producer: Producer, message: Any) -> None:
            tell(producer, message)
            self.note(type(message).__name__, "consumer", "producer", type(message).__name__)

        def happened(side: ConsumerSide, fetch: Any, event: str, error: str = "") -> None:
            happens(side, fetch, event, error)
            if event != "read":  # that has been told, as a Release
                texts = {"confirmed": "Released", "ready": "" if fetch.is_push else "blocks"}
                message = ("producer", "consumer", texts[event]) if texts.get(event) else ()
                self.note(f"{event}: {fetch.stage}", *message)

        patches.enter_context(mock.patch.object(Producer, "tell", told_producer))
        patches.enter_context(mock.patch.object(ConsumerSide, "_happens", happened))
        return patches

    def compute(self) -> list[Any]:
        """Let the producer compute the prompt; record each step, when what it has pushed is
        there."""
        said, before, deadline = [], 0, time.monotonic() + 60
        while self.producer.has_unfinished or not before:  # an order may be on its way
            said += self.producer.step()
            there, is_pushed = (
                self._blocks(self.producer),
                bool(self.consumer.peers.connector.fetches),
            )
            while (
                is_pushed
                and sum(
                    self._arrived(*pair) for pair in zip(self.table, self._here(), strict=False)
                )
                < there["computed"]
            ):
                time.sleep(0.001)
            if there["computed"] > before:
                before = there["computed"]
                self.note(
                    f"computed {before}",
                    *(("producer", "consumer", "blocks") if is_pushed else ("", "", "")),
                )
            assert time.monotonic() < deadline, "it never came to that"
        return said

    def _here(self) -> list[int]:
        return self._blocks(self.consumer)["table"]

    def first_token(self) -> None:
        """Let the consumer take the KV over, and sample a token."""
        while not self.num_tokens:
            self.num_tokens += sum(len(output.new_token_ids) for output in self.consumer.step())
        self.note("first token")

    def give_back(self) -> None:
        """Let the producer notice that its blocks are not needed any more."""
        self.until(self.producer, lambda: not self.producer.manager.held)
        self.note("free")

    def prefill_first(self) -> None:
        """The router asks the producer, and gives its answer to the consumer, which pulls."""
        self.producer.add_request(_ask("prompt", PROMPT, 1, {"do_remote_decode": True}))
        self.note("sent", "router", "producer", "prompt")
        done = self.compute()[-1]
        self.note("answered", "producer", "router", "where its KV is")
        self.consumer.add_request(_ask("answer", PROMPT, 8, done.kv_transfer_params))
        self.note("sent", "router", "consumer", "prompt,\nwhere its KV is")
        self.first_token()
        self.give_back()

    def decode_first(self) -> None:
        """The router asks the consumer, which orders the prompt from the producer, and has it
        pushed."""
        (place,) = self.producer.limits.kv_transfer
        address = [place["kv_host"], place["kv_port"]]
        transfer = {
            "do_remote_prefill": True,
            "prefill_addresses": [address],
            "kv_direction": "push",
        }
        self.consumer.add_request(_ask("answer", PROMPT, 8, transfer))
        self.note("sent", "router", "consumer", "prompt,\nwhom to ask")
        self.until(
            self.consumer,
            lambda: any(
                f.stage == "moving" for f in self.consumer.peers.connector.fetches.values()
            ),
        )
        self.compute()
        self.first_token()
        self.give_back()


def _ask(name: str, prompt: list[int], count: int, transfer: dict | None = None) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return EngineRequest(name, prompt, params, kv_transfer_params=transfer)


def fetch() -> Reel:
    """A prompt is computed by one engine and continued by another: prefill first, then decode
    first."""
    record = []
    for way in (Fetching.prefill_first, Fetching.decode_first):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(SHAPE))
            engines = Fetching(folder)
            with engines.watched():
                way(engines)
            engines.consumer.close()
            engines.producer.close()
        record += [{"way": way.__name__} | event for event in engines.record]
    words = [
        (
            "Prefill first. The router sends the prompt of 22 tokens to the producer: max_tokens "
            "is 1, do_remote_decode is true."
        ),
        (
            "The producer computes the prompt in chunks of 10 tokens, in blocks of four. The "
            "consumer does not know of it yet."
        ),
        "The second chunk.",
        (
            "The prompt is computed, and the request ends. Its blocks are not freed: they are held "
            "for a reader."
        ),
        (
            "The answer to the router says where the keys and values are: blocks 7 to 12 of this "
            "producer."
        ),
        "The router sends the prompt and this answer to a consumer.",
        (
            "The consumer's scheduler gives the request 6 blocks of its own, and claims the "
            "producer's blocks. The request waits."
        ),
        (
            "The ranks are told to read: 7 → 4, 8 → 5, ..., 12 → 9. Meanwhile the consumer can "
            "compute other requests."
        ),
        (
            "All blocks are read (dotted). The consumer releases the producer's blocks, and asks "
            "whether they were held so long."
        ),
        "They were. What has arrived counts as computed, up to the last token: 21 of 22.",
        (
            "The consumer computes only the last token, since its logits are needed, and samples "
            "the first token of the answer."
        ),
        (
            "In its next step the producer frees the blocks. Their content stays in its prefix "
            "cache (hatched)."
        ),
        (
            "Decode first. The router sends the prompt to the consumer at once, and says which "
            "producer it can ask."
        ),
        (
            "The consumer gives the request 6 blocks, and orders the prompt from the producer. The "
            "order names these blocks."
        ),
        "The consumer's ranks expect the blocks. The producer has not begun.",
        (
            "The producer computes the first chunk. After each layer it offers the layer's blocks, "
            "and the consumer reads them at once."
        ),
        (
            "The second chunk. Block 9 crosses again: now it is full. The transfer hides behind "
            "the computation."
        ),
        (
            "With the last chunk come the last blocks. Hardly anything is left to be transferred "
            "when the prompt is computed."
        ),
        (
            "All has arrived from blocks that the producer held: nothing has to be confirmed, and "
            "the request runs."
        ),
        (
            "The consumer computes the last token, and samples. Between the end of the prompt and "
            "this token there was no round trip."
        ),
        (
            "The producer frees its blocks in its next step. The price of this order: the "
            "consumer's blocks were taken before the prompt was computed."
        ),
    ]
    assert len(words) == len(record), [event["event"] for event in record]
    ways = {"prefill_first": "prefill first, pull", "decode_first": "decode first, push"}
    beats = told(
        [i for i in range(len(record)) if i != 2], dict(enumerate(words))
    )  # without the second chunk
    return Reel(
        "Prefill here, decode there: one request",
        record,
        beats,
        _draw,
        3.8,
        lambda i: ways[record[i]["way"]],
    )


def _draw(ax: Axes, record: Any, number: int) -> None:
    ax.set(xlim=(0, 100), ylim=(39, 0))
    event = record[number]
    places = {"router": (50, 3.4), "producer": (21.5, 24), "consumer": (78.5, 24)}
    ax.add_patch(Rectangle((41, 0.4), 18, 6, facecolor=BACKGROUND, edgecolor=INK, linewidth=1.2))
    ax.text(50, 3.4, "router", ha="center", va="center", fontsize=12)
    _draw_engine(ax, 0.4, "producer", event["producer"], event["producer"]["table"], {})
    arrived = dict(zip(event["consumer"]["table"], event["consumer"]["arrived"], strict=False))
    _draw_engine(ax, 57.4, "consumer", event["consumer"], event["consumer"]["table"], arrived)
    who, whom, text = event["message"]
    if not who:
        return
    (x, _), (end, _) = places[who], places[whom]
    if "router" in (who, whom):
        engine = end if who == "router" else x
        side = 40.6 if engine < 50 else 59.4
        corner = [(side, 3.4), (engine, 3.4), (engine, 11)]
        corner = corner if who == "router" else corner[::-1]
        ax.plot(*zip(*corner[:2], strict=True), color=INK, linewidth=1.4)
        arrow(ax, corner[1], corner[2])
        ax.text(
            engine + (1 if engine > 50 else -1),
            7,
            text,
            ha="left" if engine > 50 else "right",
            va="center",
            fontsize=11,
        )
    else:
        left, right = 43.4, 56.6
        arrow(ax, (left, 25) if x < end else (right, 25), (right, 25) if x < end else (left, 25))
        ax.text(50, 24, text, ha="center", va="bottom", fontsize=11)


def _draw_engine(
    ax: Axes, x: float, name: str, state: Any, table: list[int], arrived: dict[int, int]
) -> None:
    """An engine: what its request does, its block table, and its pool."""
    color, wide, high = request_color(0), 4.4, 4.4
    ax.add_patch(Rectangle((x, 11.4), 42.2, 27, facecolor=BACKGROUND, edgecolor=INK, linewidth=1.2))
    ax.text(x + 1.5, 13.9, name, va="center", fontsize=12.5, fontweight="bold")
    if name == "producer":
        doing = (
            "holds the blocks"
            if state["held"]
            else f"computed {state['computed']} of {len(PROMPT)}"
            if table
            else "idle"
        )
    else:
        doing = f"waits: {state['stage']}" if state["stage"] else "runs" if table else "idle"
        doing += f", sampled {state['tokens']}" if state["tokens"] else ""
    ax.text(x + 40.6, 13.9, doing, va="center", ha="right", fontsize=11.5)
    ax.text(x + 1.5, 18.3, f"block table {table if table else '–'}", va="center", fontsize=11)
    for block in range(NUM_BLOCKS):
        left, top = x + 1.7 + 4.95 * (block % 8), 22.4 + 8.2 * (block // 8)
        kinds = ["cached"] * 4 if block in state["cached"] else ["free"] * 4  # of its four tokens
        if block in table:
            first = 4 * table.index(block)
            num_filled = (
                arrived[block] if block in arrived else min(4, max(0, state["computed"] - first))
            )
            kinds = ["transferred" if block in arrived else "prefill"] * num_filled + ["free"] * (
                4 - num_filled
            )
            if arrived and state["computed"] == len(PROMPT) == first + num_filled:
                kinds[num_filled - 1] = "prefill"  # the last token was computed here
        for token, kind in enumerate(kinds):
            at = left + wide / 2 * (token % 2), top + high / 2 * (token // 2)
            look = mark_style(kind, MUTED if kind == "cached" else color) | {"linewidth": 0.6}
            ax.add_patch(Rectangle(at, wide / 2, high / 2, **look))
        edge = color if block in table else FAINT
        ax.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=edge, linewidth=1.4))
        ax.text(
            left + wide / 2,
            top + high + 1.3,
            str(block),
            ha="center",
            va="center",
            fontsize=9,
            color=MUTED,
        )
