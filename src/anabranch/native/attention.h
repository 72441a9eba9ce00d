// Attention of the nodes of a pass over the KV cache. Each node attends to its visible keys in text order, so the result
// does not depend on where a key is in the cache, nor on which queries are computed together.
//
// T is the type of the rows between two products, P = Storage<T> the cache's, Q = Operand<P> that of queries and weights. Tasks
// are compiled for each P, not for each T, and only sums of values for each number of channels: attention for each of both took
// a compiler as long as everything else.
#pragma once

#include "products.h"
#include "runner.h"

namespace {

constexpr int KEY_TILE = 64;     // keys that are transposed at a time
constexpr int VALUE_TILE = 512;  // values that all queries of a task use while they are in the second-level cache
constexpr int CACHED_TILE = 128;  // values of a quantised cache that are converted at a time, into the first-level cache
constexpr int MAX_TASK_QUERIES = 24;
constexpr int MAX_HEAD = 256;  // channels

// rows between the products of a layer; hidden: of all threads, null where each has its own
template <class T>
struct Activations {
  float* qkv;
  T *hidden, *heads, *inner, *low;
  T* terms;      // rows inside a low-rank term
  int rank;      // the largest rank of these terms
  float* added;  // what attention or the MLP adds to the rows, before its norm
};

// memory for the scores of ``span`` keys in whole vectors, and one value more
inline int64_t padded_scores(int span) { return (static_cast<int64_t>(span) + 31) / 16 * 16; }

// ---- quantised caches ----------------------------------------------------------------------------------------------
//
// A key or value of a quantised cache is E values of int8, then a float32 scale for each 32 of them: channels of keys differ
// much in size. Attention converts them to P, those of the pass's own nodes too, so that a key is the same to every node.

// Quantises E values; a group with a value that is not finite becomes NaN.
inline void quantize_row(const float* from, int e, int8_t* to) {
  for (int g = 0; g < e / BLOCK; ++g) {
    QuantizedGroup group;
    store32(&group, 0, load16(from + g * BLOCK), load16(from + g * BLOCK + 16));
    std::memcpy(to + g * BLOCK, group.value, BLOCK);
    std::memcpy(to + e + g * static_cast<int>(sizeof(float)), &group.scale, sizeof(float));
  }
}

// The keys or the values of one batch row and kv head, of ``e`` channels.
template <class P>
class CachedRows {
 public:
  CachedRows(const void* rows, int64_t offset, int e, bool quantized)
      : rows_(static_cast<const char*>(rows) + offset * (quantized ? 1 : static_cast<int64_t>(sizeof(P)))), e_(e),
        quantized_(quantized) {}

  bool quantized() const { return quantized_; }

  // ``count`` rows from ``first`` on: the cache's own, or converted into ``tile``
  const P* at(int first, int count, P* tile) const {
    if (!quantized_) return reinterpret_cast<const P*>(rows_) + static_cast<int64_t>(first) * e_;
    convert(first, count, tile);
    return tile;
  }

 private:
  NOINLINE void convert(int first, int count, P* to) const {
    const int groups = e_ / BLOCK, bytes = e_ + groups * static_cast<int>(sizeof(float));
    const char* row = rows_ + static_cast<int64_t>(first) * bytes;
    for (int i = 0; i < count; ++i, row += bytes, to += e_)
      for (int g = 0; g < groups; ++g) {
        float scale;
        std::memcpy(&scale, row + e_ + g * static_cast<int>(sizeof(float)), sizeof(float));
        const int8_t* value = reinterpret_cast<const int8_t*>(row) + g * BLOCK;
        store16(to + g * BLOCK, load16(value) * broadcast(scale));
        store16(to + g * BLOCK + 16, load16(value + 16) * broadcast(scale));
      }
  }

