// CPU kernels for products with quantized weights, which native_quantized.py compiles and calls through a plain C interface.
// Shapes and contracts are documented in nanovllm/ops/quantized.py. Results are those of reference_quantized.py to the last
// bit, so products and sums are rounded one by one: the compiler is told to contract nothing.
#include "cpu_packed.h"

// ----------------------------------------------------------------------------------------------------- W8A8
//
// A word of the packed weight is four neighbouring inputs of one output, each plus 128: one instruction multiplies four
// unsigned bytes by four signed ones, and the signed ones, x, may be repeated from memory. Of each sum, 128 times the sum
// of x's row is subtracted at the end. Sums of integers are exact, whatever their order. Sixteen words of the weight are
// also a tile (cpu_tiles.h), and a row of x is one of the other operand, so tiles multiply what vectors multiply.

#if defined(__AVX512VNNI__)
constexpr bool MULTIPLIES_BYTES = true;
#else
constexpr bool MULTIPLIES_BYTES = false;  // 16-bit numbers, which are multiplied and added in pairs
#endif

// LANES unsigned bytes, each widened to 32 bits.
INLINE Ints load_bytes(const uint8_t* source) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  Bytes result;
  std::memcpy(&result, source, sizeof result);
  return __builtin_convertvector(result, Ints);
}

// In each lane the products of two unsigned 16-bit numbers below 256 and a pair of signed ones, added.
[[maybe_unused]] INLINE Ints multiply_pairs(Words w, uint32_t pair) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(pair));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Ints)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(pair));
#else
  return (Ints)(w & 0xffff) * int16_t(pair) + (Ints)(w >> 16) * int16_t(pair >> 16);
#endif
}

struct ByteProduct {
  static constexpr int PARTS = 1, ROW_WORDS = MULTIPLIES_BYTES ? 1 : 2;
  using Total = Ints;
  INLINE Words read(Words w, int /*v*/, int /*i*/) { return w; }
  INLINE Ints add(Ints total, const uint32_t* row, Words w) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, _mm512_set1_epi32(row[0]));
#else
    return total + multiply_pairs(w & 0x00ff00ff, row[0]) + multiply_pairs(w >> 8 & 0x00ff00ff, row[1]);
#endif
  }

  // Rearranges a row of bytes where it is: without instructions for bytes, of each word the inputs 0 and 2, then 1 and 3.
  static void arrange(uint32_t* row, int64_t words) {
    if (MULTIPLIES_BYTES) return;
    for (int64_t i = words - 1; i >= 0; --i) {
      const uint32_t word = row[i];
      const auto half = [word](int k) { return uint32_t(uint16_t(int8_t(word >> 8 * k))); };
      row[2 * i] = half(0) | half(2) << 16;
      row[2 * i + 1] = half(1) | half(3) << 16;
    }
  }
};

#if HAS_BYTE_TILES
// Vectors multiply up to so many tokens about as fast as the weight comes from memory (on AMD's Zen 4; not timed with AMX).
constexpr int64_t FEW_TOKENS = 4;

INLINE bool by_byte_tiles(int64_t tokens) { return tokens > FEW_TOKENS && uses_tiles<int8_t>(); }

// `words` words of each group of a weight; those of the next group are `distance` words further. A part at a time becomes
// tiles of bytes, which the Product reads from words. Zeros fill the last tile, so it does not matter what they meet in x.
template <class Product>
struct ByteTiles {
  static constexpr bool UNPACKS = true;
  static constexpr int PARTS = Product::PARTS;
  const uint32_t* weight;
  int64_t words, distance;

  int64_t steps() const { return (words * PARTS + LANES - 1) / LANES; }

  Part read(int64_t group, int64_t groups, int64_t first, int64_t count, uint32_t* buffer) const {
    uint32_t* target = buffer;
    for (int64_t i = group; i < group + groups; ++i)
      for (int64_t word = first / PARTS; word < (first + count) / PARTS; ++word) {
        const uint32_t* source = weight + (i * distance + word) * GROUP;
        __builtin_prefetch(source + WORDS_AHEAD * GROUP, 0, 2);
        const Words packed = word < words ? load_words(source) : Words{};
        for (int part = 0; part < PARTS; ++part, target += GROUP) store_words(target, Product::read(packed, 0, part));
      }
    return {buffer, count * GROUP};
  }
};
#else
INLINE bool by_byte_tiles(int64_t) { return false; }
#endif

