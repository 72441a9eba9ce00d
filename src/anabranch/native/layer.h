// Transformer layers over the rows of a pass. All threads of a job run the same functions, with six barriers per layer, two more
// if norms follow attention and MLP, and three more if it attends to sources.
#pragma once

#include "attention.h"

namespace {

// Number of rows from which threads share the norms of a pass: then a barrier takes less time than computing all of them.
constexpr int SHARED_NORM_ROWS = 64;

// a layer's MLP for streams only
struct StreamLayer {
  LowRank mlp;       // silu(h down') up', added to the MLP or instead of it
  int32_t replaces;  // 1: instead
};

// Rows of a pass, ``count`` from row ``first`` on, whose products have terms of their own in some of its layers.
struct TermRows {
  int first, count;
  const Terms* layers;  // of each layer of the pass
};

// The rows of a pass with terms: those of its nodes with LoRAs, whose layers begin with ``layer`` of these, and its streams.
inline std::vector<TermRows> term_rows(const RaggedBatch& batch, int layer, const Streams& streams, const Terms* of_streams) {
  std::vector<TermRows> rows;
  for (int b = 0; batch.loras != nullptr && b < batch.batch; ++b) {
    if (batch.loras[b] == nullptr || batch.count(b) == 0) continue;
    const Terms* layers = batch.loras[b] + layer;
    if (!rows.empty() && rows.back().layers == layers && rows.back().first + rows.back().count == batch.start(b))
      rows.back().count += batch.count(b);
    else
      rows.push_back({batch.start(b), batch.count(b), layers});
  }
  if (of_streams != nullptr && streams.count > 0) rows.push_back({batch.nodes, batch.nodes * streams.count, of_streams});
  return rows;
}

// memory for ``rows`` rows between the products of ``count`` layers; ``sides`` may be null
template <class T>
Activations<T> activations(Runner& runner, const Shape& s, const Layer* layers, int count, const StreamLayer* sides,
                           const std::vector<TermRows>& with_terms, int rows) {
  const int64_t m = rows;
  int rank = 1, terms = 1;
  bool added = false;
  for (int i = 0; i < count; ++i) {
    rank = std::max(rank, layers[i].low.data == nullptr ? 0 : layers[i].low.outputs);
    added = added || layers[i].after_attention != nullptr || layers[i].after_mlp != nullptr;
    if (sides != nullptr) rank = std::max(rank, sides[i].mlp.rank());
    for (const TermRows& each : with_terms) terms = std::max(terms, each.layers[i].rank());
  }
  return {runner.qkv.of<float>(m * (s.heads + 2 * s.kv_heads) * s.e),
          rows < SHARED_NORM_ROWS ? nullptr : runner.hidden.of<T>(row_offset<T>(m, s.d)),
          runner.heads.of<T>(row_offset<T>(m, s.heads * s.e)), runner.inner.of<T>(row_offset<T>(m, s.inner)),
          runner.low.of<T>(row_offset<T>(m, rank)), runner.terms.of<T>(row_offset<T>(m, terms)), terms,
          added ? runner.added.of<float>(m * s.d) : nullptr};
}

// The plan of a pass for layers without and with a window, the plan for its sources, and memory for its rows.
template <class T>
struct PreparedPass {
  PassPlan plan, sliding, sources;
  Activations<T> rows;
  const StreamLayer* sides;  // of each layer; null: none
  std::vector<TermRows> terms;
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
  // layer ``index`` of the pass
  LayerPart(Runner& runner, const Shape& s, const Layer& l, int index, const PreparedPass<T>& pass, int thread)
      : runner_(runner), pool_(runner.pool), s_(s), l_(l), index_(index), side_(pass.sides == nullptr ? nullptr : pass.sides + index),
        plan_(l.slides != 0 ? pass.sliding : pass.plan), sources_(pass.sources), rows_(pass.rows), terms_(pass.terms),
        thread_(thread), m_(pass.plan.rows), main_(pass.plan.nodes), fed_(side_ != nullptr && side_->replaces != 0 ? main_ : m_) {
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
    attend(runner_, s_, l_, plan_, rows_, false, thread_);
    pool_.barrier();
    if (s_.wiring != PARALLEL) {
      project_out();
      renorm(l_.norm_in, l_.norm_in_bias);
      if (l_.cross.q.data != nullptr) attend_to_sources();
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
    renorm(l_.norm_mlp, l_.norm_mlp_bias);
  }

 private:
  // h = norm of all rows, or the rows themselves without a weight or where norms follow; shared by the threads if there are many
  void norm(const float* weight, const float* bias) {
    if (s_.wiring == POST) weight = nullptr;
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

  // replaces the rows by their norms, where these follow attention and MLP
  void renorm(const float* weight, const float* bias) {
    if (s_.wiring != POST) return;
    pool_.barrier();
    int first, last;
    split_range(m_, pool_.size(), thread_, &first, &last);
    for (int i = first; i < last; ++i) {
      float* x = plan_.x + static_cast<int64_t>(i) * s_.d;
      normalize(s_, x, weight, bias, x);
    }
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

  using Which = LowRank Terms::*;

  // the memory of rows inside their term
  T* inside(const TermRows& rows) const { return rows_.terms + row_offset<T>(rows.first, rows_.rank); }

  // Computes the rows inside the terms ``which``; returns it, or null if no row has one.
  Which with_rows(Which which, const T* x) {
    bool any = false;
    for (const TermRows& rows : terms_) {
      const Packed& w = (rows.layers[index_].*which).down;
      if (w.data == nullptr) continue;
      down(w, x, rows.first, rows.count, inside(rows), [](F32x16 v) { return v; });
      any = true;
    }
    if (any) pool_.barrier();
    return any ? which : nullptr;
  }

  // y = activation(x w') for ``count`` rows from ``first`` on
  template <class A>
  void down(const Packed& w, const T* x, int first, int count, T* y, A activation) {
    multiply_tiles(pool_, x + row_offset<T>(first, w.width), count, w, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
      store32(y + row_offset<T>(row, w.outputs), b, activation(low), activation(high));
    });
  }

  // Adds block b of the product of ``low``, whose ``have`` rows begin with row ``start`` of the pass, to the sums of ``count`` rows
  // from ``first`` on.
  void add_product(const Packed& up, const T* low, int start, int have, int first, int count, int b, Sums& acc) {
    const int from = std::max(start, first), rows = std::min(start + have, first + count) - from;
    if (rows <= 0) return;
    Sums more;
    clear_sums(more, rows);
    multiply_rows(0, rows, low + row_offset<T>(from - start, up.width), up, b, more);
    F32x16(*sums)[2] = acc + (from - first);
    for (int i = 0; i < rows; ++i)
      for (int half = 0; half < 2; ++half) sums[i][half] = sums[i][half] + more[i][half];
  }

  // adds block b of the terms ``which`` to the sums of ``count`` rows from ``first`` on
  void add_terms(Which which, int first, int count, int b, Sums& acc) {
    if (which == nullptr) return;
    for (const TermRows& rows : terms_) {
      const LowRank& term = rows.layers[index_].*which;
      if (term.down.data != nullptr) add_product(term.up, inside(rows), rows.first, rows.count, first, count, b, acc);
    }
  }

  // ``multiply`` of the first ``count`` rows, without the first ``skipped`` blocks of outputs, with terms, or null
  template <class Done>
  void multiply_all(const T* x, int count, const Packed& w, int skipped, Which which, Done&& done) {
    const Packed rest = w.from(skipped);
    if (which == nullptr)
      return multiply(pool_, x, count, rest, thread_,
                      [&](int row, int b, F32x16 low, F32x16 high) { done(row, b + skipped, low, high); });
    const int size = tile_rows<T>(count, w.width);
    pool_.parallel_for(rest.blocks(), thread_, [&](int b) {
      Sums acc;
      for (int r = 0; r < count; r += size) {
        clear_sums(acc, size);
        const int n = multiply_rows(r, count, x, rest, b, acc);
        add_terms(which, r, n, b + skipped, acc);
        for (int i = 0; i < n; ++i) done(r + i, b + skipped, acc[i][0], acc[i][1]);
      }
    });
  }

  // q, k and v, without the first ``skipped`` blocks of outputs
  void project_in(int skipped) {
    norm(l_.norm_in, l_.norm_in_bias);
    const Which terms = with_rows(&Terms::qkv, h_);
    multiply_all(h_, m_, l_.qkv, skipped, terms, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(l_.qkv_bias, b, BLOCK, &low, &high);
      float* to = rows_.qkv + static_cast<int64_t>(row) * l_.qkv.outputs + b * BLOCK;
      store16(to, low);
      store16(to + 16, high);
    });
  }

  // the value of a row, rotated where that tells streams apart (``turned`` [E])
  const float* turned_value(const float* value, int row, float* turned) const {
    if (plan_.streams.turns == nullptr || row < main_) return value;
    const float* turn = plan_.streams.turns + (row - main_) % plan_.streams.count * 2;
    const F32x16 cos = broadcast(turn[0]), sin = broadcast(turn[1]);
    for (int i = 0, half = s_.e / 2; i < half; i += 16) {  // heads have multiples of 32 channels
      const F32x16 left = load16(value + i), right = load16(value + i + half);
      store16(turned + i, left * cos - right * sin);
      store16(turned + i + half, left * sin + right * cos);
    }
    return turned;
  }

  // writes the rows' keys and values after those of the committed tokens
  void store_keys_values() {
    using P = Storage<T>;
    int first, last;
    split_range(m_ * s_.kv_heads, pool_.size(), thread_, &first, &last);
    for (int i = first; i < last; ++i) {
      const int row = i / s_.kv_heads, head = i % s_.kv_heads, b = plan_.row[row];
      const float* keys = rows_.qkv + static_cast<int64_t>(row) * l_.qkv.outputs + s_.heads * s_.e;
      const int64_t start = plan_.place(b) * s_.row_stride + head * s_.head_stride;
      const int64_t at = start + (plan_.lengths[b] + plan_.key[row]) * s_.cached();
      const int64_t angle = plan_.rotation_of[row] * s_.rope_dim + l_.rope_keys;
      const auto rotate_to = [&](auto* to) {
        rotate(keys, head, s_.kv_heads, l_.k_norm, s_, l_.rope_width, plan_.cos + angle, plan_.sin + angle, to);
      };
      alignas(64) float turned[MAX_HEAD];
      const float* value = turned_value(keys + (s_.kv_heads + head) * s_.e, row, turned);
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
    const Which terms = with_rows(&Terms::out, rows_.heads);
    multiply_all(rows_.heads, m_, l_.out, 0, terms, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(l_.out_bias, b, BLOCK, &low, &high);
      add_to_row(l_.after_attention != nullptr, row, b, low, high);
    });
    add_normed(l_.after_attention);
  }

  // adds attention of all rows to the sources of their batch rows
  void attend_to_sources() {
    const Cross& w = l_.cross;
    prefetch_weight(w.q, pool_.size(), thread_);
    pool_.barrier();
    norm(w.norm, w.norm_bias);
    multiply(pool_, h_, m_, w.q, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(w.q_bias, b, BLOCK, &low, &high);
      float* to = rows_.qkv + static_cast<int64_t>(row) * l_.qkv.outputs + b * BLOCK;
      store16(to, low);
      store16(to + 16, high);
    });
    prefetch_weight(w.out, pool_.size(), thread_);
    pool_.barrier();
    attend(runner_, s_, l_, sources_, rows_, true, thread_);
    pool_.barrier();
    multiply(pool_, rows_.heads, m_, w.out, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(w.out_bias, b, BLOCK, &low, &high);
      add_to_row(false, row, b, low, high);
    });
    renorm(w.norm, w.norm_bias);
  }

