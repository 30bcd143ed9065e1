// Products with a weight in groups of 16 outputs, of which a word holds neighbouring inputs of one output: [group][word][output].
//
// All tokens of any batch take one path, which adds the words of an output in their order, so no result depends on its
// company. What a word is, a `Product` says: a float, two bfloat16, four 8-bit integers, or eight of 4 bits.
#pragma once

#include <memory>
#include <vector>

#include "cpu_threads.h"
#include "cpu_tiles.h"
#include "cpu_vector.h"

#define UNROLL _Pragma("GCC unroll 16")  // before GCC decides where to keep an array: in registers, if no index is left

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

// Words of floats, or of two bfloat16. A word of the weight is multiplied in PARTS, one after the other.
template <class T>
struct FloatProduct {
  static constexpr int PARTS = 1, ROW_WORDS = WIDENS<T> ? 2 : 1;  // words of x to one part
  using Total = Floats;
  // Part `i` of the words in vector `v` of the one or two groups.
  INLINE Words read(Words w, int /*v*/, int /*i*/) { return w; }
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
// Of the weight at a time, where they have to stay in the first-level cache: they are unpacked, or few tokens multiply each of them.
constexpr int64_t PART_WORDS = 64;
constexpr int64_t WORDS_AHEAD = 64;  // fetched: without it, 8 tokens read at three quarters of the speed
constexpr int PER_GROUP = GROUP / LANES;  // vectors

// What a tile's totals begin with, and what becomes of them: sums [token][2 * PER_GROUP], to which each part of a row adds.
template <class Total>
struct Sums {
  Total* sums;
  bool begins;  // the first part of the row

  Total start(int token, int v) const { return begins ? Total{} : sums[token * 2 * PER_GROUP + v]; }
  void finish(int token, int v, Total total) const { sums[token * 2 * PER_GROUP + v] = total; }
};

// The products of TOKENS rows of x and `words` words of one or two groups, `distance` words apart.
template <int TOKENS, int GROUPS, class Product, class Target>
static void packed_tile(const Product& product, const uint32_t* x, int64_t stride, const uint32_t* weight,
                        int64_t distance, int64_t words, const Target& target, bool fetch) {
  constexpr int VECTORS = GROUPS * PER_GROUP, PAIR = VECTORS > 1 ? 2 : 1;  // read at once: more would leave no registers
  typename Product::Total totals[TOKENS][VECTORS];
  UNROLL for (int token = 0; token < TOKENS; ++token)
    UNROLL for (int v = 0; v < VECTORS; ++v) totals[token][v] = target.start(token, v);
  for (int64_t word = 0; word < words; ++word, weight += GROUP) {
    if (fetch)
      for (int group = 0; group < GROUPS; ++group)
        __builtin_prefetch(weight + group * distance + WORDS_AHEAD * GROUP, 0, 2);
    UNROLL for (int first = 0; first < VECTORS; first += PAIR) {
      UNROLL for (int i = 0; i < Product::PARTS; ++i) {
        Words w[PAIR];
        UNROLL for (int v = 0; v < PAIR; ++v) {
          const uint32_t* source = weight + (first + v) / PER_GROUP * distance + (first + v) % PER_GROUP * LANES;
          w[v] = product.read(load_words(source), first + v, i);
        }
        const uint32_t* row = x + (word * Product::PARTS + i) * Product::ROW_WORDS;
        UNROLL for (int token = 0; token < TOKENS; ++token)
          UNROLL for (int v = 0; v < PAIR; ++v)
            totals[token][first + v] = Product::add(totals[token][first + v], row + token * stride, w[v]);
      }
    }
  }
  UNROLL for (int token = 0; token < TOKENS; ++token)
    UNROLL for (int v = 0; v < VECTORS; ++v) target.finish(token, v, totals[token][v]);
}

// The same for 1 to TOKENS tokens.
template <int GROUPS, int TOKENS = PACKED_TOKENS, class... Arguments>
INLINE void packed_tiles(int64_t tokens, const Arguments&... arguments) {
  if constexpr (TOKENS > 1)
    if (tokens < TOKENS) return packed_tiles<GROUPS, TOKENS - 1>(tokens, arguments...);
  packed_tile<TOKENS, GROUPS>(arguments...);
}

// Words of one group; those of the next are `distance` further.
struct Part {
  const uint32_t* weight;
  int64_t distance;
};

// A weight that is packed as it is multiplied: `words` words of each group.
struct PackedWeight {
  static constexpr bool UNPACKS = false;  // read() points into the weight; otherwise it fills the buffer, as large as a part
  const uint32_t* weight;
  int64_t words;

