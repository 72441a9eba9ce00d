// The candidates of a draft, level by level, and the tree that the best of them form. It does not depend on the type of rows;
// draft.h computes the scores.
#pragma once

#include <functional>
#include <tuple>

#include "plan.h"
#include "runner.h"
#include "sampling.h"

namespace {

constexpr int LONGEST_MATCH = 8;      // tokens
constexpr int MOST_OCCURRENCES = 32;  // occurrences of the longest match that are used, the newest ones

struct DraftConfig {
  Table embedding;
  Packed token, state, carry, to_state;  // U, C, A, W of the conditioner; without outputs: there is none
  Packed head, row_head;                 // of the draft vocabulary, and of the sequence's own tokens
  const int64_t *ids, *row_ids;          // token ids of the outputs of head and row_head
  int32_t d, depth;                      // model width, number of streams
  int32_t children, nodes, frontier;     // maximum children of a node, nodes of the tree, expanded nodes of a level
  int32_t blocks;                        // blocks of the head scored per level: those with the best tokens of its stream
  float min_log_prob;                    // minimum joint log probability of a node
  const uint64_t* keys;                  // for sampled rows the keys of the levels' positions (else null); scores are then
  float score_scale, noise_scale;        // score * score_scale + noise * noise_scale
  const int64_t* text;                   // the sequence, which ends with the root; null: no copying
  int64_t text_length;
  // by the length of a match, from 1 token on: the weight w, and the probability of a copied token below the last stream
  float mixed[LONGEST_MATCH], alone[LONGEST_MATCH];
};

// The candidates of all levels, and the nodes whose children the next level scores.
class DraftLevels {
 public:
  // The tree's nodes by rank, the most probable first: tokens, parents, sources and joints, at most c.nodes with the root.
  struct Tree {
    int64_t *tokens, *parents;
    int64_t* sources;  // the depth of nodes that a stream proposes; the number of streams + 1 for copied ones
    float* joints;     // joint log probabilities
  };

 protected:
  struct Candidate {
    int64_t token;
    float joint;
    int32_t parent;  // index among the candidates of all levels; -1: the root
    bool copied;     // rather than proposed by a stream
  };

  // a token that followed occurrences of the longest match, and its share of these
  struct Continuation {
    int64_t token;
    float share;
    bool known;  // a stream proposes it too
  };

  // a block of the head: its largest score, and the log-sum-exp of its scores
  struct BlockScore {
    float best, log_sum;
  };

  DraftLevels(Runner& runner, const DraftConfig& config, int64_t root)
      : pool_(runner.pool), c_(config), root_(root), keep_(config.nodes - 1) {
    limit_ = std::max(1, std::min(c_.frontier, keep_));  // a level has at most the nodes of the tree
    wide_ = c_.token.outputs;
    conditional_ = wide_ != 0;
    words_ = c_.head.outputs;
    // Noise may favour any token, so all blocks are scored for sampled rows.
    partial_ = c_.keys == nullptr && 2 * c_.blocks <= c_.head.blocks();
    blocks_ = partial_ ? c_.blocks : c_.head.blocks();
    scored_ = std::min(blocks_ * BLOCK, words_);
    width_ = scored_ + c_.row_head.outputs;
    chosen_.resize(static_cast<size_t>(c_.head.blocks()));
    for (size_t b = 0; b < chosen_.size(); ++b) chosen_[b] = static_cast<int32_t>(b);
    const size_t levels = static_cast<size_t>(c_.depth) * static_cast<size_t>(keep_), widest = static_cast<size_t>(limit_);
    for (auto* list : {&joints_, &kept_joints_}) list->reserve(std::max(levels, widest));
    for (auto* list : {&places_, &parent_places_}) list->reserve(std::max(levels, widest));
    tokens_.reserve(widest);
    level_.reserve(widest * (static_cast<size_t>(c_.children) + MOST_OCCURRENCES));
    candidates_.reserve(levels);
    continuations_.reserve(MOST_OCCURRENCES);
    joints_.push_back(0.0f), tokens_.push_back(root), places_.push_back(-1);
  }

  // Chooses the blocks that a level scores. ``rest_``: log-sum-exp of the others' scores without conditioning.
  void choose_blocks(int depth) {
    const BlockScore* scores = block_scores_ + depth * c_.head.blocks();
    const auto higher = [scores](int32_t a, int32_t b) {
      return scores[a].best > scores[b].best || (scores[a].best == scores[b].best && a < b);
    };
    std::nth_element(chosen_.begin(), chosen_.begin() + blocks_, chosen_.end(), higher);
    std::sort(chosen_.begin(), chosen_.begin() + blocks_);
    float largest = -INFINITY, sum = 0.0f;
    for (size_t i = static_cast<size_t>(blocks_); i < chosen_.size(); ++i)
      largest = std::max(largest, scores[chosen_[i]].log_sum);
    for (size_t i = static_cast<size_t>(blocks_); i < chosen_.size(); ++i)
      sum += std::exp(scores[chosen_[i]].log_sum - largest);
    rest_ = std::log(sum) + largest;
  }