  // inner of the MLP; low = silu(h low'). The low-rank term may replace the MLP.
  void mlp_up() {
    norm(l_.norm_mlp, l_.norm_mlp_bias);
    if (side_ != nullptr && side_->mlp.down.data != nullptr)
      down(side_->mlp.down, h_, main_, m_ - main_, rows_.low, [](F32x16 v) { return silu(v); });
    const Which terms = with_rows(&Terms::up, h_);
    with_activation(s_.activation,
                    [&](auto activation) { s_.gated != 0 ? gated_up(activation, terms) : plain_up(activation, terms); });
    if (l_.low.data != nullptr)
      multiply(pool_, h_, m_, l_.low, thread_, [&](int row, int b, F32x16 low, F32x16 high) {
        store32(rows_.low + row_offset<T>(row, l_.low.outputs), b, silu(low), silu(high));
      });
  }

  // inner = activation(up)
  template <class A>
  void plain_up(A activation, Which terms) {
    if (l_.up.data == nullptr) return;
    multiply_all(h_, fed_, l_.up, 0, terms, [&](int row, int b, F32x16 low, F32x16 high) {
      add_bias(l_.up_bias, b, BLOCK, &low, &high);
      store32(rows_.inner + row_offset<T>(row, s_.inner), b, activation(low), activation(high));
    });
  }

