// Rows that ride in a pass (Speculative Streaming): from layer ``start`` on, every node has S streams of its own, which pass
// through the layers together with the nodes, so that a read of the weights serves all rows. Before that, early exit may prune
// the nodes: those stay whose tokens the states at this layer already expect.
//
// The rows of nodes are computed as without streams, to the bit, unless they attend to these.
#pragma once

#include <algorithm>
#include <optional>

#include "layer.h"
#include "screen.h"

namespace {

struct Rider {
  int32_t start;       // the first layer with streams
  int32_t keep;        // number of nodes that pruning keeps of a batch row; 0: all
  float least;         // minimum log probability of a kept node given its parent; -inf: none
  float softcap;       // of early-exit scores; 0: none
  int32_t from_main;   // 1: streams start from their node's row, 0: from nothing
  int32_t positioned;  // 1: the model's embeddings of positions are added
  Streams streams;
  // a stream starts as m + init(m) + p_j + up silu(inputs m' + h_j): m is its node's row, ' means scaled to unit RMS
  const float* embeddings;  // p [S, D]; null: none
  LowRank init;
  Packed inputs, up;    // data null: none
  const float* hidden;  // h [S, inner]
  const StreamLayer* sides;  // of the layers from ``start`` on; null: none
  const Terms* terms;        // the same
  LowRank exit;  // o of the early-exit scores: head norm(m + o(m))
  // results: the streams after the last norm [kept nodes * S, D], of the cache's type; the kept nodes of each batch row, from its
  // first node on, ascending [kept nodes]; and their number [B]
  void* states;
  int64_t *kept, *counts;
  // early-exit scores of the nodes with children [M, vocabulary], and the log-sum-exp of each [M]; null: not needed
  float *scores, *sums;

  bool prunes() const { return keep > 0 || least > -INFINITY; }
};

// the nodes of a batch that pruning kept
struct KeptNodes {
  std::vector<int64_t> starts, parents;

  // ``kept`` nodes of each row ascend, and have their parents among them
  RaggedBatch of(const RaggedBatch& whole, const int64_t* kept, const int64_t* counts) {
    starts.assign(1, 0), parents.clear();
    std::vector<int64_t> place(static_cast<size_t>(whole.nodes));
    for (int b = 0; b < whole.batch; ++b) {
      for (int64_t i = 0; i < counts[b]; ++i) {
        const int64_t node = kept[starts.back() + i], from = whole.starts[b] + node;
        const int64_t parent = whole.parents == nullptr ? node - 1 : whole.parents[from];
        place[static_cast<size_t>(from)] = i;
        parents.push_back(parent < 0 ? -1 : place[static_cast<size_t>(whole.starts[b] + parent)]);
      }
      starts.push_back(static_cast<int64_t>(parents.size()));
    }
    RaggedBatch batch = whole;
    batch.nodes = static_cast<int32_t>(parents.size());
    batch.starts = starts.data(), batch.parents = parents.data();
    return batch;
  }

  // moves the kept rows of x [M, D] together
  static void gather(const RaggedBatch& whole, const int64_t* kept, const int64_t* counts, int d, float* x) {
    float* to = x;
    for (int b = 0; b < whole.batch; ++b)
      for (int64_t i = 0; i < counts[b]; ++i, to += d)
        std::memmove(to, x + (whole.starts[b] + *kept++) * d, sizeof(float) * static_cast<size_t>(d));
  }
};

// memory of riders, kept with the runner
struct RiderMemory {
  PassMemory plan;
  KeptNodes kept;
  Workspace rows, inner, low;                          // of initial streams, and of early exit
  Workspace exits, normed, converted, sums, scores;  // of early exit
};

// ---- early exit ---------------------------------------------------------------------------------------------------

// Log probabilities of nodes given their parents, from the rows at an early layer; and the nodes that these let stay.
template <class T>
class EarlyExit {
  using P = Storage<T>;