  // `count` words from `first` on of one or two groups.
  Part read(int64_t group, int64_t /*groups*/, int64_t first, int64_t /*count*/, uint32_t* /*buffer*/) const {
    return {weight + (group * words + first) * GROUP, words * GROUP};
  }
};

// At most BLOCK_TOKENS tokens times one or two groups of the weight. Calls write(token, i, sums) for LANES outputs from i on.
template <class Product, int GROUPS, class Weight, class Write>
INLINE void packed_block(const uint32_t* x, int64_t stride, const Weight& weight, int64_t group, int64_t tokens,
                         int64_t words, const Write& write) {
  typename Product::Total sums[BLOCK_TOKENS * 2 * PER_GROUP];
  alignas(64) uint32_t buffer[Weight::UNPACKS ? GROUPS * PART_WORDS * GROUP : 1];
  const int64_t tiles = (tokens + PACKED_TOKENS - 1) / PACKED_TOKENS;
  // Twelve tokens take so long with a word that the second-level cache brings the next; in parts, their sums would come from there, too.
  const bool in_parts = Weight::UNPACKS || (tiles > 1 && PACKED_TOKENS < 12);
  const int64_t part_words = in_parts ? PART_WORDS : words;
  for (int64_t first = 0; first < words; first += part_words) {
    const int64_t here = std::min(part_words, words - first);
    const Part part = weight.read(group, GROUPS, first, here, buffer);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = tile * tokens / tiles, count = (tile + 1) * tokens / tiles - token;
      const Sums<typename Product::Total> target{sums + token * 2 * PER_GROUP, first == 0};
      packed_tiles<GROUPS>(count, Product(), x + token * stride + first * Product::ROW_WORDS, stride, part.weight,
                           part.distance, here, target, tile == 0 && !Weight::UNPACKS);
    }
  }
  for (int64_t token = 0; token < tokens; ++token)
    for (int v = 0; v < GROUPS * PER_GROUP; ++v) write(token, v * LANES, sums[token * 2 * PER_GROUP + v]);
}

// Calls body(token, count, group, GROUPS) for blocks of at most BLOCK_TOKENS tokens and one or two groups of outputs, in
// threads that have tiles if they are wanted.
template <class Body>
INLINE void for_each_block(int64_t tokens, int64_t outputs, int threads, bool tiles, const Body& body) {
  const int64_t groups = outputs / GROUP, pairs = (groups + 1) / 2;
  const int64_t blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  const auto take_tiles = [tiles] { return Tiles(tiles); };
  parallel_for<Portions::IN_RUNS>(blocks * pairs, threads, take_tiles, [&](int64_t task, const Tiles&) {
    const int64_t token = task / pairs * BLOCK_TOKENS, group = task % pairs * 2;
    const int64_t count = std::min(BLOCK_TOKENS, tokens - token);
    if (group + 1 < groups)
      body(token, count, group, std::integral_constant<int, 2>());
    else
      body(token, count, group, std::integral_constant<int, 1>());
  });
}

// ------------------------------------------------------------------------------------------------------- by tiles

#if HAS_TILES || HAS_BYTE_TILES
constexpr int64_t BLOCK_STEPS = 9;  // of the weight at a time, which stay in the first-level cache

// Tile registers are named by numerals in the source.
#define ADD_PRODUCT(sums, x, weight)              \
  if constexpr (std::is_same<T, bfloat16>::value) \
    _tile_dpbf16ps(sums, x, weight);              \
  else                                            \
    _tile_dpbsud(sums, x, weight)

// Adds to TOKENS x 2 tiles of sums, or begins them. `x` and `more` are 16 rows each, of bfloat16 or signed bytes, which are
// multiplied by unsigned ones; the two groups of the weight are `distance` tiles apart.
template <int TOKENS, class T>
INLINE void multiply_tiles(const T* x, const T* more, int64_t stride, const TileMemory* weight, int64_t distance,
                           int64_t steps, bool begin, TileMemory* sums) {
  if (begin) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, TILE_BYTES);
    _tile_loadd(1, sums + 1, TILE_BYTES);
    if (TOKENS > 1) _tile_loadd(2, sums + 2, TILE_BYTES);
    if (TOKENS > 1) _tile_loadd(3, sums + 3, TILE_BYTES);
  }
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, x + step * TILE_VALUES<T>, stride);
    _tile_loadd(6, weight + step, TILE_BYTES);
    _tile_loadd(7, weight + distance + step, TILE_BYTES);
    ADD_PRODUCT(0, 4, 6);
    ADD_PRODUCT(1, 4, 7);
    if (TOKENS > 1) {
      _tile_loadd(5, more + step * TILE_VALUES<T>, stride);
      ADD_PRODUCT(2, 5, 6);
      ADD_PRODUCT(3, 5, 7);
    }
  }
  _tile_stored(0, sums, TILE_BYTES);
  _tile_stored(1, sums + 1, TILE_BYTES);
  if (TOKENS > 1) _tile_stored(2, sums + 2, TILE_BYTES);
  if (TOKENS > 1) _tile_stored(3, sums + 3, TILE_BYTES);
}

