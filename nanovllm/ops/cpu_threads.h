// Threads that share the tasks of a loop with the thread that asks for it.
//
// The asking thread never waits for a thread to begin: it takes tasks itself until none is left, and waits for those that
// are being done. So a thread that gets no processor, since another program has it, delays at most the task in its hands,
// where OpenMP's barriers delay every loop until each thread has come by.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

class Team {
 public:
  // The team of this process. A forked child, which has none of its parent's threads, begins with a new one.
  static Team& get() {
    static std::atomic<Team*> team{nullptr};
    static const int registered = (team = new Team, pthread_atfork(nullptr, nullptr, [] { team = new Team; }));
    (void)registered;
    return *team;
  }

  // Calls work() in this thread, and at the same time in up to `helpers` others, if no other loop has them. When it returns,
  // no call is running.
  template <class Work>
  void run(int helpers, const Work& work) {
    if (busy.exchange(true)) return work();
    for (; members < helpers; ++members) std::thread([this, number = members] { help(number); }).detach();
    call = [](const void* context) { (*static_cast<const Work*>(context))(); };
    context = &work;
    wanted = helpers;
    ++round;  // odd: open
    if (sleeping > 0) {
      const std::lock_guard<std::mutex> lock(mutex);
      wake.notify_all();
    }
    work();
    ++round;  // even: closed. Helpers that are inside by now are waited for; no other enters.
    const auto none_inside = [this] { return inside == 0; };
    if (!spin(none_inside)) {
      std::unique_lock<std::mutex> lock(mutex);
      waiting = true;
      left.wait(lock, none_inside);
      waiting = false;
    }
    busy = false;
  }

 private:
  // Whether the condition comes true before a sleep would be worth its while.
  template <class Condition>
  static bool spin(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    do {
      for (int i = 0; i < 32; ++i) {
        if (condition()) return true;
#ifdef __SSE2__
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  void help(int number) {
    for (uint32_t seen = 0;;) {
      const auto is_open = [&] { return round % 2 == 1 && round != seen; };
      if (!spin(is_open)) {
        std::unique_lock<std::mutex> lock(mutex);
        ++sleeping;
        wake.wait(lock, is_open);
        --sleeping;
      }
      const uint32_t now = round;
      if (now % 2 == 0) continue;
      seen = now;
      if (number >= wanted) continue;
      ++inside;
      if (round == now) call(context);  // else it was closed a moment ago, and `context` may be gone
      if (--inside == 0 && waiting) {
        const std::lock_guard<std::mutex> lock(mutex);
        left.notify_one();
      }
    }
  }

  // All in the same sequential order: a helper that sees the round open after it has entered is seen inside afterwards.
  std::atomic<bool> busy{false}, waiting{false};
  std::atomic<uint32_t> round{0};
  std::atomic<int> inside{0}, sleeping{0}, wanted{0};
  std::atomic<void (*)(const void*)> call{nullptr};
  std::atomic<const void*> context{nullptr};
  int members = 0;
  std::mutex mutex;
  std::condition_variable wake, left;
};

// In what portions threads take tasks. IN_TURN, one by one, evens out tasks of unequal size. IN_RUNS gives a thread a part
// of what is left at once, again and again: it reads on where it is, which memory is fast at.
enum class Portions { IN_TURN, IN_RUNS };

// Runs body(begin, end, state) for portions of the tasks on up to `threads` threads, each with a state = make_state() of its own.
template <class MakeState, class Body>
static void parallel_portions(Portions portions, int64_t tasks, int threads, const MakeState& make_state, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t parts = portions == Portions::IN_RUNS ? 2 * std::max(1, threads) : tasks;
  const auto work = [&] {
    int64_t begin = next;
    if (begin >= tasks) return;
    const auto state = make_state();
    while (begin < tasks) {
      const int64_t end = begin + std::max<int64_t>(1, (tasks - begin) / parts);
      if (!next.compare_exchange_weak(begin, end)) continue;  // `begin` is what it is by now
      body(begin, end, state);
      begin = next;
    }
  };
  const int64_t helpers = std::min<int64_t>(threads, tasks) - 1;
  if (helpers > 0)
    Team::get().run(helpers, work);
  else
    work();
}
// Runs body(task, state) for every task.
template <Portions PORTIONS = Portions::IN_TURN, class MakeState, class Body>
static void parallel_for(int64_t tasks, int threads, const MakeState& make_state, const Body& body) {
  parallel_portions(PORTIONS, tasks, threads, make_state, [&](int64_t begin, int64_t end, const auto& state) {
    for (int64_t task = begin; task < end; ++task) body(task, state);
  });
}
template <Portions PORTIONS = Portions::IN_TURN, class Body>
static void parallel_for(int64_t tasks, int threads, const Body& body) {
  parallel_for<PORTIONS>(tasks, threads, [] { return 0; }, [&](int64_t task, int) { body(task); });
}

// Elementwise work below this many elements is done before a second thread would have begun.
constexpr int64_t PARALLEL_ELEMENTS = 16384;

static inline int threads_for(int64_t elements, int threads) { return elements < PARALLEL_ELEMENTS ? 1 : threads; }

// Splits `rows` into about four tasks a thread and calls body(row) for every row.
template <class Body>
static void for_each_row(int64_t rows, int64_t width, int threads, const Body& body) {
  const int used = threads_for(rows * width, threads);
  const int64_t per_task = used == 1 ? rows : std::max<int64_t>(1, rows / (4 * used));
  if (rows == 0) return;
  parallel_for((rows + per_task - 1) / per_task, used, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * per_task);
    for (int64_t row = task * per_task; row < end; ++row) body(row);
  });
}
