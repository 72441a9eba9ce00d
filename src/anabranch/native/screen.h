// Screening: the largest output of a row, exactly, without reading the whole weight.
//
// Beside a weight lies a copy in int8. For a row x, which is y in int8, and an output's weights w, which are v in the copy,
//
//     |x w - y v|  <=  |x| |w - v|  +  |x - y| |v|                                                  (Cauchy-Schwarz)
//
// so the copy bounds each output from both sides. Only an output whose upper bound reaches the largest lower bound can be
// the largest. Blocks with such outputs, one in a hundred (docs/log.md), are multiplied as if there were no copy, so the
// result is the same to the bit; and the copy is read in half the time of bf16 weights.
#pragma once

#include <cmath>

#include "sampling.h"

namespace {

constexpr int SCREENED_ROWS = 16;          // most rows of a screened search: each row adds blocks to multiply
constexpr int BLOCKS_AT_ONCE = 16;         // blocks that a thread claims at a time
constexpr float NORM_ROUNDING = 1.001f;    // upper bound of a norm over its computed value
constexpr float MAX_NORM = 1e12f;          // of a screened row: sums of larger ones may overflow
constexpr float UNDERFLOW_BOUND = 1e-30f;  // bound of products that are flushed to zero

// ``screen`` may be null: then all blocks are multiplied, and the rest has no memory.
template <class P>
struct ScreenedSearch : ArgmaxSearch<P> {
  const Screen* screen;
  QuantizedGroup* rows;  // [count, width] in int8
  float* norms;          // [count, 2]: of x and of x - y
  float* upper;          // [count, blocks]: upper bounds of each block's outputs
  F32x16* lower;         // [threads, count]: the largest lower bounds
};

template <class P>
ScreenedSearch<P> screened_search(Runner& runner, const P* x, int count, const Packed& w, const float* bias,
                                  const Screen& screen) {
  ScreenedSearch<P> made{};
  static_cast<ArgmaxSearch<P>&>(made) = argmax_search(runner, x, count, w, bias);
  if (screen.copy.data == nullptr || count > SCREENED_ROWS) return made;
  const int64_t rows = count;
  made.screen = &screen;
  made.rows = runner.screened.of<QuantizedGroup>(row_offset<QuantizedGroup>(rows, w.width));
  made.norms = runner.norms.of<float>(2 * rows);
  made.upper = runner.upper.of<float>(rows * w.blocks());
  made.lower = runner.lower.of<F32x16>(runner.pool.size() * rows);
  return made;
}

// the norms of a row and of its rounding error in int8
template <class P>
void row_norms(const P* x, const QuantizedGroup* y, int width, float* norms) {
  alignas(64) float values[BLOCK];
  float whole = 0.0f, error = 0.0f;
  for (int g = 0; g < width / BLOCK; ++g) {
    store16(values, load16(x + g * BLOCK));
    store16(values + 16, load16(x + g * BLOCK + 16));
    for (int i = 0; i < BLOCK; ++i) {
      const float difference = values[i] - y[g].scale * static_cast<float>(y[g].value[i]);
      whole += values[i] * values[i];
      error += difference * difference;
    }
  }
  norms[0] = NORM_ROUNDING * std::sqrt(whole);
  norms[1] = NORM_ROUNDING * std::sqrt(error);
}

// a thread's part of a search
template <class P>
void search_argmax(ThreadPool& pool, const ScreenedSearch<P>& search, int thread) {
  using T = Operand<P>;
  if (search.screen == nullptr) return search_argmax(pool, static_cast<const ArgmaxSearch<P>&>(search), thread);
  const Packed& w = *search.w;
  const Screen& screen = *search.screen;
  const int count = search.count, width = w.width, blocks = w.blocks();
  const auto* exact = reinterpret_cast<const T*>(search.x);
  if constexpr (!std::is_same<T, P>::value) exact = static_cast<T*>(search.buffer);
  int first, last;
  split_range(count, pool.size(), thread, &first, &last);
  for (int m = first; m < last; ++m) {
    const P* x = search.x + static_cast<int64_t>(m) * width;
    QuantizedGroup* y = search.rows + row_offset<QuantizedGroup>(m, width);
    convert_row(x, width, y);
    row_norms(x, y, width, search.norms + 2 * m);
    if constexpr (!std::is_same<T, P>::value) convert_row(x, width, static_cast<T*>(search.buffer) + row_offset<T>(m, width));
  }
  F32x16* lower = search.lower + static_cast<int64_t>(thread) * count;
  std::fill(lower, lower + count, broadcast(-INFINITY));
  pool.barrier();

  multiply(pool, search.rows, count, screen.copy, thread, [&](int m, int b, F32x16 low, F32x16 high) {
    float* upper = search.upper + static_cast<int64_t>(m) * blocks + b;
    const bool bounded = search.norms[2 * m] <= MAX_NORM && (b + 1) * BLOCK <= w.outputs;
    if (!bounded) {  // also NaN, and the padding of the last block
      *upper = INFINITY;
      return;
    }
    const F32x16 whole = broadcast(search.norms[2 * m]), error = broadcast(search.norms[2 * m + 1]);
    const auto bound = [&](int at) {
      return mul_add(whole, load16(screen.error + at), mul_add(error, load16(screen.size + at), broadcast(UNDERFLOW_BOUND)));
    };
    const F32x16 of_low = bound(b * BLOCK), of_high = bound(b * BLOCK + 16);
    *upper = reduce_max(max(low + of_low, high + of_high));
    lower[m] = max(lower[m], max(low - of_low, high - of_high));
  });
  pool.barrier();

  float floor[SCREENED_ROWS];
  for (int m = 0; m < count; ++m) {
    F32x16 largest = search.lower[m];
    for (int i = 1; i < pool.size(); ++i) largest = max(largest, search.lower[static_cast<int64_t>(i) * count + m]);
    floor[m] = reduce_max(largest);
  }
  Argmax* mine = search.best + static_cast<int64_t>(thread) * count;
  std::fill(mine, mine + count, Argmax{-INFINITY, -1});
  pool.parallel_for((blocks + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE, thread, [&](int part) {
    for (int b = part * BLOCKS_AT_ONCE; b < std::min(blocks, (part + 1) * BLOCKS_AT_ONCE); ++b)
      for (int m = 0; m < count; ++m) {
        if (search.upper[static_cast<int64_t>(m) * blocks + b] < floor[m]) continue;
        multiply_block(exact + row_offset<T>(m, width), 1, w, b, [&](int, int, F32x16 low, F32x16 high) {
          update_argmax(low, w.outputs - b * BLOCK, b * BLOCK, mine + m);
          update_argmax(high, w.outputs - b * BLOCK - 16, b * BLOCK + 16, mine + m);
        });
      }
  });
}

// The indices of the largest outputs of rows [count, w.width], without storing the outputs.
template <class P>
void choose(Runner& runner, const P* x, int count, const Packed& w, const float* bias, const Screen& screen, int64_t* places) {
  const ScreenedSearch<P> search = screened_search(runner, x, count, w, bias, screen);
  runner.pool.run([&](int thread) { search_argmax(runner.pool, search, thread); });
  reduce_argmax(search.best, runner.pool.size(), count, places);
}

}  // namespace
