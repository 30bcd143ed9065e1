// CPU kernels for a paged cache in 8 bits, which native_quantized_cache.py compiles and calls through a plain C interface. Layout
// and rounding are documented in nanovllm/ops/quantized_cache.py, whose bytes and scales these are, to the last bit.
//
// Attention is that of cpu_attention.h. Before each product, the keys or values of a step become numbers of the queries' type
// in a buffer that stays in the first-level cache; all 8-bit numbers are exact there. Their scales are applied to the scores
// and to the probabilities, so that nothing is rounded for them.
#include "cpu_attention.h"

struct int8 {
  int8_t bits;
};
// A floating-point number: the sign, 4 bits of the exponent, 3 of the mantissa.
struct e4m3 {
  uint8_t bits;
};
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

// ---------------------------------------------------------------------------------------------- from 8 bits to floats

INLINE Floats load(const int8* source) {
  SignedBytes bytes;
  std::memcpy(&bytes, source, sizeof bytes);
#ifdef __AVX512F__
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}
INLINE Floats load(const e4m3* source) {
  Bytes bytes;
  std::memcpy(&bytes, source, sizeof bytes);
#ifdef __AVX512F__
  const Words words = (Words)_mm512_cvtepu8_epi32((__m128i)bytes);
#else
  const Words words = __builtin_convertvector(bytes, Words);
#endif
  const Words magnitude = words & 0x7f;
  const Words normal = (magnitude << 20) + (120u << 23);  // the exponents' biases are 7 and 127
  const Words subnormal = (Words)(__builtin_convertvector((Ints)magnitude, Floats) * 0x1p-9f);
  return (Floats)((magnitude < 8 ? subnormal : normal) | (words & 0x80) << 24);
}

// Two vectors of numbers, as T.
template <class T, class C>
INLINE void widen_two(const C* source, T* target) {
  for (int i = 0; i < 2 * LANES; i += LANES) store(target + i, load(source + i));
}
#ifdef __AVX512BF16__
INLINE void widen_two(const int8* source, bfloat16* target) {
  const __m512 low = (__m512)load(source), high = (__m512)load(source + LANES);
  _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
INLINE void widen_two(const e4m3* source, bfloat16* target) {
  // As above, in 16 bits; the eight numbers below the normal ones are looked up.
  const __m512i below = _mm512_castsi128_si512(
      _mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0));
  const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_below = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_below, magnitude, below);
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
  _mm512_storeu_si512(target, _mm512_or_si512(value, sign));
}
#endif

template <class T, class C>
INLINE void widen(const C* source, int count, T* target) {
  int i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) widen_two(source + i, target + i);
  for (; i < count; i += LANES) store(target + i, load(source + i, count - i), count - i);
}

// ---------------------------------------------------------------------------------------------------------- attention

template <class T, class C>
class WideningReader {
 public:
  static constexpr int words(int heads, int head_dim) {
    return heads * KEYS * (2 + head_dim * int{sizeof(T)} / int{sizeof(uint32_t)});
  }

  WideningReader(const Scratch& scratch, int heads, int head_dim)
      : scales(reinterpret_cast<float*>(scratch.more)), heads(heads), head_dim(head_dim),
        wide(reinterpret_cast<T*>(scratch.more + heads * KEYS * 2)) {
    rows.count = KEYS;
    for (int key = 0; key < KEYS; ++key) rows.row[key] = wide + key * head_dim;
  }
  View<T> keys(const Rows<C>& now, const Pages<C>& pages, int) {
    float* target = scales;
    for (int head = 0; head < heads; ++head)
      for (int value = 0; value < 2; ++value)
        for (int key = 0; key < KEYS; key += LANES, target += LANES) {
          const int64_t offset = head * pages.head_stride() + value * pages.value_offset;
          constexpr int LAST = LANES - 1;
          if (pages.block_size % LANES == 0 && now.scale[key + LAST] == now.scale[key] + LAST * sizeof(float))
            std::memcpy(target, now.scale[key] + offset, LANES * sizeof(float));
          else
            for (int i = 0; i < LANES; ++i) std::memcpy(target + i, now.scale[key + i] + offset, sizeof(float));
        }
    return read(now, pages, 0);
  }
  View<T> values(const Rows<C>& now, const Pages<C>& pages, int) { return read(now, pages, pages.value_offset); }

  float* const scales;

