// Drafting: builds a draft tree from the stream states of one sequence, level by level (NativeDraft in draft.py). This is
// the fast form of grow() in drafting/grow.py: the same choice of nodes, and the same rule for ties.
//
// Node i of level j, whose parent has the token t and the hidden state z', is conditioned on its path:
//   z = silu(A z' + U E[t] / rms(E[t]) + C s_j),   score = head . (s_j + W z)
// with s_j the state of stream j. Without a conditioner the score is head . s_j, the same for all nodes of a level, and is
// computed once. T is the type of the rows between two products; see products.h.
//
// If the newest tokens of a node's path and the text occurred before, the distribution q of its children is mixed with c, that
// of the tokens after the occurrences of the longest match: (1 - w) q + w c. The weight depends on the length of the
// match; see copying.py. Below the last stream, children are copied only.
#pragma once

#include "levels.h"

namespace {

// memory of drafts, kept with the runner
struct DraftMemory {
  Workspace states, embeddings, hidden, parent_hidden, sums, conditioned, scores, values, places, noise, blocks;
};

template <class T>
class Drafter : DraftLevels {
  using P = Storage<T>;

 public:
  Drafter(Runner& runner, const DraftConfig& config, const P* states, int64_t root)
      : DraftLevels(runner, config, root), given_(states) {
    ones_.assign(static_cast<size_t>(c_.d), 1.0f);
    reserve(runner.extension<DraftMemory>());
  }

  // Returns the number of nodes.
  int run(const Tree& tree) {
    pool_.run([&](int thread) {
      convert_states(thread);
      if (partial_) rank_blocks(thread);
      for (int depth = 0; depth < c_.depth && !tokens_.empty(); ++depth) level(depth, thread);
    });
    while (c_.text != nullptr && !tokens_.empty() && static_cast<int>(candidates_.size()) < MAX_CANDIDATES) copy_level();
    require(!unknown_token_, "a token of a draft vocabulary or the text is not in the embedding");
    return select(tree);
  }

 private:
  // Allocates all memory of the job, which must not throw.
  void reserve(DraftMemory& memory) {
    states_ = memory.states.of<T>(row_offset<T>(c_.depth, c_.d));
    embeddings_ = memory.embeddings.of<T>(row_offset<T>(limit_, c_.d));
    hidden_ = memory.hidden.of<T>(row_offset<T>(limit_, wide_));
    parent_hidden_ = memory.parent_hidden.of<T>(row_offset<T>(limit_, wide_));
    sums_ = memory.sums.of<float>(static_cast<int64_t>(limit_) * wide_);
    conditioned_ = memory.conditioned.of<T>(row_offset<T>(limit_, c_.d));
    scores_ = memory.scores.of<float>(static_cast<int64_t>(limit_) * width_);
    values_ = memory.values.of<float>(static_cast<int64_t>(limit_) * c_.children);
    at_ = memory.places.of<int64_t>(static_cast<int64_t>(limit_) * c_.children);
    noise_ = memory.noise.of<float>(c_.keys == nullptr ? 0 : width_);
    block_scores_ = memory.blocks.of<BlockScore>(partial_ ? c_.depth * c_.head.blocks() : 0);
    if (!conditional_) return;
    hidden_rows_ = reinterpret_cast<char*>(hidden_), parent_rows_ = reinterpret_cast<char*>(parent_hidden_);
    hidden_bytes_ = sizeof(T) * static_cast<size_t>(row_offset<T>(1, wide_));
  }

  void convert_states(int thread) {
    int first, last;
    split_range(c_.depth, pool_.size(), thread, &first, &last);
    for (int i = first; i < last; ++i)
      convert_row(given_ + static_cast<int64_t>(i) * c_.d, c_.d, states_ + row_offset<T>(i, c_.d));
  }

  // scores of all blocks of the head with the streams' own states
  void rank_blocks(int thread) {
    pool_.barrier();
    multiply(pool_, states_, c_.depth, c_.head, thread, [&](int m, int b, F32x16 low, F32x16 high) {
      if (words_ - b * BLOCK < BLOCK) {  // the last block may be partial
        alignas(64) float part[BLOCK];
        std::fill(part, part + BLOCK, -INFINITY);
        store_outputs(part, words_ - b * BLOCK, low, high);
        low = load16(part), high = load16(part + 16);
      }
      float best = reduce_max(max(low, high));
      if (!(best > -INFINITY)) best = -INFINITY;  // NaN cannot be ordered
      const F32x16 each = exp(low - broadcast(best)) + exp(high - broadcast(best));
      block_scores_[m * c_.head.blocks() + b] = {best, std::log(reduce_sum(each)) + best};
    });
  }

  // A thread's part of one level: the children of all expanded nodes of the level above.
  void level(int depth, int thread) {
    const int expanded = static_cast<int>(tokens_.size()), rows = conditional_ ? expanded : 1;
    if (conditional_) embed_parents(rows, thread);
    pool_.barrier();
    if (partial_ && thread == 0) choose_blocks(depth);
    if (conditional_) {
      condition(depth, rows, thread);
      pool_.barrier();
      apply_condition(depth, rows, thread);
    }
    pool_.barrier();
    score(conditional_ ? conditioned_ : states_ + row_offset<T>(depth, c_.d), rows, thread);
    if (c_.keys != nullptr) draw_noise(c_.keys[depth], thread);
    pool_.barrier();
    pool_.parallel_for(rows, thread, [&](int i) { best_children(i); });
    pool_.barrier();
    if (thread == 0) collect(expanded);
    pool_.barrier();
  }

