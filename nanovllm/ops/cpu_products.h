// The two products of attention, queries x keys and probabilities x values, for up to 64 keys at a time.
//
// Keys and values are packed first, so that both products are one dense routine on the words of `Dot`. For the few rows
// of a decoding sequence, cpu_in_place.h reads the cache as it stands, and adds in the same order.
#pragma once

#include <memory>
#include <utility>

#include "cpu_tiles.h"
#include "cpu_vector.h"

constexpr int KEYS = 64;  // keys in a step, and columns in a product
constexpr int VECTORS = KEYS / LANES;

#ifdef __AVX512F__
constexpr int BLOCK_ROWS = 6;  // rows whose accumulators, 4 vectors each, stay in registers
#else
constexpr int BLOCK_ROWS = 1;
#endif

// Of a key or value in a cache of type C: a cache of bytes has a float for each.
template <class C>
constexpr int SCALE_BYTES = sizeof(C) == 1 ? sizeof(float) : 0;

// The working memory of one tile of query rows. Strides are in words or floats, padded to whole vectors or products.
struct Scratch {
  int words, columns;
  std::unique_ptr<uint32_t[]> memory;
  uint32_t *queries, *keys, *values, *probabilities, *more;
  float *scores, *out, *totals, *maxima, *rescale, *merged;  // a total is a vector of sums

  static int columns_of(int head_dim) { return (head_dim + KEYS - 1) / KEYS * KEYS; }

  Scratch(int rows, int head_dim, int values_per_word, int more_words) {
    words = (head_dim / values_per_word + LANES - 1) / LANES * LANES;
    columns = columns_of(head_dim);
    const int padded_rows = (rows + LANES - 1) / LANES * LANES;
    const int size = padded_rows * (words + 2 * KEYS + 2 * columns + LANES + 4) + KEYS * (words + columns) + LANES +
                     more_words;
    memory.reset(new uint32_t[size]);  // a vector would be cleared first
    uint32_t* next = memory.get() + (-(reinterpret_cast<uintptr_t>(memory.get()) / 4) & (LANES - 1));
    auto take = [&next](int size) { return std::exchange(next, next + size); };
    queries = take(padded_rows * words);
    keys = take(KEYS * words);
    values = take(KEYS * columns);
    probabilities = take(padded_rows * KEYS);
    more = take(more_words);
    scores = reinterpret_cast<float*>(take(padded_rows * KEYS));
    out = reinterpret_cast<float*>(take(padded_rows * columns));
    totals = reinterpret_cast<float*>(take(padded_rows * LANES));
    maxima = reinterpret_cast<float*>(take(padded_rows));
    rescale = reinterpret_cast<float*>(take(padded_rows));
    merged = reinterpret_cast<float*>(take(padded_rows * (columns + 2)));
  }
};

// One KV head's keys of one sequence; a value stands `value_offset` behind its key. In each block, the scales of a head's
// keys, if there are any, follow its keys.
template <class C>
struct Pages {
  const C* keys;         // of the cache's first block
  const int32_t* table;  // of the sequence
  int64_t block_stride, value_offset;
  int block_size, head_dim;

  int64_t head_stride() const { return int64_t{block_size} * (head_dim + SCALE_BYTES<C>); }
};

// Where the keys of one step stand: `begin` and those after it, from `lowest` on and before `end`. The first and the
// last of them are repeated, so that all 64 can be read: what an unwritten slot holds may be NaN, which a probability
// of 0 would not silence.
template <class C>
struct Rows {
  static constexpr bool SCALED = SCALE_BYTES<C> > 0;
  const C* row[KEYS];
  const C* scale[SCALED ? KEYS : 1];
  int count;

