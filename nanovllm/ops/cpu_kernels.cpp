// CPU kernels, part 1: normalisation, rotary embedding, cache writes, SwiGLU and matrix products.
// Part 2, attention, is cpu_attention.cpp; part 3, all layers in one call, is cpu_layers.cpp. native.py compiles them and
// calls them through a plain C interface.
//
// Shapes and contracts are documented in nanovllm/ops/__init__.py. Strides count elements. In bfloat16 the elementwise
// kernels round wherever the same formula in torch would.
#include <memory>
#include <vector>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "cpu_operators.h"
#include "cpu_packed.h"
#include "cpu_threads.h"
#include "cpu_tiles.h"

// ---------------------------------------------------------------------------------------------- normalisation

template <class T>
INLINE void normalize_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  Floats squares = {};
  for (int64_t i = 0; i < width; i += LANES) {
    Floats value = load(x + i, width - i);
    squares += value * value;
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / width + eps);
  for (int64_t i = 0; i < width; i += LANES) {
    Floats normalized = rounded<T>(load(x + i, width - i) * inverse);
    store(out + i, normalized * load(weight + i, width - i), width - i);
  }
}

// x holds `tokens` rows, `token_stride` apart, of `groups` contiguous vectors of `width`; each is normalised alone.
template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t tokens, int64_t groups, int64_t width,
                     int64_t token_stride, float eps, int threads) {
  for_each_row(tokens * groups, width, threads, [&](int64_t row) {
    const T* source = x + row / groups * token_stride + row % groups * width;
    normalize_row(source, weight, out + row * width, width, eps);
  });
}

template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t tokens, int64_t width, float eps,
                         int threads) {
  for_each_row(tokens, width, threads, [&](int64_t row) {
    const int64_t start = row * width;
    for (int64_t i = 0; i < width; i += LANES) {
      Floats total = load(residual + start + i, width - i) + load(x + start + i, width - i);
      store(residual + start + i, total, width - i);
    }
    normalize_row(residual + start, weight, out + start, width, eps);
  });
}

// ---------------------------------------------------------------------------------- rotary embedding and cache

template <class T>
INLINE void rotate_heads(T* heads, int64_t count, int64_t head_dim, const float* cosines) {
  const int64_t half = head_dim / 2;
  for (int64_t head = 0; head < count; ++head, heads += head_dim) {
    for (int64_t i = 0; i < half; i += LANES) {
      const int64_t rest = half - i;
      Floats cosine = rounded<T>(load(cosines + i, rest)), sine = rounded<T>(load(cosines + half + i, rest));
      Floats first = load(heads + i, rest), second = load(heads + half + i, rest);
      store(heads + i, rounded<T>(first * cosine) - rounded<T>(second * sine), rest);
      store(heads + half + i, rounded<T>(second * cosine) + rounded<T>(first * sine), rest);
    }
  }
}

// False, and nothing done, where a position is outside the table.
template <class T>
bool apply_rope(T* q, T* k, const int64_t* positions, const float* cos_sin, int64_t tokens, int64_t num_heads,
                       int64_t num_kv_heads, int64_t head_dim, int64_t q_stride, int64_t k_stride,
                       int64_t num_positions, int threads) {
  for (int64_t token = 0; token < tokens; ++token)
    if (positions[token] < 0 || positions[token] >= num_positions) return false;
  for_each_row(tokens, (num_heads + num_kv_heads) * head_dim, threads, [&](int64_t token) {
    const float* cosines = cos_sin + positions[token] * head_dim;
    rotate_heads(q + token * q_stride, num_heads, head_dim, cosines);
    rotate_heads(k + token * k_stride, num_kv_heads, head_dim, cosines);
  });
  return true;
}

