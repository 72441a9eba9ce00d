// A thread pool with barriers and work stealing, which uses fewer threads while other processes keep CPUs busy.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "vector_math.h"

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int SPINS_BEFORE_SLEEP = 100000;  // longer than the time in Python between two calls of a pass
constexpr int SPINS_BEFORE_YIELD = 4000;

// A thread without a CPU delays the others at the next barrier. So after each WINDOW of jobs, the pool shrinks by the number of
// CPUs that were missing in it, and after REST all threads are used again. On an idle machine with two CPUs, two threads rarely
// lack one, for 25 ms; while another process is busy they always lack one, and take twice as long as one thread.
constexpr int64_t WINDOW = 60'000'000, REST = 1'000'000'000;  // nanoseconds

inline int64_t nanoseconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// the part of [0, count) that belongs to a thread
inline void split_range(int count, int threads, int thread, int* first, int* last) {
  *first = static_cast<int>(static_cast<int64_t>(count) * thread / threads);
  *last = static_cast<int>(static_cast<int64_t>(count) * (thread + 1) / threads);
}

// A job runs on ``size`` threads at once, with the caller as thread 0. Workers spin between jobs, and sleep after a while. If
// the system cannot start a thread, the pool is smaller. Jobs must not throw: the other threads would wait at a barrier forever.
// Threads are POSIX's: std::thread would bring a part of the C++ library that a wheel would have to contain (hatch_build.py).
class ThreadPool {
 public:
  explicit ThreadPool(int threads) : members_(static_cast<size_t>(threads)) {
    for (Member& member : members_) member.pool = this;
    for (most_ = 1; most_ < threads; ++most_)
      if (pthread_create(&member_of(most_).worker, nullptr, work_as, &member_of(most_)) != 0) break;
    size_ = most_;  // no worker reads it before its first job
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    stopping_ = true;
    start(most_);
    for (int i = 1; i < most_; ++i) pthread_join(member_of(i).worker, nullptr);
    for (Member& member : members_) pthread_cond_destroy(&member.wake);
    pthread_mutex_destroy(&mutex_);
  }

  int size() const { return size_; }
  int most() const { return most_; }

  // Chooses ``size`` for the jobs of the next call.
  void adapt() {
    if (size_ == most_ && worked_ < WINDOW) return;
    const int64_t now = nanoseconds(CLOCK_MONOTONIC);
    if (worked_ >= WINDOW) {
      int64_t lacked = worked_ / 2;
      for (Member& member : members_) lacked += std::exchange(member.lacked, 0);
      const int64_t missing = lacked / std::exchange(worked_, 0);  // CPUs, rounded
      if (missing == 0) return;
      size_ = static_cast<int>(std::max<int64_t>(1, size_ - missing));
      rested_ = now + REST;
    } else if (now >= rested_) {
      size_ = most_;
      for (Member& member : members_) member.loops = members_[0].loops, member.lacked = 0;
      worked_ = 0;
    }
  }

  template <class Job>
  void run(Job&& job) {
    if (size_ == 1) {
      job(0);
      return release_tiles();
    }
    const int64_t began = nanoseconds(CLOCK_MONOTONIC);
    call_ = [](void* context, int thread) { (*static_cast<Job*>(context))(thread); };
    context_ = const_cast<void*>(static_cast<const void*>(&job));
    running_.store(size_ - 1, std::memory_order_relaxed);
    members_[0].lacked -= without_cpu();
    start(size_);
    job(0);
    release_tiles();
    wait([this] { return running_.load(std::memory_order_acquire) == 0; });
    members_[0].lacked += without_cpu();
    worked_ += nanoseconds(CLOCK_MONOTONIC) - began;
  }

  // Calls work(i) once for each i of [0, count). All threads of a job call this; each starts with its own part and then
  // steals from the others. It returns when all calls have started; a barrier waits until they are done.
  template <class Work>
  void parallel_for(int count, int thread, Work&& work) {
    const uint64_t loop = ++member_of(thread).loops;
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
  struct Member;

  template <class Done>
  static void wait(Done&& done) {
    for (int spins = 0; !done(); ++spins) {
      spin_pause();
      if (spins > SPINS_BEFORE_YIELD) sched_yield();
    }
  }

  // time without a CPU of the calling thread, plus a constant
  static int64_t without_cpu() { return nanoseconds(CLOCK_MONOTONIC) - nanoseconds(CLOCK_THREAD_CPUTIME_ID); }

  // starts a job on the workers among the first ``threads``
  void start(int threads) {
    pthread_mutex_lock(&mutex_);
    for (int i = 1; i < threads; ++i) member_of(i).jobs.fetch_add(1, std::memory_order_release);
    pthread_mutex_unlock(&mutex_);
    for (int i = 1; i < threads; ++i) pthread_cond_signal(&member_of(i).wake);
  }

  static void* work_as(void* member) {
    Member& me = *static_cast<Member*>(member);
    me.pool->work(me, static_cast<int>(&me - me.pool->members_.data()));
    return nullptr;
  }

  void work(Member& me, int thread) {
    int seen = 0;
    for (;;) {
      int spins = 0;
      while (me.jobs.load(std::memory_order_acquire) == seen) {
        spin_pause();
        if (++spins > SPINS_BEFORE_SLEEP) {
          pthread_mutex_lock(&mutex_);
          while (me.jobs.load() == seen) pthread_cond_wait(&me.wake, &mutex_);
          pthread_mutex_unlock(&mutex_);
        }
      }
      seen = me.jobs.load(std::memory_order_acquire);
      if (stopping_) return;
      me.lacked -= without_cpu();
      call_(context_, thread);
      release_tiles();
      me.lacked += without_cpu();
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  // A thread, and the progress of its part: ``claimed`` is the number of the loop that last claimed from it, shifted left by 24
  // bits, plus the number of claimed indices. Loop numbers increase, so nothing has to be reset. ``loops`` counts the thread's
  // calls of parallel_for, which all threads of a job make equally often. Both may wrap around.
  struct alignas(64) Member {
    std::atomic<uint64_t> claimed{0};
    uint64_t loops = 0;
    int64_t lacked = 0;        // nanoseconds of jobs without a CPU
    std::atomic<int> jobs{0};  // number of jobs started
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
    pthread_t worker{};
    ThreadPool* pool = nullptr;
  };

  Member& member_of(int thread) { return members_[static_cast<size_t>(thread)]; }

  // consecutive indices of a part
  struct Claim {
    int first, count;
  };

  // Claims half of the remaining indices of a thread's part, which has ``size``: claiming them one by one takes a few percent of
  // a pass (docs/log.md). 0 indices if none remain. If a faster thread has moved the counter to a later loop, this part is
  // finished.
  Claim claim(int owner, uint64_t loop, int size) {
    std::atomic<uint64_t>& claimed = member_of(owner).claimed;
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

  int size_ = 1, most_ = 1;
  int64_t worked_ = 0, rested_ = 0;  // nanoseconds: of jobs on several threads; when to use all threads again
  std::vector<Member> members_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  bool stopping_ = false;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

}  // namespace
