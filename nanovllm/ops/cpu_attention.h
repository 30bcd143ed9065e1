// Causal attention over the paged cache, for mixed batches. Queries and results are of type T. The cache is, too, or else of an
// 8-bit type C with scales (`Widened`).
//
// One tile = some queries of one sequence x the heads that share one KV head. Its rows pass over the keys, 64 at a
// time, with a running maximum and sum (online softmax: Milakov and Gimelshein, 2018, arXiv 1805.02867; tiled as in
// FlashAttention, Dao et al., 2022, arXiv 2205.14135). A decoding sequence is a tile with one query, of
// several KV heads: they stand one behind the other in each block, and memory is fast at long streams.
//
// After every 256 keys of the sequence a part ends: it has a maximum, a sum and an output of its own, and parts are
// merged in their order. Threads share the parts of a tile of few rows (Flash-Decoding: Dao et al., 2023). A query meets
// the same keys, in the same lanes, steps and parts, whatever tile it is in, so its result depends neither on the batch
// nor on the chunk or the number of threads.
#pragma once

#include <memory>
#include <vector>

#include "cpu_in_place.h"
#include "cpu_threads.h"

constexpr int TILE_ROWS = 192;      // query rows of a tile: enough to repay packing the keys
constexpr int CUT_ROWS = 24;        // of tiles of at most so many, each part is a task
constexpr int KEYS_PER_PART = 256;  // a multiple of KEYS
constexpr int STEP_BYTES = 128 << 10;  // keys and values of a step: two steps stay in the second-level cache
constexpr int PARALLEL_KEYS = 256;  // fewer are done before a second thread would have begun

struct Problem {
  int num_heads, num_kv_heads, head_dim, block_size;
  int64_t q_stride, num_blocks, block_stride, table_width, table_stride;
  const int32_t *block_tables, *seq_lens, *query_start_loc;
  float scale, soft_cap;
  int window;

  int group() const { return num_heads / num_kv_heads; }
};

struct Tile {
  int sequence, kv_head, kv_heads;
  int query, queries;                     // rows query .. query + queries - 1 of the packed batch
  int position;                           // of the first query in its sequence
  int begin, end;                         // keys that some query sees
  int part;                               // index among the parts that are tasks, or -1

  int first_step() const { return begin / KEYS * KEYS; }
  // Rows of a KV head: its heads for each query.
  int head_rows(const Problem& problem) const { return queries * problem.group(); }
  int rows(const Problem& problem) const { return kv_heads * head_rows(problem); }
  // Which query of the tile a row is, and where it stands in [tokens, heads].
  int index(const Problem& problem, int row) const { return row % head_rows(problem) / problem.group(); }
  int token(const Problem& problem, int row) const { return query + index(problem, row); }
  int head(const Problem& problem, int row) const {
    return (kv_head + row / head_rows(problem)) * problem.group() + row % problem.group();
  }
};

// --------------------------------------------------------------------------------------------------------- tile

// Turns the scores of one row against 64 keys, of which [first, last) are visible, into probabilities relative to
// the row's running maximum, and brings maximum and sum up to date. Where keys and values have scales, the scores are
// multiplied with the former, and the probabilities that are stored with the latter.
template <class Probability, bool SCALED>
INLINE void softmax_step(const Problem& problem, int row, int first, int last, const Scratch& scratch,
                         const float* scales) {
  Ints lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  const bool whole = first <= 0 && last >= KEYS;
  Floats scores[VECTORS], highest = splat(-FLT_MAX);
  for (int v = 0; v < VECTORS; ++v) {
    scores[v] = load(scratch.scores + row * KEYS + v * LANES) * problem.scale;
    if (SCALED) scores[v] *= load(scales + v * LANES);
    if (problem.soft_cap > 0) {
      Floats twice = exponential(scores[v] * (2.0f / problem.soft_cap));
      scores[v] = problem.soft_cap - 2.0f * problem.soft_cap / (twice + 1.0f);  // soft_cap * tanh
    }
    if (!whole) {
      const Ints key = lanes + v * LANES;
      scores[v] = ((key >= first) & (key < last)) ? scores[v] : splat(-INFINITY);
    }
    highest = maximum(highest, scores[v]);
  }
  const float before = scratch.maxima[row], now = std::max(before, largest(highest));
  const float rescale = before == now ? 1.0f : std::exp(before - now);  // after a few steps hardly any row rises
  Floats total = {};
  Probability* probabilities = reinterpret_cast<Probability*>(scratch.probabilities + row * KEYS);
  for (int v = 0; v < VECTORS; ++v) {
    Floats probability = exponential<false>(scores[v] - now);
    if (!whole) probability = scores[v] < -FLT_MAX ? Floats{} : probability;  // 1e-38 shows where values cancel
    total += probability;
    if (SCALED) probability *= load(scales + KEYS + v * LANES);
    store(probabilities + v * LANES, probability);
  }
  scratch.maxima[row] = now;
  store(scratch.totals + row * LANES, load(scratch.totals + row * LANES) * rescale + total);
  scratch.rescale[row] = rescale;
}