 public:
  EarlyExit(Runner& runner, RiderMemory& memory, const Shape& s, const PassPlan& plan, const Ends& ends, const Rider& rider)
      : pool_(runner.pool), s_(s), plan_(plan), ends_(ends), rider_(rider) {
    std::vector<int> place(static_cast<size_t>(plan.nodes), -1);
    for (int i = 0; i < plan.nodes; ++i)
      if (const int above = parent(i); above >= 0 && place[static_cast<size_t>(above)] < 0) {
        place[static_cast<size_t>(above)] = static_cast<int>(parents_.size());
        parents_.push_back(above);
      }
    children_.resize(parents_.size());
    for (int i = 0; i < plan.nodes; ++i)
      if (const int above = parent(i); above >= 0) children_[static_cast<size_t>(place[static_cast<size_t>(above)])].push_back(i);
    count_ = static_cast<int>(parents_.size());
    rows_ = memory.rows.of<T>(row_offset<T>(count_, s.d));
    low_ = memory.low.of<T>(row_offset<T>(count_, std::max(BLOCK, rider.exit.rank())));
    x_ = memory.exits.of<float>(static_cast<int64_t>(count_) * s.d);
    normed_ = memory.normed.of<P>(static_cast<int64_t>(count_) * s.d);
    converted_ = conversion_buffer<P>(memory.converted, count_, ends.head);
    scores_ = memory.scores.of<float>(plan.nodes);
    sums_ = memory.sums.of<Sum>(static_cast<int64_t>(pool_.size()) * count_);
    std::fill(sums_, sums_ + static_cast<int64_t>(pool_.size()) * count_, Sum{broadcast(LOWEST), zero()});
  }

  // a thread's part
  void run(int thread) {
    int first, last;
    split_range(count_, pool_.size(), thread, &first, &last);
    for (int i = first; i < last; ++i) {
      const float* m = plan_.x + static_cast<int64_t>(parents_[static_cast<size_t>(i)]) * s_.d;
      std::memcpy(x_ + static_cast<int64_t>(i) * s_.d, m, sizeof(float) * static_cast<size_t>(s_.d));
      convert_row(m, s_.d, rows_ + row_offset<T>(i, s_.d));
    }
    pool_.barrier();
    if (rider_.exit.rank() > 0) transform(thread);
    norm_rows(pool_, x_, count_, s_, ends_.norm, ends_.norm_bias, normed_, thread);
    pool_.barrier();
    Sum* sums = sums_ + static_cast<int64_t>(thread) * count_;
    multiply_converted(pool_, normed_, count_, ends_.head, converted_, thread, [&](int m, int b, F32x16 low, F32x16 high) {
      const int left = ends_.head.outputs - b * BLOCK;
      add_bias(ends_.bias, b, left, &low, &high);
      if (rider_.softcap > 0.0f) {
        const F32x16 cap = broadcast(rider_.softcap);
        low = cap * tanh(low / cap), high = cap * tanh(high / cap);
      }
      if (left < BLOCK) low = first_of(low, left), high = first_of(high, left - 16);
      if (rider_.scores != nullptr) {
        const int64_t row = static_cast<int64_t>(parents_[static_cast<size_t>(m)]) * ends_.head.outputs;
        store_outputs(rider_.scores + row + b * BLOCK, left, low, high);
      }
      sums[m].add(low, high);
      for (const int child : children_[static_cast<size_t>(m)]) {
        if (ends_.tokens[child] / BLOCK != b) continue;
        alignas(64) float outputs[BLOCK];
        store16(outputs, low), store16(outputs + 16, high);
        scores_[child] = outputs[ends_.tokens[child] % BLOCK];
      }
    });
  }

  // The kept nodes of each batch row: those no less probable than ``least``, and of these the ``keep`` with the largest product
  // of probabilities along their path, the first among equals.
  void choose(int64_t* kept, int64_t* counts) {
    subtract_sums();
    std::vector<double> joint(static_cast<size_t>(plan_.nodes));
    std::vector<int64_t> order;
    for (int b = 0; b < plan_.batch; ++b) {
      const int start = plan_.start(b);
      const auto of = [&](int64_t node) -> double& { return joint[static_cast<size_t>(start + node)]; };
      order.clear();
      for (int node = 0; node < plan_.count(b); ++node) {
        const int above = parent(start + node);
        // in double, so that a child's sum never rounds above its parent's
        of(node) = above < 0 ? 0.0 : joint[static_cast<size_t>(above)] + static_cast<double>(scores_[start + node]);
        const bool stays = above < 0 || (scores_[start + node] >= rider_.least && of(node) > -HUGE_VAL);
        if (!stays) of(node) = -HUGE_VAL;
        if (stays) order.push_back(node);
      }
      std::stable_sort(order.begin(), order.end(), [&](int64_t left, int64_t right) { return of(left) > of(right); });
      if (rider_.keep > 0 && order.size() > static_cast<size_t>(rider_.keep)) order.resize(static_cast<size_t>(rider_.keep));
      std::sort(order.begin(), order.end());
      kept = std::copy(order.begin(), order.end(), kept);
      counts[b] = static_cast<int64_t>(order.size());
    }
  }

