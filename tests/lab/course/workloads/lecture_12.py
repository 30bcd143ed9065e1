"""Looks up a waiting request again only if the cache has changed."""

from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request


class MyManager(KVCacheManager):
    def get_computed_blocks(self, request: Request) -> list[int]:
        now = (self.pool.num_evictions, len(self.pool.cached_blocks), request.num_tokens)
        known = self.__dict__.setdefault("known", {})
        if request.request_id not in known or known[request.request_id][0] != now:
            known[request.request_id] = (now, super().get_computed_blocks(request))
        return list(known[request.request_id][1])