// Rows of x as integers: the words that a Product reads, a scale per row, and the sum of each of its groups, `factor` times.
// A tile may read beyond a row's end, and 16 rows where fewer are left: that memory exists, whatever is in it.
template <class Product>
struct Quantized {
  int64_t stride, groups;
  std::unique_ptr<TileMemory[]> memory;
  uint32_t* words;
  std::unique_ptr<float[]> scales;
  std::unique_ptr<int32_t[]> sums;

  template <class T>
  Quantized(const T* x, int64_t tokens, int64_t inner, int64_t groups, int32_t factor, int64_t row_words, int threads)
      : stride(row_words),
        groups(groups),
        memory(new TileMemory[(rows_of_memory(tokens) * stride + 15) / TILE_WORDS + 1]),
        words(memory[0].words),
        scales(new float[tokens]),
        sums(new int32_t[tokens * groups]) {
    for_each_row(tokens, inner, threads, [&](int64_t row) {
      uint32_t* target = &words[row * stride];
      auto* bytes = reinterpret_cast<int8_t*>(target);
      scales[row] = quantize(x + row * inner, inner, bytes);
      const int64_t size = inner / groups;
      for (int64_t group = 0; group < groups; ++group) {
        int32_t sum = 0;
        for (int64_t i = group * size; i < (group + 1) * size; ++i) sum += bytes[i];
        sums[row * groups + group] = factor * sum;
      }
      Product::arrange(target, inner / 4);
    });
  }

 private:
  typedef int8_t Bytes __attribute__((vector_size(LANES)));

  static int64_t rows_of_memory(int64_t tokens) { return by_byte_tiles(tokens) ? (tokens + 15) / 16 * 16 : tokens; }

  // Returns the scale.
  template <class T>
  INLINE float quantize(const T* x, int64_t inner, int8_t* target) {
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds, and leaves the integer in the low bits
    Floats maxima = {}, nan = {};
    for (int64_t i = 0; i < inner; i += LANES) {
      const Floats value = load(x + i, inner - i), absolute = (Floats)((Words)value & 0x7fffffff);
      maxima = maximum(maxima, absolute);
      nan += absolute * 0.0f;  // what is not a number, and infinity, leave a NaN
    }
    const float largest_value = largest(maxima), inverse = largest_value > 0 ? 127.0f / largest_value : 0.0f;
    for (int64_t i = 0; i < inner; i += LANES) {
      const Bytes bytes = __builtin_convertvector((Words)(load(x + i, inner - i) * inverse + shifter), Bytes);
      std::memcpy(target + i, &bytes, std::min<int64_t>(LANES, inner - i));
    }
    return largest_value / 127.0f + sum(nan);
  }
};

#if HAS_BYTE_TILES
// tiles_block() for rows from `token` on, and their words from `first` on.
template <int GROUPS, class Product, class Weight, class Write>
INLINE void byte_tiles_block(const Quantized<Product>& x, int64_t token, int64_t first, const Weight& weight, int64_t group,
                             int64_t tokens, int64_t steps, const Write& write) {
  const auto rows = [&](int64_t row) {
    return reinterpret_cast<const int8_t*>(&x.words[(token + row) * x.stride + first]);
  };
  is_written(x.words);
  tiles_block<int8_t, GROUPS>(rows, x.stride * sizeof(uint32_t), weight, group, tokens, steps, write);
}
#endif

