"""Second part of lecture 14: read shared pages once.

Sixteen requests decode in one step, and their block tables begin with the same pages: a system
prompt. Counted are the rows of keys and values that `gather` copies out of the cache. The result
must be that of `paged_attention`.
"""

from collections.abc import Callable

from torch import Tensor

from nanovllm.ops.attention import paged_attention


def attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    gather: Callable[..., tuple[Tensor, Tensor]],
) -> Tensor:
    """Return what `paged_attention` returns.

    Args:
        gather: counts; called as `gather_kv` is, `gather(kv_cache, block_table, seq_len, first)`.
    """
    return paged_attention(
        q,
        kv_cache,
        block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        scale=scale,
        gather=gather,
    )
