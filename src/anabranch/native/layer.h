// Transformer layers over the rows of a pass. All threads of a job run the same functions, with six barriers per layer.
#pragma once

#include "attention.h"

namespace {

// Number of rows from which threads share the norms of a pass: then a barrier takes less time than computing all of them.
constexpr int SHARED_NORM_ROWS = 64;

// memory for the rows between the products of ``count`` layers
template <class T>
Activations<T> activations(Runner& runner, const Shape& s, const Layer* layers, int count, int nodes) {
  const int64_t m = nodes;
  int rank = 1;
  for (int i = 0; i < count; ++i) rank = std::max(rank, layers[i].low.data == nullptr ? 0 : layers[i].low.outputs);
  return {runner.qkv.of<float>(m * (s.heads + 2 * s.kv_heads) * s.e),
          nodes < SHARED_NORM_ROWS ? nullptr : runner.hidden.of<T>(row_offset<T>(m, s.d)),
          runner.heads.of<T>(row_offset<T>(m, s.heads * s.e)), runner.inner.of<T>(row_offset<T>(m, s.inner)),
          runner.low.of<T>(row_offset<T>(m, rank))};
}

// One thread's part of one layer.
template <class T>
class LayerPart {
 public:
  LayerPart(Runner& runner, const Shape& s, const Layer& l, const PassPlan& plan, const Activations<T>& rows, int thread)
      : runner_(runner), pool_(runner.pool), s_(s), l_(l), plan_(plan), rows_(rows), thread_(thread), m_(plan.nodes) {
    h_ = rows.hidden == nullptr ? runner.scratch[static_cast<size_t>(thread)].hidden.of<T>(row_offset<T>(m_, s.d)) : rows.hidden;
  }

  // The keys and values of the layer only. Returns without a barrier, like ``run``.
  void run_keys_values() {
    project_in(s_.heads * s_.e / BLOCK);
    pool_.barrier();
    store_keys_values();
  }

  // Returns without a barrier: outputs of other threads may not be complete.
  void run() {
    project_in(0);
    prefetch_weight(l_.out, pool_.size(), thread_);
    pool_.barrier();
    store_keys_values();
    pool_.barrier();
    attend(runner_, s_, l_, plan_, rows_, thread_);
    pool_.barrier();
    project_out();
    prefetch_weight(l_.up, pool_.size(), thread_);
    pool_.barrier();
    mlp_up();
    prefetch_weight(l_.down, pool_.size(), thread_);
    pool_.barrier();
    mlp_down();
  }

 private:
  // h = norm of all rows, or the rows themselves without a weight; shared by the threads if there are many rows
  void norm(const float* weight) {
    int first = 0, last = m_;
    if (rows_.hidden != nullptr) split_range(m_, pool_.size(), thread_, &first, &last);
    for (int i = first; i < last; ++i) {
      const float* x = plan_.x + static_cast<int64_t>(i) * s_.d;
      T* h = h_ + row_offset<T>(i, s_.d);
      if (weight != nullptr)
        rms_norm(x, weight, s_.d, s_.eps, h);
      else
        for (int b = 0; b < s_.d / BLOCK; ++b) store32(h, b, load16(x + b * BLOCK), load16(x + b * BLOCK + 16));
    }
    if (rows_.hidden != nullptr) pool_.barrier();
  }

  // adds 32 outputs to a row of x
  void add_to_row(int row, int b, F32x16 low, F32x16 high) {
    float* x = plan_.x + static_cast<int64_t>(row) * s_.d + b * BLOCK;
    store16(x, load16(x) + low);
    store16(x + 16, load16(x + 16) + high);
  }

  // q, k and v, without the first ``skipped`` blocks of outputs
  void project_in(int skipped) {
    norm(l_.norm_in);
    const Packed rest = l_.qkv.from(skipped);
    multiply(pool_, h_, m_, rest, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
      b += skipped;
      add_bias(l_.qkv_bias, b, BLOCK, &low, &high);
      float* to = rows_.qkv + static_cast<int64_t>(row) * l_.qkv.outputs + b * BLOCK;
      store16(to, low);
      store16(to + 16, high);
    });
  }

  // writes the nodes' keys and values after those of the committed tokens
  void store_keys_values() {
    using P = Storage<T>;
    int first, last;
    split_range(m_ * s_.kv_heads, pool_.size(), thread_, &first, &last);
    for (int i = first; i < last; ++i) {
      const int row = i / s_.kv_heads, head = i % s_.kv_heads, b = plan_.row[row], node = row - plan_.start(b);
      float* key = rows_.qkv + static_cast<int64_t>(row) * l_.qkv.outputs + (s_.heads + head) * s_.e;
      const int64_t at = b * s_.row_stride + head * s_.head_stride + (plan_.lengths[b] + node) * s_.e;
      const int64_t angle = plan_.rotation_of[row] * s_.rope_dim;
      rotate(key, l_.k_norm, s_, plan_.cos + angle, plan_.sin + angle, static_cast<P*>(l_.keys) + at);
      const float* value = key + s_.kv_heads * s_.e;
      for (int c = 0; c < s_.e; c += 16) store16(static_cast<P*>(l_.values) + at + c, load16(value + c));
    }
  }