template <class T>
void linear_w8a8(const T* x, const uint32_t* weight, const float* scales, const uint8_t* /*zeros*/, const T* bias, T* out,
                 int64_t tokens, int64_t inner, int64_t outputs, int64_t /*groups*/, int threads) {
  const int64_t words = inner / 4;
  const Quantized<ByteProduct> rows(x, tokens, inner, 1, -128, words * ByteProduct::ROW_WORDS, threads);
  const PackedWeight packed{weight, words};
  const bool tiles = by_byte_tiles(tokens);
  threads = threads_for(tokens * inner * outputs / 8, threads);
  for_each_block(tokens, outputs, threads, tiles, [&](int64_t token, int64_t count, int64_t group, auto groups) {
    const int64_t output = group * GROUP;
    const auto write = [&](int64_t row, int i, Ints sums) {
      const Floats exact = __builtin_convertvector(sums + rows.sums[token + row], Floats);
      Floats result = exact * rows.scales[token + row] * load(scales + output + i);
      if (bias) result += load(bias + output + i);
      store(out + (token + row) * outputs + output + i, result);
    };
#if HAS_BYTE_TILES
    const ByteTiles<ByteProduct> copied{weight, words, words};
    if (tiles && words % LANES == 0)
      return byte_tiles_block<groups>(rows, token, 0, packed, group, count, words / LANES, write);
    if (tiles) return byte_tiles_block<groups>(rows, token, 0, copied, group, count, copied.steps(), write);
#endif
    packed_block<ByteProduct, groups>(&rows.words[token * rows.stride], rows.stride, packed, group, count, words, write);
  });
}

// ----------------------------------------------------------------------------------------------------- W4A8
//
// A word of the packed weight is eight neighbouring inputs of one output, the first in the lowest four bits. Its even
// inputs are the lower halves of its bytes, and its odd ones the upper halves: so four of x's even inputs are a word, and
// the odd ones beside them the next. The exact sum of each group of inputs is multiplied by its scale, in float32, and
// the groups are added in their order.

// Of vector `v` from this group of outputs on, for a group of inputs: the place of scales or zeros, [outputs / GROUP, groups,
// GROUP].
INLINE int64_t place_of_scale(int64_t group, int v, int64_t groups, int64_t part) {
  return ((group + v / PER_GROUP) * groups + part) * GROUP + v % PER_GROUP * LANES;
}

struct NibbleProduct {
  using Total = Ints;
#if defined(__AVX512VNNI__)
  static constexpr int PARTS = 2, ROW_WORDS = 1;
  INLINE Words read(Words w, int /*v*/, int i) { return w >> 4 * i & 0x0f0f0f0f; }
  INLINE Ints add(Ints total, const uint32_t* row, Words w) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, _mm512_set1_epi32(row[0]));
  }
#else
  static constexpr int PARTS = 1, ROW_WORDS = 2;
  INLINE Words read(Words w, int /*v*/, int /*i*/) { return w; }
  INLINE Ints add(Ints total, const uint32_t* row, Words w) {
    const Words even = w & 0x0f0f0f0f, odd = w >> 4 & 0x0f0f0f0f;
#if defined(__AVX512BW__)  // the 16-bit sums of four products are far from their limits: 4 * 15 * 127
    const __m512i sums = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)even, _mm512_set1_epi32(row[0])),
                                          _mm512_maddubs_epi16((__m512i)odd, _mm512_set1_epi32(row[1])));
    return total + (Ints)_mm512_madd_epi16(sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)even, _mm256_set1_epi32(row[0])),
                                          _mm256_maddubs_epi16((__m256i)odd, _mm256_set1_epi32(row[1])));
    return total + (Ints)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#else
    for (int byte = 0; byte < 32; byte += 8)
      total += (Ints)(even >> byte & 15) * int8_t(row[0] >> byte) + (Ints)(odd >> byte & 15) * int8_t(row[1] >> byte);
    return total;
#endif
  }
#endif

  // Sorts the bytes of each pair of words into even and odd ones.
  static void arrange(uint32_t* row, int64_t words) {
    for (int64_t i = 0; i < words; i += 2) {
      uint64_t pair, sorted = 0;
      std::memcpy(&pair, row + i, sizeof pair);
      for (int shift : {0, 8}) {
        uint64_t half = pair >> shift & 0x00ff00ff00ff00ff;
        half = (half | half >> 8) & 0x0000ffff0000ffff;
        sorted |= (half | half >> 16) << 32 >> (shift ? 0 : 32);
      }
      std::memcpy(row + i, &sorted, sizeof sorted);
    }
  }
};