  // The noise of the tokens at a position.
  void draw_noise(uint64_t key, int thread) {
    for (const auto& [ids, count, to] : {std::tuple{c_.ids, words_, noise_},
                                         std::tuple{c_.row_ids, c_.row_head.outputs, noise_ + scored_}}) {
      int first, last;
      split_range((count + 15) / 16, pool_.size(), thread, &first, &last);
      for (int i = 16 * first; i < std::min(16 * last, count); i += 16)
        masked_store(to + i, count - i, gumbel(masked_load_u32(ids + i, count - i), key));
    }
  }

  // Chooses the best children of a row by its scores.
  void best_children(int row) {
    float* scores = scores_ + static_cast<int64_t>(row) * width_;
    const bool drawn = c_.keys != nullptr;
    for (int j = 0; j < width_ && (drawn || c_.score_scale != 1.0f); j += 16) {
      const F32x16 noise = drawn ? masked_load(noise_ + j, width_ - j, zero()) * broadcast(c_.noise_scale) : zero();
      const F32x16 score = masked_load(scores + j, width_ - j, zero());
      masked_store(scores + j, width_ - j, mul_add(score, broadcast(c_.score_scale), noise));
    }
    const int64_t first = static_cast<int64_t>(row) * c_.children;
    top_log_softmax(scores, width_, rest_, c_.children, values_ + first, at_ + first);
  }

  // A level below the last stream's.
  void copy_level() {
    level_.clear();
    for (int i = 0; i < static_cast<int>(tokens_.size()); ++i) {
      const int match = find_continuations(i);
      for (const Continuation& each : continuations_)
        add({each.token, joints_[static_cast<size_t>(i)] + std::log(c_.alone[match - 1] * each.share), i, true});
    }
    keep();
  }

  // The candidates of a level that streams propose.
  void collect(int rows) {
    level_.clear();
    for (int i = 0; i < rows; ++i) add_children(i, conditional_ ? i * c_.children : 0);
    keep();
  }

