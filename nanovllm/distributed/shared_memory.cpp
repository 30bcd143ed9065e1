// What processes that share memory need and Python does not have: counters that one can wait for, and sums in place.
//
// A segment begins with a line of cache for each member; `payload` bytes from its start begin the data. A member writes
// only its own line. Its counter says how much it has done (messages, or parts of a collective), so nobody needs a lock:
// who waits for a counter and sees it also sees everything that was written before it (release and acquire).

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
    std::atomic<uint32_t> sleepers;  // how many sleep in the kernel until `count` changes
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

// Sleeps until somebody wakes the sleepers of this counter, if it still is `seen`.
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

constexpr int SPINS = 100;             // a few microseconds: the other one is in the middle of it
constexpr int64_t YIELDING = 100'000;  // nanoseconds: more ranks than cores, the other one may need this core
constexpr int64_t SLICE = 50'000'000;  // the longest sleep: Python then looks for signals and for the dead

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
    // Announced before the last look: whoever counts further either is seen now or sees that somebody sleeps.
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

bool wait_for(char* segment, int member, uint32_t target) {
    return wait_briefly(reinterpret_cast<Member*>(segment)[member], target);
}

void count_to(char* segment, int member, uint32_t count) {
    set_count(reinterpret_cast<Member*>(segment)[member], count);
}

void leave(char* segment, int member) {
    Member& self = reinterpret_cast<Member*>(segment)[member];
    self.left.store(1);
    wake_sleepers(self.count);
}

// A message that fits into slot number `count`, after its length. False if a reader has not made room, or this end is
// closed.
bool put_short(char* segment, int64_t payload, int64_t slot_bytes, int64_t num_slots, int64_t num_readers,
               int64_t count, const char* message, int64_t length) {
    Member* members = reinterpret_cast<Member*>(segment);
    if (members[0].left.load()) return false;
    for (int64_t reader = 1; reader <= num_readers; reader++)
        if (!has_reached(members[reader], uint32_t(count + 1 - num_slots))) return false;
    char* slot = segment + payload + count % num_slots * slot_bytes;
    memcpy(slot, &length, sizeof length);
    memcpy(slot + sizeof length, message, length);
    set_count(members[0], uint32_t(count + 1));
    return true;
}

// Waits briefly for the message in slot number `count`, and takes it out. Returns its length; -1 if none has come or this
// end is closed, -2 if it is longer than a slot, and still there.
int64_t get_short(char* segment, int64_t payload, int64_t slot_bytes, int64_t num_slots, int64_t reader, int64_t count,
                  char* message) {
    Member* members = reinterpret_cast<Member*>(segment);
    if (members[reader].left.load() || !wait_briefly(members[0], uint32_t(count + 1))) return -1;
    const char* slot = segment + payload + count % num_slots * slot_bytes;
    int64_t length;
    memcpy(&length, slot, sizeof length);
    if (length > slot_bytes - int64_t(sizeof length)) return -2;
    memcpy(message, slot + sizeof length, length);
    set_count(members[reader], uint32_t(count + 1));
    return length;
}

// All-reduce (row == 0; `sum` says of what) or all-gather (row: bytes that stay together) of `bytes` from x into out.
//
// Goes on from byte `begin`, of a part that is in the segment already if `published`. Returns the bytes that are done:
// fewer than `bytes` when somebody was not there after a slice; call it again, with `published`. Returns -1 - rank if
// that rank is in another collective.
int64_t collective(char* segment, int64_t payload, int64_t part_bytes, int rank, int world, const char* x, char* out,
                   int64_t bytes, int64_t row, int sum, uint64_t kind, int64_t begin, bool published) {
    Member* members = reinterpret_cast<Member*>(segment);
    Member& self = members[rank];
    while (begin < bytes) {
        uint32_t number = self.count.load() + !published;
        int64_t size = bytes - begin < part_bytes ? bytes - begin : part_bytes;
        // Two halves by turns. A half is written again two parts later, and everybody has published the part between
        // by then, hence has read this one.
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