// At most BLOCK_TOKENS tokens times GROUPS groups of the weight. rows(token) are 16 rows of x, `stride` bytes apart. Calls
// write(token, i, sums) for 16 outputs from i on.
template <class T, int GROUPS, class Rows, class Weight, class Write>
INLINE void tiles_block(const Rows& rows, int64_t stride, const Weight& weight, int64_t group, int64_t tokens,
                        int64_t steps, const Write& write) {
  using Total = std::conditional_t<std::is_same<T, bfloat16>::value, Floats, Ints>;
  const int64_t parts = Weight::UNPACKS || tokens > 2 * LANES ? (steps + BLOCK_STEPS - 1) / BLOCK_STEPS : 1;
  TileMemory sums[BLOCK_TOKENS / LANES * 2], buffer[Weight::UNPACKS ? 2 * BLOCK_STEPS : 1];
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * steps / parts, count = (part + 1) * steps / parts - begin;
    const int64_t skip = begin * TILE_VALUES<T>;
    const Part read = weight.read(group, GROUPS, begin * LANES, count * LANES, buffer->words);
    if (Weight::UNPACKS) is_written(buffer);
    const auto* tiles = reinterpret_cast<const TileMemory*>(read.weight);
    const int64_t distance = GROUPS == 2 ? read.distance / TILE_WORDS : 0;
    for (int64_t token = 0; token < tokens; token += 2 * LANES) {
      TileMemory* target = sums + token / LANES * 2;
      if (token + LANES < tokens)
        multiply_tiles<2>(rows(token) + skip, rows(token + LANES) + skip, stride, tiles, distance, count, part == 0,
                          target);
      else
        multiply_tiles<1, T>(rows(token) + skip, nullptr, stride, tiles, distance, count, part == 0, target);
      if (part + 1 < parts) continue;
      for (int64_t row = token; row < std::min(tokens, token + 2 * LANES); ++row)
        for (int i = 0; i < GROUPS; ++i)
          write(row, i * LANES, (Total)load_words(sums[row / LANES * 2 + i].words + row % LANES * LANES));
    }
  }
}
#endif

// ---------------------------------------------------------------------------------------------- floats, by vectors

template <class T, class Weight>
static void multiply_by_vectors(const T* x, const Weight& weight, const T* bias, T* out, int64_t tokens, int64_t inner,
                                int64_t outputs, int threads) {
  using Product = FloatProduct<T>;
  const int64_t words = inner * sizeof(T) / sizeof(uint32_t), stride = words * Product::ROW_WORDS;
  std::unique_ptr<float[]> wide;
  if constexpr (WIDENS<T>) wide = widened(x, tokens, inner, threads);
  const auto* rows = WIDENS<T> ? reinterpret_cast<const uint32_t*>(wide.get()) : reinterpret_cast<const uint32_t*>(x);
  threads = threads_for(tokens * inner * outputs / 8, threads);
  for_each_block(tokens, outputs, threads, false, [&](int64_t token, int64_t count, int64_t group, auto groups) {
    const T* added = bias ? bias + group * GROUP : nullptr;
    T* target = out + token * outputs + group * GROUP;
    packed_block<Product, groups>(rows + token * stride, stride, weight, group, count, words,
                                  [&](int64_t row, int i, Floats sums) {
                                    store(target + row * outputs + i, sums + (added ? load(added + i) : Floats{}));
                                  });
  });
}

// ---------------------------------------------------------------------------------------------- bfloat16, by tiles

#if HAS_TILES
template <class Weight>
static void multiply_by_tiles(const bfloat16* x, const Weight& weight, const bfloat16* bias, bfloat16* out,
                              int64_t tokens, int64_t inner, int64_t outputs, int threads) {
  const int64_t whole = tokens / LANES * LANES;
  std::vector<bfloat16> padded(whole < tokens ? LANES * inner : 0);  // the rows after the last whole 16
  std::copy(x + whole * inner, x + tokens * inner, padded.begin());
  is_written(padded.data());
  for_each_block(tokens, outputs, threads, true, [&](int64_t token, int64_t count, int64_t group, auto groups) {
    const auto rows = [&](int64_t row) { return row + LANES <= count ? x + (token + row) * inner : padded.data(); };
    const bfloat16* added = bias ? bias + group * GROUP : nullptr;
    bfloat16* target = out + token * outputs + group * GROUP;
    tiles_block<bfloat16, groups>(rows, inner * sizeof(bfloat16), weight, group, count, inner / TILE_VALUES<bfloat16>,
                                  [&](int64_t row, int i, Floats sums) {
                                    store(target + row * outputs + i, sums + (added ? load(added + i) : Floats{}));
                                  });
  });
}
#endif

template <class T, class Weight>
static void multiply_packed(const T* x, const Weight& weight, const T* bias, T* out, int64_t tokens, int64_t inner,
                            int64_t outputs, int threads) {
#if HAS_TILES
  if constexpr (std::is_same<T, bfloat16>::value)
    if (tiles_permitted()) return multiply_by_tiles(x, weight, bias, out, tokens, inner, outputs, threads);
#endif
  multiply_by_vectors(x, weight, bias, out, tokens, inner, outputs, threads);
}
