// The operators of one decoder layer, which cpu_kernels.cpp and cpu_attention.cpp define for float and bfloat16.
#pragma once

#include "cpu_vector.h"

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t tokens, int64_t groups, int64_t width, int64_t token_stride,
              float eps, int threads);
template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t tokens, int64_t width, float eps,
                  int threads);
template <class T>
bool apply_rope(T* q, T* k, const int64_t* positions, const float* cos_sin, int64_t tokens, int64_t num_heads,
                int64_t num_kv_heads, int64_t head_dim, int64_t q_stride, int64_t k_stride, int64_t num_positions,
                int threads);
template <class T>
bool write_kv_cache(const T* k, const T* v, T* kv_cache, const int64_t* slots, int64_t tokens, int64_t num_kv_heads,
                    int64_t head_dim, int64_t num_blocks, int64_t block_size, int64_t k_stride, int64_t v_stride,
                    int64_t block_stride, int threads);
template <class T>
bool paged_attention(const T* q, const T* kv_cache, T* out, const int32_t* block_tables, const int32_t* seq_lens,
                     const int32_t* query_start_loc, int64_t sequences, int64_t num_heads, int64_t num_kv_heads,
                     int64_t head_dim, int64_t block_size, int64_t q_stride, int64_t num_blocks, int64_t block_stride,
                     int64_t table_width, int64_t table_stride, float scale, int64_t window, float soft_cap,
                     int threads);
template <class T>
void silu_and_mul(const T* x, T* out, int64_t tokens, int64_t size, int threads);
template <class T>
void linear_packed(const T* x, const uint32_t* weight, const T* bias, T* out, int64_t tokens, int64_t inner,
                   int64_t outputs, int threads);