 private:
  static constexpr float LOWEST = -1e30f;

  // of each lane the largest score, and the sum of exp(score - largest)
  struct Sum {
    F32x16 largest, total;

    void add(F32x16 low, F32x16 high) {
      const F32x16 top = max(largest, max(low, high));
      total = total * exp(largest - top) + exp(low - top) + exp(high - top);
      largest = top;
    }
    void add(const Sum& other) {
      const F32x16 top = max(largest, other.largest);
      total = total * exp(largest - top) + other.total * exp(other.largest - top);
      largest = top;
    }
  };

  static F32x16 first_of(F32x16 x, int count) {
    alignas(64) float values[16];
    store16(values, x);
    return masked_load(values, count, broadcast(LOWEST));
  }

  // the parent of a node, as a row of the pass; -1: none
  int parent(int i) const {
    const int start = plan_.start(plan_.row[i]);
    const int64_t above = plan_.parents == nullptr ? i - start - 1 : plan_.parents[i];
    return above < 0 ? -1 : start + static_cast<int>(above);
  }

  // x += o(x)
  void transform(int thread) {
    multiply_tiles(pool_, rows_, count_, rider_.exit.down, thread, [&](int row, int b, F32x16 low, F32x16 high) {
      store32(low_ + row_offset<T>(row, rider_.exit.rank()), b, low, high);
    });
    pool_.barrier();
    multiply(pool_, low_, count_, rider_.exit.up, thread, [&](int row, int b, F32x16 low, F32x16 high) {
      float* x = x_ + static_cast<int64_t>(row) * s_.d + b * BLOCK;
      store16(x, load16(x) + low);
      store16(x + 16, load16(x + 16) + high);
    });
    pool_.barrier();
  }

  // scores become log probabilities
  void subtract_sums() {
    for (int i = 0; i < count_; ++i) {
      Sum sum = sums_[i];
      for (int thread = 1; thread < pool_.size(); ++thread) sum.add(sums_[static_cast<int64_t>(thread) * count_ + i]);
      const float top = reduce_max(sum.largest);
      const float all = top + std::log(reduce_sum(sum.total * exp(sum.largest - broadcast(top))));
      if (rider_.sums != nullptr) rider_.sums[parents_[static_cast<size_t>(i)]] = all;
      for (const int child : children_[static_cast<size_t>(i)]) scores_[child] -= all;
    }
  }

  ThreadPool& pool_;
  const Shape& s_;
  const PassPlan& plan_;
  const Ends& ends_;
  const Rider& rider_;
  std::vector<int> parents_;               // nodes with children
  std::vector<std::vector<int>> children_;  // of each
  int count_;
  T *rows_, *low_;
  float *x_, *scores_;
  P* normed_;
  void* converted_;
  Sum* sums_;
};

// ---- streams ------------------------------------------------------------------------------------------------------

// The initial rows of streams, after those of the nodes. ``T`` is the type of rows between products.
template <class T>
class StreamRows {
 public:
  StreamRows(Runner& runner, RiderMemory& memory, const Shape& s, const PassPlan& plan, const Ends& ends, const Rider& rider)
      : pool_(runner.pool), d_(s.d), nodes_(plan.nodes), count_(plan.streams.count), inner_(rider.inputs.outputs), plan_(plan),
        ends_(ends), rider_(rider), x_(plan.x + static_cast<int64_t>(plan.nodes) * s.d) {
    inputs_ = memory.rows.of<T>(row_offset<T>(nodes_, d_));
    hidden_ = memory.inner.of<T>(row_offset<T>(static_cast<int64_t>(nodes_) * count_, inner_));
    low_ = memory.low.of<T>(row_offset<T>(nodes_, std::max(BLOCK, rider.init.rank())));
    ones_.assign(static_cast<size_t>(d_), 1.0f);
  }

  // a thread's part; ends with a barrier
  void run(int thread) {
    begin(thread);
    pool_.barrier();
    if (rider_.init.rank() > 0) transform(thread);
    if (rider_.inputs.data != nullptr) condition(thread);
  }

 private:
  static constexpr float RMS_EPS = 1e-9f;