  void project_out() {
    multiply(pool_, rows_.heads, m_, l_.out, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(l_.out_bias, b, BLOCK, &low, &high);
      add_to_row(row, b, low, high);
    });
  }

  // inner = silu(gate) * up, whose blocks alternate; low = silu(h low'). The low-rank term may replace the MLP.
  void mlp_up() {
    norm(l_.norm_mlp);
    Sums gate, up;
    const int size = tile_rows<T>(m_, BLOCK);  // all widths of a layer are multiples of BLOCK
    pool_.parallel_for(l_.up.data == nullptr ? 0 : s_.inner / BLOCK, thread_, [&](int b) {
      for (int r = 0; r < m_; r += size) {
        clear_sums(gate, size);
        multiply_rows(r, m_, h_, l_.up, 2 * b, gate);
        clear_sums(up, size);
        const int n = multiply_rows(r, m_, h_, l_.up, 2 * b + 1, up);
        for (int i = 0; i < n; ++i) {
          const F32x16 low = silu(gate[i][0]) * up[i][0], high = silu(gate[i][1]) * up[i][1];
          store32(rows_.inner + row_offset<T>(r + i, s_.inner), b, low, high);
        }
      }
    });
    if (l_.low.data != nullptr)
      multiply(pool_, h_, m_, l_.low, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
        store32(rows_.low + row_offset<T>(row, l_.low.outputs), b, silu(low), silu(high));
      });
  }

  // x += inner down' + low high'
  void mlp_down() {
    const int size = tile_rows<T>(m_, BLOCK);
    pool_.parallel_for(s_.d / BLOCK, thread_, [&](int b) {
      Sums acc;
      for (int r = 0; r < m_; r += size) {
        const int n = std::min(size, m_ - r);
        clear_sums(acc, size);
        if (l_.up.data != nullptr) multiply_rows(r, m_, rows_.inner, l_.down, b, acc);
        if (l_.low.data != nullptr) multiply_rows(r, m_, rows_.low, l_.high, b, acc);
        for (int i = 0; i < n; ++i) add_to_row(r + i, b, acc[i][0], acc[i][1]);
      }
    });
  }

  Runner& runner_;
  ThreadPool& pool_;
  const Shape& s_;
  const Layer& l_;
  const PassPlan& plan_;
  const Activations<T>& rows_;
  const int thread_, m_;
  T* h_;
};

// The plan of a pass, and memory for its rows.
template <class T>
struct PreparedPass {
  PassPlan plan;
  Activations<T> rows;
};

// Plans a pass and allocates all of its memory; ``x`` holds the rows [M, D] if the batch has none.
template <class T>
PreparedPass<T> prepare_pass(Runner& runner, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch,
                             PlanMemory& memory, Workspace& x) {
  PreparedPass<T> pass{plan_pass(batch, memory), activations<T>(runner, s, layers, count, batch.nodes)};
  if (pass.plan.x == nullptr) pass.plan.x = x.of<float>(static_cast<int64_t>(batch.nodes) * s.d);
  plan_attention(runner, s, pass.rows, pass.plan);
  return pass;
}

// Normalises a thread's part of the rows of a pass: y [M, D].
template <class P>
void norm_rows(const ThreadPool& pool, const PassPlan& plan, const Shape& s, const float* weight, P* y, int thread) {
  int first, last;
  split_range(plan.nodes, pool.size(), thread, &first, &last);
  for (int i = first; i < last; ++i) {
    const int64_t row = static_cast<int64_t>(i) * s.d;
    rms_norm(plan.x + row, weight, s.d, s.eps, y + row);
  }
}

// Copies a thread's part of the rows [M, D] of a pass: of the nodes of ``tail``, or of all if it is null.
inline void copy_rows(const ThreadPool& pool, const PassPlan& plan, const Tail* tail, int d, float* to, int thread) {
  int first, last;
  split_range(tail == nullptr ? plan.nodes : tail->batch.nodes, pool.size(), thread, &first, &last);
  for (int i = first; i < last; ++i)
    std::memcpy(to + static_cast<int64_t>(i) * d,
                plan.x + static_cast<int64_t>(tail == nullptr ? i : tail->nodes[static_cast<size_t>(i)]) * d,
                sizeof(float) * static_cast<size_t>(d));
}

// A thread's part of ``count`` layers, with a barrier after each. ``tap`` (or null) receives the rows before layer ``tapped``,
// see ``copy_rows``. Unless ``to_end``, only the keys and values of the last layer are computed.
template <class T>
void run_layers(Runner& runner, const Shape& s, const Layer* layers, int count, const PreparedPass<T>& pass, const Tail* tail,
                float* tap, int tapped, bool to_end, int thread) {
  for (int i = 0; i < count; ++i) {
    if (tap != nullptr && i == tapped) copy_rows(runner.pool, pass.plan, tail, s.d, tap, thread);
    LayerPart<T> part(runner, s, layers[i], pass.plan, pass.rows, thread);
    to_end || i + 1 < count ? part.run() : part.run_keys_values();
    if (i + 1 < count) prefetch_weight(layers[i + 1].qkv, runner.pool.size(), thread);
    runner.pool.barrier();
  }
}

}  // namespace