  // the best candidates of all levels
  int select(const Tree& tree) const {
    // Stable sort, as in grow(): among equals the shallower one comes first, so that no node is kept without its parent.
    std::vector<int32_t> order(candidates_.size()), node_of(candidates_.size(), -1);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
      return candidates_[static_cast<size_t>(i)].joint > candidates_[static_cast<size_t>(j)].joint;
    });
    if (static_cast<int>(order.size()) > keep_) order.resize(static_cast<size_t>(keep_));
    tree.tokens[0] = root_, tree.parents[0] = -1, tree.sources[0] = 0, tree.joints[0] = 0.0f;
    int count = 1;
    for (const int32_t i : order) {
      const Candidate& node = candidates_[static_cast<size_t>(i)];
      if (node.joint < c_.min_log_prob) continue;
      node_of[static_cast<size_t>(i)] = count;
      tree.tokens[count] = node.token;
      tree.parents[count] = node.parent < 0 ? 0 : node_of[static_cast<size_t>(node.parent)];
      int64_t depth = 1;
      for (int32_t at = node.parent; at >= 0; at = candidates_[static_cast<size_t>(at)].parent) ++depth;
      tree.sources[count] = node.copied ? c_.depth + 1 : depth;
      tree.joints[count++] = node.joint;
    }
    return count;
  }

  static constexpr int MAX_CANDIDATES = 1 << 16;  // of levels that are copied

  ThreadPool& pool_;
  const DraftConfig& c_;
  int64_t root_;
  int keep_, limit_, wide_, words_, blocks_, scored_, width_;
  bool conditional_, partial_, unknown_token_ = false;
  float rest_ = -INFINITY;
  std::vector<int32_t> chosen_;             // blocks of the head, those that are scored first
  BlockScore* block_scores_;                // [depth, blocks]
  float *scores_, *values_, *noise_;
  int64_t* at_;                             // indices of the values among the scores
  char *hidden_rows_, *parent_rows_;        // hidden states of a level, and of the nodes that the next one expands
  size_t hidden_bytes_ = 0;                 // of a row of them; 0: there are none
  // of the nodes that the next level expands: their tokens, joint log probabilities and indices among all candidates
  std::vector<int64_t> tokens_;
  std::vector<float> joints_, kept_joints_;
  std::vector<int32_t> places_, parent_places_;
  std::vector<Candidate> level_, candidates_;
  std::vector<Continuation> continuations_;

 private:
  int64_t token_at(int64_t at) const {
    if (at >= scored_) return c_.row_ids[at - scored_];
    return c_.ids[chosen_[static_cast<size_t>(at / BLOCK)] * BLOCK + at % BLOCK];
  }

  // Finds the tokens after the occurrences of the longest match that ends with an expanded node; returns its length.
  int find_continuations(int expanded) {
    continuations_.clear();
    if (c_.text == nullptr) return 0;
    int64_t path[LONGEST_MATCH];  // the newest token first
    int known = 0;
    for (int32_t at = places_[static_cast<size_t>(expanded)]; at >= 0 && known < LONGEST_MATCH;
         at = candidates_[static_cast<size_t>(at)].parent)
      path[known++] = candidates_[static_cast<size_t>(at)].token;
    for (int64_t i = c_.text_length - 1; i >= 0 && known < LONGEST_MATCH; --i) path[known++] = c_.text[i];
    int longest = 0, count = 0;
    for (int64_t i = c_.text_length - 2; i >= 0; --i) {
      if (c_.text[i] != path[0]) continue;
      int length = 1;
      while (length < known && length <= i && c_.text[i - length] == path[length]) ++length;
      if (length > longest) continuations_.clear(), longest = length, count = 0;
      if (length < longest || count == MOST_OCCURRENCES) continue;
      ++count;
      const int64_t token = c_.text[i + 1];
      auto same = std::find_if(continuations_.begin(), continuations_.end(), [&](const auto& c) { return c.token == token; });
      if (same == continuations_.end()) same = continuations_.insert(same, {token, 0.0f, false});
      same->share += 1.0f;
    }
    for (Continuation& each : continuations_) each.share /= static_cast<float>(count);
    return longest;
  }

  // Adds the children of an expanded node: those of the streams, at ``from`` among the values, mixed with copied ones.
  void add_children(int expanded, int from) {
    const int match = find_continuations(expanded);
    const float joint = joints_[static_cast<size_t>(expanded)], weight = match == 0 ? 0.0f : c_.mixed[match - 1];
    for (int i = from; i < from + c_.children; ++i) {
      if (!(values_[i] > -INFINITY)) continue;  // padding: there are fewer candidates
      const int64_t token = token_at(at_[i]);
      float share = 0.0f;
      for (Continuation& each : continuations_)
        if (each.token == token) share = each.share, each.known = true;
      const float own = (1.0f - weight) * std::exp(values_[i]), copied = weight * share;
      const float value = match == 0 ? values_[i] : std::log(own + copied);
      add({token, joint + value, expanded, copied > own});
    }
    for (const Continuation& each : continuations_)
      if (!each.known) add({each.token, joint + std::log(weight * each.share), expanded, true});
  }

  void add(const Candidate& node) {
    if (node.token < 0 || node.token >= c_.embedding.words)
      unknown_token_ = true;
    else
      level_.push_back(node);
  }

  // Keeps the best candidates of a level, and chooses those to expand: all that can have children in the tree, given that a
  // child is no more probable than its parent.
  void keep() {
    std::stable_sort(level_.begin(), level_.end(), [](const Candidate& a, const Candidate& b) { return a.joint > b.joint; });
    if (static_cast<int>(level_.size()) > keep_) level_.resize(static_cast<size_t>(keep_));
    for (const Candidate& node : level_) kept_joints_.push_back(node.joint);
    float least = c_.min_log_prob;
    if (static_cast<int>(kept_joints_.size()) > keep_) {
      std::nth_element(kept_joints_.begin(), kept_joints_.begin() + keep_ - 1, kept_joints_.end(), std::greater<float>());
      least = std::max(least, kept_joints_[static_cast<size_t>(keep_ - 1)]);
    }
    parent_places_.swap(places_);
    places_.clear(), joints_.clear(), tokens_.clear();
    bool expand = true;
    for (const Candidate& node : level_) {
      const int32_t place = static_cast<int32_t>(candidates_.size());
      candidates_.push_back({node.token, node.joint, parent_places_[static_cast<size_t>(node.parent)], node.copied});
      expand = expand && static_cast<int>(tokens_.size()) < limit_ && node.joint > least;
      if (!expand) continue;
      if (hidden_bytes_ > 0)
        std::memcpy(parent_rows_ + tokens_.size() * hidden_bytes_, hidden_rows_ + static_cast<size_t>(node.parent) * hidden_bytes_,
                    hidden_bytes_);
      tokens_.push_back(node.token);
      joints_.push_back(node.joint);
      places_.push_back(place);
    }
  }
};

}  // namespace
