// The two products of attention for the few rows of a decoding sequence, whose time is what memory needs to bring its keys
// and values: each is read once, in place, and turned over in registers on its way into the sums. A vector holds a word
// of LANES keys, or the values of a pair of keys, as after packing: the sums have the same order, and the same bits.
#pragma once

#include "cpu_products.h"

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int IN_PLACE_BLOCK = 6;  // rows whose accumulators, 4 vectors each, stay in registers
#else
constexpr int IN_PLACE_BLOCK = 3;
#endif
constexpr int IN_PLACE_ROWS = 2 * IN_PLACE_BLOCK;  // at most, of a KV head: for more, packing repays
constexpr int IN_PLACE_COLUMNS = 4 * LANES;
constexpr int LINE = 64;  // bytes

template <class T>
INLINE bool fits_in_place(int rows, int head_dim) {
  return rows <= IN_PLACE_ROWS && head_dim % IN_PLACE_COLUMNS == 0 && !uses_tiles<T>();
}

// Calls body(row, count) for blocks of at most ROWS rows, whose number is a constant.
template <int ROWS = IN_PLACE_BLOCK, class Body>
INLINE void for_blocks(int rows, const Body& body, int row = 0) {
  for (; row + ROWS <= rows; row += ROWS) body(row, std::integral_constant<int, ROWS>());
  if constexpr (ROWS > 1)
    if (row < rows) for_blocks<ROWS - 1>(rows, body, row);
}

// Asks memory for the keys or values of a step, of several heads, some lines at a time and in their order in memory: block
// after block, and in a block head after head. That is the order in which memory is fastest, whatever the order of use.
template <class C>
class Fetcher {
 public:
  Fetcher(const Rows<C>& rows, const Pages<C>& pages, int64_t offset, int heads)
      : rows(rows), offset(offset), head_stride(pages.head_stride()), heads(heads),
        run(KEYS % pages.block_size == 0 ? pages.block_size : pages.block_size % KEYS == 0 ? KEYS : 1),
        run_bytes(run == pages.block_size ? pages.head_stride() * sizeof(C) : run * pages.head_dim * sizeof(C)), key(heads > 0 ? 0 : KEYS) {
    start_run();
  }
  void fetch(int lines) {
    if (key >= KEYS) return;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(next + i * LINE, 0, 2);
    if ((next += lines * LINE) < end) return;
    if (++head == heads) head = 0, key += run;
    start_run();
  }
  void fetch_all() {
    while (key < KEYS) fetch(2);
  }

 private:
  void start_run() {
    if (key == KEYS) return;
    next = reinterpret_cast<const char*>(rows.row[key] + offset + head * head_stride);
    end = next + run_bytes;
  }

  const Rows<C>& rows;
  const int64_t offset, head_stride;
  const int heads, run, run_bytes;  // a run: the keys of one head that stand one behind the other, perhaps with scales
  int key, head = 0;
  const char *next = nullptr, *end = nullptr;
};

// Four vectors of columns: of a key's values, or of a pair's where the machine multiplies such, and of sums.
template <class T>
struct Columns {
  using Vector = typename Dot<T>::Vector;
  INLINE void read(const T* const* row, int64_t offset, Vector* values) {
    for (int v = 0; v < 4; ++v) values[v] = (Vector)load(row[0] + offset + v * LANES);
  }
  INLINE void load_sums(const float* source, Floats* sums) {
    for (int v = 0; v < 4; ++v) sums[v] = load(source + v * LANES);
  }
  INLINE void store_sums(const Floats* sums, float* target) {
    for (int v = 0; v < 4; ++v) store(target + v * LANES, sums[v]);
  }
};
#ifdef __AVX512BF16__
// Two keys are interleaved within 128-bit lanes: of 32 columns, one vector has 0 to 3, 8 to 11, .., and the next the others.
template <>
struct Columns<bfloat16> {
  INLINE void read(const bfloat16* const* row, int64_t offset, __m512bh* values) {
    for (int v = 0; v < 4; v += 2) {
      const __m512i one = _mm512_loadu_si512(row[0] + offset + v * LANES);
      const __m512i other = _mm512_loadu_si512(row[1] + offset + v * LANES);
      values[v] = (__m512bh)_mm512_unpacklo_epi16(one, other);
      values[v + 1] = (__m512bh)_mm512_unpackhi_epi16(one, other);
    }
  }
  INLINE void load_sums(const float* source, Floats* sums) {
    for (int v = 0; v < 4; v += 2) {
      const __m512 a = (__m512)load(source + v * LANES), b = (__m512)load(source + (v + 1) * LANES);
      sums[v] = (Floats)_mm512_shuffle_f32x4(a, b, 0x88);
      sums[v + 1] = (Floats)_mm512_shuffle_f32x4(a, b, 0xdd);
    }
  }
  INLINE void store_sums(const Floats* sums, float* target) {
    for (int v = 0; v < 4; v += 2) {
      const __m512 a = _mm512_shuffle_f32x4((__m512)sums[v], (__m512)sums[v + 1], 0x44);
      const __m512 b = _mm512_shuffle_f32x4((__m512)sums[v], (__m512)sums[v + 1], 0xee);
      store(target + v * LANES, (Floats)_mm512_shuffle_f32x4(a, a, 0xd8));
      store(target + (v + 1) * LANES, (Floats)_mm512_shuffle_f32x4(b, b, 0xd8));
    }
  }
};
#endif

