// Vectors of floats and bfloat16: what the CPU kernels are written in.
//
// The vector types are those of GCC and Clang, as wide as the machine's registers (AVX-512, AVX2, NEON or SSE): a wider
// one GCC keeps in memory, which makes a product ten times slower. Intrinsics stand only where an instruction has no
// portable spelling, each with a plain loop beside it.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16, HALVINGS = 4;  // 2^HALVINGS lanes
#elif defined(__AVX2__)
constexpr int LANES = 8, HALVINGS = 3;
#else
constexpr int LANES = 4, HALVINGS = 2;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
  uint16_t bits;
};

INLINE float widen(float value) { return value; }
INLINE float widen(bfloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

INLINE Floats splat(float value) { return Floats{} + value; }
INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }

// total + a * b, rounded once where the machine can. Left to itself GCC decides that for every loop (on AMD's CPUs it
// takes two instructions where a loop has one sum), so that a sum would depend on the tile it is computed in.
INLINE Floats multiply_add(Floats total, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)total, (float32x4_t)a, (float32x4_t)b);
#else
  return total + a * b;
#endif
}

INLINE Floats load(const float* source) {
  Floats result;
  std::memcpy(&result, source, sizeof result);
  return result;
}
INLINE Words load_words(const uint32_t* source) {
  Words result;
  std::memcpy(&result, source, sizeof result);
  return result;
}
// Unsigned 16-bit values, each widened to 32 bits.
INLINE Words load_halves(const uint16_t* source) {
  Halves result;
  std::memcpy(&result, source, sizeof result);
#ifdef __AVX512F__
  return (Words)_mm512_cvtepu16_epi32((__m256i)result);  // GCC 12 makes six instructions of the line below
#else
  return __builtin_convertvector(result, Words);
#endif
}
INLINE Floats load(const bfloat16* source) { return (Floats)(load_halves(&source->bits) << 16); }

INLINE void store(float* target, Floats value) { std::memcpy(target, &value, sizeof value); }
INLINE void store_words(uint32_t* target, Words value) { std::memcpy(target, &value, sizeof value); }
// Rounds to the nearest bfloat16, ties to even.
INLINE void store(bfloat16* target, Floats value) {
#ifdef __AVX512BF16__
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
#else
  Words bits = (Words)value;
  Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Halves rounded = __builtin_convertvector(value == value ? nearest : (bits >> 16) | 0x40, Halves);
#endif
  std::memcpy(target, &rounded, 2 * LANES);
}

// As above, but no more than the `count` elements that a row has left; further lanes are zero, or not written.
template <class T>
INLINE Floats load(const T* source, int64_t count) {
  if (count >= LANES) return load(source);
  T padded[LANES] = {};
  std::memcpy(padded, source, count * sizeof(T));
  return load(padded);
}
template <class T>
INLINE void store(T* target, Floats value, int64_t count) {
  if (count >= LANES) return store(target, value);
  T padded[LANES];
  store(padded, value);
  std::memcpy(target, padded, count * sizeof(T));
}

// The value as T would hold it: kernels round wherever the same computation in torch would.
template <class T>
INLINE Floats rounded(Floats value) {
  if (std::is_same<T, float>::value) return value;
  T narrow[LANES];
  store(narrow, value);
  return load(narrow);
}

// Sums of neighbouring lanes: a's in the lower half, b's in the upper half.
INLINE Floats add_neighbours(Floats a, Floats b) {
#ifdef __AVX512F__
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (Floats)_mm512_permutex2var_ps((__m512)a, even, (__m512)b) +
         (Floats)_mm512_permutex2var_ps((__m512)a, odd, (__m512)b);
#elif defined(__AVX2__)
  const __m256d pairs = _mm256_castps_pd(_mm256_hadd_ps((__m256)a, (__m256)b));  // two of a, two of b, twice
  return (Floats)_mm256_permute4x64_pd(pairs, 0xd8);
#else
  Floats result;
  for (int lane = 0; lane < LANES / 2; ++lane) {
    result[lane] = a[2 * lane] + a[2 * lane + 1];
    result[lane + LANES / 2] = b[2 * lane] + b[2 * lane + 1];
  }
  return result;
#endif
}
INLINE float largest(Floats value) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)value);
#endif
  float lanes[LANES];
  std::memcpy(lanes, &value, sizeof value);
  return *std::max_element(lanes, lanes + LANES);
}

