// Transformer layers over the rows of a pass. All threads of a job run the same functions, with six barriers per layer, or
// eight if norms follow attention and MLP.
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
  bool added = false;
  for (int i = 0; i < count; ++i) {
    rank = std::max(rank, layers[i].low.data == nullptr ? 0 : layers[i].low.outputs);
    added = added || layers[i].after_attention != nullptr || layers[i].after_mlp != nullptr;
  }
  return {runner.qkv.of<float>(m * (s.heads + 2 * s.kv_heads) * s.e),
          nodes < SHARED_NORM_ROWS ? nullptr : runner.hidden.of<T>(row_offset<T>(m, s.d)),
          runner.heads.of<T>(row_offset<T>(m, s.heads * s.e)), runner.inner.of<T>(row_offset<T>(m, s.inner)),
          runner.low.of<T>(row_offset<T>(m, rank)), added ? runner.added.of<float>(m * s.d) : nullptr};
}

// The plan of a pass for layers without and with a window, and memory for its rows.
template <class T>
struct PreparedPass {
  PassPlan plan, sliding;
  Activations<T> rows;
};

// calls f(activation)
template <class F>
inline void with_activation(int activation, F&& f) {
  switch (activation) {
    case SILU: f(Silu{}); break;
    case GELU: f(Gelu{}); break;
    case GELU_TANH: f(GeluTanh{}); break;
    default: f(Relu{}); break;
  }
}

// a norm of a row
template <class T>
inline void normalize(const Shape& s, const float* x, const float* weight, const float* bias, T* y) {
  s.layer_norm != 0 ? layer_norm(x, weight, bias, s.d, s.eps, y) : rms_norm(x, weight, s.d, s.eps, y);
}

// One thread's part of one layer.
template <class T>
class LayerPart {
 public:
  LayerPart(Runner& runner, const Shape& s, const Layer& l, const PreparedPass<T>& pass, int thread)
      : runner_(runner), pool_(runner.pool), s_(s), l_(l), plan_(l.slides != 0 ? pass.sliding : pass.plan), rows_(pass.rows),
        thread_(thread), m_(pass.plan.nodes) {
    Scratch& memory = runner.scratch[static_cast<size_t>(thread)];
    h_ = rows_.hidden == nullptr ? memory.hidden.of<T>(row_offset<T>(m_, s.d)) : rows_.hidden;
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
    if (s_.parallel == 0) {
      project_out();
      prefetch_weight(l_.up, pool_.size(), thread_);
      pool_.barrier();
      mlp_up();
    } else {  // the MLP reads the rows before attention's output is added
      mlp_up();
      pool_.barrier();
      project_out();
    }
    prefetch_weight(l_.down, pool_.size(), thread_);
    pool_.barrier();
    mlp_down();
  }

 private:
  // h = norm of all rows, or the rows themselves without a weight; shared by the threads if there are many rows
  void norm(const float* weight, const float* bias) {
    int first = 0, last = m_;
    if (rows_.hidden != nullptr) split_range(m_, pool_.size(), thread_, &first, &last);
    for (int i = first; i < last; ++i) {
      const float* x = plan_.x + static_cast<int64_t>(i) * s_.d;
      T* h = h_ + row_offset<T>(i, s_.d);
      if (weight != nullptr)
        normalize(s_, x, weight, bias, h);
      else
        for (int b = 0; b < s_.d / BLOCK; ++b) store32(h, b, load16(x + b * BLOCK), load16(x + b * BLOCK + 16));
    }
    if (rows_.hidden != nullptr) pool_.barrier();
  }

  // adds 32 outputs to a row of x, or keeps them for ``add_normed``
  void add_to_row(bool keeps, int row, int b, F32x16 low, F32x16 high) {
    const int64_t at = static_cast<int64_t>(row) * s_.d + b * BLOCK;
    if (keeps) {
      store16(rows_.added + at, low);
      store16(rows_.added + at + 16, high);
      return;
    }
    float* x = plan_.x + at;
    const F32x16 scale = broadcast(s_.residual_scale);
    store16(x, load16(x) + low * scale);
    store16(x + 16, load16(x + 16) + high * scale);
  }

  // adds the norm of what ``add_to_row`` kept, if there is one
  void add_normed(const float* weight) {
    if (weight == nullptr) return;
    pool_.barrier();
    int first, last;
    split_range(m_, pool_.size(), thread_, &first, &last);
    const F32x16 scale = broadcast(s_.residual_scale);
    for (int i = first; i < last; ++i) {
      float *x = plan_.x + static_cast<int64_t>(i) * s_.d, *added = rows_.added + static_cast<int64_t>(i) * s_.d;
      normalize(s_, added, weight, nullptr, added);
      for (int j = 0; j < s_.d; j += 16) store16(x + j, load16(x + j) + load16(added + j) * scale);
    }
  }