  // inner = activation(gate) * up, whose blocks alternate
  template <class A>
  void gated_up(A activation, Which terms) {
    Sums gate, up;
    const int size = tile_rows<T>(fed_, BLOCK);  // all widths of a layer are multiples of BLOCK
    pool_.parallel_for(l_.up.data == nullptr ? 0 : s_.inner / BLOCK, thread_, [&](int b) {
      for (int r = 0; r < fed_; r += size) {
        clear_sums(gate, size);
        multiply_rows(r, fed_, h_, l_.up, 2 * b, gate);
        clear_sums(up, size);
        const int n = multiply_rows(r, fed_, h_, l_.up, 2 * b + 1, up);
        add_terms(terms, r, n, 2 * b, gate);
        add_terms(terms, r, n, 2 * b + 1, up);
        for (int i = 0; i < n; ++i) {
          add_bias(l_.up_bias, 2 * b, BLOCK, &gate[i][0], &gate[i][1]);
          add_bias(l_.up_bias, 2 * b + 1, BLOCK, &up[i][0], &up[i][1]);
          const F32x16 low = activation(gate[i][0]) * up[i][0], high = activation(gate[i][1]) * up[i][1];
          store32(rows_.inner + row_offset<T>(r + i, s_.inner), b, low, high);
        }
      }
    });
  }

