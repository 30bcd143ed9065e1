// Matrix tiles (Intel AMX): one instruction adds the product of 16 x 32 and 32 x 16 bfloat16 values to 16 x 16 floats, or
// that of 16 x 64 and 64 x 16 bytes to 16 x 16 integers. A core finishes one every 16 cycles: sixteen times the rate of its
// vectors.
//
// A tile register holds 16 rows of 64 bytes. Of the left operand a row is 32 values, or 64 bytes, as they stand in memory;
// of the right one a row is 16 columns of one word: two values, or four bytes, that stand one above the other. The sums run
// along the inner dimension alone, so that an element does not depend on what else is multiplied beside it.
#pragma once

#include "cpu_vector.h"

constexpr int TILE_BYTES = 64;    // of a row
constexpr int TILE_WORDS = 256;   // of a tile
template <class T>
constexpr int TILE_VALUES = TILE_BYTES / sizeof(T);  // of a left row

struct alignas(TILE_BYTES) TileMemory {
  uint32_t words[TILE_WORDS];
};

// 16 rows of a tile are the lanes of a vector, and bytes are multiplied by VNNI where they are too few for tiles.
#if defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
// As in every machine with these tiles: the vectors beside them hold bfloat16, too.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES 1
#endif
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define HAS_BYTE_TILES 1
#endif
#endif

#if HAS_TILES || HAS_BYTE_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Whether the operating system lets this process use the tile registers, for which it must be asked once.
static bool tiles_permitted() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return permitted;
}

// GCC's tile instructions do not say what they read: what was written to this memory is in it from here on.
INLINE void is_written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }
#endif

// Whether products of T go through tiles on this machine.
template <class T>
INLINE bool uses_tiles() {
#if HAS_TILES
  if (std::is_same<T, bfloat16>::value) return tiles_permitted();
#endif
#if HAS_BYTE_TILES
  if (std::is_same<T, int8_t>::value) return tiles_permitted();
#endif
  return false;
}

// Shapes the registers of the current thread, eight of 16 x 64 bytes, and lets go of them at its end.
class Tiles {
 public:
  explicit Tiles(bool wanted) : taken(wanted) {
#if HAS_TILES || HAS_BYTE_TILES
    if (!taken) return;
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    std::fill_n(shapes.row_bytes, 8, TILE_BYTES);
    std::fill_n(shapes.rows, 8, LANES);
    is_written(&shapes);
    _tile_loadconfig(&shapes);
#endif
  }
  ~Tiles() {
#if HAS_TILES || HAS_BYTE_TILES
    if (taken) _tile_release();
#endif
  }
  Tiles(const Tiles&) = delete;

 private:
  bool taken;
};