  const char* rows_;
  int e_;
  bool quantized_;
};

// ---- tasks --------------------------------------------------------------------------------------------------------

// number of queries of a batch row whose scores fit the second-level cache
inline int cached_queries(const PassPlan& plan, int b) {
  return std::max(1, std::min(MAX_TASK_QUERIES, 131072 / plan.span(b)));
}

// Number of queries per task, of so many queries of a batch row. ``even``: tasks of ``cached_queries`` divide evenly among the
// threads.
inline int queries_per_task(const Shape& s, const PassPlan& plan, int b, int queries, int threads, bool even) {
  const int group = s.heads / s.kv_heads;
  int size = cached_queries(plan, b);
  // transposing the keys takes as long as three queries, so a task has at least the queries of one node
  if (!even) size = std::min(size, std::max(group, (queries + threads - 1) / threads));
  // tasks of about the same size, rounded up: queries are scored three, six or twelve at a time
  const auto parts = [queries](int each) { return (queries + each - 1) / each; };
  size = parts(parts(size));
  return size > 3 ? std::min((size + 2) / 3 * 3, MAX_TASK_QUERIES) : size;
}

// Plans the attention tasks of a pass, and reserves the threads' scratch memory: jobs must not throw.
template <class T>
void plan_attention(Runner& runner, const Shape& s, const Activations<T>& rows, PassPlan& plan) {
  const int group = s.heads / s.kv_heads, threads = runner.pool.size(), streams = plan.streams.count;
  // calls f(batch row, its first row of the pass, number of queries) for the nodes and the streams of each batch row
  const auto each = [&](auto&& f) {
    for (int b = 0; b < plan.batch; ++b) {
      if (plan.count(b) == 0) continue;
      f(b, plan.start(b), plan.count(b) * group);
      if (streams > 0) f(b, plan.nodes + plan.start(b) * streams, plan.count(b) * streams * group);
    }
  };
  int64_t tasks = 0, queries_of_task = 0, scores = 0;
  each([&](int b, int, int queries) {
    const int size = cached_queries(plan, b);
    tasks += s.kv_heads * ((queries + size - 1) / size);
  });
  std::vector<AttentionTask>& list = *plan.tasks;
  list.clear();
  each([&](int b, int node, int queries) {
    const int size = queries_per_task(s, plan, b, queries, threads, tasks % threads == 0);
    queries_of_task = std::max<int64_t>(queries_of_task, size);
    scores = std::max(scores, size * padded_scores(plan.span(b)));
    for (int head = 0; head < s.kv_heads; ++head)
      for (int first = 0; first < queries; first += size)
        list.push_back({b, head, node, first, std::min(size, queries - first)});
  });
  for (Scratch& memory : runner.scratch) {
    if (rows.hidden == nullptr) memory.hidden.of<T>(row_offset<T>(plan.rows, s.d));
    memory.queries.of<Operand<Storage<T>>>(queries_of_task * s.e);
    memory.scores.of<float>(scores);
    memory.sums.of<F32x16>(queries_of_task * s.e / 16);
    if (s.quantized_cache) memory.cached.of<Storage<T>>(CACHED_TILE * s.e);
    if (matrix_tiles) memory.pairs.of<KeyLanes>(CACHED_TILE / BLOCK * s.e);
  }
}

// ---- parts of a task ----------------------------------------------------------------------------------------------

// Head ``head`` of ``count`` heads of a row: RMS norm (where the model has one), rotary embedding of the first ``width``
// channels, and conversion to T.
template <class T>
inline void rotate(const float* heads, int head, int count, const float* norm, const Shape& s, int width, const float* cos,
                   const float* sin, T* to) {
  alignas(64) float normed[MAX_HEAD];
  const float* v = heads + head * s.e;
  if (norm != nullptr) {
    const float* over = s.heads_normed != 0 ? heads : v;
    const int values = s.heads_normed != 0 ? count * s.e : s.e;
    const float factor = 1.0f / std::sqrt(sum_of_squares(over, values) / static_cast<float>(values) + s.eps);
    const float* weight = s.heads_normed != 0 ? norm + head * s.e : norm;
    for (int i = 0; i < s.e; ++i) normed[i] = v[i] * factor * weight[i];
    v = normed;
  }
  if (width == 0) {
    for (int i = 0; i < s.e; i += 16) store16(to + i, load16(v + i));
    return;
  }
  const int half = width / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const F32x16 a = load16(v + i), b = load16(v + i + half);
    store16(to + i, a * load16(cos + i) - b * load16(sin + i));
    store16(to + i + half, b * load16(cos + i + half) + a * load16(sin + i + half));
  }
  for (; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    store1(to + i, a * cos[i] - b * sin[i]);
    store1(to + i + half, b * cos[i + half] + a * sin[i + half]);
  }
  for (i = width; i < s.e; ++i) store1(to + i, v[i]);
}

