// What processes that share memory need and Python does not have: counters to wait for, a ring of messages, and sums in place.
//
// A segment begins with a cache line for each member; the data begin `payload` bytes from its start. A member writes only its
// own line. Its counter says how much it has done (bytes of messages, or parts of a collective), so no lock is needed: a
// process that sees a counter also sees everything that was written before it (release and acquire).

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct alignas(64) Member {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> sleepers;  // processes that sleep in the kernel until `count` changes
    std::atomic<uint32_t> process;   // its id; 0: not here yet
    std::atomic<uint32_t> left;
    uint64_t kinds[2];  // which collective the part in each half of the buffer belongs to
    uint8_t token[16];  // of the segment, in the first line
};
static_assert(sizeof(Member) == 64, "Python reads it as sixteen words");

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Sleeps until the sleepers of this counter are woken, unless it is no longer `seen`.
void sleep_on(std::atomic<uint32_t>& counter, uint32_t seen, int64_t nanoseconds) {
    timespec limit = {time_t(nanoseconds / 1000000000), long(nanoseconds % 1000000000)};
#ifdef __linux__
    syscall(SYS_futex, &counter, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    timespec brief = {0, 100000};
    (void)limit, (void)seen, (void)counter;
    nanosleep(&brief, nullptr);
#endif
}

void wake_sleepers(std::atomic<uint32_t>& counter) {
#ifdef __linux__
    syscall(SYS_futex, &counter, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)counter;
#endif
}

// Counters wrap around, so that only differences mean something.
bool has_reached(const Member& member, uint32_t target) {
    return int32_t(member.count.load(std::memory_order_acquire) - target) >= 0;
}

// Bytes of the stream that passes through a ring, from byte number `count` on; they may wrap around the ring's end. The size
// of a ring is a power of two, as the counters wrap around, too.
void write_ring(char* ring, int64_t ring_bytes, uint32_t count, const char* data, int64_t size) {
    int64_t place = count % ring_bytes, fitting = size < ring_bytes - place ? size : ring_bytes - place;
    memcpy(ring + place, data, fitting);
    memcpy(ring, data + fitting, size - fitting);
}

void read_ring(const char* ring, int64_t ring_bytes, uint32_t count, char* data, int64_t size) {
    int64_t place = count % ring_bytes, fitting = size < ring_bytes - place ? size : ring_bytes - place;
    memcpy(data, ring + place, fitting);
    memcpy(data + fitting, ring, size - fitting);
}

constexpr int SPINS = 100;             // a few microseconds: the other member is probably about to count
constexpr int64_t YIELDING = 100'000;  // nanoseconds: with more ranks than cores, the other member may need this core
constexpr int64_t SLICE = 50'000'000;  // the longest sleep: Python then looks for signals, and whether the other member lives

// True when the counter has reached the target; false after at most a slice, or when a signal has come.
bool wait_briefly(Member& member, uint32_t target) {
    for (int i = 0; i < SPINS; i++) {
        if (has_reached(member, target)) return true;
        pause_briefly();
    }
    for (int64_t end = now() + YIELDING; now() < end;) {
        sched_yield();
        if (has_reached(member, target)) return true;
    }
    uint32_t seen = member.count.load(std::memory_order_acquire);
    // Announced before the last look: a member that counts after this look sees the sleeper, and wakes it.
    member.sleepers.fetch_add(1);
    if (!has_reached(member, target) && !member.left.load()) sleep_on(member.count, seen, SLICE);
    member.sleepers.fetch_sub(1);
    return has_reached(member, target);
}

void set_count(Member& member, uint32_t count) {
    member.count.store(count);
    if (member.sleepers.load()) wake_sleepers(member.count);
}

// -------------------------------------------------------------------------------------------------- collectives

// Two bytes as a number that is summed in float32: sums in 16 bits would lose more with every rank.
struct BFloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }
    BFloat16& operator=(float value) {
        uint32_t wide;
        memcpy(&wide, &value, 4);
        bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
        bits = is_nan ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to the nearest, ties to even
        return *this;
    }
};

// The sum over all ranks in the order of the ranks, which is the same on every rank: all get the same bits.
template <typename T, typename Sum>
void add_up(const char* parts, int64_t stride, int world, char* out, int64_t bytes) {
    constexpr int64_t BLOCK = 512;  // sums that stay in the first cache while the ranks' numbers pass
    Sum sums[BLOCK];
    int64_t count = bytes / int64_t(sizeof(T));
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t size = count - start < BLOCK ? count - start : BLOCK;
        const T* numbers = reinterpret_cast<const T*>(parts) + start;
        for (int64_t i = 0; i < size; i++) sums[i] = Sum(numbers[i]);
        for (int rank = 1; rank < world; rank++) {
            numbers = reinterpret_cast<const T*>(parts + rank * stride) + start;
            for (int64_t i = 0; i < size; i++) sums[i] += Sum(numbers[i]);
        }
        T* total = reinterpret_cast<T*>(out) + start;
        for (int64_t i = 0; i < size; i++) total[i] = sums[i];
    }
}