  void embed_parents(int rows, int thread) {
    int first, last;
    split_range(rows, pool_.size(), thread, &first, &last);
    for (int i = first; i < last; ++i)
      embed_normed(c_.embedding, tokens_[static_cast<size_t>(i)], ones_.data(), c_.d, RMS_EPS,
                   embeddings_ + row_offset<T>(i, c_.d));
  }

  // s_j + W z
  void apply_condition(int depth, int rows, int thread) {
    const P* state = given_ + static_cast<int64_t>(depth) * c_.d;
    multiply(pool_, hidden_, rows, c_.to_state, thread, [&](int m, int b, F32x16 low, F32x16 high) {
      store32(conditioned_ + row_offset<T>(m, c_.d), b, low + load16(state + b * BLOCK),
              high + load16(state + b * BLOCK + 16));
    });
  }

  // hidden = silu(A z' + U E' + C s_j), block by block
  void condition(int depth, int rows, int thread) {
    pool_.parallel_for(c_.token.blocks(), thread, [&](int block) {
      F32x16 of_state[2] = {zero(), zero()};
      multiply_block(states_ + row_offset<T>(depth, c_.d), 1, c_.state, block,
                     [&](int, int, F32x16 low, F32x16 high) { of_state[0] = low, of_state[1] = high; });
      multiply_block(embeddings_, rows, c_.token, block, [&](int m, int b, F32x16 low, F32x16 high) {
        float* to = sums_ + static_cast<int64_t>(m) * wide_ + b * BLOCK;
        store16(to, low + of_state[0]);
        store16(to + 16, high + of_state[1]);
      });
      multiply_block(parent_hidden_, depth == 0 ? 0 : rows, c_.carry, block, [&](int m, int b, F32x16 low, F32x16 high) {
        float* to = sums_ + static_cast<int64_t>(m) * wide_ + b * BLOCK;
        store16(to, low + load16(to));
        store16(to + 16, high + load16(to + 16));
      });
      for (int m = 0; m < rows; ++m) {
        const float* from = sums_ + static_cast<int64_t>(m) * wide_ + block * BLOCK;
        store32(hidden_ + row_offset<T>(m, wide_), block, silu(load16(from)), silu(load16(from + 16)));
      }
    });
  }

  // scores of the chosen blocks of the head, followed by those of the sequence's own tokens
  void score(const T* states, int rows, int thread) {
    pool_.parallel_for(blocks_, thread, [&](int i) {
      const int chosen = chosen_[static_cast<size_t>(i)];
      multiply_block(states, rows, c_.head, chosen, [&](int m, int b, F32x16 low, F32x16 high) {
        float* to = scores_ + static_cast<int64_t>(m) * width_ + i * BLOCK;
        const int left = words_ - b * BLOCK;
        store_outputs(to, left, low, high);
        if (partial_ && left < BLOCK) std::fill(to + left, to + BLOCK, -INFINITY);
      });
    });
    const int own = c_.row_head.outputs;
    if (own == 0) return;
    multiply(pool_, states, rows, c_.row_head, thread, [&](int m, int b, F32x16 low, F32x16 high) {
      store_outputs(scores_ + static_cast<int64_t>(m) * width_ + scored_ + b * BLOCK, own - b * BLOCK, low, high);
    });
  }

  static constexpr float RMS_EPS = 1.1920929e-7f;  // torch.finfo(float32).eps, as F.rms_norm

  const P* given_;  // stream states [depth, D]
  std::vector<float> ones_;
  T *states_, *embeddings_, *hidden_, *parent_hidden_, *conditioned_;
  float* sums_;
};

// ---- checks -------------------------------------------------------------------------------------------------------

void check(int kind, const DraftConfig& c, int64_t root) {
  require(in_range(c.d, BLOCK, MAX_EMBEDDING_WIDTH) && c.d % BLOCK == 0, "the model is too wide, or not a multiple of 32");
  check(c.embedding, c.d);
  require(in_range(root, 0, c.embedding.words - 1), "the root is not in the vocabulary");
  const int wide = c.token.outputs;
  require(in_range(wide, 0, MAX_VALUES) && wide % BLOCK == 0, "the conditioner's rank is not a multiple of 32");
  if (wide != 0) {
    check(c.token, kind, wide, c.d);
    check(c.state, kind, wide, c.d);
    check(c.carry, kind, wide, wide);
    check(c.to_state, kind, c.d, wide);
  }
  check(c.head, kind, c.head.outputs, c.d);
  require(c.ids != nullptr, "a draft vocabulary has no tokens");
  require(c.row_head.outputs == 0 || c.row_ids != nullptr, "a sequence's own vocabulary has no tokens");
  if (c.row_head.outputs != 0) check(c.row_head, kind, c.row_head.outputs, c.d);
  require(in_range(c.depth, 1, 1 << 10) && in_range(c.nodes, 1, 1 << 16), "a draft's depth or nodes are out of range");
  require(in_range(c.children, 1, 1 << 16) && c.blocks >= 1, "a draft's children or blocks are out of range");
  const int64_t most = std::max(1, std::min(c.frontier, c.nodes - 1));
  require(most * c.children <= MAX_VALUES && static_cast<int64_t>(c.depth) * c.nodes <= MAX_VALUES, "a draft is too large");
  require(c.text == nullptr || (c.text_length >= 1 && c.text[c.text_length - 1] == root), "the text does not end with the root");
  for (int i = 0; c.text != nullptr && i < LONGEST_MATCH; ++i)
    require(c.mixed[i] >= 0.0f && c.mixed[i] < 1.0f && c.alone[i] >= 0.0f && c.alone[i] <= 1.0f, "a weight is no share");
  require(!std::isnan(c.min_log_prob) && !std::isnan(c.score_scale) && !std::isnan(c.noise_scale), "a setting is NaN");
}

}  // namespace