// False, and nothing written, where a slot is beyond the cache.
template <class T>
bool write_kv_cache(const T* k, const T* v, T* kv_cache, const int64_t* slots, int64_t tokens,
                           int64_t num_kv_heads, int64_t head_dim, int64_t num_blocks, int64_t block_size,
                           int64_t k_stride, int64_t v_stride, int64_t block_stride, int threads) {
  for (int64_t token = 0; token < tokens; ++token)
    if (slots[token] >= num_blocks * block_size) return false;
  const int64_t head_stride = block_size * head_dim, value_offset = num_kv_heads * head_stride;
  for_each_row(tokens, 2 * num_kv_heads * head_dim, threads, [&](int64_t token) {
    const int64_t slot = slots[token];
    if (slot < 0) return;
    T* target = kv_cache + slot / block_size * block_stride + slot % block_size * head_dim;
    for (int64_t head = 0; head < num_kv_heads; ++head, target += head_stride) {
      std::memcpy(target, k + token * k_stride + head * head_dim, head_dim * sizeof(T));
      std::memcpy(target + value_offset, v + token * v_stride + head * head_dim, head_dim * sizeof(T));
    }
  });
  return true;
}

// ----------------------------------------------------------------------------------------------------- SwiGLU

template <class T>
void silu_and_mul(const T* x, T* out, int64_t tokens, int64_t size, int threads) {
  constexpr int64_t WIDTH = 512;  // columns a task: a single wide row is shared between threads too
  const int64_t pieces = (size + WIDTH - 1) / WIDTH;
  for_each_row(tokens * pieces, WIDTH, threads, [&](int64_t piece) {
    const int64_t token = piece / pieces, begin = piece % pieces * WIDTH, end = std::min(size, begin + WIDTH);
    const T* gates = x + token * 2 * size;
    for (int64_t i = begin; i < end; i += LANES) {
      Floats gate = load(gates + i, end - i), up = load(gates + size + i, end - i);
      store(out + token * size + i, rounded<T>(gate / (exponential(-gate) + 1.0f)) * up, end - i);
    }
  });
}

// ------------------------------------------------------------------------------------------- embedding, logits

// The rows of a packed weight (see pack_weight). False where a token has none.
template <class T>
bool embedding(const int64_t* token_ids, const uint32_t* weight, T* out, int64_t tokens, int64_t inner, int64_t outputs,
               int threads) {
  for (int64_t token = 0; token < tokens; ++token)
    if (token_ids[token] < 0 || token_ids[token] >= outputs) return false;
  const int64_t words = inner * sizeof(T) / 4;
  for_each_row(tokens, inner, threads, [&](int64_t token) {
    const uint32_t* source = weight + token_ids[token] / GROUP * words * GROUP + token_ids[token] % GROUP;
    for (int64_t i = 0; i < words; ++i) std::memcpy(out + token * inner + i * 4 / sizeof(T), source + i * GROUP, 4);
  });
  return true;
}

template <class T>
void widen(const T* x, float* out, int64_t rows, int64_t width, int threads) {
  for_each_row(rows, width, threads, [&](int64_t row) {
    for (int64_t i = 0; i < width; i += LANES)
      store(out + row * width + i, load(x + row * width + i, width - i), width - i);
  });
}

constexpr int64_t ARGMAX_BLOCK = 512;  // columns whose maximum is taken at a time; one block is searched again

// The first column of the largest value of a row. As in torch, NaN is larger than any number.
template <class T>
INLINE int64_t first_largest(const T* row, int64_t width) {
  float best = -INFINITY;
  int64_t begin = 0;  // of the first block with `best`
  Ints unordered = {};  // lanes that have seen NaN; no comparison below is true of it
  bool has_nan = false;
  for (int64_t block = 0; block < width; block += ARGMAX_BLOCK) {
    const int64_t end = std::min(width, block + ARGMAX_BLOCK);
    Floats tops = splat(-INFINITY);
    int64_t i = block;
    for (; i + LANES <= end; i += LANES) {
      const Floats values = load(row + i);
      unordered |= values != values;
      tops = maximum(values, tops);
    }
    float top = largest(tops);
    for (; i < end; ++i) {
      const float value = widen(row[i]);
      has_nan |= value != value;
      top = value > top ? value : top;
    }
    if (top > best) {
      best = top;
      begin = block;
    }
  }
  for (int lane = 0; lane < LANES; ++lane) has_nan |= unordered[lane] != 0;
  int64_t found = has_nan ? 0 : begin;
  while (has_nan ? widen(row[found]) == widen(row[found]) : widen(row[found]) != best) ++found;
  return found;
}

