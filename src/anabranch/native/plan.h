// The inputs of a pass, and its plan: the position and the visible keys of each node.
//
// B batch rows; M nodes of a pass, batch row by batch row; D model width, H query heads, K kv heads, E channels of a head.
#pragma once

#include <vector>

#include "pack.h"
#include "vector_math.h"
#include "workspace.h"

namespace {

// the weights of a layer's attention to the sources of the rows; q.data null: none
struct Cross {
  const float *norm, *norm_bias, *q_bias, *out_bias;  // null: none
  Packed q, out;
};

// the weights and the cache of a layer
struct Layer {
  // weights of norms [D], null: none; of q and k [E], or of all heads together
  const float *norm_in, *norm_mlp, *q_norm, *k_norm, *after_attention, *after_mlp;
  const float *norm_in_bias, *norm_mlp_bias, *qkv_bias, *out_bias, *up_bias, *down_bias;  // null: none
  Packed qkv, out, up, down, low, high;  // low, high: a low-rank term added to the MLP (data null: none)
  // Rotations of the first ``rope_width`` channels of a head, by the columns of cos and sin from these on; 0: none.
  int32_t rope_queries, rope_keys, rope_width;
  int32_t slides;       // 1: nodes see the pass's window, 0: all positions
  void *keys, *values;  // of the pass's first batch row: [K, capacity, E]
  Cross cross;
  int32_t source;  // the layer in the keys and values of sources
};

// a low-rank term: x -> (x down') up'; data null: none
struct LowRank {
  Packed down, up;

  int rank() const { return down.data == nullptr ? 0 : down.outputs; }
};

// low-rank terms that are added to the products of a layer
struct Terms {
  LowRank qkv, out, up, down;

  int rank() const { return std::max(std::max(qkv.rank(), out.rank()), std::max(up.rank(), down.rank())); }
};

enum Activation { SILU, GELU, GELU_TANH, RELU };

// SEQUENTIAL: norm, attention, sum, norm, MLP, sum. PARALLEL: attention and MLP read the same rows. POST: attention, sum, norm, MLP,
// sum, norm
enum Wiring { SEQUENTIAL, PARALLEL, POST };

// sizes shared by all layers
struct Shape {
  int32_t d, heads, kv_heads, e, inner, rope_dim;  // rope_dim: the columns of cos and sin
  int32_t activation;                              // of the MLP
  int32_t gated;         // 1: inner = activation(gate) * up, 0: inner = activation(up)
  int32_t wiring;
  int32_t layer_norm;    // 1: LayerNorm, 0: RMS norm
  int32_t heads_normed;  // 1: q_norm and k_norm normalise all heads together, 0: each head
  int32_t quantized_cache;  // 1: keys and values are in int8 (``quantize_row``), 0: in the type of rows
  float eps, scale;
  float softcap;                          // of attention's scores; 0: none
  float residual_scale, embedding_scale;  // of what a layer adds to the rows, and of the embedding
  // Added to the scores of a key that is k positions after its query: [H, 2 distance + 1], from -distance on; beyond that as there.
  // Null: none.
  const float* biases;
  int64_t distance;
  int64_t row_stride, head_stride;  // of the cache, in values, or in bytes if it is quantised

  // the size of a cached key or value, in the unit of the strides: E values; quantised, E bytes and a scale for each 32
  int64_t cached() const { return quantized_cache ? e + e / BLOCK * static_cast<int64_t>(sizeof(float)) : e; }
};

// the nodes of a pass
struct RaggedBatch {
  int32_t batch, nodes;  // B, M
  int32_t window;        // the number of positions that a node sees, including its own (0: all)
  int32_t trailing;      // 1: all nodes see the window of the newest committed token, 0: each its own
  int32_t positions;     // rows of cos and sin
  int32_t whole;         // 1: each node sees all nodes of its batch row, 0: its ancestors and itself
  float* x;                // [M, D], in and out
  const float *cos, *sin;  // [positions, Shape::rope_dim]
  const int64_t* starts;   // [B + 1]: batch row b has the nodes starts[b] to starts[b + 1] - 1, possibly none
  const int64_t* lengths;  // committed tokens [B]
  const int64_t* parents;  // of each node [M], relative to its batch row; parents come first; -1: none; null: chains
  const int64_t* rotations;    // the row of cos and sin that is position 0 of each batch row [B]; null: 0
  const int64_t* places;   // the row of the cache of each batch row [B]; null: b
  const int64_t* sizes;    // of the source of each batch row [B]; null: no layer attends to sources
  const void* const* source_keys;  // of each batch row [B]: [layers, K, size, E], of the type of rows
  const void* const* source_values;
  const Terms* const* loras;  // the terms of each batch row in each layer of the pass [B], null: none; null: no row has one