using AddUp = void (*)(const char*, int64_t, int, char*, int64_t);
constexpr AddUp SUMS[] = {
    add_up<float, float>,
    add_up<double, double>,
    add_up<BFloat16, float>,
    add_up<int32_t, int32_t>,
    add_up<int64_t, int64_t>,
#ifdef __FLT16_MANT_DIG__
    add_up<_Float16, float>,
#endif
};
constexpr int NUM_SUMS = sizeof(SUMS) / sizeof(SUMS[0]);

// Bytes [begin, begin + bytes) of a rank's tensor, seen as rows of `row` bytes, go into rows of `world` such rows.
void lay_out(const char* part, int64_t begin, int64_t bytes, int64_t row, int rank, int world, char* out) {
    while (bytes > 0) {
        int64_t index = begin / row, offset = begin % row;
        int64_t piece = row - offset < bytes ? row - offset : bytes;
        memcpy(out + (index * world + rank) * row + offset, part, piece);
        part += piece, begin += piece, bytes -= piece;
    }
}

}  // namespace

extern "C" {

int num_sums() { return NUM_SUMS; }

// Writes a message, from its byte `begin` on; a message begins with its length. Returns how many of its bytes have been
// written: fewer than `length` if a reader has not made room after a slice.
int64_t put(char* segment, int64_t payload, int64_t ring_bytes, int num_readers, const char* message, int64_t length,
            int64_t begin) {
    Member* members = reinterpret_cast<Member*>(segment);
    while (begin < length) {
        // A long message goes in halves of the ring, so that writer and readers work at the same time.
        int64_t rest = length - begin, size = rest < ring_bytes / 2 ? rest : ring_bytes / 2;
        uint32_t count = members[0].count.load();
        for (int reader = 1; reader <= num_readers; reader++)
            if (!wait_briefly(members[reader], uint32_t(count + size - ring_bytes))) return begin;
        write_ring(segment + payload, ring_bytes, count, message + begin, size);
        set_count(members[0], uint32_t(count + size));
        begin += size;
    }
    return begin;
}

// Reads a message into a buffer. Returns its length; -1 if not all of it has come after a slice, or if it is longer than the
// buffer. `progress` keeps what is known of it between calls: its length (-1: unknown), and how much has been read.
int64_t get(char* segment, int64_t payload, int64_t ring_bytes, int reader, char* buffer, int64_t size, int64_t* progress) {
    Member* members = reinterpret_cast<Member*>(segment);
    Member& self = members[reader];
    int64_t &length = progress[0], &begin = progress[1];
    while (begin < length || length < 0) {
        uint32_t count = self.count.load();
        if (!wait_briefly(members[0], count + 1)) return -1;
        int64_t there = uint32_t(members[0].count.load() - count);
        if (length < 0) {  // which comes as a whole
            read_ring(segment + payload, ring_bytes, count, reinterpret_cast<char*>(&length), sizeof length);
            set_count(self, uint32_t(count + sizeof length));
        } else {
            int64_t rest = length - begin, part = there < rest ? there : rest;
            read_ring(segment + payload, ring_bytes, count, buffer + begin, part);
            set_count(self, uint32_t(count + part));
            begin += part;
        }
        if (length > size) return -1;
    }
    int64_t done = length;
    length = -1, begin = 0;
    return done;
}

// All-reduce (row == 0; `sum` says of what) or all-gather (row: bytes that stay together) of `bytes` from x into out.
//
// Goes on from byte `begin`, of a part that is in the segment already if `published`. Returns the bytes that are done:
// fewer than `bytes` when a rank was missing after a slice; call it again, with `published`. Returns -1 - rank if
// that rank is in another collective.
int64_t collective(char* segment, int64_t payload, int64_t part_bytes, int rank, int world, const char* x, char* out,
                   int64_t bytes, int64_t row, int sum, uint64_t kind, int64_t begin, bool published) {
    Member* members = reinterpret_cast<Member*>(segment);
    Member& self = members[rank];
    while (begin < bytes) {
        uint32_t number = self.count.load() + !published;
        int64_t size = bytes - begin < part_bytes ? bytes - begin : part_bytes;
        // Two halves by turns. A half is written again two parts later; by then all ranks have published the part between,
        // and hence have read this one.
        char* parts = segment + payload + (number & 1) * part_bytes * world;
        if (!published) {
            memcpy(parts + rank * part_bytes, x + begin, size);
            self.kinds[number & 1] = kind;
            set_count(self, number);
        }
        for (int other = 0; other < world; other++) {
            if (other == rank) continue;
            if (!wait_briefly(members[other], number)) return begin;
            if (members[other].kinds[number & 1] != kind) return -1 - other;
        }
        if (row == 0) {
            SUMS[sum](parts, part_bytes, world, out + begin, size);
        } else {
            for (int other = 0; other < world; other++)
                lay_out(parts + other * part_bytes, begin, size, row, other, world, out);
        }
        begin += size;
        published = false;
    }
    return bytes;
}
}