// A row of a part, and of parts that were merged: the maximum, the sum, and the output, not yet divided by the sum.
INLINE void merge_row(float* merged, float maximum, float sum, const float* out, int columns) {
  const float highest = std::max(merged[0], maximum);
  const float before = std::exp(merged[0] - highest), factor = std::exp(maximum - highest);
  merged[0] = highest;
  merged[1] = std::fma(merged[1], before, sum * factor);
  for (int column = 2; column < columns + 2; column += LANES, out += LANES)
    store(merged + column, multiply_add(load(out) * factor, load(merged + column), splat(before)));
}

template <class C>
INLINE Pages<C> pages_of(const Problem& problem, const Tile& tile, const C* kv_cache) {
  const int64_t head_stride = int64_t{problem.block_size} * (problem.head_dim + SCALE_BYTES<C>);
  return {kv_cache + tile.kv_head * head_stride,
          problem.block_tables + tile.sequence * problem.table_stride,
          problem.block_stride,
          problem.num_kv_heads * head_stride,
          problem.block_size,
          problem.head_dim};
}

// What gives the products the keys and values of a step: of a cache of T, as they stand there. For a cache of bytes, there is
// a specialisation, which widens them; its `scales` are those of the step, [head][of keys, of values][64].
template <class T, class C>
struct Reader {
  static constexpr int words(int, int) { return 0; }  // of Scratch::more, for so many heads of this size

  Reader(const Scratch&, int, int) {}
  View<T> keys(const Rows<C>& now, const Pages<C>& pages, int) { return {now, 0, pages.head_stride()}; }
  View<T> values(const Rows<C>& now, const Pages<C>& pages, int) { return {now, pages.value_offset, pages.head_stride()}; }
  const float* scales = nullptr;
};

// Leaves the tile's rows, with all its parts merged, in `merged`: [rows][2 + columns]. HEAD_DIM is the head's size
// where it is known beforehand, or 0. A thread's tiles come one after the other: `previous` has fetched what this one
// begins with, and this one fetches what `following` begins with; each is null where there is none.
template <class T, class C, int HEAD_DIM>
static void attend(const Problem& problem, const Tile& tile, const Tile* previous, const Tile* following, const T* q,
                   const C* kv_cache, const Scratch& scratch, float* merged) {
  const int head_dim = HEAD_DIM ? HEAD_DIM : problem.head_dim;
  const int head_rows = tile.head_rows(problem), rows = tile.rows(problem), width = scratch.columns + 2;
  const bool in_place = fits_in_place<T>(head_rows, head_dim);
  for (int row = 0; row < rows; ++row) {
    const T* query = q + tile.token(problem, row) * problem.q_stride + tile.head(problem, row) * head_dim;
    copy_words(query, head_dim, scratch.queries + row * scratch.words);
  }
  Reader<T, C> reader(scratch, tile.kv_heads, head_dim);
  const Pages<C> pages = pages_of(problem, tile, kv_cache);
  Rows<C> next(pages, tile.first_step(), tile.begin, tile.end);
  int next_heads = tile.kv_heads;
  const auto fetch = [&](int64_t offset) { return Fetcher<C>(next, pages, offset, next_heads); };
  if (!previous) fetch(0).fetch_all(), fetch(pages.value_offset).fetch_all();
  for (int begin = tile.first_step(); begin < tile.end; begin += KEYS) {
    const Rows<C> now = next;
    if (begin + KEYS < tile.end) {
      next = Rows<C>(pages, begin + KEYS, tile.begin, tile.end);
    } else if (following) {
      next = Rows<C>(pages_of(problem, *following, kv_cache), following->first_step(), following->begin, following->end);
      next_heads = following->kv_heads;
    } else {
      next_heads = 0;
    }
    if (begin == tile.first_step() || begin % KEYS_PER_PART == 0) {
      std::fill_n(scratch.maxima, rows, -FLT_MAX);
      std::fill_n(scratch.totals, rows * LANES, 0.0f);
      std::fill_n(scratch.out, rows * scratch.columns, 0.0f);
    }
    const View<T> keys = reader.keys(now, pages, tile.kv_heads);
    if (in_place)
      score_in_place(head_rows, tile.kv_heads, keys, fetch(0), head_dim, scratch);
    else
      score_packed(rows, keys, next, head_dim, scratch);
    for (int row = 0; row < rows; ++row) {
      const int position = tile.position + tile.index(problem, row);
      const int first = problem.window > 0 ? position - problem.window + 1 - begin : 0;
      softmax_step<PackedProbability<T>, Rows<C>::SCALED>(problem, row, first, std::min(now.count, position + 1 - begin),
                                                          scratch, reader.scales + row / head_rows * 2 * KEYS);
    }
    const View<T> values = reader.values(now, pages, tile.kv_heads);
    if (in_place)
      add_values_in_place(head_rows, tile.kv_heads, values, fetch(pages.value_offset), head_dim, scratch);
    else
      add_packed_values(rows, values, next, pages.value_offset, head_dim, scratch);
    if (begin + KEYS < tile.end && (begin + KEYS) % KEYS_PER_PART != 0) continue;
    for (int row = 0; row < rows; ++row) {
      float *target = merged + row * width, *out = scratch.out + row * scratch.columns;
      const float total = sum(load(scratch.totals + row * LANES));
      if (begin / KEYS_PER_PART == tile.begin / KEYS_PER_PART) {
        target[0] = scratch.maxima[row];
        target[1] = total;
        std::copy_n(out, scratch.columns, target + 2);
      } else {
        merge_row(target, scratch.maxima[row], total, out, scratch.columns);
      }
    }
  }
}

