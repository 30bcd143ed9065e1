// Products with a weight in groups of 16 outputs, of which a word holds neighbouring inputs of one output: [group][word][output].
//
// All tokens of any batch take one path, which adds the words of an output in their order, so no result depends on its
// company. What a word is, a `Product` says: a float, two bfloat16, or four 8-bit integers.
#pragma once

#include <memory>

#include "cpu_threads.h"
#include "cpu_vector.h"

constexpr int GROUP = 16;  // outputs
constexpr int64_t BLOCK_TOKENS = 256;  // of a task: their inputs stay in the second-level cache

// Where the machine multiplies no bfloat16, x is widened once, and the weight on the way.
INLINE void widen_all(const bfloat16* source, float* target, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store(target + i, load(source + i));
}

// x[tokens, inner] in float32.
[[maybe_unused]] static std::unique_ptr<float[]> widened(const bfloat16* x, int64_t tokens, int64_t inner,
                                                         int threads) {
  std::unique_ptr<float[]> wide(new float[tokens * inner]);  // a vector would be cleared first
  for_each_row(tokens, inner, threads, [&](int64_t row) { widen_all(x + row * inner, &wide[row * inner], inner); });
  return wide;
}

// Words of floats, or of two bfloat16.
template <class T>
struct FloatProduct {
  static constexpr int ROW_WORDS = WIDENS<T> ? 2 : 1;  // words of x to one of the weight
  using Total = Floats;
  INLINE Floats add(Floats total, const uint32_t* row, Words w) {
    return add_word<T>(total, row, 0, w);
  }
};

// Tokens of a tile: as many accumulators, for each of them two groups' vectors, as fit the registers.
#if defined(__AVX512F__)
constexpr int PACKED_TOKENS = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int PACKED_TOKENS = 3;
#else
constexpr int PACKED_TOKENS = 1;
#endif
constexpr int64_t PART_WORDS = 64;  // of the weight at a time, which stay in the first-level cache
constexpr int64_t WORDS_AHEAD = 64;  // fetched: without it, 8 tokens read at three quarters of the speed
constexpr int PER_GROUP = GROUP / LANES;  // vectors

// sums[TOKENS][2 * PER_GROUP] += x times `words` words of one or two groups, `distance` words apart; `begin` sets them.
template <class Product, int TOKENS, int GROUPS>
static void packed_tile(const uint32_t* x, int64_t stride, const uint32_t* weight, int64_t distance, int64_t words,
                        typename Product::Total* sums, bool begin, bool fetch) {
  constexpr int VECTORS = GROUPS * PER_GROUP;
  typename Product::Total totals[TOKENS][VECTORS];
  for (int token = 0; token < TOKENS; ++token)
    for (int v = 0; v < VECTORS; ++v)
      totals[token][v] = begin ? typename Product::Total{} : sums[token * 2 * PER_GROUP + v];
  for (int64_t word = 0; word < words; ++word, weight += GROUP) {
    if (fetch)
      for (int group = 0; group < GROUPS; ++group)
        __builtin_prefetch(weight + group * distance + WORDS_AHEAD * GROUP, 0, 2);
    for (int v = 0; v < VECTORS; ++v) {
      const Words w = load_words(weight + v / PER_GROUP * distance + v % PER_GROUP * LANES);
      for (int token = 0; token < TOKENS; ++token)
        totals[token][v] = Product::add(totals[token][v], x + token * stride + word * Product::ROW_WORDS, w);
    }
  }
  for (int token = 0; token < TOKENS; ++token)
    for (int v = 0; v < VECTORS; ++v) sums[token * 2 * PER_GROUP + v] = totals[token][v];
}

// The same for 1 to TOKENS tokens.
template <class Product, int GROUPS, int TOKENS = PACKED_TOKENS, class... Arguments>
INLINE void packed_tiles(int64_t tokens, Arguments... arguments) {
  if constexpr (TOKENS > 1)
    if (tokens < TOKENS) return packed_tiles<Product, GROUPS, TOKENS - 1>(tokens, arguments...);
  packed_tile<Product, TOKENS, GROUPS>(arguments...);
}

// At most BLOCK_TOKENS tokens times one or two groups of the weight, `words` words apart. Calls write(token, i, sums) for
// LANES outputs from i on.
template <class Product, int GROUPS, class Write>
INLINE void packed_block(const uint32_t* x, int64_t stride, const uint32_t* weight, int64_t tokens, int64_t words,
                         const Write& write) {
  typename Product::Total sums[BLOCK_TOKENS * 2 * PER_GROUP];
  const int64_t tiles = (tokens + PACKED_TOKENS - 1) / PACKED_TOKENS, part_words = tiles > 1 ? PART_WORDS : words;
  for (int64_t first = 0; first < words; first += part_words) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = tile * tokens / tiles, count = (tile + 1) * tokens / tiles - token;
      packed_tiles<Product, GROUPS>(count, x + token * stride + first * Product::ROW_WORDS, stride,
                                    weight + first * GROUP, words * GROUP, std::min(part_words, words - first),
                                    sums + token * 2 * PER_GROUP, first == 0, tile == 0);
    }
  }
  for (int64_t token = 0; token < tokens; ++token)
    for (int v = 0; v < GROUPS * PER_GROUP; ++v) write(token, v * LANES, sums[token * 2 * PER_GROUP + v]);
}

// Calls body(token, count, group, GROUPS) for blocks of at most BLOCK_TOKENS tokens and one or two groups of outputs.
template <class Body>
INLINE void for_each_block(int64_t tokens, int64_t outputs, int threads, const Body& body) {
  const int64_t groups = outputs / GROUP, pairs = (groups + 1) / 2;
  const int64_t blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  parallel_for<Portions::IN_RUNS>(blocks * pairs, threads, [&](int64_t task) {
    const int64_t token = task / pairs * BLOCK_TOKENS, group = task % pairs * 2;
    const int64_t count = std::min(BLOCK_TOKENS, tokens - token);
    if (group + 1 < groups)
      body(token, count, group, std::integral_constant<int, 2>());
    else
      body(token, count, group, std::integral_constant<int, 1>());
  });
}
