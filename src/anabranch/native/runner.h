// A thread pool and its memory. A runner executes one call at a time.
#pragma once

#include <map>
#include <memory>

#include "plan.h"
#include "threads.h"
#include "workspace.h"

namespace {

// memory of one thread
struct Scratch {
  Workspace hidden, queries, scores, sums, cached, pairs;
};

class Runner {
 public:
  explicit Runner(int threads) : pool(threads), scratch(static_cast<size_t>(pool.most())) {}

  ThreadPool pool;
  std::vector<Scratch> scratch;  // of each thread
  PassMemory plan, tail_plan;
  Tail tail;
  Workspace x, tail_x, qkv, hidden, heads, inner, low, terms, added;  // rows of a pass, and between the products of its layers
  Workspace argmax, converted;
  Workspace screened, norms, upper, lower;  // of a screened search

  // memory of a method's own kernels, created on first use and kept with the runner
  template <class T>
  T& extension() {
    static const char key = 0;  // its address identifies T
    auto kept = extensions_.find(&key);
    if (kept == extensions_.end())
      kept = extensions_.emplace(&key, Extension(new T(), [](void* memory) { delete static_cast<T*>(memory); })).first;
    return *static_cast<T*>(kept->second.get());
  }

 private:
  using Extension = std::unique_ptr<void, void (*)(void*)>;
  std::map<const void*, Extension> extensions_;
};

// the runner of a call, with the number of threads adapted to the CPUs that are free
inline Runner& ready(void* runner) {
  Runner& self = *static_cast<Runner*>(runner);
  self.pool.adapt();
  return self;
}

}  // namespace
