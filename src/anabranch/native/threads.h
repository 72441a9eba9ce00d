// A thread pool with barriers and work stealing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "vector_math.h"

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int SPINS_BEFORE_SLEEP = 100000;  // longer than the time in Python between two calls of a pass
constexpr int SPINS_BEFORE_YIELD = 4000;

// the part of [0, count) that belongs to a thread
inline void split_range(int count, int threads, int thread, int* first, int* last) {
  *first = static_cast<int>(static_cast<int64_t>(count) * thread / threads);
  *last = static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / threads);
}

// A job runs on all threads at once, with the caller as thread 0. Workers spin between jobs, and sleep after a while. If the
// system cannot start a thread, the pool is smaller. Jobs must not throw: the other threads would wait at a barrier forever.
class ThreadPool {
 public:
  explicit ThreadPool(int threads) : size_(threads), progress_(static_cast<size_t>(threads)) {
    workers_.reserve(static_cast<size_t>(threads));
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
    } catch (const std::bad_alloc&) {
    }
    size_ = static_cast<int>(workers_.size()) + 1;  // no worker reads it before its first job
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      job_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  template <class Job>
  void run(Job&& job) {
    if (size_ == 1) {
      job(0);
      return release_tiles();
    }
    call_ = [](void* context, int thread) { (*static_cast<Job*>(context))(thread); };
    context_ = const_cast<void*>(static_cast<const void*>(&job));
    running_.store(size_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    release_tiles();
    wait([this] { return running_.load(std::memory_order_acquire) == 0; });
  }

  // Calls work(i) once for each i of [0, count). All threads of a job call this; each starts with its own part and then
  // steals from the others. It returns when all calls have started; a barrier waits until they are done.
  template <class Work>
  void parallel_for(int count, int thread, Work&& work) {
    const uint64_t loop = ++progress_[static_cast<size_t>(thread)].loops;
    for (int i = 0; i < size_; ++i) {
      const int owner = thread + i < size_ ? thread + i : thread + i - size_;
      int first, last;
      split_range(count, size_, owner, &first, &last);
      for (Claim part; (part = claim(owner, loop, last - first)).count > 0;)
        for (int next = 0; next < part.count; ++next) work(first + part.first + next);
    }
  }

  // all threads of a job wait here for each other
  void barrier() {
    if (size_ == 1) return;
    const unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      wait([this, round] { return round_.load(std::memory_order_acquire) != round; });
    }
  }

 private:
  template <class Done>
  static void wait(Done&& done) {
    for (int spins = 0; !done(); ++spins) {
      spin_pause();
      if (spins > SPINS_BEFORE_YIELD) std::this_thread::yield();
    }
  }

  void work(int thread) {
    int seen = 0;
    for (;;) {
      int spins = 0;
      while (job_.load(std::memory_order_acquire) == seen) {
        spin_pause();
        if (++spins > SPINS_BEFORE_SLEEP) {
          std::unique_lock<std::mutex> lock(mutex_);
          wake_.wait(lock, [&] { return job_.load() != seen; });
        }
      }
      seen = job_.load(std::memory_order_acquire);
      if (stopping_) return;
      call_(context_, thread);
      release_tiles();
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  // The progress of a thread's part: the number of the loop that last claimed from it, shifted left by 24 bits, plus the
  // number of claimed indices. Loop numbers increase, so nothing has to be reset. ``loops`` counts the thread's own calls of
  // parallel_for, which are the same for all threads. Both may wrap around.
  struct alignas(64) Progress {
    std::atomic<uint64_t> claimed{0};
    uint64_t loops = 0;
  };

  // consecutive indices of a part
  struct Claim {
    int first, count;
  };

  // Claims half of what is left of a thread's part of ``size`` indices: claiming them one by one takes a few percent of a pass
  // (docs/log.md). 0 indices if none are left. If a faster thread has moved the counter on to a later loop, this part was
  // already finished.
  Claim claim(int owner, uint64_t loop, int size) {
    std::atomic<uint64_t>& claimed = progress_[static_cast<size_t>(owner)].claimed;
    const uint64_t begin = loop << 24;
    uint64_t seen = claimed.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t since = static_cast<int64_t>(seen - begin);  // below 0: from an earlier loop
      if (since >= size) return {size, 0};
      const int first = since < 0 ? 0 : static_cast<int>(since), count = (size - first + 1) / 2;
      if (claimed.compare_exchange_weak(seen, begin + static_cast<uint64_t>(first + count), std::memory_order_relaxed))
        return {first, count};
    }
  }

  int size_;
  std::vector<Progress> progress_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> job_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

}  // namespace
