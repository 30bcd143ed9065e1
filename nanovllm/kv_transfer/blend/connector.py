"""Blends parts of a prompt that were computed before, behind another prefix: CacheBlend as a
connector.

A separator marks a prompt's parts, as in LMCache: `system SEP document SEP document SEP question`.
Each part in the middle is a
chunk: when it has been computed for the first time, its keys and values are copied. A later prompt
with the same chunk at any position gets them at its own positions, with the tokens that differ most
computed anew; see `blend`. For the scheduler, that is KV that another engine provides, and the next
step computes the question as usual."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from nanovllm.core.kv_cache_manager import hash_block, hash_salt
from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import KVConnectorOutput
from nanovllm.kv_transfer.blend.blend import blend
from nanovllm.kv_transfer.blend.chunks import Chunk, save_chunk
from nanovllm.kv_transfer.connector import KVConnectorScheduler, KVConnectorWorker, Tables
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.text.tokenizer import Tokenizer


@dataclass
class Part:
    """The tokens `start : end` of a prompt, the key of their chunk, and whether they may be saved
    from this prompt."""

    start: int
    end: int
    key: bytes
    may_be_saved: bool = True


@dataclass
class BlendJob:
    """Fill a request's blocks with the keys and values of `token_ids`; the last three are arguments
    of `blend`."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    parts: list[Part]
    num_computed_tokens: int
    recompute_ratio: float
    check_layer: int


@dataclass
class BlendMetadata:
    """What the ranks do when the step's own tokens are computed, in this order.

    Attributes:
        saves: parts whose keys and values are copied, each with its prompt's block table.
        drops: keys of parts that are forgotten.
    """

    saves: list[tuple[Part, list[int]]] = field(default_factory=list)
    blend: BlendJob | None = None
    drops: list[bytes] = field(default_factory=list)