  // m + p_j, and m as products read it
  void begin(int thread) {
    using P = Storage<T>;
    int first, last;
    split_range(nodes_, pool_.size(), thread, &first, &last);
    for (int i = first; i < last; ++i) {
      const float* m = plan_.x + static_cast<int64_t>(i) * d_;
      if (rider_.init.rank() > 0) convert_row(m, d_, inputs_ + row_offset<T>(i, d_));
      for (int j = 0; j < count_; ++j) {
        const int64_t row = static_cast<int64_t>(i) * count_ + j, at = plan_.rotation_of[nodes_ + row];
        float* x = x_ + row * d_;
        const float* p = rider_.embeddings == nullptr ? nullptr : rider_.embeddings + static_cast<int64_t>(j) * d_;
        // streams that reach past the last position are never used
        const P* place = rider_.positioned == 0 || ends_.places.rows == nullptr ? nullptr
                         : static_cast<const P*>(ends_.places.rows) + std::min<int64_t>(at, ends_.places.words - 1) * d_;
        for (int c = 0; c < d_; c += 16) {
          F32x16 value = rider_.from_main != 0 ? load16(m + c) : zero();
          if (p != nullptr) value = value + load16(p + c);
          if (place != nullptr) value = value + load16(place + c);
          store16(x + c, value);
        }
      }
    }
  }

  // adds init(m)
  void transform(int thread) {
    multiply_tiles(pool_, inputs_, nodes_, rider_.init.down, thread, [&](int row, int b, F32x16 low, F32x16 high) {
      store32(low_ + row_offset<T>(row, rider_.init.rank()), b, low, high);
    });
    pool_.barrier();
    multiply(pool_, low_, nodes_, rider_.init.up, thread, [&](int row, int b, F32x16 low, F32x16 high) {
      for (int j = 0; j < count_; ++j) add(static_cast<int64_t>(row) * count_ + j, b, low, high);
    });
    pool_.barrier();
  }

  // adds up silu(inputs m' + h_j)
  void condition(int thread) {
    int first, last;
    split_range(nodes_, pool_.size(), thread, &first, &last);
    for (int i = first; i < last; ++i)
      rms_norm(plan_.x + static_cast<int64_t>(i) * d_, ones_.data(), d_, RMS_EPS, inputs_ + row_offset<T>(i, d_));
    pool_.barrier();
    multiply_tiles(pool_, inputs_, nodes_, rider_.inputs, thread, [&](int row, int b, F32x16 low, F32x16 high) {
      for (int j = 0; j < count_; ++j) {
        const float* h = rider_.hidden + static_cast<int64_t>(j) * inner_ + b * BLOCK;
        T* to = hidden_ + row_offset<T>(static_cast<int64_t>(row) * count_ + j, inner_);
        store32(to, b, silu(low + load16(h)), silu(high + load16(h + 16)));
      }
    });
    pool_.barrier();
    multiply(pool_, hidden_, nodes_ * count_, rider_.up, thread,
             [&](int row, int b, F32x16 low, F32x16 high) { add(row, b, low, high); });
    pool_.barrier();
  }

  void add(int64_t row, int b, F32x16 low, F32x16 high) {
    float* x = x_ + row * d_ + b * BLOCK;
    store16(x, load16(x) + low);
    store16(x + 16, load16(x + 16) + high);
  }