// For the tiles of one group of inputs: to the floats `sums`, [token][2 * PER_GROUP], the exact sums times their scales are
// added. `surplus`, [token][groups], is what x's nibbles have too much: -8 times the sum of x, or with ZEROS -1 times it.
template <bool ZEROS>
struct ScaledSums {
  Floats* sums;
  const int32_t* surplus;
  int64_t groups;
  Floats scale[2 * PER_GROUP];
  Ints zero[2 * PER_GROUP];

  Ints start(int token, int v) const {
    const int32_t here = surplus[token * groups];
    return ZEROS ? zero[v] * here : Ints{} + here;
  }
  void finish(int token, int v, Ints total) const {
    sums[token * 2 * PER_GROUP + v] += __builtin_convertvector(total, Floats) * scale[v];
  }
};

template <bool ZEROS, class T>
static void multiply_w4a8(const T* x, const uint32_t* nibbles, const float* scales, const uint8_t* zeros, const T* bias,
                          T* out, int64_t tokens, int64_t inner, int64_t outputs, int64_t groups, int threads) {
  const int64_t words = inner / 8, part_words = words / groups;
  const Quantized<NibbleProduct> rows(x, tokens, inner, groups, ZEROS ? -1 : -8, 2 * words, threads);
  const PackedWeight packed{nibbles, words};
  const bool by_tiles = by_byte_tiles(tokens);
  threads = threads_for(tokens * inner * outputs / 8, threads);
  for_each_block(tokens, outputs, threads, by_tiles, [&](int64_t token, int64_t count, int64_t group, auto pair) {
    constexpr int VECTORS = pair * PER_GROUP;
    const int64_t tiles = (count + PACKED_TOKENS - 1) / PACKED_TOKENS;
    Floats sums[BLOCK_TOKENS * 2 * PER_GROUP];
    std::fill_n(sums, count * 2 * PER_GROUP, Floats{});
    for (int64_t part = 0; part < groups; ++part) {
      const int64_t first = part * part_words;
      const Part read = packed.read(group, pair, first, part_words, nullptr);
      ScaledSums<ZEROS> target{};
      target.groups = groups;
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t at = place_of_scale(group, v, groups, part);
        target.scale[v] = load(scales + at);
        if (ZEROS) target.zero[v] = load_bytes(zeros + at);
      }
#if HAS_BYTE_TILES
      if (by_tiles) {
        target.sums = sums;
        target.surplus = &rows.sums[token * groups + part];
        const ByteTiles<NibbleProduct> weight{nibbles + first * GROUP, part_words, words};
        byte_tiles_block<pair>(rows, token, 2 * first, weight, group, count, weight.steps(),
                               [&](int64_t row, int i, Ints sum) {
                                 target.finish(row, i / LANES, sum + target.start(row, i / LANES));
                               });
        continue;
      }
#endif
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = tile * count / tiles, here = (tile + 1) * count / tiles - begin;
        target.sums = sums + begin * 2 * PER_GROUP;
        target.surplus = &rows.sums[(token + begin) * groups + part];
        packed_tiles<pair>(here, NibbleProduct(), &rows.words[(token + begin) * rows.stride + 2 * first], rows.stride,
                           read.weight, read.distance, part_words, target, tile == 0);
      }
    }
    for (int64_t row = token; row < token + count; ++row)
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t output = group * GROUP + v * LANES;
        Floats result = sums[(row - token) * 2 * PER_GROUP + v] * rows.scales[row];
        if (bias) result += load(bias + output);
        store(out + row * outputs + output, result);
      }
  });
}

template <class T>
void linear_w4a8(const T* x, const uint32_t* nibbles, const float* scales, const uint8_t* zeros, const T* bias, T* out,
                 int64_t tokens, int64_t inner, int64_t outputs, int64_t groups, int threads) {
  (zeros ? multiply_w4a8<true, T> : multiply_w4a8<false, T>)(x, nibbles, scales, zeros, bias, out, tokens, inner,
                                                             outputs, groups, threads);
}

