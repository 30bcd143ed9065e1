"""Gathers the pages that all tables begin with once."""

import torch

from nanovllm.ops.attention import attend_dense


def attention(q, cache, tables, lens, starts, scale, gather):
    n = 0
    size = cache.shape[3]
    while n < tables.shape[1] and (tables[:, n] == tables[0, n]).all():
        n += 1
    k0, v0 = gather(cache, tables[0], n * size)
    out = torch.empty_like(q)
    for s in range(len(lens)):
        k, v = gather(cache, tables[s], int(lens[s]), n * size)
        a, b = int(starts[s]), int(starts[s + 1])
        out[a:b] = attend_dense(q[a:b], torch.cat([k0, k], 1), torch.cat([v0, v], 1), scale)
    return out
