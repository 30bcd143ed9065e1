// CPU kernels, part 2: causal attention over the paged cache, for mixed batches.
//
// One tile = some queries of one sequence x the heads that share one KV head. Its rows pass over the keys, 64 at a
// time, with a running maximum and sum (online softmax: Milakov and Gimelshein, 2018, arXiv 1805.02867; tiled as in
// FlashAttention, Dao et al., 2022, arXiv 2205.14135). A decoding sequence is a tile with one query. Tiles of few rows
// over many keys are cut along the keys too, and merged at the end (Flash-Decoding: Dao et al., 2023); where they are
// cut depends on the sequence alone, so that its result depends neither on the batch nor on the number of threads.
#include "cpu_products.h"

constexpr int TILE_ROWS = 192;      // query rows of a tile: enough to repay packing the keys
constexpr int FEW_ROWS = 8;         // tiles of at most so many read the cache unpacked
constexpr int CUT_ROWS = 24;        // tiles of at most so many are cut along the keys ...
constexpr int KEYS_PER_PART = 256;  // ... into parts of so many
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
  int sequence, kv_head, query, queries;  // rows query .. query + queries - 1 of the packed batch
  int position;                           // of the first query in its sequence
  int begin, end;                         // keys
  int part;                               // index among the parts to be merged, or -1

  // Where the tile's row stands in [tokens, heads].
  int token(const Problem& problem, int row) const { return query + row / problem.group(); }
  int head(const Problem& problem, int row) const { return kv_head * problem.group() + row % problem.group(); }
};

// --------------------------------------------------------------------------------------------------------- tile

// Turns the scores of one row against 64 keys, of which [first, last) are visible, into probabilities relative to
// the row's running maximum, and brings maximum and sum up to date.
template <class Probability>
INLINE void softmax_step(const Problem& problem, int row, int first, int last, const Scratch& scratch) {
  Ints lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  const bool whole = first <= 0 && last >= KEYS;
  Floats scores[VECTORS], highest = splat(-FLT_MAX);
  for (int v = 0; v < VECTORS; ++v) {
    scores[v] = load(scratch.scores + row * KEYS + v * LANES) * problem.scale;
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
    total += probability;
    store(probabilities + v * LANES, probability);
  }
  scratch.maxima[row] = now;
  store(scratch.totals + row * LANES, load(scratch.totals + row * LANES) * rescale + total);
  scratch.rescale[row] = rescale;
}

// Leaves the tile's output, not yet divided by the sums, in scratch beside its rows' maxima and sums. HEAD_DIM is the
// head's size where it is known beforehand, or 0.
template <class T, int HEAD_DIM>
static void attend(const Problem& problem, const Tile& tile, const T* q, const T* kv_cache, const Scratch& scratch) {
  const int head_dim = HEAD_DIM ? HEAD_DIM : problem.head_dim;
  const int group = problem.group(), rows = tile.queries * group;
  const bool few = rows <= FEW_ROWS;
  const T* queries[FEW_ROWS];
  for (int row = 0; row < rows; ++row) {
    const T* query = q + tile.token(problem, row) * problem.q_stride + tile.head(problem, row) * head_dim;
    if (few)
      queries[row] = query;
    else
      copy_words(query, head_dim, scratch.queries + row * scratch.words);
  }
  std::fill_n(scratch.maxima, rows, -FLT_MAX);
  std::fill_n(scratch.totals, rows * LANES, 0.0f);
  std::fill_n(scratch.out, rows * scratch.columns, 0.0f);

  const int64_t head_stride = int64_t{problem.block_size} * head_dim;
  const Pages<T> pages = {kv_cache + tile.kv_head * head_stride,
                          problem.block_tables + tile.sequence * problem.table_stride,
                          problem.block_stride,
                          problem.num_kv_heads * head_stride,
                          problem.block_size,
                          head_dim};
  Rows<T> next(pages, tile.begin, tile.end);
  for (int begin = tile.begin; begin < tile.end; begin += KEYS) {
    const Rows<T> now = next;
    if (begin + KEYS < tile.end) next = Rows<T>(pages, begin + KEYS, tile.end);
    if (few)
      score_rows(rows, queries, now, pages.value_offset, head_dim, scratch);
    else
      score_packed(rows, now, pages.value_offset, head_dim, scratch);
    for (int row = 0; row < rows; ++row) {
      const int position = tile.position + row / group;
      const int first = problem.window > 0 ? position - problem.window + 1 - begin : 0;
      const int last = std::min(now.count, position + 1 - begin);
      if (few)
        softmax_step<float>(problem, row, first, last, scratch);
      else
        softmax_step<PackedProbability<T>>(problem, row, first, last, scratch);
    }
    if (few)
      add_values(0, rows, now, next, pages.value_offset, head_dim, scratch);
    else
      add_packed_values(rows, now, next, pages.value_offset, head_dim, scratch);
  }
  for (int row = 0; row < rows; ++row) scratch.sums[row] = sum(load(scratch.totals + row * LANES));
}

