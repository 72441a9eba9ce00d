// Sampling: the largest log probabilities, argmax, and Gumbel noise.
#pragma once

#include "products.h"
#include "runner.h"

namespace {

// ---- the largest log probabilities --------------------------------------------------------------------------------

// Inserts a score into the ``have`` largest so far, in descending order; among equals, the first one stays first.
inline void insert_top(float score, int at, int best, int* have, float* values, int64_t* places) {
  int place = *have < best ? (*have)++ : best - 1;
  for (; place > 0 && values[place - 1] < score; --place) {
    values[place] = values[place - 1];
    places[place] = places[place - 1];
  }
  values[place] = score;
  places[place] = at;
}

// ``top_log_softmax`` of a row with fewer than ``best`` finite scores, or with NaN or +inf: these count as -inf
void top_finite(const float* z, int width, float rest, int best, float* values, int64_t* places) {
  int have = 0;
  for (int at = 0; at < width; ++at)
    if (std::isfinite(z[at]) && (have < best || z[at] > values[best - 1]))
      insert_top(z[at], at, best, &have, values, places);
  if (have > 0) {
    const double highest = values[0];
    double total = std::isfinite(rest) ? std::exp(rest - highest) : 0.0;
    for (int at = 0; at < width; ++at)
      if (std::isfinite(z[at])) total += std::exp(z[at] - highest);
    for (int i = 0; i < have; ++i) values[i] = static_cast<float>(values[i] - highest - std::log(total));
  }
  std::fill(values + have, values + best, -INFINITY);
  std::fill(places + have, places + best, 0);
}

// The ``best`` largest values of a row's log softmax, descending, and their indices; among equals the first comes first.
// exp(rest) is added to the sum of the softmax. If there are fewer finite scores, the rest is -inf at index 0.
void top_log_softmax(const float* z, int width, float rest, int best, float* values, int64_t* places) {
  const F32x16 low = broadcast(-INFINITY);
  F32x16 largest[4] = {low, low, low, low};
  int i = 0;
  for (; i + 64 <= width; i += 64)
    for (int c = 0; c < 4; ++c) largest[c] = max(largest[c], load16(z + i + 16 * c));
  for (; i < width; i += 16) largest[0] = max(largest[0], masked_load(z + i, width - i, low));
  const F32x16 of_lanes = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
  const F32x16 highest = broadcast(reduce_max(of_lanes));
  // the largest score of each lane is at least the smallest of these, so at least 16 scores reach this threshold
  float threshold = best > 16 ? -INFINITY : std::nextafter(-reduce_max(zero() - of_lanes), -INFINITY);
  F32x16 total = zero(), part = zero();  // a single sum would lose what many improbable tokens add to a probable one
  int have = 0;
  for (i = 0; i < width; i += 16) {
    const F32x16 v = masked_load(z + i, width - i, low);
    part = part + keep_first(width - i, exp(v - highest));
    if (i % 1024 == 1008) total = total + part, part = zero();
    uint32_t candidates = threshold == -INFINITY ? first_lanes(width - i) : greater(v, broadcast(threshold));
    for (; candidates != 0; candidates &= candidates - 1) {
      const int at = i + __builtin_ctz(candidates);
      if (!(z[at] > threshold)) continue;
      insert_top(z[at], at, best, &have, values, places);
      if (have == best) threshold = values[best - 1];
    }
  }
  const float scale = std::log(reduce_sum(total + part) + std::exp(rest - first_lane(highest))) + first_lane(highest);
  if (have < best || !std::isfinite(scale)) return top_finite(z, width, rest, best, values, places);
  for (i = 0; i < best; ++i) values[i] -= scale;
}

// ---- noise --------------------------------------------------------------------------------------------------------

inline U32x16 mix_bits(U32x16 x) {
  x = bitwise_xor(x, shift_right<16>(x));
  x = mul(x, broadcast_u32(0x7feb352du));
  x = bitwise_xor(x, shift_right<15>(x));
  x = mul(x, broadcast_u32(0x846ca68bu));
  return bitwise_xor(x, shift_right<16>(x));
}

// Gumbel noise of 16 tokens at positions whose keys have these halves; see sampling.gumbels
inline F32x16 gumbel(U32x16 tokens, U32x16 low, U32x16 high) {
  U32x16 x = add(mul(tokens, broadcast_u32(0x9e3779b9u)), low);
  x = mix_bits(bitwise_xor(mix_bits(x), high));
  const F32x16 one = broadcast(1.0f);
  F32x16 v = mul_add(to_float(x), broadcast(0x1p-32f), broadcast(0x1p-33f));
  v = min(v, broadcast(1.0f - 0x1p-24f));
  // -log(1 - v), accurate to the last digits where v is small
  const F32x16 u = one - v, d = one - u;
  const F32x16 negative_log = (zero() - log(u)) * v / d;
  return zero() - log(select_greater(d, zero(), negative_log, v));
}

inline F32x16 gumbel(U32x16 tokens, uint64_t key) {
  return gumbel(tokens, broadcast_u32(static_cast<uint32_t>(key)), broadcast_u32(static_cast<uint32_t>(key >> 32)));
}

// ---- argmax -------------------------------------------------------------------------------------------------------

// The largest score so far and its index; -inf at -1: none yet; infinity at -1: there was a NaN.
struct Argmax {
  float value;
  int32_t at;
};

// Updates with the first ``count`` of 16 scores, which start at index ``at``. Among equal scores the lowest index wins,
// independent of the order of blocks. A NaN is never ignored.
inline void update_argmax(F32x16 scores, int count, int at, Argmax* best) {
  const bool before = at < best->at;
  const float threshold = before ? std::nextafter(best->value, -INFINITY) : best->value;
  uint32_t candidates = greater_or_nan(scores, broadcast(threshold)) & first_lanes(count);
  if (candidates == 0) return;
  alignas(64) float each[16];
  store16(each, scores);
  for (; candidates != 0; candidates &= candidates - 1) {
    const int i = __builtin_ctz(candidates);
    if (std::isnan(each[i]))
      *best = {INFINITY, -1};
    else if (each[i] > best->value || (each[i] == best->value && at + i < best->at)) *best = {each[i], at + i};
  }
}

// A search for the largest output y = x w' + bias of each row; each thread searches the blocks that it computes.
template <class P>
struct ArgmaxSearch {
  const P* x;
  int count;
  const Packed* w;
  const float* bias;
  void* buffer;
  Argmax* best;  // [threads, count]
};

template <class P>
ArgmaxSearch<P> argmax_search(Runner& runner, const P* x, int count, const Packed& w, const float* bias) {
  const int64_t results = static_cast<int64_t>(runner.pool.size()) * count;
  return {x, count, &w, bias, conversion_buffer<P>(runner.converted, count, w), runner.argmax.of<Argmax>(results)};
}

// a thread's part of a search
template <class P>
void search_argmax(ThreadPool& pool, const ArgmaxSearch<P>& search, int thread) {
  const Packed& w = *search.w;
  Argmax* mine = search.best + static_cast<int64_t>(thread) * search.count;
  std::fill(mine, mine + search.count, Argmax{-INFINITY, -1});
  multiply_converted(pool, search.x, search.count, w, search.buffer, thread, [&](int m, int b, F32x16 low, F32x16 high) {
    const int left = w.outputs - b * BLOCK;
    add_bias(search.bias, b, left, &low, &high);
    update_argmax(low, left, b * BLOCK, mine + m);
    update_argmax(high, left - 16, b * BLOCK + 16, mine + m);
  });
}

// The indices of the best among all threads; -1 if the largest score is not finite, or any is NaN.
void reduce_argmax(const Argmax* results, int threads, int count, int64_t* places) {
  for (int m = 0; m < count; ++m) {
    Argmax best = results[m];
    for (int i = 1; i < threads; ++i) {
      const Argmax& other = results[static_cast<int64_t>(i) * count + m];
      if (other.value > best.value || (other.value == best.value && other.at < best.at)) best = other;
    }
    places[m] = std::isfinite(best.value) ? best.at : -1;
  }
}

// The largest of z / temperature + noise of each row of z [count, width]; rows with the same key share their noise.
void sample(Runner& runner, const float* z, int count, int width, float temperature, const uint64_t* keys, int64_t* places) {
  constexpr int PART = 512;
  const int threads = runner.pool.size();
  Argmax* results = runner.argmax.of<Argmax>(static_cast<int64_t>(threads) * count);
  runner.pool.run([&](int thread) {
    Argmax* mine = results + static_cast<int64_t>(thread) * count;
    std::fill(mine, mine + count, Argmax{-INFINITY, -1});
    int first, last;
    split_range((width + PART - 1) / PART, threads, thread, &first, &last);
    const F32x16 divisor = broadcast(temperature);
    alignas(64) float noise[PART];
    for (int part = first; part < last; ++part) {
      const int from = part * PART, to = std::min(width, from + PART);
      for (int m = 0; m < count; ++m) {
        if (std::find(keys, keys + m, keys[m]) != keys + m) continue;  // done together with the first row of this key
        for (int i = from; i < to; i += 16) store16(noise + i - from, gumbel(iota(i), keys[m]));
        for (int row = m; row < count; ++row) {
          if (keys[row] != keys[m]) continue;
          for (int i = from; i < to; i += 16) {
            const float* at = z + static_cast<int64_t>(row) * width + i;
            const F32x16 score = masked_load(at, to - i, zero()) / divisor + load16(noise + i - from);
            update_argmax(score, to - i, i, mine + row);
          }
        }
      }
    }
  });
  reduce_argmax(results, threads, count, places);
}

}  // namespace