// Scores of QUERIES queries and up to KEY_TILE transposed keys in groups of 16, as many groups at a time as there are
// accumulators: this hides the latency of the sums and loads each value of a query once for all groups. ``words`` are those of a
// key.
template <class T, int QUERIES>
NOINLINE void score_keys(const T* q, int64_t stride, const KeyLanes* keys, int words, int groups, float* to,
                       int64_t to_stride) {
  constexpr int AT_ONCE = std::min(KEY_TILE / 16, std::max(1, ACCUMULATORS / QUERIES));
  const auto score = [&](int first, auto at_once) {
    constexpr int GROUPS = at_once;
    F32x16 acc[QUERIES][GROUPS];
    for (auto& row : acc)
      for (auto& a : row) a = zero();
    for (int d = 0; d < words; ++d) {
      KeyLanes k[GROUPS];
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) k[g] = keys[(first + g) * words + d];
#pragma GCC unroll 12
      for (int i = 0; i < QUERIES; ++i) {
        const auto value = broadcast_word(q + i * stride + PER_LANE<T> * d);
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) acc[i][g] = dot_add<T>(acc[i][g], value, k[g]);
      }
    }
    for (int i = 0; i < QUERIES; ++i)
      for (int g = 0; g < GROUPS; ++g) store16(to + i * to_stride + 16 * (first + g), acc[i][g]);
  };
  int g = 0;
  for (; g + AT_ONCE <= groups; g += AT_ONCE) score(g, std::integral_constant<int, AT_ONCE>{});
  for (; g < groups; ++g) score(g, std::integral_constant<int, 1>{});
}

// Caps n scores: scores = cap tanh(scale scores / cap); ``p`` is padded to whole vectors.
inline void cap_scores(float* p, int n, float scale, float cap) {
  for (int i = 0; i < n; i += 16) store16(p + i, broadcast(cap) * tanh(load16(p + i) * broadcast(scale / cap)));
}

// Softmax of n scores without the division; returns the sum to divide by. ``p`` is padded to whole vectors. The weights, values
// of T at ``to``, which is not after the scores, may overwrite them. A zero follows, so that they form whole pairs.
template <class T>
inline float softmax(const float* p, int n, float scale, T* to) {
  const F32x16 low = broadcast(-INFINITY);
  F32x16 largest[4] = {low, low, low, low};
  int i = 0;
  for (; i + 64 <= n; i += 64)
    for (int c = 0; c < 4; ++c) largest[c] = max(largest[c], load16(p + i + 16 * c));
  for (; i < n; i += 16) largest[0] = max(largest[0], masked_load(p + i, n - i, low));
  const F32x16 top = broadcast(reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3]))));
  F32x16 total = zero();
  if constexpr (std::is_same<T, float>::value) {
    for (i = 0; i <= n; i += 16) {
      const F32x16 v = keep_first(n - i, exp((masked_load(p + i, n - i, top) - top) * broadcast(scale)));
      store16(to + i, v);
      total = total + v;
    }
  } else {
    constexpr float LOG2E = 1.44269504f;
    const F32x16 slope = broadcast(scale * LOG2E), offset = top * slope;
    const auto weight = [&](F32x16 v) { return exp2(mul_add(v, slope, zero() - offset)); };
    for (i = 0; i + 16 <= n; i += 16) total = total + store_rounded(to + i, weight(load16(p + i)));
    total = total + store_rounded(to + i, keep_first(n - i, weight(masked_load(p + i, n - i, top))));
  }
  return reduce_sum(total);
}

// ---- a task -------------------------------------------------------------------------------------------------------

// One task. ``heads`` receives rows of Q, or (``quantizes``) of QuantizedGroup. With ``to_source``, keys and values are those of the
// batch row's source.
template <class P>
class Attention {
  using Q = Operand<P>;

