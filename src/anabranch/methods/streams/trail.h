// Trailing: the streams of the newest committed nodes run through the top layers after the target's pass (native.py).
//
// Stream j of a batch row starts as m + p_j + up silu(inputs [m', e'] + h_j): m is the main row that is trailed, e the
// embedding of the token emitted at it, ' means scaled to unit RMS, p_j and h_j are trained. Batch rows without streams are
// skipped, and their inputs are not read.
#pragma once

#include "layer.h"

namespace {

struct TrailEntry {
  const float* main;               // main rows of a pass [rows, D]
  const int64_t* nodes;            // index of the main row that each batch row trails [B]
  int32_t rows, streams_count;     // streams_count: S
  Table embedding;
  const int64_t* emitted;          // the token emitted at each of these nodes [B]
  Packed inputs, up;
  const float *streams, *hidden;   // p [S, D], h [S, inner]
  const float *norm, *norm_bias;   // the last norm [D]; null: none
};

// memory of trailing streams, kept with the runner
struct TrailMemory {
  Workspace active, main, inputs, hidden;
};

// the initial states of streams
template <class T>
class TrailStart {
 public:
  TrailStart(Runner& runner, const Shape& s, const PassPlan& plan, const TrailEntry& entry)
      : pool_(runner.pool), d_(s.d), inner_(entry.inputs.outputs), plan_(plan), entry_(entry) {
    TrailMemory& memory = runner.extension<TrailMemory>();
    active_ = memory.active.of<int32_t>(plan.batch);
    for (int b = 0; b < plan.batch; ++b)
      if (plan.count(b) > 0) active_[active_count_++] = b;
    main_ = memory.main.of<float>(static_cast<int64_t>(plan.batch) * d_);
    inputs_ = memory.inputs.of<T>(row_offset<T>(active_count_, 2 * d_));
    hidden_ = memory.hidden.of<T>(row_offset<T>(plan.nodes, inner_));
    ones_.assign(static_cast<size_t>(d_), 1.0f);
  }

  // a thread's part, written to the rows of the pass; ends with a barrier
  void run(int thread) {
    gather_inputs(thread);
    pool_.barrier();
    multiply(pool_, inputs_, active_count_, entry_.inputs, thread, [&](int i, int block, F32x16 low, F32x16 high) {
      const int b = active_[i];
      for (int j = 0; j < plan_.count(b); ++j) {
        const float* h = entry_.hidden + static_cast<int64_t>(j) * inner_ + block * BLOCK;
        T* to = hidden_ + row_offset<T>(plan_.start(b) + j, inner_);
        store32(to, block, silu(low + load16(h)), silu(high + load16(h + 16)));
      }
    });
    pool_.barrier();
    multiply(pool_, hidden_, plan_.nodes, entry_.up, thread, [&](int row, int block, F32x16 low, F32x16 high) {
      const int b = plan_.row[row];
      const float* m = main_ + static_cast<int64_t>(b) * d_ + block * BLOCK;
      const float* p = entry_.streams + static_cast<int64_t>(row - plan_.start(b)) * d_ + block * BLOCK;
      float* x = plan_.x + static_cast<int64_t>(row) * d_ + block * BLOCK;
      store16(x, load16(m) + load16(p) + low);
      store16(x + 16, load16(m + 16) + load16(p + 16) + high);
    });
    pool_.barrier();
  }

 private:
  static constexpr float RMS_EPS = 1e-9f;

  // [m', e'] of each active batch row, m rounded to the cache's type
  void gather_inputs(int thread) {
    using P = Storage<T>;
    int first, last;
    split_range(active_count_, pool_.size(), thread, &first, &last);
    for (int i = first; i < last; ++i) {
      const int b = active_[i];
      const float* from = entry_.main + entry_.nodes[b] * d_;
      float* m = main_ + static_cast<int64_t>(b) * d_;
      alignas(64) P part[16];
      for (int j = 0; j < d_; j += 16) {
        store16(part, load16(from + j));
        store16(m + j, load16(part));
      }
      T* to = inputs_ + row_offset<T>(i, 2 * d_);
      rms_norm(m, ones_.data(), d_, RMS_EPS, to);
      embed_normed(entry_.embedding, entry_.emitted[b], ones_.data(), d_, RMS_EPS, to + row_offset<T>(1, d_));
    }
  }

  ThreadPool& pool_;
  int d_, inner_, active_count_ = 0;
  const PassPlan& plan_;
  const TrailEntry& entry_;
  std::vector<float> ones_;
  int32_t* active_;  // batch rows with streams
  float* main_;      // m [B, D]
  T *inputs_, *hidden_;
};

// Streams through all layers and the last norm: ``states`` [M, D].
template <class T>
void trail(Runner& runner, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch, const TrailEntry& entry,
           Storage<T>* states) {
  const PreparedPass<T> pass = prepare_pass<T>(runner, s, layers, count, batch, runner.plan, runner.x);
  TrailStart<T> start(runner, s, pass.plan, entry);
  runner.pool.run([&](int thread) {
    start.run(thread);
    run_layers<T>(runner, s, layers, 0, count, pass, nullptr, Taps{}, true, thread);
    norm_rows(runner.pool, pass.plan.x, pass.plan.nodes, s, entry.norm, entry.norm_bias, states, thread);
  });
}

// ---- checks -------------------------------------------------------------------------------------------------------

void check(int kind, const Shape& s, const RaggedBatch& batch, const TrailEntry& entry) {
  require(entry.main != nullptr && entry.nodes != nullptr && entry.emitted != nullptr && entry.streams != nullptr &&
              entry.hidden != nullptr,
          "a pointer of streams is null");
  require(s.d <= MAX_EMBEDDING_WIDTH, "the model is too wide for streams");
  check(entry.embedding, s.d);
  require(entry.inputs.outputs % BLOCK == 0, "the width of the streams' first product is not a multiple of 32");
  check(entry.inputs, kind, entry.inputs.outputs, 2 * s.d);
  check(entry.up, kind, s.d, entry.inputs.outputs);
  for (int b = 0; b < batch.batch; ++b) {
    if (batch.count(b) == 0) continue;
    require(batch.count(b) <= entry.streams_count, "a row has too many streams");
    require(in_range(entry.nodes[b], 0, static_cast<int64_t>(entry.rows) - 1), "a trailed node is not in the pass");
    require(in_range(entry.emitted[b], 0, entry.embedding.words - 1), "a token is not in the vocabulary");
  }
}

}  // namespace