  int start(int b) const { return static_cast<int>(starts[b]); }
  int count(int b) const { return static_cast<int>(starts[b + 1] - starts[b]); }
  int64_t place(int b) const { return places == nullptr ? b : places[b]; }
};

// Rows that ride in a pass: S streams of each node. Stream j (from 1 on) of a node is j positions after it, and attends to what
// the node attends to of the main stream, and to streams 1 to j of the node. In rows of a pass [M (1 + S)], and in the cache
// after the nodes of a batch row, streams follow all nodes, node by node.
struct Streams {
  int32_t count;       // S; 0: none
  int32_t own;         // 1: a node also attends to its own streams
  const float* turns;  // cosine and sine of the angle by which the values of each stream are rotated [S, 2]; null: 0
};

// embeddings [words, D]: row by row, or as a packed weight of the same type, or (RAW_TABLE) as rows of a GGUF file
struct Table {
  const void* rows;
  int32_t packed, words;  // words: the size of the vocabulary
  int32_t type;           // the StoredType of a RAW_TABLE
};
constexpr int RAW_TABLE = 2;

// the start of a pass, from tokens, and its end: the last norm, and the tokens that the head chooses
struct Ends {
  Table embedding;
  const int64_t* tokens;  // [M]; null: RaggedBatch::x is given
  Table places;           // embeddings of positions, of the cache's type, row by row; rows null: none
  const float *norm_embedding, *norm_embedding_bias;  // of the rows before the first layer [D]; null: none
  const float *norm, *norm_bias;  // the last norm [D]; null: none
  void* hidden;           // the rows after it [M, D]; null: only keys and values are needed
  Packed head;
  const float* bias;
  Screen screen;    // of the head, which has no bias then
  int64_t* chosen;  // the index of the head's largest output [M], the first of equals; null: not needed
  // The number of prefill nodes at the start of each batch row [B]: a chain of prompt tokens, of which only keys and values are
  // needed. ``hidden``, ``chosen`` and a tap then have rows for the other nodes only. Null: none.
  const int64_t* prefill;
};

// the rows of nodes before some layers of a pass, ascending: rows [count, stride, D]
struct Taps {
  int32_t count, stride;
  const int32_t* layers;
  float* rows;
};

// a range of queries of one batch row and one kv head, from row ``node`` of the pass on; a query is (row, head of the group)
struct AttentionTask {
  int32_t row, head, node, first, count;
};

// A batch, and its streams, with the visible keys of its rows. Keys of a batch row are numbered from its first node on, in the
// cache after the committed tokens. Row i of the pass attends to the first ``seen`` keys of its batch row from first[i] on, which
// are the committed tokens, and to the keys ancestors[offsets[i] : offsets[i + 1]] after them, in ascending order: of its
// ancestors, itself, and streams. Where the window begins after the committed tokens, it leaves out skipped[i] ancestors. The first
// run[i] of the others are keys skipped[i], skipped[i] + 1, ...
//
// In a flat plan all rows of a batch row attend to the same keys, ``seen`` of them: to all nodes, or to its source.
struct PassPlan : RaggedBatch {
  Streams streams;
  int32_t rows;             // M (1 + S)
  const int32_t* row;       // the batch row of each row [rows]
  const int32_t* key;       // the number of its key [rows]
  const int64_t* rotation_of;     // its row of cos and sin [rows]
  const int32_t *offsets, *ancestors, *first, *skipped, *run;
  std::vector<AttentionTask>* tasks;  // of one layer
  const int64_t* seen;                // [B]
  bool flat;