 private:
  View<T> read(const Rows<C>& now, const Pages<C>& pages, int64_t offset) {
    T* target = wide;
    for (int head = 0; head < heads; ++head, offset += pages.head_stride())
      for (int key = 0; key < KEYS; ++key, target += head_dim) widen(now.row[key] + offset, head_dim, target);
    return {rows, 0, int64_t{KEYS} * head_dim};
  }

  const int heads, head_dim;
  T* const wide;
  Rows<T> rows;
};
template <class T>
struct Reader<T, int8> : WideningReader<T, int8> {
  using WideningReader<T, int8>::WideningReader;
};
template <class T>
struct Reader<T, e4m3> : WideningReader<T, e4m3> {
  using WideningReader<T, e4m3>::WideningReader;
};

// ---------------------------------------------------------------------------------------------- from floats to 8 bits

INLINE Ints nearest(Floats value) {  // halves to even
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)value);
#elif defined(__aarch64__)
  return (Ints)vcvtnq_s32_f32((float32x4_t)value);
#else
  Ints result;
  for (int lane = 0; lane < LANES; ++lane) result[lane] = int32_t(std::nearbyint(value[lane]));
  return result;
#endif
}

INLINE Words narrow(Floats value, int8) { return (Words)nearest(value); }
// Of numbers up to 448, and a little above, which an unlucky rounding of the scale may yield.
INLINE Words narrow(Floats value, e4m3) {
  const Words bits = (Words)value, magnitude = bits & 0x7fffffff;
  const Words normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const Words subnormal = (Words)nearest((Floats)magnitude * 512.0f);
  return ((Floats)magnitude < 0x1p-6f ? subnormal : normal) | (bits >> 24 & 0x80);
}

template <class C>
constexpr float LARGEST = std::is_same<C, int8>::value ? 127.0f : 448.0f;

// A row of one token and head to its numbers and its scale.
template <class T, class C>
INLINE void quantize(const T* x, int64_t head_dim, C* target, void* scale) {
  Floats maxima = splat(1e-30f);
  for (int64_t i = 0; i < head_dim; i += LANES)
    maxima = maximum(maxima, (Floats)((Words)load(x + i, head_dim - i) & 0x7fffffff));
  const float absmax = largest(maxima), inverse = LARGEST<C> / absmax, quotient = absmax / LARGEST<C>;
  for (int64_t i = 0; i < head_dim; i += LANES) {
    const auto bytes = __builtin_convertvector(narrow(load(x + i, head_dim - i) * inverse, C()), Bytes);
    std::memcpy(target + i, &bytes, std::min<int64_t>(LANES, head_dim - i));
  }
  std::memcpy(scale, &quotient, sizeof quotient);
}

// False, and nothing written, where a slot is beyond the cache.
template <class T, class C>
static bool write_kv_cache(const T* k, const T* v, C* kv_cache, const int64_t* slots, int64_t tokens,
                           int64_t num_kv_heads, int64_t head_dim, int64_t num_blocks, int64_t block_size,
                           int64_t k_stride, int64_t v_stride, int64_t block_stride, int threads) {
  for (int64_t token = 0; token < tokens; ++token)
    if (slots[token] >= num_blocks * block_size) return false;
  const int64_t head_stride = block_size * (head_dim + SCALE_BYTES<C>);
  for_each_row(tokens, 2 * num_kv_heads * head_dim, threads, [&](int64_t token) {
    const int64_t slot = slots[token], offset = slot % block_size;
    if (slot < 0) return;
    C* plane = kv_cache + slot / block_size * block_stride;
    for (int64_t part = 0; part < 2 * num_kv_heads; ++part, plane += head_stride) {
      const bool is_key = part < num_kv_heads;
      const T* x = is_key ? k + token * k_stride + part * head_dim
                          : v + token * v_stride + (part - num_kv_heads) * head_dim;
      quantize(x, head_dim, plane + offset * head_dim, plane + block_size * head_dim + offset * SCALE_BYTES<C>);
    }
  });
  return true;
}

#define EXPORT_FOR(T, suffix)                                              \
  extern "C" {                                                             \
  auto* write_kv_cache_int8_##suffix = &write_kv_cache<T, int8>;           \
  auto* write_kv_cache_float8_e4m3fn_##suffix = &write_kv_cache<T, e4m3>;  \
  auto* paged_attention_int8_##suffix = &attend_paged<T, int8>;            \
  auto* paged_attention_float8_e4m3fn_##suffix = &attend_paged<T, e4m3>;   \
  }
EXPORT_FOR(float, f32)
EXPORT_FOR(bfloat16, bf16)