 public:
  Attention(const Shape& s, const Layer& l, const PassPlan& plan, const float* qkv, void* heads, bool quantizes, bool to_source,
            const AttentionTask& task, Scratch& memory)
      : s_(s), l_(l), plan_(plan), qkv_(qkv), heads_(heads), quantizes_(quantizes), to_source_(to_source), task_(task),
        keys_(rows_of(l.keys, plan.source_keys)), values_(rows_of(l.values, plan.source_values)) {
    group_ = s.heads / s.kv_heads;
    length_ = static_cast<int>(plan.seen[task.row]);
    const int last_row = node_of(task.count - 1), last = plan.flat ? -1 : plan.ancestors[plan.offsets[last_row + 1] - 1];
    // the rows of a task do not attend to later keys than its last row
    span_ = length_ + last + 1;
    from_ = span_;
    for (int node = node_of(0); node <= last_row; ++node) from_ = std::min(from_, begin_of(node));
    width_ = padded_scores(span_);
    q_ = memory.queries.of<Q>(static_cast<int64_t>(task.count) * s.e);
    p_ = memory.scores.of<float>(task.count * width_);
    sums_ = memory.sums.of<F32x16>(task.count * s.e / 16);
    if (keys_.quantized()) tile_ = memory.cached.of<P>(CACHED_TILE * s.e);
    if (in_tiles()) pairs_ = memory.pairs.of<KeyLanes>(CACHED_TILE / BLOCK * s.e);
  }

  NOINLINE void run() {
    rotate_queries();
    score();
    float total[MAX_TASK_QUERIES];
    for (int i = 0; i < task_.count; ++i) {
      const int from = in_tiles() ? begin_of(node_of(i)) : 0;  // of the first visible score, after ``gather_seen``
      const int seen = gather_seen(i);
      float* p = p_ + i * width_ + from;
      if (s_.biases != nullptr && !to_source_) add_biases(i, p, seen);
      if (s_.softcap > 0.0f) cap_scores(p, seen, s_.scale, s_.softcap);
      total[i] = softmax<Q>(p, seen, s_.softcap > 0.0f ? 1.0f : s_.scale, weights_of(i) + from);
    }
    if (in_tiles()) return weigh_values_in_tiles(total);
    switch (s_.e / BLOCK) {
      case 1: weigh_values<2>(total); break;
      case 2: weigh_values<4>(total); break;
      case 3: weigh_values<6>(total); break;
      case 4: weigh_values<8>(total); break;
      default: weigh_values<16>(total); break;
    }
  }

 private:
  alignas(64) static constexpr P ZEROS[MAX_HEAD] = {};

  // queries from ``first`` on whose weights are applied together to the first ``count`` keys after ``from``
  struct Part {
    int first, queries, from, count;
  };

  // the cached rows of this task
  CachedRows<P> rows_of(const void* cache, const void* const* sources) const {
    if (!to_source_) {
      const int64_t offset = plan_.place(task_.row) * s_.row_stride + task_.head * s_.head_stride;
      return {cache, offset, s_.e, s_.quantized_cache != 0};
    }
    const int64_t head = static_cast<int64_t>(l_.source) * s_.kv_heads + task_.head;
    return {sources[task_.row], head * plan_.seen[task_.row] * s_.e, s_.e, false};
  }

  // Whether scores and values are multiplied in matrix tiles. Sums are over 32 keys at a time then, the first at a multiple of 32
  // in the text.
  static bool in_tiles() { return matrix_tiles && std::is_same<Q, bf16>::value; }

  Q* weights_of(int i) const { return reinterpret_cast<Q*>(p_ + i * width_); }  // of query i, over its scores

  int node_of(int i) const { return task_.node + (task_.first + i) / group_; }

  int head_of(int i) const { return task_.head * group_ + (task_.first + i) % group_; }

  void rotate_queries() {
    const float* norm = to_source_ ? nullptr : l_.q_norm;
    const int width = to_source_ ? 0 : l_.rope_width;
    for (int i = 0; i < task_.count; ++i) {
      const int64_t node = node_of(i), angle = plan_.rotation_of[node] * s_.rope_dim + l_.rope_queries;
      rotate(qkv_ + node * l_.qkv.outputs, head_of(i), s_.heads, norm, s_, width, plan_.cos + angle, plan_.sin + angle,
             q_ + i * s_.e);
    }
  }