// scores[ROWS][64] of one head's keys, which stand at an offset from those in `now`.
template <class T, int ROWS, class C>
static void score_block(const uint32_t* queries, int stride, const Rows<T>& now, int64_t offset, int head_dim,
                        float* scores, Fetcher<C>& ahead) {
  constexpr int PER_WORD = sizeof(uint32_t) / sizeof(T), TOGETHER = 2;  // vectors of keys
  for (int key = 0; key < now.count; key += TOGETHER * LANES) {
    Floats totals[ROWS][TOGETHER] = {};
    for (int word = 0; word < head_dim / PER_WORD; word += 4) {
      ahead.fetch(TOGETHER * LANES * 4 * int{sizeof(uint32_t)} / LINE);
      for (int v = 0; v < TOGETHER; ++v) {
        Words columns[4];
        transpose_four(now.row + key + v * LANES, offset + word * PER_WORD, columns);
        for (int i = 0; i < 4; ++i)
          for (int row = 0; row < ROWS; ++row)
            totals[row][v] = add_word<T>(totals[row][v], queries + row * stride, word + i, columns[i]);
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int v = 0; v < TOGETHER; ++v) store(scores + row * KEYS + key + v * LANES, totals[row][v]);
  }
}

// out[ROWS, IN_PLACE_COLUMNS] = rescale[row] * out + probabilities[ROWS, 64] x values.
template <class T, int ROWS, class C>
static void value_block(const uint32_t* probabilities, const Rows<T>& now, int64_t offset, float* out, int stride,
                        const float* rescale, Fetcher<C>& ahead) {
  constexpr int PAIR = Dot<T>::STEP / LANES;
  Floats totals[ROWS][4];
  for (int row = 0; row < ROWS; ++row) {
    Columns<T>::load_sums(out + row * stride, totals[row]);
    for (int v = 0; v < 4; ++v) totals[row][v] *= rescale[row];
  }
  for (int key = 0; key < now.count; key += PAIR) {
    ahead.fetch(std::max(1, PAIR * IN_PLACE_COLUMNS * int{sizeof(T)} / LINE));
    typename Dot<T>::Vector values[4];
    Columns<T>::read(now.row + key, offset, values);
    for (int row = 0; row < ROWS; ++row) {
      const auto probability = Dot<T>::repeat(probabilities[row * KEYS + key / PAIR]);
      for (int v = 0; v < 4; ++v) totals[row][v] = Dot<T>::add(totals[row][v], probability, values[v]);
    }
  }
  for (int row = 0; row < ROWS; ++row) Columns<T>::store_sums(totals[row], out + row * stride);
}

// The scores of a step for `heads` KV heads with `rows` rows each, while what comes next is fetched.
template <class T, class C>
INLINE void score_in_place(int rows, int heads, const View<T>& keys, Fetcher<C> ahead, int head_dim,
                           const Scratch& scratch) {
  for (int head = 0; head < heads; ++head)
    for_blocks(rows, [&](int block, auto count) {
      const int row = head * rows + block;
      score_block<T, count>(scratch.queries + row * scratch.words, scratch.words, keys.rows,
                            keys.offset + head * keys.head_stride, head_dim, scratch.scores + row * KEYS, ahead);
    });
  ahead.fetch_all();
}

template <class T, class C>
INLINE void add_values_in_place(int rows, int heads, const View<T>& values, Fetcher<C> ahead, int head_dim,
                                const Scratch& scratch) {
  for (int head = 0; head < heads; ++head)
    for (int column = 0; column < head_dim; column += IN_PLACE_COLUMNS)
      for_blocks(rows, [&](int block, auto count) {
        const int row = head * rows + block;
        value_block<T, count>(scratch.probabilities + row * KEYS, values.rows,
                              values.offset + head * values.head_stride + column, scratch.out + row * scratch.columns + column, scratch.columns, scratch.rescale + row, ahead);
      });
  ahead.fetch_all();
}
