// Blocks of one KV cache into blocks of another that the same process maps: one call, during which Python can go on.

#include <cstdint>
#include <cstring>

extern "C" {

// Of block from_ids[i] into block to_ids[i]: `planes` runs of `run` bytes, which stand `*_plane` bytes apart on each side.
void copy_blocks(char* to, const int64_t* to_ids, int64_t to_block, int64_t to_plane, const char* from,
                 const int64_t* from_ids, int64_t from_block, int64_t from_plane, int64_t count, int64_t planes,
                 int64_t run) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t plane = 0; plane < planes; plane++)
            memcpy(to + to_ids[i] * to_block + plane * to_plane, from + from_ids[i] * from_block + plane * from_plane,
                   run);
}
}