  // Adds the biases of query i to the scores of the keys that it sees, whose positions ascend from 0 on.
  void add_biases(int i, float* p, int seen) const {
    const int64_t far = s_.distance, at = plan_.rotation_of[node_of(i)];
    const float* biases = s_.biases + head_of(i) * (2 * far + 1);
    for (int j = 0; j < seen; ++j) p[j] += biases[std::min(std::max(j - at, -far), far) + far];
  }

  // scores of all queries and keys
  void score() {
    const int words = s_.e / PER_LANE<Q>;
    KeyLanes transposed[KEY_TILE / 16 * MAX_HEAD / PER_LANE<Q>];
    for (int k = from_ / BLOCK * BLOCK; k < span_; k += KEY_TILE) {
      const int groups = (std::min(KEY_TILE, span_ - k) + 15) / 16;
      for (int g = 0; g < groups; ++g) {
        const int at = k + 16 * g, have = std::min(16, span_ - at);
        transpose_keys(keys_.at(at, have, tile_), have, s_.e, transposed + g * words);
      }
      if constexpr (MATRIX_UNIT && std::is_same<Q, bf16>::value)
        if (in_tiles()) {
          score_in_tiles(task_.count, q_, s_.e, transposed, words, groups, p_ + k, width_);
          continue;
        }
      int i = 0;
      const auto score_some = [&](auto queries) {
        for (; i + queries <= task_.count; i += queries)
          score_keys<Q, queries>(q_ + i * s_.e, s_.e, transposed, words, groups, p_ + i * width_ + k, width_);
      };
      if constexpr (ACCUMULATORS >= 12) score_some(std::integral_constant<int, 12>{});
      score_some(std::integral_constant<int, 6>{});
      score_some(std::integral_constant<int, 3>{});
      score_some(std::integral_constant<int, 1>{});
    }
  }

  // the place in the text of the first key visible to a node, and how many keys from there on are side by side in the cache
  int begin_of(int node) const { return plan_.first[node] + plan_.skipped[node]; }
  int adjacent_of(int node) const { return length_ - plan_.first[node] + plan_.run[node]; }

  // the place after the last key visible to a node
  int end_of(int node) const { return length_ + plan_.skipped[node] + plan_.offsets[node + 1] - plan_.offsets[node]; }

  // the value at a place of a node's text, or zeros where it does not see it
  const P* value_of(int node, int place, P* converted) const {
    if (place < begin_of(node) || place >= end_of(node)) return ZEROS;
    const int own = place - length_ - plan_.skipped[node];  // the number of the ancestor
    return values_.at(own < plan_.run[node] ? place : length_ + plan_.ancestors[plan_.offsets[node] + own], 1, converted);
  }

  // Compacts the scores of the keys visible to query i, in text order: committed tokens, then ancestors. Returns the count. The
  // first comes to the front, or (``in_tiles``) stays at its place in the text.
  int gather_seen(int i) {
    float *scores = p_ + i * width_, *p = scores;
    const int node = node_of(i), from = begin_of(node);
    int n = adjacent_of(node);
    if (in_tiles())
      p += from;
    else if (from > 0)
      std::memmove(p, p + from, sizeof(float) * static_cast<size_t>(n));
    for (int a = plan_.offsets[node] + plan_.run[node]; a < plan_.offsets[node + 1]; ++a)
      p[n++] = scores[length_ + plan_.ancestors[a]];
    return n;
  }

  // Queries with the same visible committed tokens, as many at a time as fit: ``at_once``, 3 or 1. The leading nodes of the batch
  // row that are visible to all of them are treated as part of the committed tokens.
  int split_queries(Part* parts, int at_once) const {
    int count = 0;
    for (int i = 0; i < task_.count;) {
      const int from = begin_of(node_of(i));
      int same = 1;
      while (same < at_once && i + same < task_.count && begin_of(node_of(i + same)) == from) ++same;
      const int queries = same == at_once ? at_once : same >= 3 ? 3 : 1;
      int common = adjacent_of(node_of(i));
      for (int node = node_of(i); node <= node_of(i + queries - 1); ++node) common = std::min(common, adjacent_of(node));
      parts[count++] = {i, queries, from, common / PER_LANE<Q> * PER_LANE<Q>};
      i += queries;
    }
    return count;
  }