// ----------------------------------------------------------------------------------------------------- W4A16
//
// The same packed weight. A part of it at a time becomes what pack_weight() would make of the dequantized matrix; the rest
// is linear_packed().

// Words of T: a float, or two bfloat16 of which the first is in the lower half.
template <class T>
struct Rounding;
template <>
struct Rounding<float> {
  static constexpr int VALUES = 1;
  INLINE Words word(const Floats* values) { return (Words)values[0]; }
};
template <>
struct Rounding<bfloat16> {
  static constexpr int VALUES = 2;
  INLINE Words word(const Floats* values) {
#ifdef __AVX512BF16__
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
    const Words places = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                          0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    return (Words)_mm512_permutexvar_epi16((__m512i)places, halves);
#else
    bfloat16 low[LANES], high[LANES];
    store(low, values[0]);
    store(high, values[1]);
    return load_halves(&low->bits) | load_halves(&high->bits) << 16;
#endif
  }
};

// The lowest four bits of each word, less 8.
INLINE Floats nibbles_less_8(Words words) {
#ifdef __AVX512F__  // one instruction, which looks at no other bits
  const Floats numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return (Floats)_mm512_permutexvar_ps((__m512i)words, (__m512)numbers);
#else
  return __builtin_convertvector((Ints)(words & 15) - 8, Floats);
#endif
}

// Of a word of nibbles PARTS words of T: the product of floats with the dequantized weight, for one group of inputs.
template <class T, bool ZEROS>
struct DequantizingProduct : FloatProduct<T> {
  static constexpr int VALUES = Rounding<T>::VALUES, PARTS = 8 / VALUES;
  Floats scale[2 * PER_GROUP], zero[2 * PER_GROUP];

  // For `vectors` vectors from this group of outputs on.
  DequantizingProduct(const T* scales, const uint8_t* zeros, int64_t group, int vectors, int64_t groups, int64_t part) {
    for (int v = 0; v < vectors; ++v) {
      const int64_t at = place_of_scale(group, v, groups, part);
      scale[v] = load(scales + at);
      if (ZEROS) zero[v] = __builtin_convertvector(load_bytes(zeros + at) - 8, Floats);
    }
  }

  __attribute__((always_inline)) Words read(Words packed, int v, int i) const {
    Floats values[VALUES];
    for (int k = 0; k < VALUES; ++k) {
      values[k] = nibbles_less_8(packed >> 4 * (i * VALUES + k));
      values[k] = (ZEROS ? values[k] - zero[v] : values[k]) * scale[v];
    }
    return Rounding<T>::word(values);
  }
};

// For many tokens: a part of the weight is dequantized at a time.
template <class T, bool ZEROS>
struct NibbleWeight {
  static constexpr bool UNPACKS = true;
  static constexpr int WORDS = DequantizingProduct<T, ZEROS>::PARTS;
  const uint32_t* nibbles;
  const T* scales;
  const uint8_t* zeros;
  int64_t words, groups;

  Part read(int64_t group, int64_t count_of_groups, int64_t first, int64_t count, uint32_t* buffer) const {
    for (int64_t i = 0; i < count_of_groups; ++i)
      unpack(group + i, first / WORDS, (first + count) / WORDS, buffer + i * count * GROUP);
    return {buffer, count * GROUP};
  }

 private:
  // The words of nibbles from `begin` to `end` of a group of outputs.
  void unpack(int64_t group, int64_t begin, int64_t end, uint32_t* target) const {
    const int64_t part_words = words / groups;
    for (int64_t word = begin; word < end;) {
      const int64_t part = word / part_words, stop = std::min(end, (part + 1) * part_words);
      const DequantizingProduct<T, ZEROS> product(scales, zeros, group, PER_GROUP, groups, part);
      for (; word < stop; ++word, target += WORDS * GROUP)
        for (int v = 0; v < PER_GROUP; ++v) {
          const Words packed = load_words(nibbles + (group * words + word) * GROUP + v * LANES);
          for (int i = 0; i < WORDS; ++i) store_words(target + i * GROUP + v * LANES, product.read(packed, v, i));
        }
    }
  }
};