// -------------------------------------------------------------------------------------------------------- parts

template <class T>
INLINE void write_row(const Problem& problem, const Tile& tile, int row, const float* source, float total, T* out) {
  const int head_dim = problem.head_dim;
  T* target = out + (int64_t{tile.token(problem, row)} * problem.num_heads + tile.head(problem, row)) * head_dim;
  for (int i = 0; i < head_dim; i += LANES) store(target + i, load(source + i) * (1.0f / total), head_dim - i);
}

// What remains of the parts of a tile: a maximum, a sum and an output for every row.
struct Parts {
  int columns;
  std::vector<float> memory;

  Parts(int count, int head_dim) : columns((head_dim + LANES - 1) / LANES * LANES) {
    memory.resize(int64_t{count} * CUT_ROWS * (columns + 2));
  }
  float* at(int part, int row) { return memory.data() + (int64_t{part} * CUT_ROWS + row) * (columns + 2); }
};

// Merges `count` parts from `tile`, their first, on.
template <class T>
static void merge(const Problem& problem, const Tile& tile, int count, Parts& parts, T* out) {
  for (int row = 0; row < tile.queries * problem.group(); ++row) {
    float highest = -FLT_MAX, total = 0;
    for (int i = 0; i < count; ++i) highest = std::max(highest, parts.at(tile.part + i, row)[0]);
    float* merged = parts.at(tile.part, row) + 2;
    for (int i = 0; i < count; ++i) {
      const float* part = parts.at(tile.part + i, row);
      const float factor = std::exp(part[0] - highest);
      total += part[1] * factor;
      for (int column = 0; column < parts.columns; column += LANES) {
        const Floats before = i == 0 ? Floats{} : load(merged + column);
        store(merged + column, before + load(part + 2 + column) * factor);
      }
    }
    write_row(problem, tile, row, merged, total, out);
  }
}

// ------------------------------------------------------------------------------------------------------- driver

struct Plan {
  std::vector<Tile> tiles;
  int rows = 0, parts = 0;
  int64_t keys = 0;
  bool valid = true;
};