  // for heads of 16 NE channels
  template <int NE>
  NOINLINE void weigh_values(const float* total) {
    constexpr int AT_ONCE = 24 / NE < 6 ? 24 / NE : 6;  // queries whose accumulators fit the registers
    Part parts[MAX_TASK_QUERIES];
    const int count = split_queries(parts, AT_ONCE);
    int longest = 0;
    for (int i = 0; i < count; ++i) longest = std::max(longest, parts[i].count);
    for (int i = 0; i < task_.count * NE; ++i) sums_[i] = zero();
    const int64_t stride = width_ * PER_LANE<Q>;
    const int size = tile_ != nullptr ? CACHED_TILE : VALUE_TILE;
    for (int j = 0; j < longest; j += size)
      for (int i = 0; i < count; ++i) {
        const Part& part = parts[i];
        if (j >= part.count) continue;
        const int have = std::min(size, part.count - j);
        const P* values = tile_of_values(part.from + j, have);
        const auto accumulate = [&](auto queries) {
          accumulate_values<queries, NE>(static_cast<const Q*>(weights_of(part.first)) + j, stride, values, have,
                                         sums_ + part.first * NE);
        };
        if (part.queries == AT_ONCE)
          accumulate(std::integral_constant<int, AT_ONCE>{});
        else if (part.queries == 3)
          accumulate(std::integral_constant<int, 3>{});
        else
          accumulate(std::integral_constant<int, 1>{});
      }
    for (const Part* part = parts; part < parts + count; ++part)
      for (int i = part->first; i < part->first + part->queries; ++i) finish<NE>(i, part->count, total[i]);
  }

  // ``count`` values from ``first`` on; queries of a task that see the same ones share their conversion
  const P* tile_of_values(int first, int count) {
    if (tile_ != nullptr && first == tile_first_ && count <= tile_count_) return tile_;
    tile_first_ = first, tile_count_ = count;
    return values_.at(first, count, tile_);
  }

  // Adds the values visible to query i after the first ``done`` keys, divides, and stores the head.
  template <int NE>
  void finish(int i, int done, float total) {
    constexpr int STEP = PER_LANE<Q>;
    const Q* p = weights_of(i);
    F32x16* acc = sums_ + i * NE;
    const int node = node_of(i), from = begin_of(node), end = end_of(node) - from;
    alignas(64) P converted[STEP][16 * NE];
    const auto value_at = [&](int j, int place) { return value_of(node, from + j, converted[place]); };
    for (int j = done; j < end; j += STEP) {
      KeyLanes pair[NE];
      load_pairs<NE>(value_at(j, 0), value_at(std::min(j + STEP, end) - 1, STEP - 1), pair);
      const auto weight = broadcast_word(p + j);
      for (int c = 0; c < NE; ++c) acc[c] = dot_add<Q>(acc[c], weight, pair[c]);
    }
    store_head(i, total);
  }

  // Divides the sums of query i and stores the head.
  void store_head(int i, float total) {
    const F32x16 inverse = broadcast(1.0f / total);
    F32x16* acc = sums_ + i * s_.e / 16;
    const int64_t row = static_cast<int64_t>(node_of(i)) * s_.heads + head_of(i);
    auto* groups = static_cast<QuantizedGroup*>(heads_) + row_offset<QuantizedGroup>(row, s_.e);
    Q* to = static_cast<Q*>(heads_) + row_offset<Q>(row, s_.e);
    for (int c = 0; c < s_.e / BLOCK; ++c) {
      unpair_sums<Q>(&acc[2 * c], &acc[2 * c + 1]);
      const F32x16 low = acc[2 * c] * inverse, high = acc[2 * c + 1] * inverse;
      quantizes_ ? store32(groups, c, low, high) : store32(to, c, low, high);
    }
  }

  // ---- values in matrix tiles ----
  //
  // A sum is over the keys at 32 places in the text, the first a multiple of 32; places that a query does not see have weight zero.
  // Up to ``shared_end``, a place is the same key for all queries of the task.

  int shared_end(int end) const {
    for (int node = node_of(0); node <= node_of(task_.count - 1); ++node)
      if (const int adjacent = begin_of(node) + adjacent_of(node); adjacent < end_of(node))
        end = std::min(end, adjacent / BLOCK * BLOCK);
    return end;
  }