  Rows() = default;
  Rows(const Pages<C>& pages, int begin, int lowest, int end) : count(std::min(KEYS, end - begin)) {
    const int first = std::max(0, lowest - begin);
    int i = first, block = (begin + i) / pages.block_size, offset = (begin + i) % pages.block_size;
    for (; i < count; ++block, offset = 0) {
      const C* source = pages.keys + pages.table[block] * pages.block_stride;
      const C* scales = source + pages.block_size * pages.head_dim + offset * SCALE_BYTES<C>;
      source += int64_t{offset} * pages.head_dim;
      const int stop = std::min(count, i + pages.block_size - offset);
      for (; i < stop; ++i, source += pages.head_dim, scales += SCALE_BYTES<C>) {
        row[i] = source;
        if constexpr (SCALED) scale[i] = scales;
      }
    }
    repeat(row, first);
    if constexpr (SCALED) repeat(scale, first);
  }

 private:
  void repeat(const C** each, int first) {
    std::fill(each, each + first, each[first]);
    std::fill(each + count, each + KEYS, each[count - 1]);
  }
};

// The keys or values of a step for the products: those of KV head h stand `offset + h * head_stride` behind the rows.
template <class T>
struct View {
  const Rows<T>& rows;
  int64_t offset, head_stride;
};

// What probabilities are stored as when the values they meet are packed.
template <class T>
using PackedProbability = std::conditional_t<Dot<T>::STEP == LANES, float, T>;

// A row of head_dim values as words, the last vector filled with zeros.
template <class T>
INLINE void copy_words(const T* source, int head_dim, uint32_t* target) {
  for (int i = 0; i < head_dim; i += Dot<T>::STEP, target += LANES)
    store_words(target, (Words)Dot<T>::read(source + i, head_dim - i));
}

// Asks for a row's keys, or at an offset its values, to be brought from memory.
template <class C>
INLINE void fetch_row(const C* row, int head_dim) {
  for (int i = 0; i < head_dim; i += 64 / sizeof(C)) __builtin_prefetch(row + i, 0, 2);
}

// keys[word][key], while the next step's keys are fetched: a step's time is what memory needs to bring 64 of them.
template <class T, class C>
INLINE void pack_keys(const Rows<T>& now, const Rows<C>& next, int head_dim, const Scratch& scratch) {
  for (int first = 0; first < KEYS; first += LANES) {
    for (int key = 0; key < LANES; ++key) fetch_row(next.row[first + key], head_dim);
    for (int i = 0, word = 0; i < head_dim; i += Dot<T>::STEP, word += LANES) {
      Words block[LANES];
      for (int key = 0; key < LANES; ++key) block[key] = (Words)Dot<T>::read(now.row[first + key] + i, head_dim - i);
      transpose(block, scratch.keys + word * KEYS + first, KEYS);
    }
  }
}

// values[key][column], or pairs of keys in one word, while the next step's values are fetched.
template <class T, class C>
INLINE void pack_values(const View<T>& values, const Rows<C>& next, int64_t next_offset, int head_dim,
                        const Scratch& scratch) {
  constexpr int PAIR = Dot<T>::STEP / LANES;
  for (int key = 0; key < KEYS; key += PAIR) {
    uint32_t* target = scratch.values + key / PAIR * scratch.columns;
    for (int i = 0; i < head_dim; i += LANES) {
      Words words = (Words)load(values.rows.row[key] + values.offset + i, head_dim - i);
      if (PAIR == 2)  // a bfloat16 is the upper half of a float
        words = words >> 16 | (Words)load(values.rows.row[key + 1] + values.offset + i, head_dim - i);
      store_words(target + i, words);
    }
    for (int k = key; k < key + PAIR; ++k) fetch_row(next.row[k] + next_offset, head_dim);
  }
}

// out[ROWS, 64] = rescale[row] * out + a[ROWS, depth] x b[depth, 64]; without rescale out is overwritten.
template <class T, int ROWS>
static void multiply_block(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth, float* out,
                           int out_stride, const float* rescale) {
  using Vector = typename Dot<T>::Vector;
  Floats totals[ROWS][VECTORS] = {};
  if (rescale)
    for (int row = 0; row < ROWS; ++row)
      for (int v = 0; v < VECTORS; ++v) totals[row][v] = load(out + row * out_stride + v * LANES) * rescale[row];
  for (int i = 0; i < depth; ++i) {
    Vector columns[VECTORS];
    for (int v = 0; v < VECTORS; ++v) columns[v] = (Vector)load_words(b + i * b_stride + v * LANES);
    for (int row = 0; row < ROWS; ++row) {
      const Vector a_row = Dot<T>::repeat(a[row * a_stride + i]);
      for (int v = 0; v < VECTORS; ++v) totals[row][v] = Dot<T>::add(totals[row][v], a_row, columns[v]);
    }
  }
  for (int row = 0; row < ROWS; ++row)
    for (int v = 0; v < VECTORS; ++v) store(out + row * out_stride + v * LANES, totals[row][v]);
}