  // x += inner down' + low high', and terms
  void mlp_down() {
    const Which terms = with_rows(&Terms::down, rows_.inner);
    const Packed* high = side_ == nullptr || side_->mlp.up.data == nullptr ? nullptr : &side_->mlp.up;
    const int size = tile_rows<T>(fed_, BLOCK), rest = m_ - fed_, of_rest = tile_rows<T>(rest, BLOCK);
    const auto add = [&](int row, int count, int b, Sums& acc) {
      for (int i = 0; i < count; ++i) {
        add_bias(l_.down_bias, b, BLOCK, &acc[i][0], &acc[i][1]);
        add_to_row(l_.after_mlp != nullptr, row + i, b, acc[i][0], acc[i][1]);
      }
    };
    pool_.parallel_for(s_.d / BLOCK, thread_, [&](int b) {
      Sums acc;
      for (int r = 0; r < fed_; r += size) {
        const int n = std::min(size, fed_ - r);
        clear_sums(acc, size);
        if (l_.up.data != nullptr) multiply_rows(r, fed_, rows_.inner, l_.down, b, acc);
        if (l_.low.data != nullptr) multiply_rows(r, fed_, rows_.low, l_.high, b, acc);
        add_terms(terms, r, n, b, acc);
        if (high != nullptr) add_product(*high, rows_.low, main_, m_ - main_, r, n, b, acc);
        add(r, n, b, acc);
      }
      for (int r = 0; r < rest; r += of_rest) {  // streams without the MLP, and without its bias
        const int n = std::min(of_rest, rest - r);
        clear_sums(acc, of_rest);
        multiply_rows(r, rest, rows_.low, *high, b, acc);
        for (int i = 0; i < n; ++i) add_to_row(l_.after_mlp != nullptr, fed_ + r + i, b, acc[i][0], acc[i][1]);
      }
    });
    add_normed(l_.after_mlp);
  }

  Runner& runner_;
  ThreadPool& pool_;
  const Shape& s_;
  const Layer& l_;
  const int index_;
  const StreamLayer* side_;
  const PassPlan &plan_, &sources_;
  const Activations<T>& rows_;
  const std::vector<TermRows>& terms_;
  const int thread_, m_;
  const int main_, fed_;  // the first rows of m_: of nodes, and of those that pass through the MLP
  T* h_;
};