template <class T>
void argmax(const T* x, int64_t* out, int64_t rows, int64_t width, int64_t row_stride, int threads) {
  for_each_row(rows, width, threads, [&](int64_t row) { out[row] = first_largest(x + row * row_stride, width); });
}

// ----------------------------------------------------------------------------------------------------- linear
//
// A dot product a pair of rows, along the inner dimension, so that the weight is read once, in order and as it is
// stored. Every output is summed in the same order whatever the tile it falls into, the number of other rows or of
// threads: a token's result does not depend on its company.

// Rows of x and of the weight in one tile: as many accumulators as fit the registers.
#ifdef __AVX512F__
constexpr int TILE_TOKENS = 4, TILE_OUTPUTS = 6;
#else
constexpr int TILE_TOKENS = 2, TILE_OUTPUTS = LANES == 8 ? 6 : 4;
#endif
constexpr int64_t TASK_OUTPUTS = 16 * TILE_OUTPUTS;
constexpr int64_t FETCHED_AHEAD = 8192;  // elements of the weight; measured, flat between 4096 and 8192

// A tile of the product. The `first` to touch a part of the weight also fetches, into the second-level cache, what
// comes later in memory: left to itself the hardware reads six parallel rows at half the memory's speed.
template <int TOKENS, int OUTPUTS, class In, class T>
INLINE void linear_tile(const In* x, const In* weight, const T* bias, T* out, int64_t inner, int64_t outputs,
                        bool first) {
  constexpr int TOGETHER = TOKENS % 2 || 2 * OUTPUTS > LANES ? 1 : 2;  // tokens summed at once: a lane for each sum
  Floats totals[TOKENS * OUTPUTS] = {};
  for (int64_t i = 0; i < inner; i += Dot<In>::STEP) {
    typename Dot<In>::Vector w[OUTPUTS];
    for (int output = 0; output < OUTPUTS; ++output) w[output] = Dot<In>::read(weight + output * inner + i);
    if (first)
      for (int output = 0; output < OUTPUTS; ++output)
        __builtin_prefetch(weight + output * inner + i + FETCHED_AHEAD, 0, 2);
    for (int token = 0; token < TOKENS; ++token) {
      auto row = Dot<In>::read(x + token * inner + i);
      for (int output = 0; output < OUTPUTS; ++output)
        totals[token * OUTPUTS + output] = Dot<In>::add(totals[token * OUTPUTS + output], row, w[output]);
    }
  }
  for (int token = 0; token < TOKENS; token += TOGETHER) {
    float sums[LANES];
    store(sums, sum_each<TOGETHER * OUTPUTS>(totals + token * OUTPUTS));
    if (bias)
      for (int i = 0; i < TOGETHER * OUTPUTS; ++i) sums[i] += widen(bias[i % OUTPUTS]);
    T narrow[LANES];
    store(narrow, load(sums));
    for (int i = 0; i < TOGETHER; ++i)
      std::memcpy(out + (token + i) * outputs, narrow + i * OUTPUTS, OUTPUTS * sizeof(T));
  }
}

// All tokens times OUTPUTS rows of the weight, in tiles of TOKENS, then of half as many.
template <int TOKENS, int OUTPUTS, class In, class T>
INLINE void linear_rows(const In* x, const In* weight, const T* bias, T* out, int64_t tokens, int64_t inner,
                        int64_t outputs, bool first) {
  for (; tokens >= TOKENS; tokens -= TOKENS, x += TOKENS * inner, out += TOKENS * outputs, first = false)
    linear_tile<TOKENS, OUTPUTS>(x, weight, bias, out, inner, outputs, first);
  if constexpr (TOKENS > 1)
    if (tokens > 0) linear_rows<TOKENS / 2, OUTPUTS>(x, weight, bias, out, tokens, inner, outputs, first);
}

// Calls rows(output, count) for the rows of the weight that a task has, TILE_OUTPUTS at a time, then one by one.
template <class Rows>
INLINE void for_outputs(int64_t task, int64_t outputs, const Rows& rows) {
  const int64_t end = std::min(outputs, (task + 1) * TASK_OUTPUTS);
  int64_t output = task * TASK_OUTPUTS;
  for (; output + TILE_OUTPUTS <= end; output += TILE_OUTPUTS)
    rows(output, std::integral_constant<int, TILE_OUTPUTS>());
  for (; output < end; ++output) rows(output, std::integral_constant<int, 1>());
}