// The parts of a tile stand one after the other.
static Plan make_plan(const Problem& problem, int sequences) {
  Plan plan;
  const int group = problem.group(), tile_queries = std::max(1, TILE_ROWS / group);
  for (int sequence = 0; sequence < sequences; ++sequence) {
    const int start = problem.query_start_loc[sequence], queries = problem.query_start_loc[sequence + 1] - start;
    const int context = problem.seq_lens[sequence] - queries;
    plan.valid &= queries >= 0 && context >= 0;
    for (int done = 0; done < queries && plan.valid; done += tile_queries) {
      Tile tile = {sequence, 0, start + done, std::min(tile_queries, queries - done), context + done, 0, 0, -1};
      const int end = tile.position + tile.queries;
      const int begin = problem.window > 0 ? std::max(0, tile.position - problem.window + 1) : 0;
      const bool cut = tile.queries * group <= CUT_ROWS && end - begin > KEYS_PER_PART;
      const int step = cut ? KEYS_PER_PART : end - begin;
      for (tile.kv_head = 0; tile.kv_head < problem.num_kv_heads; ++tile.kv_head) {
        for (tile.begin = begin; tile.begin < end; tile.begin += step) {
          tile.end = std::min(end, tile.begin + step);
          tile.part = cut ? plan.parts++ : -1;
          plan.tiles.push_back(tile);
        }
      }
      const int32_t* table = problem.block_tables + sequence * problem.table_stride;
      for (int block = begin / problem.block_size; block <= (end - 1) / problem.block_size && plan.valid; ++block)
        plan.valid = block < problem.table_width && table[block] >= 0 && table[block] < problem.num_blocks;
      plan.rows = std::max(plan.rows, tile.queries * group);
      plan.keys += int64_t{end - begin} * problem.num_kv_heads;
    }
  }
  return plan;
}

// False, and nothing done, where a sequence needs a block that its table or the cache does not have.
template <class T>
static bool paged_attention(const T* q, const T* kv_cache, T* out, const int32_t* block_tables,
                            const int32_t* seq_lens, const int32_t* query_start_loc, int64_t sequences,
                            int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                            int64_t q_stride, int64_t num_blocks, int64_t block_stride, int64_t table_width,
                            int64_t table_stride, float scale, int64_t window, float soft_cap, int threads) {
  const Problem problem = {int(num_heads), int(num_kv_heads), int(head_dim), int(block_size), q_stride,
                           num_blocks,     block_stride,      table_width,   table_stride,    block_tables,
                           seq_lens,       query_start_loc,   scale,         soft_cap,        int(window)};
  const Plan plan = make_plan(problem, sequences);
  if (!plan.valid) return false;
  Parts parts(plan.parts, head_dim);
  const auto run = head_dim == 64 ? attend<T, 64> : head_dim == 128 ? attend<T, 128> : attend<T, 0>;
  const int64_t count = plan.tiles.size();
  const int used = plan.keys < PARALLEL_KEYS ? 1 : threads;
  struct Worker {
    Scratch scratch;
    Tiles tiles;
  };
  const auto make_worker = [&] {
    return Worker{Scratch(plan.rows, head_dim, Dot<T>::STEP / LANES), Tiles(uses_tiles<T>() && plan.rows > FEW_ROWS)};
  };
  parallel_for(count, used, make_worker, [&](int64_t task, const Worker& worker) {
    const Scratch& scratch = worker.scratch;
    // Later tiles of a prefill see more keys: begun first, they leave small ones to even out the threads' ends.
    const Tile& tile = plan.tiles[count - 1 - task];
    run(problem, tile, q, kv_cache, scratch);
    for (int row = 0; row < tile.queries * problem.group(); ++row) {
      const float* result = scratch.out + row * scratch.columns;
      if (tile.part < 0) {
        write_row(problem, tile, row, result, scratch.sums[row], out);
      } else {
        float* part = parts.at(tile.part, row);
        part[0] = scratch.maxima[row];
        part[1] = scratch.sums[row];
        std::copy_n(result, parts.columns, part + 2);
      }
    }
  });
  for (int64_t i = 0, next; i < count; i = next) {
    const Tile& tile = plan.tiles[i];
    for (next = i + 1; next < count && plan.tiles[next].part >= 0 && plan.tiles[next].query == tile.query &&
                       plan.tiles[next].kv_head == tile.kv_head;)
      ++next;
    if (tile.part >= 0) merge(problem, tile, next - i, parts, out);
  }
  return true;
}

EXPORT(paged_attention)