template <class T, int ROWS = BLOCK_ROWS>
static void multiply_vectors(int rows, const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth,
                             float* out, int out_stride, const float* rescale) {
  int row = 0;
  for (; row + ROWS <= rows; row += ROWS)
    multiply_block<T, ROWS>(a + row * a_stride, a_stride, b, b_stride, depth, out + row * out_stride, out_stride,
                            rescale ? rescale + row : nullptr);
  if constexpr (ROWS > 1)
    if (row < rows)
      multiply_vectors<T, ROWS - 1>(rows - row, a + row * a_stride, a_stride, b, b_stride, depth,
                                    out + row * out_stride, out_stride, rescale ? rescale + row : nullptr);
}

#if HAS_TILES
// The same for any number of rows, in tiles of 16: rows up to the next multiple of 16 are there to be overwritten.
static void multiply_tiles(int rows, const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth,
                           float* out, int out_stride, const float* rescale) {
  const int a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, out_bytes = 4 * out_stride;
  for (int row = 0; row < rows; row += LANES, a += LANES * a_stride, out += LANES * out_stride) {
    if (rescale) {
      for (int i = 0; i < LANES; ++i) {
        if (rescale[row + i] == 1.0f) continue;
        for (int v = 0; v < VECTORS; ++v) {
          float* target = out + i * out_stride + v * LANES;
          store(target, load(target) * rescale[row + i]);
        }
      }
      is_written(out);
      _tile_loadd(0, out, out_bytes);
      _tile_loadd(1, out + LANES, out_bytes);
      _tile_loadd(2, out + 2 * LANES, out_bytes);
      _tile_loadd(3, out + 3 * LANES, out_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int word = 0; word < depth; word += LANES) {
      const uint32_t* columns = b + word * b_stride;
      _tile_loadd(4, a + word, a_bytes);
      _tile_loadd(5, columns, b_bytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, columns + LANES, b_bytes);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, columns + 2 * LANES, b_bytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, columns + 3 * LANES, b_bytes);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + LANES, out_bytes);
    _tile_stored(2, out + 2 * LANES, out_bytes);
    _tile_stored(3, out + 3 * LANES, out_bytes);
  }
}
#endif

template <class T>
static void multiply(int rows, const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth, float* out,
                     int out_stride, const float* rescale) {
#if HAS_TILES
  if (uses_tiles<T>()) return multiply_tiles(rows, a, a_stride, b, b_stride, depth, out, out_stride, rescale);
#endif
  multiply_vectors<T>(rows, a, a_stride, b, b_stride, depth, out, out_stride, rescale);
}

template <class T, class C>
INLINE void score_packed(int rows, const View<T>& keys, const Rows<C>& next, int head_dim, const Scratch& scratch) {
  pack_keys(keys.rows, next, head_dim, scratch);
  multiply<T>(rows, scratch.queries, scratch.words, scratch.keys, KEYS, scratch.words, scratch.scores, KEYS, nullptr);
}

template <class T, class C>
INLINE void add_packed_values(int rows, const View<T>& values, const Rows<C>& next, int64_t next_offset, int head_dim,
                              const Scratch& scratch) {
  pack_values(values, next, next_offset, head_dim, scratch);
  for (int column = 0; column < head_dim; column += KEYS)
    multiply<T>(rows, scratch.probabilities, KEYS, scratch.values + column, scratch.columns,
                KEYS * LANES / Dot<T>::STEP, scratch.out + column, scratch.columns, scratch.rescale);
}
