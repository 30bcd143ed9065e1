// CPU kernels, part 2: attention over a paged cache of the queries' type; see cpu_attention.h.
#include "cpu_attention.h"
#include "cpu_operators.h"

template <class T>
bool paged_attention(const T* q, const T* kv_cache, T* out, const int32_t* block_tables, const int32_t* seq_lens,
                     const int32_t* query_start_loc, int64_t sequences, int64_t num_heads, int64_t num_kv_heads,
                     int64_t head_dim, int64_t block_size, int64_t q_stride, int64_t num_blocks, int64_t block_stride,
                     int64_t table_width, int64_t table_stride, float scale, int64_t window, float soft_cap,
                     int threads) {
  return attend_paged(q, kv_cache, out, block_tables, seq_lens, query_start_loc, sequences, num_heads, num_kv_heads,
                      head_dim, block_size, q_stride, num_blocks, block_stride, table_width, table_stride, scale,
                      window, soft_cap, threads);
}

EXPORT(paged_attention)