// For the tokens of one tile: words are dequantized in registers, while those before them are multiplied.
template <bool ZEROS, class T>
static void multiply_few(const T* x, const uint32_t* nibbles, const T* scales, const uint8_t* zeros, const T* bias,
                         T* out, int64_t tokens, int64_t inner, int64_t outputs, int64_t groups, int threads) {
  using Product = DequantizingProduct<T, ZEROS>;
  constexpr int ROW_WORDS = Product::PARTS * Product::ROW_WORDS;
  const int64_t words = inner / 8, part_words = words / groups, stride = words * ROW_WORDS;
  std::unique_ptr<float[]> wide;
  if constexpr (WIDENS<T>) wide = widened(x, tokens, inner, threads);
  const auto* rows = WIDENS<T> ? reinterpret_cast<const uint32_t*>(wide.get()) : reinterpret_cast<const uint32_t*>(x);
  const PackedWeight packed{nibbles, words};
  threads = threads_for(tokens * inner * outputs / 8, threads);
  for_each_block(tokens, outputs, threads, false, [&](int64_t, int64_t, int64_t group, auto pair) {
    constexpr int VECTORS = pair * PER_GROUP;
    Floats sums[PACKED_TOKENS * 2 * PER_GROUP];
    for (int64_t part = 0; part < groups; ++part) {
      const Product product(scales, zeros, group, VECTORS, groups, part);
      const Part read = packed.read(group, pair, part * part_words, part_words, nullptr);
      packed_tiles<pair>(tokens, product, rows + part * part_words * ROW_WORDS, stride, read.weight, read.distance,
                         part_words, Sums<Floats>{sums, part == 0}, true);
    }
    for (int64_t row = 0; row < tokens; ++row)
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t output = group * GROUP + v * LANES;
        store(out + row * outputs + output, sums[row * 2 * PER_GROUP + v] + (bias ? load(bias + output) : Floats{}));
      }
  });
}

template <bool ZEROS, class T>
static void multiply_w4a16(const T* x, const uint32_t* nibbles, const T* scales, const uint8_t* zeros, const T* bias,
                           T* out, int64_t tokens, int64_t inner, int64_t outputs, int64_t groups, int threads) {
  if (tokens <= PACKED_TOKENS && !uses_tiles<T>())
    return multiply_few<ZEROS>(x, nibbles, scales, zeros, bias, out, tokens, inner, outputs, groups, threads);
  const NibbleWeight<T, ZEROS> weight{nibbles, scales, zeros, inner / 8, groups};
  multiply_packed(x, weight, bias, out, tokens, inner, outputs, threads);
}

template <class T>
void linear_w4a16(const T* x, const uint32_t* nibbles, const T* scales, const uint8_t* zeros, const T* bias, T* out,
                  int64_t tokens, int64_t inner, int64_t outputs, int64_t groups, int threads) {
  (zeros ? multiply_w4a16<true, T> : multiply_w4a16<false, T>)(x, nibbles, scales, zeros, bias, out, tokens, inner,
                                                               outputs, groups, threads);
}

// ----------------------------------------------------------------------------------------------------- layers
//
// The same products as the layers of a decoder call them (cpu_layers.cpp), which know nothing of scales.

// The addresses of a weight's tensors, as native_quantized.py lays them out.
struct Addresses {
  const uint32_t* values;
  const void* scales;
  const uint8_t* zeros;
  int64_t groups;
};

#define LAYER(name, Scale)                                                                                             \
  template <class T>                                                                                                   \
  void layer_##name(const T* x, const Addresses* weight, const T* bias, T* out, int64_t tokens, int64_t inner,         \
                    int64_t outputs, int threads) {                                                                    \
    linear_##name<T>(x, weight->values, static_cast<const Scale*>(weight->scales), weight->zeros, bias, out, tokens,   \
                     inner, outputs, weight->groups, threads);                                                         \
  }                                                                                                                    \
  EXPORT(linear_##name)                                                                                                \
  EXPORT(layer_##name)
LAYER(w4a16, T)
LAYER(w4a8, float)
LAYER(w8a8, float)
