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
  const PackedWeight packed{weight, words};
  threads = threads_for(tokens * inner * outputs / 8, threads);
  for_each_block(tokens, outputs, threads, [&](int64_t token, int64_t count, int64_t group, auto groups) {
    const int64_t output = group * GROUP;
    packed_block<ByteProduct, groups>(
        &rows.words[token * rows.stride], rows.stride, packed, group, count, words,
        [&](int64_t row, int i, Ints sums) {
          const Floats exact = __builtin_convertvector(sums - rows.surplus[token + row], Floats);
          Floats result = exact * rows.scales[token + row] * load(scales + output + i);
          if (bias) result += load(bias + output + i);
          store(out + (token + row) * outputs + output + i, result);
        });
  });
}

// ----------------------------------------------------------------------------------------------------- W4A16
//
// A word of the packed weight is eight neighbouring inputs of one output, the first in the lowest four bits. A part of it
// at a time becomes what pack_weight() would make of the dequantized matrix; the rest is linear_packed().

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

template <class T>
struct NibbleWeight {
  static constexpr bool UNPACKS = true;
  static constexpr int WORDS = 8 / Rounding<T>::VALUES;  // of T in a word of nibbles
  const uint32_t* nibbles;
  const T* scales;      // [outputs, groups]
  const int8_t* zeros;  // the same, or null: 8
  int64_t words, groups;

  Part read(int64_t group, int64_t count_of_groups, int64_t first, int64_t count, uint32_t* buffer) const {
    for (int64_t i = 0; i < count_of_groups; ++i)
      for (int v = 0; v < GROUP; v += LANES)
        (this->*(zeros ? &NibbleWeight::unpack<true> : &NibbleWeight::unpack<false>))(
            (group + i) * GROUP + v, first / WORDS, (first + count) / WORDS, buffer + i * count * GROUP + v);
    return {buffer, count * GROUP};
  }

 private:
  // The words of nibbles from `begin` to `end` of LANES outputs.
  template <bool ZEROS>
  void unpack(int64_t output, int64_t begin, int64_t end, uint32_t* target) const {
    const uint32_t* source = nibbles + output / GROUP * words * GROUP + output % GROUP;
    const int64_t words_of_group = words / groups;
    for (int64_t word = begin; word < end;) {
      const int64_t group = word / words_of_group, stop = std::min(end, (group + 1) * words_of_group);
      Floats scale, zero;
      for (int lane = 0; lane < LANES; ++lane) {
        const int64_t at = (output + lane) * groups + group;
        scale[lane] = widen(scales[at]);
        if (ZEROS) zero[lane] = zeros[at] - 8;
      }
      for (; word < stop; ++word) {
        const Words packed = load_words(source + word * GROUP);
        for (int i = 0; i < WORDS; ++i, target += GROUP) {
          Floats values[Rounding<T>::VALUES];
          for (int k = 0; k < Rounding<T>::VALUES; ++k) {
            values[k] = nibbles_less_8(packed >> 4 * (i * Rounding<T>::VALUES + k));
            values[k] = (ZEROS ? values[k] - zero : values[k]) * scale;
          }
          store_words(target, Rounding<T>::word(values));
        }
      }
    }
  }
};

template <class T>
void linear_w4a16(const T* x, const uint32_t* nibbles, const T* scales, const int8_t* zeros, const T* bias, T* out,
                  int64_t tokens, int64_t inner, int64_t outputs, int64_t groups, int threads) {
  const NibbleWeight<T> weight{nibbles, scales, zeros, inner / 8, groups};
  multiply_packed(x, weight, bias, out, tokens, inner, outputs, threads);
}

// ----------------------------------------------------------------------------------------------------- layers
//
// The same products as the layers of a decoder call them (cpu_layers.cpp), with one signature.

// The addresses of a weight's tensors, as native_quantized.py lays them out.
struct Addresses {
  const uint32_t* values;
  const void* scales;
  const int8_t* zeros;
  int64_t groups;
};

template <class T>
void layer_w8a8(const T* x, const Addresses* weight, const T* bias, T* out, int64_t tokens, int64_t inner,
                int64_t outputs, int threads) {
  linear_w8a8(x, weight->values, static_cast<const float*>(weight->scales), bias, out, tokens, inner, outputs, threads);
}

template <class T>
void layer_w4a16(const T* x, const Addresses* weight, const T* bias, T* out, int64_t tokens, int64_t inner,
                 int64_t outputs, int threads) {
  linear_w4a16(x, weight->values, static_cast<const T*>(weight->scales), weight->zeros, bias, out, tokens, inner,
               outputs, weight->groups, threads);
}

EXPORT(linear_w4a16)
EXPORT(linear_w8a8)
EXPORT(layer_w4a16)
EXPORT(layer_w8a8)