template <class T>
INLINE void write_rows(const Problem& problem, const Tile& tile, const float* merged, int width, T* out) {
  for (int row = 0; row < tile.rows(problem); ++row, merged += width) {
    const int64_t head = int64_t{tile.token(problem, row)} * problem.num_heads + tile.head(problem, row);
    for (int i = 0; i < problem.head_dim; i += LANES)
      store(out + head * problem.head_dim + i, load(merged + 2 + i) * (1.0f / merged[1]), problem.head_dim - i);
  }
}

// ------------------------------------------------------------------------------------------------------- driver

struct Plan {
  std::vector<Tile> tiles;
  int rows = 0, kv_heads = 1, parts = 0, part_rows = 0;  // the most of a tile, the number of parts, the most rows of one
  int64_t keys = 0;
  bool valid = true, in_place = true;
};

// The parts of a tile stand one after the other.
template <class T>
static Plan make_plan(const Problem& problem, int sequences, int threads) {
  Plan plan;
  const int group = problem.group(), tile_queries = std::max(1, TILE_ROWS / group);
  int64_t parts = 0;
  for (int sequence = 0; sequence < sequences; ++sequence) parts += problem.seq_lens[sequence] / KEYS_PER_PART + 1;
  // Of a tile that is read in place: all, if that makes enough tasks.
  const int64_t most_heads = STEP_BYTES / (2 * KEYS * problem.head_dim * int64_t{sizeof(T)});
  const int64_t kv_heads = std::min(most_heads, problem.num_kv_heads * parts / (2 * std::max(1, threads)));
  for (int sequence = 0; sequence < sequences; ++sequence) {
    const int start = problem.query_start_loc[sequence], queries = problem.query_start_loc[sequence + 1] - start;
    const int context = problem.seq_lens[sequence] - queries;
    plan.valid &= queries >= 0 && context >= 0;
    for (int done = 0; done < queries && plan.valid; done += tile_queries) {
      Tile tile = {sequence, 0, 1, start + done, std::min(tile_queries, queries - done), context + done, 0, 0, -1};
      const int end = tile.position + tile.queries, head_rows = tile.head_rows(problem);
      const int begin = problem.window > 0 ? std::max(0, tile.position - problem.window + 1) : 0;
      const bool cut = head_rows <= CUT_ROWS && (end - 1) / KEYS_PER_PART > begin / KEYS_PER_PART;
      const bool in_place = fits_in_place<T>(head_rows, problem.head_dim);
      plan.in_place &= in_place;
      for (; tile.kv_head < problem.num_kv_heads; tile.kv_head += tile.kv_heads) {
        if (in_place) tile.kv_heads = std::clamp<int64_t>(kv_heads, 1, problem.num_kv_heads - tile.kv_head);
        for (tile.begin = begin; tile.begin < end; tile.begin = tile.end) {
          tile.end = cut ? std::min(end, (tile.begin / KEYS_PER_PART + 1) * KEYS_PER_PART) : end;
          tile.part = cut ? plan.parts++ : -1;
          plan.tiles.push_back(tile);
        }
        plan.rows = std::max(plan.rows, tile.rows(problem));
        plan.kv_heads = std::max(plan.kv_heads, tile.kv_heads);
        if (cut) plan.part_rows = std::max(plan.part_rows, tile.rows(problem));
      }
      const int32_t* table = problem.block_tables + sequence * problem.table_stride;
      for (int block = begin / problem.block_size; block <= (end - 1) / problem.block_size && plan.valid; ++block)
        plan.valid = block < problem.table_width && table[block] >= 0 && table[block] < problem.num_blocks;
      plan.keys += int64_t{end - begin} * problem.num_kv_heads;
    }
  }
  return plan;
}