  ThreadPool& pool_;
  int d_, nodes_, count_, inner_;
  const PassPlan& plan_;
  const Ends& ends_;
  const Rider& rider_;
  float* x_;  // the rows of streams
  T *inputs_, *hidden_, *low_;
  std::vector<float> ones_;
};

// ---- the pass -----------------------------------------------------------------------------------------------------

// A pass from tokens to its ends (see run_pass) with a rider. ``hidden``, ``chosen`` and ``taps`` have rows for the kept nodes only.
template <class T>
void run_with_rider(Runner& runner, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch, const Ends& ends,
                    const Rider& rider, const Taps& taps) {
  using P = Storage<T>;
  RiderMemory& memory = runner.extension<RiderMemory>();
  ThreadPool& pool = runner.pool;
  RaggedBatch nodes = batch;
  nodes.x = runner.x.of<float>(static_cast<int64_t>(batch.nodes) * (1 + rider.streams.count) * s.d);
  const PreparedPass<T> below = prepare_pass<T>(runner, s, layers, rider.start, nodes, runner.plan, runner.x);
  check_places(below.plan, ends);
  std::optional<EarlyExit<T>> exit;
  if (rider.prunes()) exit.emplace(runner, memory, s, below.plan, ends, rider);
  pool.run([&](int thread) {
    embed_nodes<P>(pool, s, below.plan, ends, thread);
    pool.barrier();
    run_layers(runner, s, layers, 0, rider.start, below, nullptr, taps, true, thread);
    if (exit) exit->run(thread);
  });
  if (exit) {
    exit->choose(rider.kept, rider.counts);
    const RaggedBatch whole = nodes;  // its streams need no room in the cache, those of the kept nodes do
    nodes = memory.kept.of(whole, rider.kept, rider.counts);
    check(s, nodes, rider.streams.count);
    memory.kept.gather(whole, rider.kept, rider.counts, s.d, nodes.x);
    for (int tap = 0; tap < taps.count && taps.layers[tap] < rider.start; ++tap)
      memory.kept.gather(whole, rider.kept, rider.counts, s.d, taps.rows + static_cast<int64_t>(tap) * taps.stride * s.d);
  }
  const int top = count - rider.start;
  const PreparedPass<T> above =
      prepare_pass<T>(runner, s, layers + rider.start, top, nodes, memory.plan, runner.x, rider.start, rider.streams,
                       rider.sides, rider.terms);
  StreamRows<T> streams(runner, memory, s, above.plan, ends, rider);
  const bool choosing = ends.chosen != nullptr;
  ScreenedSearch<P> search;
  if (choosing)
    search = screened_search(runner, static_cast<const P*>(ends.hidden), nodes.nodes, ends.head, ends.bias, ends.screen);
  pool.run([&](int thread) {
    if (rider.streams.count > 0) streams.run(thread);
    run_layers(runner, s, layers, rider.start, top, above, nullptr, taps, true, thread);
    if (ends.hidden == nullptr) return;
    norm_rows(pool, nodes.x, nodes.nodes, s, ends.norm, ends.norm_bias, static_cast<P*>(ends.hidden), thread);
    norm_rows(pool, nodes.x + static_cast<int64_t>(nodes.nodes) * s.d, nodes.nodes * rider.streams.count, s, ends.norm,
              ends.norm_bias, static_cast<P*>(rider.states), thread);
    if (!choosing) return;
    pool.barrier();
    search_argmax(pool, search, thread);
  });
  if (choosing) reduce_argmax(search.best, pool.size(), nodes.nodes, ends.chosen);
}

// ---- checks -------------------------------------------------------------------------------------------------------

// what streams have in a layer of their own; null: nothing
void check(int kind, const Shape& s, const Layer& layer, const StreamLayer* side, const Terms* terms) {
  if (side == nullptr && terms == nullptr) return;
  require(layer.up.data != nullptr && layer.low.data == nullptr, "a layer with streams has no MLP, or a term for all rows");
  if (terms != nullptr) check(kind, s, layer, *terms);
  if (side == nullptr) return;
  check(kind, side->mlp, s.d, s.d);
  if (side->replaces == 0) return;
  require(side->mlp.down.data != nullptr, "streams have no MLP");
  require(terms == nullptr || (terms->up.down.data == nullptr && terms->down.down.data == nullptr), "terms of an MLP that is replaced");
}

void check(int kind, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch, const Ends& ends,
           const Rider& rider) {
  require(in_range(rider.start, 0, count - 1), "streams begin at no layer of the pass");
  require(ends.tokens != nullptr && ends.prefill == nullptr && batch.trailing == 0, "a pass of another kind has a rider");
  require(rider.keep >= 0 && !(rider.least > 0.0f), "pruning keeps no nodes");
  const int streams = rider.streams.count;
  require(streams == 0 || rider.states != nullptr || ends.hidden == nullptr, "a pass has no room for its streams");
  if (rider.prunes()) {
    require(rider.kept != nullptr && rider.counts != nullptr, "a pass has no room for the kept nodes");
    require((rider.scores == nullptr) == (rider.sums == nullptr), "early-exit scores without their sums");
    check(kind, rider.exit, s.d, s.d);
    check(ends.head);
    require(quantized(ends.head.kind) || (ends.head.kind == FLOAT) == (kind == FLOAT), "the head has another type");
    require(ends.head.width == s.d, "the head has another width");
  }
  if (streams == 0) return;
  check(kind, rider.init, s.d, s.d);
  if (rider.inputs.data != nullptr) {
    require(rider.inputs.outputs % BLOCK == 0 && rider.hidden != nullptr, "the term of initial streams has no rows");
    check(rider.inputs, kind, rider.inputs.outputs, s.d);
    check(rider.up, kind, s.d, rider.inputs.outputs);
  }
  for (int i = rider.start; i < count; ++i) {
    const int at = i - rider.start;
    check(kind, s, layers[i], rider.sides == nullptr ? nullptr : rider.sides + at, rider.terms == nullptr ? nullptr : rider.terms + at);
  }
}

}  // namespace
