// Complete calls: a forward pass through layers, and a product of rows with one weight.
#pragma once

#include "rider.h"

namespace {

// Runs layers over ``batch.x``, in place. With ``ends``, the pass starts with tokens and ends with the rows after the last
// norm and the tokens that the head chooses, or with the keys and values of the last layer if these rows are not needed.
// All outputs are without the prefill nodes.
template <class T>
void run_pass(Runner& runner, const Shape& s, const Layer* layers, int count, const RaggedBatch& batch, const Ends* ends,
              const Taps& taps) {
  using P = Storage<T>;
  const PreparedPass<T> pass = prepare_pass<T>(runner, s, layers, count, batch, runner.plan, runner.x);
  const bool to_end = ends == nullptr || ends->hidden != nullptr;
  const bool choosing = ends != nullptr && ends->chosen != nullptr;
  const Tail* tail = ends == nullptr || ends->prefill == nullptr ? nullptr : &runner.tail;
  PreparedPass<T> last = pass;
  if (tail != nullptr) {  // the last layer computes all keys and values, then the rest for the nodes of ``tail`` only
    runner.tail.of(batch, ends->prefill);
    last = prepare_pass<T>(runner, s, layers, count, tail->batch, runner.tail_plan, runner.tail_x);
  }
  ScreenedSearch<P> search;
  if (choosing)
    search = screened_search(runner, static_cast<const P*>(ends->hidden), last.plan.nodes, ends->head, ends->bias, ends->screen);
  if (ends != nullptr) check_places(pass.plan, *ends);
  ThreadPool& pool = runner.pool;
  pool.run([&](int thread) {
    if (ends != nullptr && ends->tokens != nullptr) {
      embed_nodes<P>(pool, s, pass.plan, *ends, thread);
      pool.barrier();
    }
    run_layers(runner, s, layers, 0, count, pass, tail, taps, to_end && tail == nullptr, thread);
    if (tail != nullptr) {
      copy_rows(pool, pass.plan, tail, s.d, last.plan.x, thread);
      pool.barrier();
      LayerPart<T>(runner, s, layers[count - 1], count - 1, last, thread).run();
      pool.barrier();
    }
    if (ends == nullptr || !to_end) return;
    norm_rows(pool, last.plan.x, last.plan.nodes, s, ends->norm, ends->norm_bias, static_cast<P*>(ends->hidden), thread);
    if (!choosing) return;
    pool.barrier();
    search_argmax(pool, search, thread);
  });
  if (choosing) reduce_argmax(search.best, pool.size(), last.plan.nodes, ends->chosen);
}

// y = x w' + bias; rows of P, which is the weight's type unless that is quantised
template <class P>
void linear(Runner& runner, const P* x, int count, const Packed& w, const float* bias, float* y) {
  void* buffer = conversion_buffer<P>(runner.converted, count, w);
  runner.pool.run([&](int thread) {
    multiply_converted(runner.pool, x, count, w, buffer, thread, [&](int m, int b, F32x16 low, F32x16 high) {
      const int left = w.outputs - b * BLOCK;
      add_bias(bias, b, left, &low, &high);
      store_outputs(y + static_cast<int64_t>(m) * w.outputs + b * BLOCK, left, low, high);
    });
  });
}

}  // namespace
