// Intel's matrix tiles as plain functions, for CPUs that have none. Included before a kernel's source. Tiles of 16 rows of 64
// bytes alone are emulated.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define syscall(...) 0L  // the system permits tiles

extern "C" inline std::atomic<int64_t> emulated_byte_products{0};  // so that a test sees that there were some
static thread_local uint32_t emulated_tiles[8][16][16];
static thread_local bool has_shapes = false;

inline void load_shapes(const void* source) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  uint16_t row_bytes[8];
  std::memcpy(row_bytes, bytes + 16, sizeof row_bytes);
  for (int number = 0; number < 8; ++number)
    if (row_bytes[number] != 64 || bytes[48 + number] != 16) __builtin_trap();
  if (bytes[0] != 1 || bytes[1] != 0) __builtin_trap();  // the palette, and the row to go on with
  has_shapes = true;
}

inline uint32_t (&tile(int number))[16][16] {
  if (!has_shapes) __builtin_trap();  // an instruction before the tiles were configured, or after they were released
  return emulated_tiles[number];
}
inline void load_tile(int number, const void* source, int64_t stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(tile(number)[row], static_cast<const char*>(source) + row * stride, 64);
}
inline void store_tile(int number, void* target, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(target) + row * stride, tile(number)[row], 64);
}
inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline void multiply_tile(int sums, int left, int right) {
  for (int row = 0; row < 16; ++row)
    for (int word = 0; word < 16; ++word)
      for (int column = 0; column < 16; ++column) {
        const uint32_t a = tile(left)[row][word], b = tile(right)[word][column];
        float sum = as_float(tile(sums)[row][column]);
        sum += as_float(a << 16) * as_float(b << 16);
        sum += as_float(a & 0xffff0000) * as_float(b & 0xffff0000);
        std::memcpy(&tile(sums)[row][column], &sum, sizeof sum);
      }
}
// Four signed bytes times four unsigned ones, added to 32 bits without saturation: TDPBSUD in Intel's manual.
inline void multiply_byte_tile(int sums, int left, int right) {
  ++emulated_byte_products;
  auto &a = tile(left), &b = tile(right), &c = tile(sums);
  for (int row = 0; row < 16; ++row)
    for (int word = 0; word < 16; ++word)
      for (int shift = 0; shift < 32; shift += 8)
        for (int column = 0; column < 16; ++column)
          c[row][column] += int8_t(a[row][word] >> shift) * int32_t(b[word][column] >> shift & 255);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd(number, source, stride) load_tile(number, source, stride)
#define _tile_stored(number, target, stride) store_tile(number, target, stride)
#define _tile_zero(number) (void)std::memset(tile(number), 0, sizeof tile(number))
#define _tile_dpbf16ps(sums, left, right) multiply_tile(sums, left, right)
#define _tile_dpbsud(sums, left, right) multiply_byte_tile(sums, left, right)
#define _tile_loadconfig(shapes) load_shapes(shapes)
#define _tile_release() (void)(has_shapes = false)
