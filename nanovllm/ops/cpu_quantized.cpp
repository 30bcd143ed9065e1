// CPU kernels for products with quantized weights, which native_quantized.py compiles and calls through a plain C interface.
// Shapes and contracts are documented in nanovllm/ops/quantized.py. Results are those of reference_quantized.py to the last
// bit, so products and sums are rounded one by one: the compiler is told to contract nothing.
#include "cpu_packed.h"

// ----------------------------------------------------------------------------------------------------- W8A8
//
// A word of the packed weight is four neighbouring inputs of one output, each plus 128: one instruction multiplies four
// unsigned bytes by four signed ones, and the signed ones, x, may be repeated from memory. Of each sum, 128 times the sum
// of x's row is subtracted at the end. Sums of integers are exact, whatever their order.

#if defined(__AVX512VNNI__)
constexpr bool MULTIPLIES_BYTES = true;
#else
constexpr bool MULTIPLIES_BYTES = false;  // 16-bit numbers, which are multiplied and added in pairs
#endif

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
  static constexpr int ROW_WORDS = MULTIPLIES_BYTES ? 1 : 2;  // words of x to one of the weight
  using Total = Ints;
  INLINE Ints add(Ints total, const uint32_t* row, Words w) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, _mm512_set1_epi32(row[0]));
#else
    return total + multiply_pairs(w & 0x00ff00ff, row[0]) + multiply_pairs(w >> 8 & 0x00ff00ff, row[1]);
#endif
  }
};

// Rows of x as integers: their words, scales, and what is to be subtracted of their sums.
struct Quantized {
  int64_t stride;
  std::unique_ptr<uint32_t[]> words;
  std::unique_ptr<float[]> scales;
  std::unique_ptr<int32_t[]> surplus;

  Quantized(int64_t tokens, int64_t inner)
      : stride(inner / 4 * ByteProduct::ROW_WORDS),
        words(new uint32_t[tokens * stride]),
        scales(new float[tokens]),
        surplus(new int32_t[tokens]) {}

  template <class T>
  INLINE void quantize(const T* x, int64_t inner, uint32_t* target, float* scale, int32_t* surplus) {
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds, and leaves the integer in the low bits
    Floats maxima = {}, nan = {};
    for (int64_t i = 0; i < inner; i += LANES) {
      const Floats value = load(x + i, inner - i), absolute = (Floats)((Words)value & 0x7fffffff);
      maxima = maximum(maxima, absolute);
      nan += absolute * 0.0f;  // what is not a number, and infinity, leave a NaN
    }
    const float largest_value = largest(maxima), inverse = largest_value > 0 ? 127.0f / largest_value : 0.0f;
    *scale = largest_value / 127.0f + sum(nan);
    Ints total = {};
    for (int64_t i = 0; i < inner; i += LANES) {
      const Words shifted = (Words)(load(x + i, inner - i) * inverse + shifter);
      total += (Ints)(shifted << 24) >> 24;
      write(shifted, target + i / 4 * ByteProduct::ROW_WORDS, std::min<int64_t>(LANES, inner - i));
    }
    int32_t lanes[LANES], all = 0;
    std::memcpy(lanes, &total, sizeof lanes);
    for (int32_t lane : lanes) all += lane;
    *surplus = 128 * all;
  }

  // The low bytes of `count` words as ByteProduct reads them.
  INLINE void write(Words numbers, uint32_t* target, int64_t count) {
    if constexpr (MULTIPLIES_BYTES) {
      uint8_t bytes[LANES];
      const auto narrow = __builtin_convertvector(numbers, Bytes);
      std::memcpy(bytes, &narrow, LANES);
      std::memcpy(target, bytes, count);
    } else {
      uint32_t words[LANES];
      std::memcpy(words, &numbers, sizeof words);
      const auto half = [&](int64_t i) { return uint32_t(uint16_t(int8_t(words[i]))); };
      for (int64_t i = 0; i < count; i += 4) {  // the inputs 0 and 2 of a word, then 1 and 3
        *target++ = half(i) | half(i + 2) << 16;
        *target++ = half(i + 1) | half(i + 3) << 16;
      }
    }
  }

 private:
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
};

template <class T>
void linear_w8a8(const T* x, const uint32_t* weight, const float* scales, const T* bias, T* out, int64_t tokens,
                 int64_t inner, int64_t outputs, int threads) {
  const Quantized rows(tokens, inner);
  for_each_row(tokens, inner, threads, [&](int64_t row) {
    Quantized::quantize(x + row * inner, inner, &rows.words[row * rows.stride], &rows.scales[row], &rows.surplus[row]);
  });
  const int64_t words = inner / 4;
  threads = threads_for(tokens * inner * outputs / 8, threads);
  for_each_block(tokens, outputs, threads, [&](int64_t token, int64_t count, int64_t group, auto groups) {
    const int64_t output = group * GROUP;
    packed_block<ByteProduct, groups>(
        &rows.words[token * rows.stride], rows.stride, weight + output * words, count, words,
        [&](int64_t row, int i, Ints sums) {
          const Floats exact = __builtin_convertvector(sums - rows.surplus[token + row], Floats);
          Floats result = exact * rows.scales[token + row] * load(scales + output + i);
          if (bias) result += load(bias + output + i);
          store(out + (token + row) * outputs + output + i, result);
        });
  });
}

EXPORT(linear_w8a8)