  // number of keys of a batch row after those that all of its rows see
  int keys(int b) const { return flat ? 0 : count(b) * (1 + streams.count); }
  // number of keys visible to the last row of a batch row
  int span(int b) const { return static_cast<int>(seen[b]) + keys(b); }
};

// memory of a plan
struct PlanMemory {
  Workspace row, key, positions, rotations, offsets, first, skipped, run, seen;
  std::vector<int32_t> ancestors;
  std::vector<AttentionTask> tasks;
};

// memory of the plans of a pass: for layers without and with a window, and for sources
struct PassMemory {
  PlanMemory whole, sliding, sources;
};

// A batch without its prefill nodes: the batch that follows them, and the indices of its nodes in the whole one.
struct Tail {
  RaggedBatch batch;
  std::vector<int64_t> starts, lengths, parents;
  std::vector<int32_t> nodes;

  void of(const RaggedBatch& whole, const int64_t* prefill) {
    starts.assign(1, 0), lengths.clear(), parents.clear(), nodes.clear();
    for (int b = 0; b < whole.batch; ++b) {
      for (int i = static_cast<int>(prefill[b]); i < whole.count(b); ++i) {
        const int node = whole.start(b) + i;
        parents.push_back((whole.parents == nullptr ? i - 1 : whole.parents[node]) - prefill[b]);
        nodes.push_back(node);
      }
      starts.push_back(static_cast<int64_t>(nodes.size()));
      lengths.push_back(whole.lengths[b] + prefill[b]);
    }
    batch = whole;
    batch.nodes = static_cast<int32_t>(nodes.size()), batch.x = nullptr;
    batch.starts = starts.data(), batch.lengths = lengths.data(), batch.parents = parents.data();
  }
};

// A plan for attention of the rows of another one to ``seen`` keys of each batch row [B]
PassPlan flat_plan(const PassPlan& rows, const int64_t* seen, PlanMemory& memory) {
  PassPlan plan = rows;
  int32_t *offsets = memory.offsets.of<int32_t>(rows.rows + 1), *none = memory.first.of<int32_t>(rows.rows);
  std::fill(offsets, offsets + rows.rows + 1, 0), std::fill(none, none + rows.rows, 0);
  plan.offsets = offsets, plan.first = plan.skipped = plan.run = none, plan.ancestors = nullptr;
  plan.tasks = &memory.tasks;
  plan.seen = seen, plan.flat = true;
  return plan;
}

// A batch's plan without its attention tasks. Throws Refusal for an invalid parent or position.
PassPlan plan_pass(const RaggedBatch& batch, const Streams& streams, PlanMemory& memory) {
  const bool trailing = batch.trailing != 0;
  const int nodes = batch.nodes, own = streams.own != 0 ? streams.count : 0, rows = nodes * (1 + streams.count);
  int32_t *row = memory.row.of<int32_t>(rows), *key = memory.key.of<int32_t>(rows);
  int32_t *offsets = memory.offsets.of<int32_t>(rows + 1), *first = memory.first.of<int32_t>(rows);
  int32_t *skipped = memory.skipped.of<int32_t>(rows), *run = memory.run.of<int32_t>(rows);
  int64_t *positions = memory.positions.of<int64_t>(nodes), *rotations = memory.rotations.of<int64_t>(rows);
  std::vector<int32_t>& seen = memory.ancestors;
  seen.clear();
  const auto end_row = [&](int i) {
    offsets[i + 1] = static_cast<int32_t>(seen.size());
    run[i] = 0;
    while (offsets[i] + run[i] < offsets[i + 1] && seen[static_cast<size_t>(offsets[i] + run[i])] == skipped[i] + run[i]) ++run[i];
  };
  for (int b = 0; b < batch.batch; ++b) std::fill(row + batch.starts[b], row + batch.starts[b + 1], b);
  for (int i = 0; i < nodes; ++i) {
    const int start = batch.start(row[i]), node = i - start;
    if (batch.parents != nullptr)
      require(batch.parents[i] >= -1 && batch.parents[i] < node, "a node's parent does not come before it");
    const int parent = batch.parents == nullptr ? node - 1 : static_cast<int>(batch.parents[i]), above = start + parent;
    const int64_t length = batch.lengths[row[i]];
    key[i] = node;
    positions[i] = parent < 0 ? length : positions[above] + 1;
    rotations[i] = positions[i] + (batch.rotations == nullptr ? 0 : batch.rotations[row[i]]);
    require(in_range(rotations[i], 0, batch.positions - 1 - streams.count), "a position is beyond the rotary tables");
    if (batch.whole != 0) continue;
    const int64_t newest = trailing ? length - 1 : positions[i];
    const int64_t from = batch.window == 0 ? 0 : std::max<int64_t>(0, newest - batch.window + 1);
    first[i] = static_cast<int32_t>(std::min(from, length)), skipped[i] = static_cast<int32_t>(from) - first[i];
    // the visible nodes of its parent that are inside the window, but not the parent's streams; itself; its streams
    offsets[i] = static_cast<int32_t>(seen.size());
    const int end = parent < 0 ? 0 : offsets[above + 1] - own;
    for (int j = parent < 0 ? 0 : offsets[above]; j < end; ++j)
      if (trailing || positions[start + seen[static_cast<size_t>(j)]] >= from) seen.push_back(seen[static_cast<size_t>(j)]);
    seen.push_back(node);
    for (int j = 0; j < own; ++j) seen.push_back(batch.count(row[i]) + node * own + j);
    end_row(i);
  }
  for (int i = nodes; i < rows; ++i) {
    const int node = (i - nodes) / streams.count, stream = (i - nodes) % streams.count, b = row[node];
    const int before = batch.count(b) + (node - batch.start(b)) * streams.count;
    row[i] = b, key[i] = before + stream, first[i] = first[node], skipped[i] = skipped[node];
    rotations[i] = rotations[node] + stream + 1;
    offsets[i] = static_cast<int32_t>(seen.size());
    for (int j = offsets[node]; j < offsets[node + 1] - own; ++j) seen.push_back(seen[static_cast<size_t>(j)]);
    for (int j = 0; j <= stream; ++j) seen.push_back(before + j);
    end_row(i);
  }
  PassPlan plan;
  static_cast<RaggedBatch&>(plan) = batch;
  plan.streams = streams;
  plan.rows = rows;
  plan.row = row;
  plan.key = key;
  plan.rotation_of = rotations;
  plan.offsets = offsets;
  plan.ancestors = seen.data();
  plan.first = first;
  plan.skipped = skipped;
  plan.run = run;
  plan.tasks = &memory.tasks;
  plan.seen = batch.lengths;
  plan.flat = false;
  if (batch.whole == 0) return plan;
  int64_t* all = memory.seen.of<int64_t>(batch.batch);
  for (int b = 0; b < batch.batch; ++b) all[b] = batch.lengths[b] + batch.count(b);
  return flat_plan(plan, all, memory);
}

// ---- embeddings ---------------------------------------------------------------------------------------------------

constexpr int MAX_EMBEDDING_WIDTH = 8192;  // of rows that ``embed_normed`` takes; see library.py

// a token's embedding
template <class P>
void embed(const Table& table, int64_t token, int d, float* to) {
  if (table.packed == RAW_TABLE) {
    with_stored_type(table.type, [&](auto format) {
      using F = decltype(format);
      unpack_raw<F>(static_cast<const uint8_t*>(table.rows) + token * raw_row_bytes<F>(d), d, to);
    });
    return;
  }
  if (!table.packed) {
    const P* from = static_cast<const P*>(table.rows) + token * d;
    for (int j = 0; j < d; j += 16) store16(to + j, load16(from + j));
    return;
  }
  // a block interleaves the 32-bit words of its outputs; the lower half of a word is the first of two bf16
  const int count = d * static_cast<int>(sizeof(P)) / 4;
  const uint32_t* first = static_cast<const uint32_t*>(table.rows) + token / BLOCK * count * BLOCK + token % BLOCK;
  uint32_t* bits = reinterpret_cast<uint32_t*>(to);
  for (int j = 0; j < count; ++j) {
    const uint32_t word = first[static_cast<int64_t>(j) * BLOCK];
    if constexpr (sizeof(P) == 4) {
      std::memcpy(bits + j, &word, 4);
    } else {
      const uint32_t pair[2] = {word << 16, word & 0xffff0000u};
      std::memcpy(bits + 2 * j, pair, 8);
    }
  }
}

// Scales the embedding of a token and adds that of its position (``places`` [D], or null), each rounded to P, as PyTorch does.
template <class P>
void scale_and_place(float scale, const P* place, int d, float* x) {
  if (scale == 1.0f && place == nullptr) return;
  alignas(64) P rounded[16];
  for (int j = 0; j < d; j += 16) {
    if (scale != 1.0f) {
      store16(rounded, load16(x + j) * broadcast(scale));
      store16(x + j, load16(rounded));
    }
    if (place != nullptr) {
      store16(rounded, load16(x + j) + load16(place + j));
      store16(x + j, load16(rounded));
    }
  }
}

// a token's embedding, scaled to unit RMS
template <class T>
void embed_normed(const Table& table, int64_t token, const float* ones, int d, float eps, T* to) {
  alignas(64) float row[MAX_EMBEDDING_WIDTH];
  embed<Storage<T>>(table, token, d, row);
  rms_norm(row, ones, d, eps, to);
}

// ---- checks -------------------------------------------------------------------------------------------------------

void check(const Table& table, int d) {
  require(table.rows != nullptr && table.words > 0, "there are no embeddings");
  if (table.packed == RAW_TABLE) stored_block_bytes(table.type, d);
}

void check(const Shape& s) {
  require(in_range(s.d, BLOCK, MAX_VALUES) && s.d % BLOCK == 0, "the model's width is not a multiple of 32");
  require(s.e == 256 || (in_range(s.e, 32, 128) && s.e % 32 == 0), "heads do not have 32, 64, 96, 128 or 256 channels");
  require(in_range(s.heads, 1, 1 << 16) && in_range(s.kv_heads, 1, s.heads) && s.heads % s.kv_heads == 0,
          "query heads are not a multiple of the key heads");
  require(in_range(s.inner, 0, MAX_VALUES) && s.inner % BLOCK == 0, "the MLP's width is not a multiple of 32");
  require(in_range(s.rope_dim, 0, 4 * s.e) && s.rope_dim % 2 == 0, "rotation tables are too wide, or odd");
  require(in_range(s.activation, SILU, RELU), "unknown activation");
  require(in_range(s.quantized_cache, 0, 1), "unknown kind of cache");
  require(in_range(s.wiring, SEQUENTIAL, POST), "unknown wiring");
  require(s.biases == nullptr || (in_range(s.distance, 1, MAX_VALUES) && s.scale == 1.0f && s.softcap == 0.0f),
          "scores with biases are scaled, or biases have no distances");
}

void check(const Shape& s, const RaggedBatch& batch, int streams) {
  check(s);
  require(in_range(batch.batch, 1, MAX_VALUES) && in_range(batch.nodes, 1, MAX_VALUES) && batch.window >= 0,
          "a pass has no rows");
  require(in_range(streams, 0, 1 << 16), "the number of streams is out of range");
  require(batch.cos != nullptr && batch.sin != nullptr && batch.starts != nullptr && batch.lengths != nullptr,
          "a pointer of a pass is null");
  require(batch.starts[0] == 0, "the first row of a pass does not start at node 0");
  for (int b = 0; b < batch.batch; ++b)
    require(in_range(batch.starts[b + 1], batch.starts[b], MAX_VALUES), "rows of a pass overlap, or have too many nodes");
  require(batch.starts[batch.batch] == batch.nodes, "the rows of a pass do not add up to its number of nodes");
  const int64_t rows = static_cast<int64_t>(batch.nodes) * (1 + streams), values = rows * s.heads * s.e;
  require(rows <= MAX_VALUES && values <= std::numeric_limits<int32_t>::max(), "a pass has too many nodes");
  const int64_t capacity = s.head_stride / s.cached();
  require(s.head_stride > 0 && s.head_stride % s.cached() == 0 && capacity <= std::numeric_limits<int32_t>::max() - 64,
          "the cache's head stride is not a multiple of a key's size");
  require(batch.batch == 1 || s.row_stride >= s.kv_heads * s.head_stride, "the cache's rows overlap");
  require(batch.whole == 0 || (batch.parents == nullptr && streams == 0 && batch.window == 0 && batch.trailing == 0),
          "nodes that all see each other have parents, streams or a window");
  for (int b = 0; b < batch.batch; ++b)
    require(in_range(batch.lengths[b], batch.trailing != 0 && batch.count(b) > 0 ? 1 : 0, capacity - batch.count(b) * (1 + static_cast<int64_t>(streams))),
            "the cache is too small for a pass");
}

void check(int kind, const Shape& s, const Layer& l) {
  require(in_range(l.rope_width, 0, s.e) && l.rope_width % 2 == 0, "rotations are wider than heads, or odd");
  require(in_range(l.rope_keys, 0, s.rope_dim - l.rope_width) && in_range(l.rope_queries, 0, s.rope_dim - l.rope_width),
          "rotations are not in the tables");
  require(l.keys != nullptr && l.values != nullptr, "a layer has no cache");
  check(l.qkv, kind, (s.heads + 2 * s.kv_heads) * s.e, s.d);
  check(l.out, kind, s.d, s.heads * s.e);
  if (l.up.data != nullptr) {
    check(l.up, kind, (s.gated != 0 ? 2 : 1) * s.inner, s.d);
    check(l.down, kind, s.d, s.inner);
  }
  if (l.low.data != nullptr) {
    require(l.low.outputs % BLOCK == 0, "the rank of a low-rank term is not a multiple of 32");
    check(l.low, kind, l.low.outputs, s.d);
    check(l.high, kind, s.d, l.low.outputs);
  }
  require(s.wiring != POST || (l.norm_in != nullptr && l.norm_mlp != nullptr), "there is no norm after attention or MLP");
  if (l.cross.q.data == nullptr) return;
  require(s.wiring != POST || l.cross.norm != nullptr, "there is no norm after attention to sources");
  require(s.wiring != PARALLEL && l.source >= 0, "a layer with a source is parallel, or has no number");
  check(l.cross.q, kind, s.heads * s.e, s.d);
  check(l.cross.out, kind, s.d, s.heads * s.e);
}

void check(int kind, const LowRank& term, int outputs, int width) {
  if (term.down.data == nullptr) return;
  require(term.down.outputs % BLOCK == 0, "the rank of a low-rank term is not a multiple of 32");
  check(term.down, kind, term.down.outputs, width);
  check(term.up, kind, outputs, term.down.outputs);
}

void check(int kind, const Shape& s, const Layer& layer, const Terms& terms) {
  check(kind, terms.qkv, layer.qkv.outputs, s.d);
  check(kind, terms.out, s.d, layer.out.width);
  check(kind, terms.up, layer.up.outputs, s.d);
  check(kind, terms.down, s.d, s.inner);
}

void check_loras(int kind, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch) {
  for (int b = 0; b < batch.batch; ++b) {
    if (batch.loras[b] == nullptr || std::find(batch.loras, batch.loras + b, batch.loras[b]) != batch.loras + b) continue;
    for (int i = 0; i < count; ++i) {
      const Terms& terms = batch.loras[b][i];
      require(layers[i].up.data != nullptr || (terms.up.down.data == nullptr && terms.down.down.data == nullptr),
              "a layer without an MLP has a LoRA for it");
      check(kind, s, layers[i], terms);
    }
  }
}

void check_sources(const RaggedBatch& batch) {
  require(batch.sizes != nullptr && batch.source_keys != nullptr && batch.source_values != nullptr, "a pass has no sources");
  for (int b = 0; b < batch.batch; ++b)
    require(batch.count(b) == 0 || (in_range(batch.sizes[b], 1, MAX_VALUES) && batch.source_keys[b] != nullptr &&
                                    batch.source_values[b] != nullptr),
            "a row has no source");
}

void check(int kind, const void* runner, const Shape* s, const Layer* layers, int count, const RaggedBatch* batch,
           int streams = 0) {
  require(runner != nullptr && s != nullptr && layers != nullptr && batch != nullptr, "a pointer is null");
  require(in_range(kind, BF16, FLOATS), "unknown kind of layers");
  check(*s, *batch, streams);
  require(in_range(count, 1, 1 << 16), "there are no layers");
  // Since the last pass, weights have evicted the layer structs from the caches: prefetch all of them at once.
  const char* first = reinterpret_cast<const char*>(layers);
  for (size_t at = 0; at < static_cast<size_t>(count) * sizeof(Layer); at += 64) prefetch(first + at);
  for (int i = 0; i < count; ++i) check(kind, *s, layers[i]);
  if (std::any_of(layers, layers + count, [](const Layer& l) { return l.cross.q.data != nullptr; })) check_sources(*batch);
  if (batch->loras != nullptr) check_loras(kind, *s, layers, count, *batch);
}

void check(const Taps& taps, int layers, int nodes) {
  require(taps.count >= 0 && (taps.count == 0 || (taps.layers != nullptr && taps.rows != nullptr)), "taps have no rows");
  require(taps.count == 0 || taps.stride >= nodes, "taps have too few rows");
  for (int i = 0; i < taps.count; ++i)
    require(in_range(taps.layers[i], i == 0 ? 0 : taps.layers[i - 1] + 1, layers - 1), "taps do not ascend, or are at no layer");
}

void check(int kind, const Shape& s, const RaggedBatch& batch, const Ends& ends) {
  require(ends.hidden != nullptr || ends.chosen == nullptr, "a pass has no output");
  require(ends.tokens != nullptr || batch.x != nullptr, "a pass has no tokens and no rows");
  if (ends.tokens != nullptr) {
    check(ends.embedding, s.d);
    for (int i = 0; i < batch.nodes; ++i)
      require(in_range(ends.tokens[i], 0, ends.embedding.words - 1), "a token is not in the vocabulary");
    require(ends.places.packed == 0 && (ends.places.rows == nullptr) == (ends.places.words == 0), "embeddings of positions");
  }
  if (ends.prefill != nullptr) {
    require(ends.hidden != nullptr && batch.trailing == 0, "a pass of another kind has prefill nodes");
    int64_t all = 0;
    for (int b = 0; b < batch.batch; all += ends.prefill[b++]) {
      require(in_range(ends.prefill[b], 0, batch.count(b)), "a row has more prefill nodes than nodes");
      for (int i = 0; batch.parents != nullptr && i < batch.count(b); ++i) {
        const int64_t parent = batch.parents[batch.start(b) + i];
        require(i < ends.prefill[b] ? parent == i - 1 : parent >= ends.prefill[b] - 1, "prefill nodes are not a chain");
      }
    }
    require(all < batch.nodes, "a pass has prefill nodes only");
  }
  if (ends.chosen == nullptr) return;
  check(ends.head);
  // rows after the last norm have the cache's type
  require(quantized(ends.head.kind) || (ends.head.kind == FLOAT) == (kind == FLOAT), "the head has another type");
  require(ends.head.width == s.d, "the head has another width");
  check(ends.screen, ends.head);
  require(ends.screen.copy.data == nullptr || ends.bias == nullptr, "a head with a bias has a screen");
}

}  // namespace