  // q, k and v, without the first ``skipped`` blocks of outputs
  void project_in(int skipped) {
    norm(l_.norm_in, l_.norm_in_bias);
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
      const float* keys = rows_.qkv + static_cast<int64_t>(row) * l_.qkv.outputs + s_.heads * s_.e;
      const int64_t at = b * s_.row_stride + head * s_.head_stride + (plan_.lengths[b] + node) * s_.cached();
      const int64_t angle = plan_.rotation_of[row] * s_.rope_dim + l_.rope_keys;
      const auto rotate_to = [&](auto* to) {
        rotate(keys, head, s_.kv_heads, l_.k_norm, s_, l_.rope_width, plan_.cos + angle, plan_.sin + angle, to);
      };
      const float* value = keys + (s_.kv_heads + head) * s_.e;
      if (s_.quantized_cache) {
        alignas(64) float key[MAX_HEAD];
        rotate_to(key);
        quantize_row(key, s_.e, static_cast<int8_t*>(l_.keys) + at);
        quantize_row(value, s_.e, static_cast<int8_t*>(l_.values) + at);
        continue;
      }
      rotate_to(static_cast<P*>(l_.keys) + at);
      for (int c = 0; c < s_.e; c += 16) store16(static_cast<P*>(l_.values) + at + c, load16(value + c));
    }
  }

  void project_out() {
    multiply(pool_, rows_.heads, m_, l_.out, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(l_.out_bias, b, BLOCK, &low, &high);
      add_to_row(l_.after_attention != nullptr, row, b, low, high);
    });
    add_normed(l_.after_attention);
  }

  // inner of the MLP; low = silu(h low'). The low-rank term may replace the MLP.
  void mlp_up() {
    norm(l_.norm_mlp, l_.norm_mlp_bias);
    with_activation(s_.activation, [&](auto activation) { s_.gated != 0 ? gated_up(activation) : plain_up(activation); });
    if (l_.low.data != nullptr)
      multiply(pool_, h_, m_, l_.low, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
        store32(rows_.low + row_offset<T>(row, l_.low.outputs), b, silu(low), silu(high));
      });
  }

  // inner = activation(up)
  template <class A>
  void plain_up(A activation) {
    if (l_.up.data == nullptr) return;
    multiply(pool_, h_, m_, l_.up, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(l_.up_bias, b, BLOCK, &low, &high);
      store32(rows_.inner + row_offset<T>(row, s_.inner), b, activation(low), activation(high));
    });
  }

  // inner = activation(gate) * up, whose blocks alternate
  template <class A>
  void gated_up(A activation) {
    Sums gate, up;
    const int size = tile_rows<T>(m_, BLOCK);  // all widths of a layer are multiples of BLOCK
    pool_.parallel_for(l_.up.data == nullptr ? 0 : s_.inner / BLOCK, thread_, [&](int b) {
      for (int r = 0; r < m_; r += size) {
        clear_sums(gate, size);
        multiply_rows(r, m_, h_, l_.up, 2 * b, gate);
        clear_sums(up, size);
        const int n = multiply_rows(r, m_, h_, l_.up, 2 * b + 1, up);
        for (int i = 0; i < n; ++i) {
          add_bias(l_.up_bias, 2 * b, BLOCK, &gate[i][0], &gate[i][1]);
          add_bias(l_.up_bias, 2 * b + 1, BLOCK, &up[i][0], &up[i][1]);
          const F32x16 low = activation(gate[i][0]) * up[i][0], high = activation(gate[i][1]) * up[i][1];
          store32(rows_.inner + row_offset<T>(r + i, s_.inner), b, low, high);
        }
      }
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
        for (int i = 0; i < n; ++i) {
          add_bias(l_.down_bias, b, BLOCK, &acc[i][0], &acc[i][1]);
          add_to_row(l_.after_mlp != nullptr, r + i, b, acc[i][0], acc[i][1]);
        }
      }
    });
    add_normed(l_.after_mlp);
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

// Plans a pass and allocates all of its memory; ``x`` holds the rows [M, D] if the batch has none.
template <class T>
PreparedPass<T> prepare_pass(Runner& runner, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch,
                             PassMemory& memory, Workspace& x) {
  int sliding = 0;
  for (int i = 0; i < count; ++i) sliding += layers[i].slides;
  RaggedBatch all = batch;
  if (all.x == nullptr) all.x = x.of<float>(static_cast<int64_t>(batch.nodes) * s.d);
  PreparedPass<T> pass{{}, {}, activations<T>(runner, s, layers, count, batch.nodes)};
  if (sliding > 0) {
    pass.plan = pass.sliding = plan_pass(all, memory.sliding);
    plan_attention(runner, s, pass.rows, pass.sliding);
  }
  if (sliding < count) {
    all.window = 0;
    pass.plan = plan_pass(all, memory.whole);
    plan_attention(runner, s, pass.rows, pass.plan);
  }
  return pass;
}

// Normalises a thread's part of the rows of a pass: y [M, D].
template <class P>
void norm_rows(const ThreadPool& pool, const PassPlan& plan, const Shape& s, const float* weight, const float* bias, P* y,
               int thread) {
  int first, last;
  split_range(plan.nodes, pool.size(), thread, &first, &last);
  for (int i = first; i < last; ++i) {
    const int64_t row = static_cast<int64_t>(i) * s.d;
    normalize(s, plan.x + row, weight, bias, y + row);
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
    LayerPart<T> part(runner, s, layers[i], pass, thread);
    to_end || i + 1 < count ? part.run() : part.run_keys_values();
    if (i + 1 < count) prefetch_weight(layers[i + 1].qkv, runner.pool.size(), thread);
    runner.pool.barrier();
  }
}

}  // namespace