class BlendScheduler(KVConnectorScheduler):
    """Cuts prompts into parts, and knows which parts are kept.

    kv_connector_extra_config: `blend_special_str`, the separator, preferably a special token, which
    cannot merge with its neighbours; `blend_recompute_ratio`; `blend_check_layer`;
    `blend_min_tokens`, the minimum length of a part; `blend_gib`, host memory for parts on each
    rank.

    Raises:
        ValueError: a setting that makes no sense, or a model or a grid of ranks for which blending
            is not possible.
    """

    def __init__(
        self, config: EngineConfig, identity: dict[str, str | int], ranks: Sequence[int]
    ) -> None:
        super().__init__(config, identity, ranks)
        if config.pipeline_parallel_size > 1:
            raise ValueError(
                "use pipeline_parallel_size 1: kv_connector blend needs all layers on each rank"
            )
        if identity["num_kv_heads"] == 0 or identity["kv_cache_dtype"] != "auto":
            raise ValueError(
                "use another connector: kv_connector blend cannot rotate latent or quantized keys"
            )
        settings = self.kv_transfer.extras(
            blend_special_str="<file_sep>",
            blend_recompute_ratio=0.15,
            blend_check_layer=1,
            blend_min_tokens=64,
            blend_gib=1.0,
        )
        ratio = settings["blend_recompute_ratio"]
        check = settings["blend_check_layer"]
        if not 0 <= ratio <= 1 or not 0 <= check < int(identity["num_layers"]):
            mistake = (
                "blend_recompute_ratio must be from 0 to 1, and blend_check_layer one of the "
                "model's"
            )
            raise ValueError(
                f"{mistake} {identity['num_layers']} layers, counted from 0; got {ratio} and "
                f"{check}"
            )
        self._recompute_ratio: float = ratio
        self._check_layer: int = check
        self.min_tokens = max(1, settings["blend_min_tokens"])
        self.max_kept_tokens = int(settings["blend_gib"] * 2**30) // max(ranks)
        self.separator = Tokenizer.of(config).encode(
            settings["blend_special_str"], add_special_tokens=False
        )
        if not self.separator:
            raise ValueError(
                "blend_special_str separates the parts of a prompt; it must not be empty"
            )
        self._kept: dict[bytes, int] = {}  # key -> tokens; least recently used first
        self._prompts: dict[str, list[Part]] = {}  # by request id
        self._jobs: dict[str, BlendJob] = {}  # by request id, in order

    # ---------------------------------------------------------------- a prompt's parts

    def _parts(self, request: Request) -> list[Part]:
        """The token ranges between two separators of the prompt that are long enough."""
        token_ids = request.token_ids[: request.num_prompt_tokens]
        width = len(self.separator)
        cuts = [i for i in range(len(token_ids)) if token_ids[i : i + width] == self.separator]
        salt = hash_salt(request.cache_salt)
        ranges = [
            (before + width, end)
            for before, end in pairwise(cuts)
            if end - before - width >= self.min_tokens
        ]
        return [Part(start, end, hash_block(salt, token_ids[start:end])) for start, end in ranges]

    def _reusable(self, request: Request, num_computed_tokens: int) -> list[Part]:
        parts = self._prompts[request.request_id]
        return [part for part in parts if part.end > num_computed_tokens and part.key in self._kept]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """The tokens up to the end of the last part that is kept, if enough of them have not been
        computed."""
        if request.request_id not in self._prompts:
            self._prompts[request.request_id] = self._parts(request)
        request.num_exact_tokens = None
        reused = self._reusable(request, num_computed_tokens)
        gain = sum(part.end - max(part.start, num_computed_tokens) for part in reused)
        return reused[-1].end - num_computed_tokens if gain >= self.min_tokens else 0, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Queue the request. Its KV is approximate from the first reused token on, and must not be
        found in the prefix cache."""
        before = request.num_computed_tokens
        reused = self._reusable(request, before)
        for part in reused:
            self._kept[part.key] = self._kept.pop(part.key)  # at the end
            part.may_be_saved = False
        request.num_exact_tokens = max(before, reused[0].start)
        token_ids = request.token_ids[: before + num_external_tokens]
        self._jobs[request.request_id] = BlendJob(
            request_id=request.request_id,
            token_ids=token_ids,
            block_ids=list(block_ids),
            parts=reused,
            num_computed_tokens=before,
            recompute_ratio=self._recompute_ratio,
            check_layer=self._check_layer,
        )
        self._in_flight.add(request.request_id)

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, RemoteKV | None]:
        """Forget the request, and drop its blend if it is still queued."""
        self._prompts.pop(request.request_id, None)
        if self._jobs.pop(request.request_id, None) is not None:
            self.update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))
        return False, None

    # ---------------------------------------------------------------- every step

    def build_connector_meta(self, plan: SchedulerOutput, tables: Tables) -> BlendMetadata | None:
        """One blend per step, and the parts that are complete after the step."""
        metadata = BlendMetadata(
            blend=self._jobs.pop(next(iter(self._jobs))) if self._jobs else None
        )
        for scheduled in plan.requests:
            for part in self._prompts.get(scheduled.request_id, ()):
                if part.may_be_saved and part.end <= scheduled.start + scheduled.num_tokens:
                    part.may_be_saved = False
                    size = part.end - part.start
                    if part.key not in self._kept and size <= self.max_kept_tokens:
                        self._kept[part.key] = size
                        metadata.saves.append((part, list(tables[scheduled.request_id])))
        needed = {part.key for job in self._jobs.values() for part in job.parts}  # by queued blends
        droppable = [key for key in self._kept if key not in needed]
        while droppable and sum(self._kept.values()) > self.max_kept_tokens:
            metadata.drops.append(droppable.pop(0))
            del self._kept[metadata.drops[-1]]
        return metadata if metadata.saves or metadata.blend or metadata.drops else None

    @property
    def has_news(self) -> bool:
        """See the base class. The next blend need not wait for anything."""
        return bool(self._jobs) or super().has_news

    def forget_requests(self) -> None:
        """See the base class. The ranks drop all parts, too."""
        super().forget_requests()
        self._kept.clear()
        self._prompts.clear()
        self._jobs.clear()


class BlendWorker(KVConnectorWorker):
    """Keeps the parts' keys and values of this rank's heads in host memory, and blends."""

    metadata: BlendMetadata | None

    def __init__(
        self, config: EngineConfig, layout: KVLayout, kv_caches: dict[int, Tensor]
    ) -> None:
        super().__init__(config, layout, kv_caches)
        self.chunks: dict[bytes, Chunk] = {}

    def get_handshake_metadata(self) -> int:
        """Bytes per token on this rank."""
        return sum(cache[0].nbytes // self.config.block_size for cache in self.kv_caches.values())

    def wait_for_save(self) -> None:
        """Save, blend and drop when the step's own tokens are computed, since a blend may attend to
        them."""
        metadata = self.metadata
        assert metadata is not None, "set around each step"
        caches = list(self.kv_caches.values())
        as_table = functools.partial(torch.tensor, dtype=torch.int32, device=caches[0].device)
        for part, block_ids in metadata.saves:
            self.chunks[part.key] = save_chunk(caches, as_table(block_ids), part.start, part.end)
        if (job := metadata.blend) is not None:
            chunks = [(part.start, self.chunks[part.key]) for part in job.parts]
            blend(
                self.model,
                self.backend,
                kv_caches=caches,
                block_table=as_table(job.block_ids),
                token_ids=job.token_ids,
                chunks=chunks,
                recompute_ratio=job.recompute_ratio,
                num_computed_tokens=job.num_computed_tokens,
                check_layer=job.check_layer,
                max_rows=self.token_budget,
            )
        for key in metadata.drops:
            del self.chunks[key]

    def get_finished(self, wait_seconds: float = 0.0) -> KVConnectorOutput:
        """See the base class."""
        assert self.metadata is not None
        job = self.metadata.blend
        return KVConnectorOutput(finished_recving=set() if job is None else {job.request_id})

    def forget_requests(self) -> None:
        """See the base class."""
        self.chunks.clear()