  // Writes the pair of values for the places 2 i and 2 i + 1 of ``pairs_``.
  void store_pair(int i, const P* one, const P* two) {
    KeyLanes* to = pairs_ + i / 16 * s_.e + i % 16;
    for (int c = 0; c < s_.e; c += BLOCK, to += 32) {
      KeyLanes both[2];
      load_pairs<2>(one + c, two + c, both);
      to[0] = both[0], to[16] = both[1];
    }
  }

  NOINLINE void weigh_values_in_tiles(const float* total) {
    if constexpr (MATRIX_UNIT && std::is_same<Q, bf16>::value) {
      const int vectors = s_.e / 16, from = from_ / BLOCK * BLOCK;
      int last = 0;
      for (int i = 0; i < task_.count; ++i) last = std::max(last, end_of(node_of(i)));
      last = (last + BLOCK - 1) / BLOCK * BLOCK;
      for (int i = 0; i < task_.count; ++i) {
        std::fill(weights_of(i) + from, weights_of(i) + begin_of(node_of(i)), Q{0});
        std::fill(weights_of(i) + end_of(node_of(i)), weights_of(i) + last, Q{0});
      }
      for (int i = 0; i < task_.count * vectors; ++i) sums_[i] = zero();
      const int shared = shared_end(last);
      const int64_t stride = 2 * width_;
      for (int place = from; place < shared; place += CACHED_TILE) {
        const int count = std::min(CACHED_TILE, shared - place), have = std::min(count, span_ - place);
        const P* values = values_.at(place, have, tile_);
        for (int i = 0; i < count / 2; ++i) {
          const P* one = values + static_cast<int64_t>(2 * i) * s_.e;
          store_pair(i, 2 * i < have ? one : ZEROS, 2 * i + 1 < have ? one + s_.e : ZEROS);
        }
        add_values_in_tiles(task_.count, weights_of(0) + place, stride, pairs_, count / BLOCK, vectors, sums_);
      }
      for (int i = 0, queries; i < task_.count; i += queries) {
        const int node = node_of(i);
        for (queries = 1; i + queries < task_.count && node_of(i + queries) == node;) ++queries;
        alignas(64) P converted[2][MAX_HEAD];
        for (int place = std::max(shared, begin_of(node) / BLOCK * BLOCK); place < end_of(node); place += BLOCK) {
          for (int pair = 0; pair < BLOCK / 2; ++pair)
            store_pair(pair, value_of(node, place + 2 * pair, converted[0]), value_of(node, place + 2 * pair + 1, converted[1]));
          add_values_in_tiles(queries, weights_of(i) + place, stride, pairs_, 1, vectors, sums_ + i * vectors);
        }
      }
      for (int i = 0; i < task_.count; ++i) store_head(i, total[i]);
    }
  }

  const Shape& s_;
  const Layer& l_;
  const PassPlan& plan_;
  const float* qkv_;
  void* heads_;
  bool quantizes_, to_source_;
  const AttentionTask& task_;
  int group_, length_, from_, span_;  // the keys from ``from_`` to ``span_`` are visible to queries of the task
  int64_t width_;
  Q* q_;
  float* p_;
  F32x16* sums_;
  P* tile_ = nullptr;                     // of a quantised cache
  KeyLanes* pairs_ = nullptr;             // values as matrix tiles take them
  int tile_first_ = -1, tile_count_ = 0;  // the values in ``tile_``
  CachedRows<P> keys_, values_;
};

// a thread's part of attention, to the texts of the rows or to their sources
template <class T>
void attend(Runner& runner, const Shape& s, const Layer& l, const PassPlan& plan, const Activations<T>& rows, bool to_source,
            int thread) {
  constexpr bool QUANTIZES = std::is_same<T, QuantizedGroup>::value;
  Scratch& memory = runner.scratch[static_cast<size_t>(thread)];
  runner.pool.parallel_for(static_cast<int>(plan.tasks->size()), thread, [&](int i) {
    const AttentionTask& task = (*plan.tasks)[static_cast<size_t>(i)];
    Attention<Storage<T>>(s, l, plan, rows.qkv, rows.heads, QUANTIZES, to_source, task, memory).run();
  });
}

}  // namespace