// Sums COUNT <= LANES vectors, each into the lane of its own index: neighbouring lanes are added in rounds, which halve
// the vectors while there are several.
template <int COUNT, int ROUNDS = HALVINGS>
INLINE Floats sum_each(const Floats* vectors) {
  static_assert(COUNT <= 1 << ROUNDS, "a lane for each sum");
  if constexpr (ROUNDS == 0) {
    return vectors[0];
  } else {
    Floats halved[(COUNT + 1) / 2];
    for (int i = 0; i < (COUNT + 1) / 2; ++i)
      halved[i] = add_neighbours(vectors[2 * i], vectors[std::min(2 * i + 1, COUNT - 1)]);
    return sum_each<(COUNT + 1) / 2, ROUNDS - 1>(halved);
  }
}

INLINE float sum(Floats value) { return sum_each<1>(&value)[0]; }

// Turns LANES x LANES words over: target[column * stride + row] = rows[row][column].
INLINE void transpose(const Words* rows, uint32_t* target, int stride) {
#ifdef __AVX512F__
  // Pairs of rows, pairs of pairs, then 128-bit lanes: after each round a vector holds more of fewer columns.
  __m512i a[LANES], b[LANES];
  for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    for (int half = 0; half < 2; ++half) {
      b[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + 2 + half]);
      b[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + 2 + half]);
    }
  }
  for (int i = 0; i < 4; ++i) {  // b[4 * n + i] holds columns i, 4 + i, 8 + i, 12 + i of rows 4 * n ..
    const __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xee);
    store_words(target + i * stride, (Words)_mm512_shuffle_i32x4(low, low2, 0x88));
    store_words(target + (4 + i) * stride, (Words)_mm512_shuffle_i32x4(low, low2, 0xdd));
    store_words(target + (8 + i) * stride, (Words)_mm512_shuffle_i32x4(high, high2, 0x88));
    store_words(target + (12 + i) * stride, (Words)_mm512_shuffle_i32x4(high, high2, 0xdd));
  }
#else
  for (int column = 0; column < LANES; ++column)
    for (int row = 0; row < LANES; ++row) target[column * stride + row] = rows[row][column];
#endif
}

// Turns four words of LANES rows over, of which row[k] is the k-th's address: columns[i] holds word i of each.
template <class T>
INLINE void transpose_four(const T* const* row, int64_t first, Words* columns) {
#if defined(__AVX512F__) || defined(__AVX2__)
  // Of the vectors' 128-bit lanes, each of which takes four rows, the first has rows 0 to 3, the second 4 to 7.
  auto four = [&](int k) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[k] + first)); };
  auto eight = [&](int k) { return _mm256_inserti128_si256(_mm256_castsi128_si256(four(k)), four(k + 4), 1); };
#ifdef __AVX512F__
  auto all = [&](int k) { return _mm512_inserti64x4(_mm512_castsi256_si512(eight(k)), eight(k + 8), 1); };
  const __m512i a = all(0), b = all(1), c = all(2), d = all(3);
  const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
  columns[0] = (Words)_mm512_unpacklo_epi64(ab, cd);
  columns[1] = (Words)_mm512_unpackhi_epi64(ab, cd);
  columns[2] = (Words)_mm512_unpacklo_epi64(ab2, cd2);
  columns[3] = (Words)_mm512_unpackhi_epi64(ab2, cd2);
