// Blocks of one KV cache into blocks of another that the same process maps: one call, during which Python can go on.

#include <cstdint>
#include <cstring>

extern "C" {

// Blocks of a cache: their numbers, the bytes of a block, and the distance of its two planes (keys, values) in bytes.
struct Blocks {
    char* cache;
    const int64_t* ids;
    int64_t block_bytes;
    int64_t plane_bytes;
};

// Copy block from.ids[i] into block to.ids[i]: `runs` runs of `run_bytes`, `plane_bytes` apart on each side.
void copy_blocks(Blocks to, Blocks from, int64_t count, int64_t runs, int64_t run_bytes) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t run = 0; run < runs; run++)
            memcpy(to.cache + to.ids[i] * to.block_bytes + run * to.plane_bytes,
                   from.cache + from.ids[i] * from.block_bytes + run * from.plane_bytes, run_bytes);
}
}