// Plans a pass through layers from ``first`` on, and allocates all of its memory; ``x`` holds the rows [M (1 + S), D] if the batch
// has none. ``sides`` and ``terms`` are those of streams.
template <class T>
PreparedPass<T> prepare_pass(Runner& runner, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch,
                             PassMemory& memory, Workspace& x, int first = 0, const Streams& streams = {},
                             const StreamLayer* sides = nullptr, const Terms* terms = nullptr) {
  int sliding = 0;
  for (int i = 0; i < count; ++i) sliding += layers[i].slides;
  RaggedBatch all = batch;
  const int rows = batch.nodes * (1 + streams.count);
  if (all.x == nullptr) all.x = x.of<float>(static_cast<int64_t>(rows) * s.d);
  const std::vector<TermRows> with_terms = term_rows(batch, first, streams, terms);
  PreparedPass<T> pass{{}, {}, {}, activations<T>(runner, s, layers, count, sides, with_terms, rows), sides, with_terms};
  if (sliding > 0) {
    pass.plan = pass.sliding = plan_pass(all, streams, memory.sliding);
    plan_attention(runner, s, pass.rows, pass.sliding);
  }
  if (sliding < count || count == 0) {
    all.window = 0;
    pass.plan = plan_pass(all, streams, memory.whole);
    plan_attention(runner, s, pass.rows, pass.plan);
  }
  if (batch.sizes != nullptr) {
    pass.sources = flat_plan(pass.plan, batch.sizes, memory.sources);
    plan_attention(runner, s, pass.rows, pass.sources);
  }
  return pass;
}

// refuses positions beyond a model's embeddings of positions
inline void check_places(const PassPlan& plan, const Ends& ends) {
  for (int i = 0; ends.places.rows != nullptr && i < plan.nodes; ++i)
    require(plan.rotation_of[i] < ends.places.words, "a position is beyond the embeddings of positions");
}

// a thread's part of the embeddings of a pass's tokens
template <class P>
void embed_nodes(const ThreadPool& pool, const Shape& s, const PassPlan& plan, const Ends& ends, int thread) {
  int first, end;
  split_range(plan.nodes, pool.size(), thread, &first, &end);
  const P* places = static_cast<const P*>(ends.places.rows);
  for (int i = first; i < end; ++i) {
    float* x = plan.x + static_cast<int64_t>(i) * s.d;
    embed<P>(ends.embedding, ends.tokens[i], s.d, x);
    scale_and_place(s.embedding_scale, places == nullptr ? nullptr : places + plan.rotation_of[i] * s.d, s.d, x);
    if (ends.norm_embedding != nullptr) normalize(s, x, ends.norm_embedding, ends.norm_embedding_bias, x);
  }
}

// Normalises a thread's part of ``count`` rows x [count, D], or only converts it if there is no norm: y [count, D].
template <class P>
void norm_rows(const ThreadPool& pool, const float* x, int count, const Shape& s, const float* weight, const float* bias, P* y,
               int thread) {
  int first, last;
  split_range(count, pool.size(), thread, &first, &last);
  for (int i = first; i < last; ++i) {
    const int64_t row = static_cast<int64_t>(i) * s.d;
    if (weight != nullptr)
      normalize(s, x + row, weight, bias, y + row);
    else
      for (int j = 0; j < s.d; j += 16) store16(y + row + j, load16(x + row + j));
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

// A thread's part of ``count`` layers from ``first`` on, with a barrier after each. ``taps`` receive rows as ``copy_rows`` does.
// Unless ``to_end``, only the keys and values of the last layer are computed.
template <class T>
void run_layers(Runner& runner, const Shape& s, const Layer* layers, int first, int count, const PreparedPass<T>& pass,
                const Tail* tail, const Taps& taps, bool to_end, int thread) {
  layers += first;
  for (int i = 0; i < count; ++i) {
    for (int tap = 0; tap < taps.count; ++tap)
      if (taps.layers[tap] == first + i)
        copy_rows(runner.pool, pass.plan, tail, s.d, taps.rows + static_cast<int64_t>(tap) * taps.stride * s.d, thread);
    LayerPart<T> part(runner, s, layers[i], i, pass, thread);
    to_end || i + 1 < count ? part.run() : part.run_keys_values();
    if (i + 1 < count) prefetch_weight(layers[i + 1].qkv, runner.pool.size(), thread);
    runner.pool.barrier();
  }
}

}  // namespace