// False, and nothing done, where a sequence needs a block that its table or the cache does not have.
template <class T, class C>
static bool attend_paged(const T* q, const C* kv_cache, T* out, const int32_t* block_tables, const int32_t* seq_lens,
                         const int32_t* query_start_loc, int64_t sequences, int64_t num_heads, int64_t num_kv_heads,
                         int64_t head_dim, int64_t block_size, int64_t q_stride, int64_t num_blocks,
                         int64_t block_stride, int64_t table_width, int64_t table_stride, float scale, int64_t window,
                         float soft_cap, int threads) {
  const Problem problem = {int(num_heads), int(num_kv_heads), int(head_dim), int(block_size), q_stride,
                           num_blocks,     block_stride,      table_width,   table_stride,    block_tables,
                           seq_lens,       query_start_loc,   scale,         soft_cap,        int(window)};
  const Plan plan = make_plan<T>(problem, sequences, threads);
  if (!plan.valid) return false;
  const auto run = head_dim == 64 ? attend<T, C, 64> : head_dim == 128 ? attend<T, C, 128> : attend<T, C, 0>;
  const int64_t count = plan.tiles.size();
  const int used = plan.keys < PARALLEL_KEYS ? 1 : threads;
  struct Worker {
    Scratch scratch;
    Tiles tiles;
  };
  const auto make_worker = [&] {
    return Worker{Scratch(plan.rows, head_dim, Dot<T>::STEP / LANES, Reader<T, C>::words(plan.kv_heads, head_dim)),
                  Tiles(uses_tiles<T>())};
  };
  const int columns = Scratch::columns_of(head_dim), width = columns + 2, part_size = plan.part_rows * width;
  const std::unique_ptr<float[]> parts(new float[int64_t{plan.parts} * part_size]);
  // Later tiles of a prefill see more keys: begun first, they leave small ones to even out the threads' ends.
  const auto tile_at = [&](int64_t task) { return &plan.tiles[count - 1 - task]; };
  const auto portions = plan.in_place ? Portions::IN_RUNS : Portions::IN_TURN;
  parallel_portions(portions, count, used, make_worker, [&](int64_t begin, int64_t end, const Worker& worker) {
    for (int64_t task = begin; task < end; ++task) {
      const Tile& tile = *tile_at(task);
      float* merged = tile.part < 0 ? worker.scratch.merged : &parts[int64_t{tile.part} * part_size];
      run(problem, tile, task > begin ? tile_at(task - 1) : nullptr, task + 1 < end ? tile_at(task + 1) : nullptr, q,
          kv_cache, worker.scratch, merged);
      if (tile.part < 0) write_rows(problem, tile, merged, width, out);
    }
  });
  for (int64_t i = 0, next; i < count; i = next) {
    const Tile& tile = plan.tiles[i];
    float* merged = &parts[int64_t{std::max(0, tile.part)} * part_size];
    for (next = i + 1; next < count && plan.tiles[next].part >= 0 && plan.tiles[next].query == tile.query &&
                       plan.tiles[next].kv_head == tile.kv_head;
         ++next) {
      const float* part = &parts[int64_t{plan.tiles[next].part} * part_size];
      for (int row = 0; row < tile.rows(problem); ++row)
        merge_row(merged + row * width, part[row * width], part[row * width + 1], part + row * width + 2, columns);
    }
    if (tile.part >= 0) write_rows(problem, tile, merged, width, out);
  }
  return true;
}