constexpr int64_t WIDENED_TOKENS = 8;  // fewer are widened on the way
constexpr int64_t LINEAR_TOKENS = 64;  // of a block: their inputs stay in the second-level cache

template <class T>
static void linear(const T* x, const T* weight, const T* bias, T* out, int64_t tokens, int64_t inner, int64_t outputs,
                   int threads) {
  const int64_t tasks = (outputs + TASK_OUTPUTS - 1) / TASK_OUTPUTS;
  std::unique_ptr<float[]> wide;
  if constexpr (WIDENS<T>)
    if (tokens >= WIDENED_TOKENS) wide = widened(x, tokens, inner, threads);
  threads = threads_for(tokens * inner * outputs / 8, threads);
  const auto make_rows = [&] { return std::unique_ptr<float[]>(new float[wide ? TILE_OUTPUTS * inner : 0]); };
  parallel_for<Portions::IN_RUNS>(tasks, threads, make_rows, [&](int64_t task, const std::unique_ptr<float[]>& rows) {
    for (int64_t token = 0; token < tokens; token += LINEAR_TOKENS)
      for_outputs(task, outputs, [&](int64_t output, auto count) {
        const int64_t here = std::min(LINEAR_TOKENS, tokens - token);
        const T *row = weight + output * inner, *added = bias ? bias + output : nullptr;
        T* target = out + token * outputs + output;
        if constexpr (WIDENS<T>)
          if (wide) {
            widen_all(row, rows.get(), count * inner);
            return linear_rows<TILE_TOKENS, count>(&wide[token * inner], rows.get(), added, target, here, inner,
                                                   outputs, false);
          }
        linear_rows<TILE_TOKENS, count>(x + token * inner, row, added, target, here, inner, outputs, token == 0);
      });
  });
}

// ---------------------------------------------------------------------------------------------- packed linear
//
// A packed weight is read from front to back, and nothing is rearranged at a call: [group of 16 outputs][step of 32
// inputs] x [word][output], a word being a float, or two neighbouring bfloat16 of one output. All tokens of any batch
// take one path, which adds the words of an output in their order, so no result depends on its company.

// weight[outputs, inner] to packed.
template <class T>
static void pack_weight(const T* weight, uint32_t* packed, int64_t inner, int64_t outputs, int threads) {
  const int64_t words = inner * sizeof(T) / sizeof(uint32_t);
  const auto* source = reinterpret_cast<const uint32_t*>(weight);
  parallel_for<Portions::IN_RUNS>(outputs / GROUP, threads, [&](int64_t group) {
    for (int64_t word = 0; word < words; word += LANES) {
      for (int first = 0; first < GROUP; first += LANES) {
        Words rows[LANES];
        const uint32_t* from = source + (group * GROUP + first) * words + word;
        for (int row = 0; row < LANES; ++row) rows[row] = load_words(from + row * words);
        transpose(rows, packed + (group * words + word) * GROUP + first, GROUP);
      }
    }
  });
}

template <class T>
void linear_packed(const T* x, const uint32_t* weight, const T* bias, T* out, int64_t tokens, int64_t inner,
                   int64_t outputs, int threads) {
  const PackedWeight packed{weight, inner * int64_t(sizeof(T)) / 4};
  multiply_packed(x, packed, bias, out, tokens, inner, outputs, threads);
}

// -------------------------------------------------------------------------------------------------- C interface

EXPORT(rms_norm)
EXPORT(add_rms_norm)
EXPORT(apply_rope)
EXPORT(write_kv_cache)
EXPORT(silu_and_mul)
EXPORT(embedding)
EXPORT(widen)
EXPORT(argmax)
EXPORT(linear)
EXPORT(pack_weight)
EXPORT(linear_packed)

extern "C" {
// The activations of a step, megabytes each, are freed and taken again some hundred times a second. Left to itself the
// C library gives them back to the system, which then clears a page at every first touch: up to a quarter of the time
// of a prefill.
void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}
}
