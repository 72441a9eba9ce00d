// Complete calls: a forward pass through layers, and a product of rows with one weight.
#pragma once

#include "layer.h"
#include "screen.h"

namespace {

// Runs layers over ``batch.x``, in place. With ``ends``, the pass starts with tokens and ends with the rows after the last
// norm and the tokens that the head chooses, or with the keys and values of the last layer if these rows are not needed.
// ``tap`` (or null) receives the rows [M, D] before layer ``tapped``. All outputs are without the prefill nodes.
template <class T>
void run_pass(Runner& runner, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch, const Ends* ends,
              float* tap, int tapped) {
  using P = Storage<T>;
  PassPlan plan = plan_pass(batch, runner.plan);
  if (plan.x == nullptr) plan.x = runner.x.of<float>(static_cast<int64_t>(batch.nodes) * s.d);
  const Activations<T> rows = activations<T>(runner, s, layers, count, batch.nodes);
  plan_attention(runner, s, rows, plan);
  const bool to_end = ends == nullptr || ends->hidden != nullptr;
  const bool choosing = ends != nullptr && ends->chosen != nullptr;
  const Tail* tail = ends == nullptr || ends->prefill == nullptr ? nullptr : &runner.tail;
  PassPlan last_plan = plan;
  Activations<T> last_rows = rows;
  if (tail != nullptr) {  // the last layer computes all keys and values, then the rest for the nodes of ``tail`` only
    runner.tail.of(batch, ends->prefill);
    last_plan = plan_pass(tail->batch, runner.tail_plan);
    last_plan.x = runner.tail_x.of<float>(static_cast<int64_t>(last_plan.nodes) * s.d);
    last_rows = activations<T>(runner, s, layers, count, last_plan.nodes);
    plan_attention(runner, s, last_rows, last_plan);
  }
  const int nodes = last_plan.nodes;
  ScreenedSearch<P> search;
  if (choosing)
    search = screened_search(runner, static_cast<const P*>(ends->hidden), nodes, ends->head, ends->bias, ends->screen);
  ThreadPool& pool = runner.pool;
  pool.run([&](int thread) {
    int first, last;
    if (ends != nullptr && ends->tokens != nullptr) {
      split_range(batch.nodes, pool.size(), thread, &first, &last);
      for (int i = first; i < last; ++i)
        embed<P>(ends->embedding, ends->tokens[i], s.d, plan.x + static_cast<int64_t>(i) * s.d);
      pool.barrier();
    }
    run_layers(runner, s, layers, count, plan, rows, tail, tap, tapped, to_end && tail == nullptr, thread);
    if (tail != nullptr) {
      copy_rows(pool, plan, tail, s.d, last_plan.x, thread);
      pool.barrier();
      LayerPart<T>(runner, s, layers[count - 1], last_plan, last_rows, thread).run();
      pool.barrier();
    }
    if (ends == nullptr || !to_end) return;
    split_range(nodes, pool.size(), thread, &first, &last);
    for (int i = first; i < last; ++i) {
      const int64_t row = static_cast<int64_t>(i) * s.d;
      rms_norm(last_plan.x + row, ends->norm, s.d, s.eps, static_cast<P*>(ends->hidden) + row);
    }
    if (!choosing) return;
    pool.barrier();
    search_argmax(pool, search, thread);
  });
  if (choosing) reduce_argmax(search.found, pool.size(), nodes, ends->chosen);
}

// y = x w' + bias; rows of P, which is the weight's type unless that is quantised
template <class P>
void linear(Runner& runner, const P* x, int count, const Packed& w, const float* bias, float* y) {
  void* buffer = conversion_buffer<P>(runner.converted, count, w);
  runner.pool.run([&](int thread) {
    multiply_converted(runner.pool, x, count, w, buffer, thread, [&](int m, int b, F32x16 low, F32x16 high) {
      const int left = w.outputs - b * BLOCK;
      if (bias != nullptr) {
        low = low + masked_load(bias + b * BLOCK, left, zero());
        high = high + masked_load(bias + b * BLOCK + 16, left - 16, zero());
      }
      store_outputs(y + static_cast<int64_t>(m) * w.outputs + b * BLOCK, left, low, high);
    });
  });
}

}  // namespace