#else
  const __m256i a = eight(0), b = eight(1), c = eight(2), d = eight(3);
  const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
  const __m256i ab2 = _mm256_unpackhi_epi32(a, b), cd2 = _mm256_unpackhi_epi32(c, d);
  columns[0] = (Words)_mm256_unpacklo_epi64(ab, cd);
  columns[1] = (Words)_mm256_unpackhi_epi64(ab, cd);
  columns[2] = (Words)_mm256_unpacklo_epi64(ab2, cd2);
  columns[3] = (Words)_mm256_unpackhi_epi64(ab2, cd2);
#endif
#else
  uint32_t words[4][LANES];
  for (int k = 0; k < LANES; ++k)
    for (int i = 0; i < 4; ++i) std::memcpy(&words[i][k], row[k] + first + i * sizeof(uint32_t) / sizeof(T), sizeof(uint32_t));
  std::memcpy(columns, words, sizeof words);
#endif
}

// One step of a dot product, in float32: STEP values of two rows, as LANES "words". A word is a float or, where the
// machine multiplies bfloat16, two neighbouring bfloat16. `read` yields zeros from `rest` values on; `repeat` fills a
// vector with one word.
template <class T>
struct Dot {
  static constexpr int STEP = LANES;
  using Vector = Floats;
  INLINE Vector read(const T* source, int64_t rest = STEP) { return load(source, rest); }
  INLINE Vector repeat(uint32_t word) { return (Vector)(Words{} + word); }
  INLINE Floats add(Floats total, Vector a, Vector b) { return multiply_add(total, a, b); }
};
#ifdef __AVX512BF16__
template <>
struct Dot<bfloat16> {
  static constexpr int STEP = 2 * LANES;
  using Vector = __m512bh;
  INLINE Vector read(const bfloat16* source, int64_t rest = STEP) {
    if (rest >= STEP) return (Vector)_mm512_loadu_si512(source);
    return (Vector)_mm512_maskz_loadu_epi16((1u << rest) - 1, source);
  }
  INLINE Vector repeat(uint32_t word) { return (Vector)_mm512_set1_epi32(word); }
  INLINE Floats add(Floats total, Vector a, Vector b) { return (Floats)_mm512_dpbf16_ps((__m512)total, a, b); }
};
#endif

// Whether values of T are widened to floats before they are multiplied: bfloat16, where the machine multiplies none.
template <class T>
constexpr bool WIDENS = std::is_same<T, bfloat16>::value && Dot<T>::STEP == LANES;

// total + x * w for the values of one 32-bit word of memory, number `word` of x. x is widened where T is.
template <class T>
INLINE Floats add_word(Floats total, const uint32_t* x, int64_t word, Words w) {
  if constexpr (WIDENS<T>) {
    total = multiply_add(total, (Floats)(Words{} + x[2 * word]), (Floats)(w << 16));
    return multiply_add(total, (Floats)(Words{} + x[2 * word + 1]), (Floats)(w & 0xffff0000));
  } else {
    return Dot<T>::add(total, Dot<T>::repeat(x[word]), (typename Dot<T>::Vector)w);
  }
}

// e^x within a relative error of about 2e-7: 2^n times a polynomial in the remainder. Below -87 the result is 0, or
// where x is known not to be POSITIVE, as in a softmax, something of 1e-38, which saves three instructions.
template <bool POSITIVE = true>
INLINE Floats exponential(Floats x) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  Floats clamped = maximum(splat(-87.0f), x);  // in this order NaN stays NaN
  if (POSITIVE) clamped = minimum(splat(88.0f), clamped);
  Floats shifted = clamped * 1.44269504f + shifter;
  Floats n = shifted - shifter;
  Floats r = clamped - n * 0.693145752f - n * 1.42860677e-6f;
  Floats p = r * (1.0f / 720) + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Floats scaled = (Floats)((Ints)p + ((Ints)shifted << 23));
  if (!POSITIVE) return scaled;
  return x < splat(-87.0f) ? Floats{} : scaled;
}

// A kernel template goes out as two C symbols, each the address of one instance.
#define EXPORT(name)                    \
  extern "C" {                          \
  auto* name##_f32 = &name<float>;      \
  auto* name##_bf16 = &name<bfloat16>;  \
  }
