// Layers of a decoder for a few rows at a time, weights in bf16, float32, int8 or int4. What depends on the processor
// stands in a header for it: numbers.h says what such a header gives.
//
// Why not a library: between two tokens a small model does three hundred tiny operations, and dispatching them costs as
// much as reading its weights. Here a pass is one call: threads meet at six barriers a layer, take the blocks of a weight
// one by one so that none waits long there, and nothing is allocated.
//
// Every output is a sum in an order that does not depend on how many rows a pass has, nor on where a key lies in the
// cache: a product accumulates over k for each row by itself, and attention runs over the keys that a row sees, in
// text order. So a tree of 32 nodes yields, to the bit, what 32 passes of one node yield, in bf16 and quantised too.
//
// T is the type of the rows between two products: Factor<bf16> or float, as weights and cache are, or Group, rows in int8
// for weights in int8 or int4, where the cache is bf16. Sums and the residual stream are always float.
//
// B batch rows; M nodes of a pass, those of its first row first, each row with a number of its own; D model width, H query
// heads, K kv heads, E head width, I inner width, R rank.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) && !defined(ANABRANCH_AVX2)
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace {

constexpr int AHEAD = 8192;  // bytes of weights asked for in advance: memory answers late
constexpr int STRETCH = 64;  // keys that are turned at a time
constexpr int NEAR = 512;    // values that stay in the second-level cache while all queries of a task take them
constexpr int IDLE = 100000;  // turns a worker spins before it sleeps: longer than what Python does between two calls

// ---- the boundary -------------------------------------------------------------------------------------------------

// What every entry returns that can fail; no exception leaves this library. See STATUSES in library.py.
enum Status : int32_t { DONE = 0, NO_MEMORY = -1, NO_THREADS = -2, REFUSED = -3 };

// what was wrong with this thread's last call that failed
thread_local char message[256] = "";

// an argument that does not fit the kernels or the other arguments
struct Refusal {
  const char* what;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw Refusal{what};
}

inline int32_t failed(Status status, const char* what) {
  std::snprintf(message, sizeof(message), "%s", what);
  return status;
}

// calls f, which returns a number from 0 on, and turns exceptions into a status
template <class F>
inline int32_t guarded(F&& f) noexcept {
  try {
    return f();
  } catch (const Refusal& refusal) {
    return failed(REFUSED, refusal.what);
  } catch (const std::bad_alloc&) {
    return failed(NO_MEMORY, "out of memory");
  } catch (const std::length_error&) {
    return failed(NO_MEMORY, "more memory than a process can have");
  } catch (const std::system_error& error) {
    return failed(NO_THREADS, error.what());
  } catch (const std::exception& error) {
    return failed(REFUSED, error.what());
  }
}

// ---- numbers ------------------------------------------------------------------------------------------------------

// values that one T holds
template <class T>
constexpr int PER = 1;
template <>
constexpr int PER<Group> = BLOCK;

// rows that share a read of the weights
template <class T>
constexpr int ROOM = TILE;
template <>
constexpr int ROOM<Group> = QUANTISED_TILE;

// whether rows of ``width`` values of T are multiplied in the processor's tiles; however many rows there are, since their
// sums are rounded in another order
template <class T>
constexpr bool in_tiles(int width) {
  return TILES && std::is_same<T, bf16>::value && width % BLOCK == 0;
}

template <class T>
constexpr int room(int width) {
  return in_tiles<T>(width) ? MOST : ROOM<T>;
}

// rows of a tile where ``count`` of ``width`` values are to be done: all tiles as good as alike
template <class T>
inline int tile_of(int count, int width) {
  const int tiles = (count + room<T>(width) - 1) / room<T>(width);
  return tiles == 0 ? 1 : (count + tiles - 1) / tiles;
}

// what T stands for outside of products, in caches say
template <class T>
using Plain = std::conditional_t<std::is_same<T, float>::value, float, bf16>;

// values [32 b, 32 b + 32) of a row
template <class T>
inline void store32(T* row, int b, Floats low, Floats high) {
  store16(row + b * BLOCK, low);
  store16(row + b * BLOCK + 16, high);
}

// e^x: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7. NaN stays NaN: of a NaN and a number,
// ``larger`` returns its second argument.
inline Floats exponential(Floats x) {
  x = larger(same(-100.0f), x);
  const Floats n = nearest(x * same(1.44269504f));
  Floats r = fnma(n, same(0.693359375f), x);
  r = fnma(n, same(-2.12194440e-4f), r);
  Floats p = same(1.9875691500e-4f);
  p = fma(p, r, same(1.3981999507e-3f));
  p = fma(p, r, same(8.3334519073e-3f));
  p = fma(p, r, same(4.1665795894e-2f));
  p = fma(p, r, same(1.6666665459e-1f));
  p = fma(p, r, same(5.0000001201e-1f));
  p = fma(p, r * r, r + same(1.0f));
  return scaled(p, n);
}

// 2^x for what is rounded to bf16 then; relative error below 3e-6
inline Floats power_of_2(Floats x) {
  const Floats n = nearest(x), r = x - n;
  Floats p = same(9.57010119e-3f);
  p = fma(p, r, same(5.59178603e-2f));
  p = fma(p, r, same(2.40247448e-1f));
  p = fma(p, r, same(6.93121815e-1f));
  p = fma(p, r, same(9.99999261e-1f));
  return scaled(p, n);
}

inline Floats silu(Floats x) {
  const Floats one = same(1.0f);
  return x / (one + exponential(zeros() - x));
}

// ---- threads ------------------------------------------------------------------------------------------------------

// the part of [0, count) that is thread id's
inline void share(int count, int threads, int id, int* first, int* last) {
  *first = static_cast<int>(static_cast<int64_t>(count) * id / threads);
  *last = static_cast<int>(static_cast<int64_t>(count) * (id + 1) / threads);
}

// A job runs on all threads at once; the caller is thread 0. Workers spin for a moment between jobs and then sleep. Where
// the system refuses a thread, the pool has fewer. Jobs must not throw: the other threads would wait at a barrier forever.
class Pool {
 public:
  explicit Pool(int threads) : size_(threads), begun_(static_cast<size_t>(threads)) {
    workers_.reserve(static_cast<size_t>(threads));
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
    } catch (const std::bad_alloc&) {
    }
    size_ = static_cast<int>(workers_.size()) + 1;  // no worker reads it before its first job
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
      turn_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  template <class Job>
  void run(Job&& job) {
    if (size_ == 1) {
      job(0);
      return drop_tiles();
    }
    call_ = [](void* context, int id) { (*static_cast<Job*>(context))(id); };
    context_ = const_cast<void*>(static_cast<const void*>(&job));
    left_.store(size_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      turn_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    drop_tiles();
    wait([this] { return left_.load(std::memory_order_acquire) == 0; });
  }

  // ``work(i)`` for each i of [0, count), once, by whichever thread comes to it: all of a job's threads call this, each
  // begins with its share, and who is done helps the others. It returns when all parts are begun; a barrier sees them done.
  template <class Work>
  void each(int count, int id, Work&& work) {
    const uint64_t turn = ++begun_[static_cast<size_t>(id)].turns;
    for (int i = 0; i < size_; ++i) {
      const int whose = id + i < size_ ? id + i : id + i - size_;
      int first, last;
      share(count, size_, whose, &first, &last);
      for (int next; (next = first + take(whose, turn)) < last;) work(next);
    }
  }

  // all threads of a job meet here
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
      pause();
      if (spins > 4000) std::this_thread::yield();  // someone else needs the processor
    }
  }

  void work(int id) {
    int seen = 0;
    for (;;) {
      int spins = 0;
      while (turn_.load(std::memory_order_acquire) == seen) {
        pause();
        if (++spins > IDLE) {
          std::unique_lock<std::mutex> lock(mutex_);
          wake_.wait(lock, [&] { return turn_.load() != seen; });
        }
      }
      seen = turn_.load(std::memory_order_acquire);
      if (ending_) return;
      call_(context_, id);
      drop_tiles();
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Which call of ``each`` a thread's share was last begun in, and behind that, in 24 bits, how many of its parts were:
  // nobody has to set it back. ``turns`` are a thread's own calls; all threads make the same ones. Both may wrap.
  struct alignas(64) Begun {
    std::atomic<uint64_t> parts{0};
    uint64_t turns = 0;
  };

  // The next part of a thread's share that nobody has begun; behind the last one larger numbers come. Someone may be a call
  // ahead, since this one had nothing left for him: then it has nothing for us either.
  int take(int whose, uint64_t turn) {
    constexpr int64_t ALL = 1 << 24;
    std::atomic<uint64_t>& parts = begun_[static_cast<size_t>(whose)].parts;
    const uint64_t begin = turn << 24;
    uint64_t seen = parts.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t since = static_cast<int64_t>(seen - begin);  // below 0: of an earlier call
      if (since >= ALL) return ALL;
      const uint64_t next = since < 0 ? begin : seen;
      if (parts.compare_exchange_weak(seen, next + 1, std::memory_order_relaxed)) return static_cast<int>(next - begin);
    }
  }

  int size_;
  std::vector<Begun> begun_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> turn_{0};
  alignas(64) std::atomic<int> left_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

// ---- products -----------------------------------------------------------------------------------------------------

// How a weight is packed.
enum Kind : int32_t { BF16 = 0, FLOAT = 1, INT8 = 2, INT4 = 3 };

// A packed weight [outputs, width]: blocks of 32 outputs, in each for every k (in bf16: every pair of k) the 32
// outputs'; quantised ones as described above
struct Packed {
  const void* data;
  int32_t outputs, width, kind;
  int64_t block_bytes() const {
    switch (kind) {
      case BF16: return static_cast<int64_t>(width) * BLOCK * 2;
      case FLOAT: return static_cast<int64_t>(width) * BLOCK * 4;
      case INT8: return static_cast<int64_t>(width) * BLOCK + BLOCK * 4;
      default: return static_cast<int64_t>(width / BLOCK) * GROUP_BYTES<Int4>;
    }
  }
  const char* block(int b) const { return static_cast<const char*>(data) + b * block_bytes(); }
  int blocks() const { return (outputs + BLOCK - 1) / BLOCK; }
};

// Rows from ``m`` on, a tile of ``count``. One tile reads its weights from memory as it goes; where there are
// several, the first two ask for half of the next block each, so that memory works while the later ones compute.
template <class W, class B, class T>
inline int some_rows_of(int m, int count, const T* x, int64_t stride, const char* here, int64_t bytes, int width,
                        Sums& acc) {
  const int size = tile_of<T>(count, width), n = std::min(size, count - m), number = m / size;
  const T* from = x + m * stride;
  const B* block = reinterpret_cast<const B*>(here);
  if (n == count)
    tile<W, 2>(n, from, stride, block, width, here + AHEAD, acc);
  else if (number < 2)
    tile<W, 1>(n, from, stride, block, width, here + bytes + number * (bytes / 2), acc);
  else
    tile<W, 0>(n, from, stride, block, width, here, acc);
  return n;
}

// of block ``b``; x has w.width values a row
template <class T>
inline int some_rows(int m, int count, const T* x, const Packed& w, int b, Sums& acc) {
  using P = Plain<T>;
  return some_rows_of<P, P>(m, count, x, w.width, w.block(b), w.block_bytes(), w.width, acc);
}

inline int some_rows(int m, int count, const Group* x, const Packed& w, int b, Sums& acc) {
  const int64_t stride = w.width / BLOCK, bytes = w.block_bytes();
  return w.kind == INT4 ? some_rows_of<Int4, uint8_t>(m, count, x, stride, w.block(b), bytes, w.width, acc)
                        : some_rows_of<Int8, uint8_t>(m, count, x, stride, w.block(b), bytes, w.width, acc);
}

// ask for where thread id's part of a weight begins, before a barrier: memory works while threads wait
inline void warm(const Packed& w, int threads, int id) {
  if (w.data == nullptr) return;
  int first, last;
  share(w.blocks(), threads, id, &first, &last);
  const char* from = w.block(first);
  for (int i = 0; i < AHEAD; i += 64) ask(from + i);
}

inline void zero(Sums& acc, int count) {
  for (int m = 0; m < count; ++m) acc[m][0] = acc[m][1] = zeros();
}

// y = x w' for block b: ``done(m, b, low, high)`` takes 32 outputs of one row
template <class T, class Done>
inline void product(const T* x, int count, const Packed& w, int b, Done&& done) {
  Sums acc;
  const int size = tile_of<T>(count, w.width);
  for (int m = 0; m < count; m += size) {
    zero(acc, size);
    const int n = some_rows(m, count, x, w, b, acc);
    for (int i = 0; i < n; ++i) done(m + i, b, acc[i][0], acc[i][1]);
  }
}

inline void store_part(float* to, int left, Floats low, Floats high) {
  store_some(to, left, low);
  store_some(to + 16, left - 16, high);
}

// a row as another type of row
template <class P, class T>
inline void narrowed(const P* x, int width, T* y) {
  for (int b = 0; b < width / BLOCK; ++b) store32(y, b, load16(x + b * BLOCK), load16(x + b * BLOCK + 16));
  const int left = width % BLOCK;
  if (left == 0) return;
  P part[BLOCK] = {};  // only plain types have rows that are not whole
  T as[BLOCK];
  std::copy(x + width - left, x + width, part);
  store32(as, 0, load16(part), load16(part + 16));
  if constexpr (!std::is_same<T, Group>::value) std::copy(as, as + left, y + width - left);
}

// where a row of ``width`` values begins among rows of T
template <class T>
inline int64_t place(int64_t row, int width) {
  return row * (width / PER<T>);
}

// ---- a layer ------------------------------------------------------------------------------------------------------

struct Layer {
  const float *norm_in, *norm_mlp, *q_norm, *k_norm, *qkv_bias, *out_bias;
  Packed qkv, out, up, down, low, high;  // low, high: a low-rank term beside the MLP (data null: none)
  void *keys, *values;                   // of the first row in use: [K, capacity, E]
};

struct Shape {
  int32_t d, heads, kv_heads, e, inner, rope_dim;
  float eps, scale;
  int64_t row_stride, head_stride;  // of the cache, in elements
};

struct Step {
  int32_t batch, nodes;  // B, M
  int32_t window;    // a node sees that many positions, its own among them (0: all)
  int32_t trailing;  // whether these are streams, whose window is that of the newest committed token
  int32_t places;    // positions that cos and sin have
  float* x;                      // [M, D], in and out
  const float *cos, *sin;        // of all positions [places, rope_dim]
  const int64_t* starts;         // [B + 1]: row b has the nodes starts[b] to starts[b + 1] - 1 of [M], perhaps none
  const int64_t* lengths;        // committed tokens [B]
  const int64_t* parents;        // of the nodes [M], counted within their row: each before its child; -1: none; null: a chain

  int first_of(int b) const { return static_cast<int>(starts[b]); }
  int nodes_of(int b) const { return static_cast<int>(starts[b + 1] - starts[b]); }
};

// A task of attention: some queries of one row of the batch and one kv head. A query is (node, head of the group).
struct Task {
  int32_t row, head, first, count;
};

// A step, where its nodes stand, and what they see, as attention reads it: their ancestors and themselves
struct Pass : Step {
  const int32_t* row;                  // the batch row of each node [M]
  const int64_t* positions;            // of the nodes in the text [M]
  const int32_t *offsets, *ancestors;  // node i of [M] sees nodes ancestors[offsets[i] : offsets[i + 1]], itself last
  const int32_t* first;                // where what a node sees of the committed text begins [M]
  const int32_t* run;                  // how many of its row's first nodes a node sees without a gap [M]
  const Task* tasks;                   // of attention, in a layer
  int32_t task_count;
};

inline float sum_of_squares(const float* x, int n) {
  Floats total = zeros();
  for (int i = 0; i < n; i += 16) {
    const Floats v = load16(x + i);
    total = fma(v, v, total);
  }
  return sum(total);
}

template <class T>
inline void rms_norm(const float* x, const float* weight, int n, float eps, T* y) {
  const Floats factor = same(1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps));
  const auto part = [&](int i) {
    return load16(x + i) * factor * load16(weight + i);
  };
  for (int b = 0; b < n / BLOCK; ++b) store32(y, b, part(b * BLOCK), part(b * BLOCK + 16));
}

// a head in place: norm it (where the model does), turn it, round it
template <class T>
inline void turn(float* v, const float* norm, const Shape& s, const float* cos, const float* sin, T* to) {
  if (norm != nullptr) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(v, s.e) / static_cast<float>(s.e) + s.eps);
    for (int i = 0; i < s.e; ++i) v[i] = v[i] * factor * norm[i];
  }
  const int half = s.rope_dim / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const Floats a = load16(v + i), b = load16(v + i + half);
    const auto times = [](Floats x, const float* y) { return x * load16(y); };
    store16(to + i, times(a, cos + i) - times(b, sin + i));
    store16(to + i + half, times(b, cos + i + half) + times(a, sin + i + half));
  }
  for (; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    store1(to + i, a * cos[i] - b * sin[i]);
    store1(to + i + half, b * cos[i + half] + a * sin[i + half]);
  }
  for (i = s.rope_dim; i < s.e; ++i) store1(to + i, v[i]);
}

// Scores of QUERIES queries and up to STRETCH keys in groups of 16, as many groups at a time as have room for their sums:
// a sum waits for the one before it, and a value of a query is read once for all of them.
template <class T, int QUERIES>
inline void scores_of(const T* q, int64_t stride, const Turned* keys, int words, int groups, float* to, int64_t to_stride) {
  constexpr int TOGETHER = std::min(STRETCH / 16, std::max(1, SUMS / QUERIES));
  const auto some = [&](int first, auto together) {
    constexpr int GROUPS = together;
    Floats acc[QUERIES][GROUPS];
    for (auto& row : acc)
      for (auto& a : row) a = zeros();
    for (int d = 0; d < words; ++d) {
      Turned k[GROUPS];
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) k[g] = keys[(first + g) * words + d];
#pragma GCC unroll 12
      for (int i = 0; i < QUERIES; ++i) {
        const auto value = spread(q + i * stride + PER_LANE<T> * d);
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) acc[i][g] = dot<T>(acc[i][g], value, k[g]);
      }
    }
    for (int i = 0; i < QUERIES; ++i)
      for (int g = 0; g < GROUPS; ++g) store16(to + i * to_stride + 16 * (first + g), acc[i][g]);
  };
  int g = 0;
  for (; g + TOGETHER <= groups; g += TOGETHER) some(g, std::integral_constant<int, TOGETHER>{});
  for (; g < groups; ++g) some(g, std::integral_constant<int, 1>{});
}

// Softmax without its division; returns the sum. ``p`` is padded to whole vectors. What comes out are values of T in the
// same place, with a zero behind them, so that they are whole pairs.
template <class T>
inline float soften(float* p, int n, float scale) {
  const Floats low = same(-INFINITY);
  Floats most[4] = {low, low, low, low};
  int i = 0;
  for (; i + 64 <= n; i += 64)
    for (int c = 0; c < 4; ++c) most[c] = larger(most[c], load16(p + i + 16 * c));
  for (; i < n; i += 16) most[0] = larger(most[0], load_some(p + i, n - i, low));
  const float highest = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  const Floats top = same(highest);
  Floats total = zeros();
  T* to = reinterpret_cast<T*>(p);
  if constexpr (std::is_same<T, float>::value) {
    for (i = 0; i <= n; i += 16) {
      const Floats v = only(n - i, exponential((load_some(p + i, n - i, top) - top) * same(scale)));
      store16(to + i, v);
      total = total + v;
    }
  } else {
    constexpr float LOG2E = 1.44269504f;
    const Floats steep = same(scale * LOG2E), level = top * steep;
    const auto weight = [&](Floats v) { return power_of_2(fma(v, steep, zeros() - level)); };
    for (i = 0; i + 16 <= n; i += 16) total = total + store_rounded(to + i, weight(load16(p + i)));
    total = total + store_rounded(to + i, only(n - i, weight(load_some(p + i, n - i, top))));
  }
  return sum(total);
}

// ``top`` of a row that has fewer than ``best`` finite scores, or others among them: those count as -inf
void top_of_finite(const float* z, int width, float rest, int best, float* values, int64_t* places) {
  int have = 0;
  for (int at = 0; at < width; ++at) {
    if (!std::isfinite(z[at]) || (have == best && z[at] <= values[best - 1])) continue;
    int place = have < best ? have++ : best - 1;
    for (; place > 0 && values[place - 1] < z[at]; --place) {
      values[place] = values[place - 1];
      places[place] = places[place - 1];
    }
    values[place] = z[at];
    places[place] = at;
  }
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

// log softmax of a row, its ``best`` largest values, falling, and where they are; of equals the first comes first. ``rest``
// is what the sum takes in besides, as a logarithm. Where there are fewer finite scores, -inf at place 0 follows.
void top(const float* z, int width, float rest, int best, float* values, int64_t* places) {
  const Floats low = same(-INFINITY);
  Floats most[4] = {low, low, low, low};
  int i = 0;
  for (; i + 64 <= width; i += 64)
    for (int c = 0; c < 4; ++c) most[c] = larger(most[c], load16(z + i + 16 * c));
  for (; i < width; i += 16) most[0] = larger(most[0], load_some(z + i, width - i, low));
  const Floats lanes_most = larger(larger(most[0], most[1]), larger(most[2], most[3]));
  const Floats highest = same(largest(lanes_most));
  // each lane has a value that is no less than the least of these: sixteen values at least are above this bar
  float bar = best > 16 ? -INFINITY : std::nextafter(-largest(zeros() - lanes_most), -INFINITY);
  Floats total = zeros();
  int have = 0;
  for (i = 0; i < width; i += 16) {
    const Floats v = load_some(z + i, width - i, low);
    total = total + only(width - i, exponential(v - highest));
    uint32_t more = bar == -INFINITY ? lanes(width - i) : above(v, same(bar));
    for (; more != 0; more &= more - 1) {
      const int at = i + __builtin_ctz(more);
      if (!(z[at] > bar)) continue;
      int place = have < best ? have++ : best - 1;
      for (; place > 0 && values[place - 1] < z[at]; --place) {
        values[place] = values[place - 1];
        places[place] = places[place - 1];
      }
      values[place] = z[at];
      places[place] = at;
      if (have == best) bar = values[best - 1];
    }
  }
  const float scale = std::log(sum(total) + std::exp(rest - first(highest))) + first(highest);
  if (have < best || !std::isfinite(scale)) return top_of_finite(z, width, rest, best, values, places);
  for (i = 0; i < best; ++i) values[i] -= scale;
}

// ---- noise --------------------------------------------------------------------------------------------------------

// of numbers above 0 that are not tiny: Cephes' polynomial; relative error below 2e-7
inline Floats logarithm(Floats x) {
  Floats mantissa, exponent;
  split(x, &mantissa, &exponent);
  const Floats root = same(1.41421356f);
  const Floats m = where_above(mantissa, root, mantissa * same(0.5f), mantissa);
  const Floats k = where_above(mantissa, root, exponent + same(1.0f), exponent);
  const Floats r = m - same(1.0f), z = r * r;
  Floats p = same(7.0376836292e-2f);
  for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                        2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, r, same(c));
  p = p * r * z;
  p = fma(k, same(-2.12194440e-4f), p);
  p = fnma(z, same(0.5f), p);
  return fma(k, same(0.693359375f), r + p);
}

inline Words mixed(Words x) {
  x = differ(x, shifted<16>(x));
  x = times(x, words(0x7feb352d));
  x = differ(x, shifted<15>(x));
  x = times(x, words(static_cast<int>(0x846ca68bu)));
  return differ(x, shifted<16>(x));
}

// the noise of 16 tokens at the position of ``key``; see sampling.gumbels
inline Floats gumbel(Words tokens, uint64_t key) {
  const Words low = words(static_cast<int>(key)), high = words(static_cast<int>(key >> 32));
  Words x = plus(times(tokens, words(static_cast<int>(0x9e3779b9u))), low);
  x = mixed(differ(mixed(x), high));
  const Floats one = same(1.0f);
  Floats v = fma(floats(x), same(0x1p-32f), same(0x1p-33f));
  v = smaller(v, same(1.0f - 0x1p-24f));
  // -log(1 - v), which must be right to the last digits where v is small
  const Floats u = one - v, d = one - u;
  const Floats whole = (zeros() - logarithm(u)) * v / d;
  return zeros() - logarithm(where_above(d, zeros(), whole, v));
}

// ---- drafts -------------------------------------------------------------------------------------------------------

// Embeddings E [vocabulary, D]: row by row, or as a packed weight of the same type
struct Table {
  const void* rows;
  int32_t packed, words;  // words: the size of the vocabulary
};

// How stream states become a tree: z_j = silu(A z_{j-1} + U E[parent] + C s_j), score = head . (s_j + W z_j)
struct Draft {
  Table embedding;
  Packed token, state, carry, to_state, head, own;
  const int64_t *ids, *own_ids;       // token ids of the rows of head and own
  int32_t d, depth, best, nodes, frontier;
  int32_t blocks;                     // of the head's, those that a level scores: where its stream's own best tokens are
  float least;                        // joint log probability that a node needs
  const uint64_t* keys;               // of the positions of all levels, where tokens are drawn (or null)
  float warmth, trust;                // then scores are scores * warmth + noise * trust
};

// A block of a draft vocabulary: its largest score, and the logarithm of the sum of exp(score)
struct Peak {
  float best, sum;
};

struct Candidate {
  int64_t token;
  float joint;
  int32_t parent;  // place among the candidates of all levels; -1: the root
};

// Streams that trail begin with main + stream_j + up silu(inputs [main', E'[emitted]] + hidden_j), ' at unit RMS. Rows of
// the batch without streams take no part: what stands for them is not read.
struct Entry {
  const float* main;                  // main rows of a pass [rows, D]
  const int64_t* nodes;               // the main row that each row of the batch trails [B]
  int32_t rows, most;                 // most: S, how many streams there are
  Table embedding;
  const int64_t* emitted;             // [B]
  Packed inputs, up;
  const float *streams, *hidden;      // [S, D], [S, inner]
  const float* norm;                  // the last norm [D]
};

// How a pass begins and ends, where its caller has no part in that
struct Ends {
  Table embedding;
  const int64_t* tokens;  // [M]; null: ``Step::x`` is given
  const float* norm;      // the last norm [D]
  void* hidden;           // the rows behind it [M, D]
  Packed head;
  const float* bias;
  int64_t* chosen;  // the head's largest outputs [M], of equals the first; null: not asked for
};

// memory that grows and stays
class Room {
 public:
  template <class T>
  T* of(int64_t count) {
    if (count < 0 || count > std::numeric_limits<int64_t>::max() / 2 / static_cast<int64_t>(sizeof(T))) throw std::bad_alloc();
    const size_t words = (static_cast<size_t>(count) * sizeof(T) + 63) / 64;
    if (lines_.size() < words) lines_.resize(words);
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

struct Scratch {
  Room h, q, scores, sums;
};

// The largest output found so far, and where it stands; -inf at -1: none yet, infinity at -1: a NaN was seen.
struct Best {
  float value;
  int32_t at;
};

// rows between the products of a layer
template <class T>
struct Between {
  float* qkv;
  T *heads, *inner, *low;
};

class Runner {
 public:
  explicit Runner(int threads) : pool(threads), own(static_cast<size_t>(pool.size())) {}
  Pool pool;
  std::vector<Scratch> own;

  // Layers over ``step.x`` in place; ``tap`` (or null) takes the rows as they are before layer ``tapped``. With ``ends``
  // from tokens to the rows behind the last norm, and to the tokens that the head chooses.
  template <class T>
  void layers(const Shape& s, const Layer* all, int count, const Step& step, const Ends* ends, float* tap, int tapped) {
    Pass pass = pass_of(step);
    const int rows = step.nodes;
    if (pass.x == nullptr) pass.x = x_.of<float>(static_cast<int64_t>(rows) * s.d);
    const Between<T> between = between_of<T>(s, all, count, pass);
    make_room<T>(s, pass);
    const bool choosing = ends != nullptr && ends->chosen != nullptr;
    Seek<Plain<T>> seek;
    if (choosing) seek = seek_of(static_cast<const Plain<T>*>(ends->hidden), rows, ends->head, ends->bias);
    pool.run([&](int id) {
      int first, last;
      share(rows, pool.size(), id, &first, &last);
      if (ends != nullptr && ends->tokens != nullptr) {
        for (int i = first; i < last; ++i)
          look_up<Plain<T>>(ends->embedding, ends->tokens[i], s.d, pass.x + static_cast<int64_t>(i) * s.d);
        pool.barrier();
      }
      climb(s, all, count, pass, between, tap, tapped, id);
      if (ends == nullptr) return;
      for (int i = first; i < last; ++i)
        rms_norm(pass.x + static_cast<int64_t>(i) * s.d, ends->norm, s.d, s.eps,
                 static_cast<Plain<T>*>(ends->hidden) + static_cast<int64_t>(i) * s.d);
      if (!choosing) return;
      pool.barrier();
      find(seek, id);
    });
    if (choosing) choice(seek.found, rows, ends->chosen);
  }

  // Streams of one node a row, all layers and the last norm: ``states`` [M, D] comes out.
  template <class T>
  void trail(const Shape& s, const Layer* all, int count, const Step& given, const Entry& from, Plain<T>* states) {
    Pass step = pass_of(given);
    const int rows = step.nodes, inner = from.inputs.outputs;
    step.x = x_.of<float>(static_cast<int64_t>(rows) * s.d);
    const Between<T> between = between_of<T>(s, all, count, step);
    make_room<T>(s, step);
    int32_t* taking = taking_.of<int32_t>(step.batch);  // rows of the batch that have streams
    int some = 0;
    for (int b = 0; b < step.batch; ++b)
      if (step.nodes_of(b) > 0) taking[some++] = b;
    T* both = both_.of<T>(place<T>(some, 2 * s.d));
    float* mains = mains_.of<float>(static_cast<int64_t>(step.batch) * s.d);
    T* z = root_.of<T>(place<T>(rows, inner));
    const std::vector<float> ones(static_cast<size_t>(s.d), 1.0f);
    pool.run([&](int id) {
      int first, last;
      share(some, pool.size(), id, &first, &last);
      for (int i = first; i < last; ++i) {
        T* to = both + place<T>(i, 2 * s.d);
        float* main = mains + static_cast<int64_t>(taking[i]) * s.d;
        rounded<Plain<T>>(from.main + from.nodes[taking[i]] * s.d, s.d, main);
        rms_norm(main, ones.data(), s.d, 1e-9f, to);
        embed(from.embedding, from.emitted[taking[i]], ones.data(), s.d, 1e-9f, to + place<T>(1, s.d));
      }
      pool.barrier();
      products(both, some, from.inputs, id, [&](int i, int block, Floats lo, Floats hi) {
        const int row = step.first_of(taking[i]);
        for (int j = 0; j < step.nodes_of(taking[i]); ++j) {
          const float* own_part = from.hidden + static_cast<int64_t>(j) * inner + block * BLOCK;
          store32(z + place<T>(row + j, inner), block, silu(lo + load16(own_part)), silu(hi + load16(own_part + 16)));
        }
      });
      pool.barrier();
      products(z, rows, from.up, id, [&](int row, int block, Floats lo, Floats hi) {
        const int b = step.row[row];
        const float* main = mains + static_cast<int64_t>(b) * s.d + block * BLOCK;
        const float* place_of = from.streams + static_cast<int64_t>(row - step.first_of(b)) * s.d + block * BLOCK;
        float* x = step.x + static_cast<int64_t>(row) * s.d + block * BLOCK;
        const auto sum = [](const float* a, const float* b, Floats c) {
          return load16(a) + load16(b) + c;
        };
        store16(x, sum(main, place_of, lo));
        store16(x + 16, sum(main + 16, place_of + 16, hi));
      });
      pool.barrier();
      climb(s, all, count, step, between, nullptr, 0, id);
      share(rows, pool.size(), id, &first, &last);
      for (int i = first; i < last; ++i)
        rms_norm(step.x + static_cast<int64_t>(i) * s.d, from.norm, s.d, s.eps, states + static_cast<int64_t>(i) * s.d);
    });
  }

  // The root and the best ``nodes`` - 1 candidates of all levels below it, breadth first, into tokens, parents, depths and
  // joints; returns how many. Of a level as many of the best are expanded as may have children among them, up to
  // ``frontier``: a child is no more probable than its parent.
  template <class T>
  int draft(const Draft& t, const Plain<T>* states, int64_t root, int64_t* tokens, int64_t* parents, int64_t* depths,
            float* joints) {
    const int keep = t.nodes - 1, wide = t.token.outputs, words = t.head.outputs, own_words = t.own.outputs;
    const int most = std::max(1, std::min(t.frontier, keep));  // no level keeps more nodes than the tree has
    // whoever draws must look at all tokens: noise may favour any
    const bool some = t.keys == nullptr && 2 * t.blocks <= t.head.blocks();
    const int blocks = some ? t.blocks : t.head.blocks(), scored = std::min(blocks * BLOCK, words), width = scored + own_words;
    const float eps = 1.1920929e-7f;
    T *e = draft_rows_.of<T>(place<T>(most, t.d)), *c = draft_states_.of<T>(place<T>(most, t.d));
    T *z = draft_z_.of<T>(place<T>(most, wide)), *before = draft_before_.of<T>(place<T>(most, wide));
    T* s = draft_state_.of<T>(place<T>(t.depth, t.d));
    Peak* peaks = draft_peaks_.of<Peak>(some ? t.depth * t.head.blocks() : 0);
    float rest = -INFINITY;
    std::vector<int32_t> chosen(static_cast<size_t>(t.head.blocks()));
    for (size_t b = 0; b < chosen.size(); ++b) chosen[b] = static_cast<int32_t>(b);
    float *scores = draft_scores_.of<float>(static_cast<int64_t>(most) * width), *parts = draft_parts_.of<float>(static_cast<int64_t>(most) * wide);
    float* values = draft_values_.of<float>(static_cast<int64_t>(most) * t.best);
    float* noise = draft_noise_.of<float>(t.keys == nullptr ? 0 : width);
    int64_t* places = draft_places_.of<int64_t>(static_cast<int64_t>(most) * t.best);
    std::vector<float> joint, falling;
    std::vector<int64_t> token;
    std::vector<int32_t> place_of, above, depth_of;
    std::vector<Candidate> level, all;
    // all the room that the job needs: it must not throw
    const size_t levels = static_cast<size_t>(t.depth) * static_cast<size_t>(keep), widest = static_cast<size_t>(most);
    for (auto* some_of : {&joint, &falling}) some_of->reserve(std::max(levels, widest));
    for (auto* some_of : {&place_of, &above, &depth_of}) some_of->reserve(std::max(levels, widest));
    token.reserve(widest), level.reserve(widest * static_cast<size_t>(t.best)), all.reserve(levels);
    joint.push_back(0.0f), token.push_back(root), place_of.push_back(-1);
    bool strange = false;  // a token that the embedding does not have
    const std::vector<float> ones(static_cast<size_t>(t.d), 1.0f);
    pool.run([&](int id) {
      int first, last;
      const int threads = pool.size();
      share(t.depth, threads, id, &first, &last);
      for (int i = first; i < last; ++i) narrowed(states + static_cast<int64_t>(i) * t.d, t.d, s + place<T>(i, t.d));
      if (some) {
        pool.barrier();
        products(s, t.depth, t.head, id, [&](int m, int b, Floats lo, Floats hi) {
          if (words - b * BLOCK < BLOCK) {  // the last block may not be whole
            alignas(64) float part[BLOCK];
            std::fill(part, part + BLOCK, -INFINITY);
            store_part(part, words - b * BLOCK, lo, hi);
            lo = load16(part), hi = load16(part + 16);
          }
          float best = largest(larger(lo, hi));
          if (!(best > -INFINITY)) best = -INFINITY;  // NaN has no place in an order
          const Floats each = exponential(lo - same(best)) + exponential(hi - same(best));
          peaks[m * t.head.blocks() + b] = {best, std::log(sum(each)) + best};
        });
      }
      for (int depth = 0; depth < t.depth; ++depth) {
        const int rows = static_cast<int>(token.size());
        if (rows == 0) return;
        const Plain<T>* state = states + static_cast<int64_t>(depth) * t.d;
        // parents' embeddings at unit RMS
        share(rows, threads, id, &first, &last);
        for (int i = first; i < last; ++i)
          embed(t.embedding, token[static_cast<size_t>(i)], ones.data(), t.d, eps, e + place<T>(i, t.d));
        pool.barrier();
        if (some && id == 0) {
          const Peak* here = peaks + depth * t.head.blocks();
          const auto higher = [here](int32_t a, int32_t b) {
            return here[a].best > here[b].best || (here[a].best == here[b].best && a < b);
          };
          std::nth_element(chosen.begin(), chosen.begin() + blocks, chosen.end(), higher);
          std::sort(chosen.begin(), chosen.begin() + blocks);
          // what is left out is as probable as the stream had it
          float most = -INFINITY, left = 0.0f;
          for (size_t i = static_cast<size_t>(blocks); i < chosen.size(); ++i) most = std::max(most, here[chosen[i]].sum);
          for (size_t i = static_cast<size_t>(blocks); i < chosen.size(); ++i) left += std::exp(here[chosen[i]].sum - most);
          rest = std::log(left) + most;
        }
        pool.each(t.token.blocks(), id, [&](int block) {
          Floats low = zeros(), high = zeros();
          product(s + place<T>(depth, t.d), 1, t.state, block, [&](int, int, Floats lo, Floats hi) { low = lo, high = hi; });
          product(e, rows, t.token, block, [&](int m, int b, Floats lo, Floats hi) {
            float* to = parts + static_cast<int64_t>(m) * wide + b * BLOCK;
            store16(to, lo + low);
            store16(to + 16, hi + high);
          });
          product(before, depth == 0 ? 0 : rows, t.carry, block, [&](int m, int b, Floats lo, Floats hi) {
            float* to = parts + static_cast<int64_t>(m) * wide + b * BLOCK;
            store16(to, lo + load16(to));
            store16(to + 16, hi + load16(to + 16));
          });
          for (int m = 0; m < rows; ++m) {
            const float* from = parts + static_cast<int64_t>(m) * wide + block * BLOCK;
            store32(z + place<T>(m, wide), block, silu(load16(from)), silu(load16(from + 16)));
          }
        });
        pool.barrier();
        products(z, rows, t.to_state, id, [&](int m, int b, Floats lo, Floats hi) {
          store32(c + place<T>(m, t.d), b, lo + load16(state + b * BLOCK),
                  hi + load16(state + b * BLOCK + 16));
        });
        pool.barrier();
        pool.each(blocks, id, [&](int i) {
          product(c, rows, t.head, chosen[static_cast<size_t>(i)], [&](int m, int b, Floats lo, Floats hi) {
            float* to = scores + static_cast<int64_t>(m) * width + i * BLOCK;
            const int left = words - b * BLOCK;
            store_part(to, left, lo, hi);
            if (some && left < BLOCK) std::fill(to + left, to + BLOCK, -INFINITY);
          });
        });
        if (own_words > 0)
          products(c, rows, t.own, id, [&](int m, int b, Floats lo, Floats hi) {
            store_part(scores + static_cast<int64_t>(m) * width + scored + b * BLOCK, own_words - b * BLOCK, lo, hi);
          });
        if (t.keys != nullptr) {
          for (const auto& [ids, count, to] :
               {std::tuple{t.ids, words, noise}, std::tuple{t.own_ids, own_words, noise + scored}}) {
            share((count + 15) / 16, threads, id, &first, &last);
            for (int i = 16 * first; i < std::min(16 * last, count); i += 16)
              store_some(to + i, count - i, gumbel(load_words(ids + i, count - i), t.keys[depth]));
          }
        }
        pool.barrier();
        pool.each(rows, id, [&](int i) {
          float* own_scores = scores + static_cast<int64_t>(i) * width;
          for (int j = 0; j < width && t.keys != nullptr; j += 16) {
            const Floats drawn = load_some(noise + j, width - j, zeros()) * same(t.trust);
            store_some(own_scores + j, width - j, fma(load_some(own_scores + j, width - j, zeros()), same(t.warmth), drawn));
          }
          top(own_scores, width, rest, t.best, values + static_cast<int64_t>(i) * t.best,
              places + static_cast<int64_t>(i) * t.best);
        });
        pool.barrier();
        if (id == 0) {
          level.clear();
          for (int i = 0; i < rows * t.best; ++i) {
            if (!(values[i] > -INFINITY)) continue;  // there are fewer
            const int64_t at = places[i];
            const int64_t id_of = at < scored ? t.ids[chosen[static_cast<size_t>(at / BLOCK)] * BLOCK + at % BLOCK]
                                              : t.own_ids[at - scored];
            if (id_of < 0 || id_of >= t.embedding.words) {
              strange = true;
              continue;
            }
            level.push_back({id_of, joint[static_cast<size_t>(i / t.best)] + values[i], i / t.best});
          }
          std::stable_sort(level.begin(), level.end(),
                           [](const Candidate& a, const Candidate& b) { return a.joint > b.joint; });
          if (static_cast<int>(level.size()) > keep) level.resize(static_cast<size_t>(keep));
          for (const Candidate& node : level) falling.push_back(node.joint);
          float least = t.least;
          if (static_cast<int>(falling.size()) > keep) {
            std::nth_element(falling.begin(), falling.begin() + keep - 1, falling.end(), std::greater<float>());
            least = std::max(least, falling[static_cast<size_t>(keep - 1)]);
          }
          above.swap(place_of);
          place_of.clear();
          joint.clear();
          token.clear();
          bool expand = true;
          for (const Candidate& node : level) {
            const int32_t here = static_cast<int32_t>(all.size());
            all.push_back({node.token, node.joint, above[static_cast<size_t>(node.parent)]});
            depth_of.push_back(depth + 1);
            expand = expand && static_cast<int>(token.size()) < most && node.joint > least;
            if (!expand) continue;
            std::memcpy(before + place<T>(static_cast<int64_t>(token.size()), wide), z + place<T>(node.parent, wide),
                        sizeof(T) * static_cast<size_t>(place<T>(1, wide)));
            token.push_back(node.token);
            joint.push_back(node.joint);
            place_of.push_back(here);
          }
        }
        pool.barrier();
      }
    });
    require(!strange, "a draft vocabulary holds tokens that the embedding does not have");
    // stable: of equals the shallower one first, so that no node is kept without its parent
    std::vector<int32_t> order(all.size()), name(all.size(), -1);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
      return all[static_cast<size_t>(i)].joint > all[static_cast<size_t>(j)].joint;
    });
    if (static_cast<int>(order.size()) > keep) order.resize(static_cast<size_t>(keep));
    std::sort(order.begin(), order.end());
    tokens[0] = root, parents[0] = -1, depths[0] = 0, joints[0] = 0.0f;
    int count = 1;
    for (const int32_t i : order) {
      const Candidate& node = all[static_cast<size_t>(i)];
      if (node.joint < t.least) continue;
      name[static_cast<size_t>(i)] = count;
      tokens[count] = node.token;
      parents[count] = node.parent < 0 ? 0 : name[static_cast<size_t>(node.parent)];
      depths[count] = depth_of[static_cast<size_t>(i)];
      joints[count++] = node.joint;
    }
    return count;
  }

  // the largest of z / temperature + noise, of equals the first; rows of one key share their noise
  void draws(const float* z, int count, int width, float temperature, const uint64_t* keys, int64_t* places) {
    constexpr int STRETCH = 512;
    Best* found = best_.of<Best>(static_cast<int64_t>(pool.size()) * count);
    pool.run([&](int id) {
      Best* mine = found + static_cast<int64_t>(id) * count;
      std::fill(mine, mine + count, Best{-INFINITY, -1});
      int first, last;
      share((width + STRETCH - 1) / STRETCH, pool.size(), id, &first, &last);
      const Floats heat = same(temperature);
      alignas(64) float noise[STRETCH];
      for (int part = first; part < last; ++part) {
        const int from = part * STRETCH, to = std::min(width, from + STRETCH);
        for (int m = 0; m < count; ++m) {
          if (std::find(keys, keys + m, keys[m]) != keys + m) continue;  // done with the first row of that key
          for (int i = from; i < to; i += 16)
            store16(noise + i - from, gumbel(count_from(i), keys[m]));
          for (int row = m; row < count; ++row) {
            if (keys[row] != keys[m]) continue;
            for (int i = from; i < to; i += 16) {
              const float* at = z + static_cast<int64_t>(row) * width + i;
              const Floats score = load_some(at, to - i, zeros()) / heat + load16(noise + i - from);
              better(score, to - i, i, mine + row);
            }
          }
        }
      }
    });
    choice(found, count, places);
  }

  // The places of the largest scores, of equals the first: y = x w' + bias is not kept.
  template <class P>
  void choose(const P* x, int count, const Packed& w, const float* bias, int64_t* places) {
    const Seek<P> seek = seek_of(x, count, w, bias);
    pool.run([&](int id) { find(seek, id); });
    choice(seek.found, count, places);
  }

  // y = x w' + bias; rows of P, the weight's type or any where it is quantised
  template <class P>
  void linear(const P* x, int count, const Packed& w, const float* bias, float* y) {
    void* ready = room_for<P>(count, w);
    pool.run([&](int id) {
      const auto done = [&](int m, int b, Floats lo, Floats hi) {
        const int left = w.outputs - b * BLOCK;
        if (bias != nullptr) {
          alignas(64) float part[BLOCK] = {};
          std::memcpy(part, bias + b * BLOCK, sizeof(float) * static_cast<size_t>(std::min(left, BLOCK)));
          lo = lo + load16(part);
          hi = hi + load16(part + 16);
        }
        store_part(y + static_cast<int64_t>(m) * w.outputs + b * BLOCK, left, lo, hi);
      };
      whole(x, count, w, ready, id, done);
    });
  }

 private:
  // a token's embedding
  template <class P>
  static void look_up(const Table& table, int64_t token, int d, float* to) {
    if (!table.packed) {
      const P* from = static_cast<const P*>(table.rows) + token * d;
      for (int j = 0; j < d; j += 16) store16(to + j, load16(from + j));
      return;
    }
    // a block holds the words of its outputs in turn; of two numbers in bf16 the first is the lower half
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

  // the same at unit RMS; rows are no wider than WIDEST in library.py
  template <class T>
  static void embed(const Table& table, int64_t token, const float* ones, int d, float eps, T* to) {
    alignas(64) float row[8192];
    look_up<Plain<T>>(table, token, d, row);
    rms_norm(row, ones, d, eps, to);
  }

  // a row as the type P holds it
  template <class P>
  static void rounded(const float* x, int d, float* to) {
    alignas(64) P part[16];
    for (int j = 0; j < d; j += 16) {
      store16(part, load16(x + j));
      store16(to + j, load16(part));
    }
  }

  // where the nodes of a step stand and what they see
  Pass pass_of(const Step& step) {
    const bool trailing = step.trailing != 0;
    const int nodes = step.nodes;
    int32_t *rows = rows_.of<int32_t>(nodes), *offsets = offsets_.of<int32_t>(nodes + 1);
    int32_t *first = first_.of<int32_t>(nodes), *run = run_.of<int32_t>(nodes);
    int64_t* positions = positions_.of<int64_t>(nodes);
    std::vector<int32_t>& seen = seen_;
    seen.clear();
    for (int b = 0; b < step.batch; ++b) std::fill(rows + step.starts[b], rows + step.starts[b + 1], b);
    for (int i = 0; i < nodes; ++i) {
      const int row = step.first_of(rows[i]), node = i - row;
      if (step.parents != nullptr)
        require(step.parents[i] >= -1 && step.parents[i] < node, "a node's parent does not come before it");
      const int parent = step.parents == nullptr ? node - 1 : static_cast<int>(step.parents[i]), above = row + parent;
      const int64_t length = step.lengths[rows[i]];
      positions[i] = parent < 0 ? length : positions[above] + 1;
      require(positions[i] < step.places, "a position has no rotation");
      const int64_t place = trailing ? length - 1 : positions[i];
      const int64_t from = step.window == 0 ? 0 : std::max<int64_t>(0, place - step.window + 1);
      first[i] = static_cast<int32_t>(std::min(from, length));
      // what its parent sees, as far as that is near, and itself
      offsets[i] = static_cast<int32_t>(seen.size());
      for (int j = parent < 0 ? 0 : offsets[above]; parent >= 0 && j < offsets[above + 1]; ++j)
        if (trailing || positions[row + seen[static_cast<size_t>(j)]] >= from) seen.push_back(seen[static_cast<size_t>(j)]);
      seen.push_back(node);
      offsets[i + 1] = static_cast<int32_t>(seen.size());
      run[i] = 0;
      while (offsets[i] + run[i] < offsets[i + 1] && seen[static_cast<size_t>(offsets[i] + run[i])] == run[i]) ++run[i];
    }
    Pass pass;
    static_cast<Step&>(pass) = step;
    pass.row = rows;
    pass.positions = positions;
    pass.offsets = offsets;
    pass.ancestors = seen.data();
    pass.first = first;
    pass.run = run;
    return pass;
  }

  // a thread's part of all layers, one behind the other; see ``layers``
  template <class T>
  void climb(const Shape& s, const Layer* all, int count, const Pass& step, const Between<T>& between, float* tap,
             int tapped, int id) {
    for (int i = 0; i < count; ++i) {
      if (tap != nullptr && i == tapped && id == 0)
        std::memcpy(tap, step.x, sizeof(float) * static_cast<size_t>(step.nodes) * static_cast<size_t>(s.d));
      layer(s, all[i], step, between, id);
      if (i + 1 < count) warm(all[i + 1].qkv, pool.size(), id);
      pool.barrier();
    }
  }

  // a thread's part of x w'; rows are turned into what the weight is multiplied with first, in ``ready``
  template <class P, class Done>
  void whole(const P* x, int count, const Packed& w, void* ready, int id, Done&& done) {
    if (w.kind < INT8)
      whole_as<Factor<P>>(x, count, w, ready, id, done);
    else
      whole_as<Group>(x, count, w, ready, id, done);
  }

  template <class T, class P, class Done>
  void whole_as(const P* x, int count, const Packed& w, void* ready, int id, Done&& done) {
    const T* rows;
    if constexpr (std::is_same<T, P>::value) {
      rows = x;
    } else {
      T* to = static_cast<T*>(ready);
      int first, last;
      share(count, pool.size(), id, &first, &last);
      for (int i = first; i < last; ++i)
        narrowed(x + static_cast<int64_t>(i) * w.width, w.width, to + place<T>(i, w.width));
      pool.barrier();
      rows = to;
    }
    products(rows, count, w, id, done);
  }

  // all blocks of a product, by all threads
  template <class T, class Done>
  void products(const T* x, int count, const Packed& w, int id, Done&& done) {
    pool.each(w.blocks(), id, [&](int b) { product(x, count, w, b, done); });
  }

  // The first of the largest of ``count`` of 16 scores that begin at place ``at``, if it is above what was found before,
  // or as large and before it: places do not come in order. A NaN is never passed over.
  static void better(Floats scores, int count, int at, Best* best) {
    const bool before = at < best->at;
    const float bar = before ? std::nextafter(best->value, -INFINITY) : best->value;
    uint32_t more = above_or_nan(scores, same(bar)) & lanes(count);
    if (more == 0) return;
    alignas(64) float each[16];
    store16(each, scores);
    for (; more != 0; more &= more - 1) {
      const int i = __builtin_ctz(more);
      if (std::isnan(each[i]))
        *best = {INFINITY, -1};
      else if (each[i] > best->value || (each[i] == best->value && at + i < best->at)) *best = {each[i], at + i};
    }
  }

  // room for rows as a weight takes them, if not as they are
  template <class P>
  void* room_for(int count, const Packed& w) {
    if (w.kind >= INT8) return ready_.of<Group>(place<Group>(count, w.width));
    return std::is_same<Factor<P>, P>::value ? nullptr : ready_.of<Factor<P>>(static_cast<int64_t>(count) * w.width);
  }

  // a search for the largest outputs of a product: each thread finds those of its part
  template <class P>
  struct Seek {
    const P* x;
    int count;
    const Packed* w;
    const float* bias;
    void* ready;
    Best* found;
  };

  template <class P>
  Seek<P> seek_of(const P* x, int count, const Packed& w, const float* bias) {
    return {x, count, &w, bias, room_for<P>(count, w), best_.of<Best>(static_cast<int64_t>(pool.size()) * count)};
  }

  template <class P>
  void find(const Seek<P>& seek, int id) {
    const Packed& w = *seek.w;
    Best* mine = seek.found + static_cast<int64_t>(id) * seek.count;
    std::fill(mine, mine + seek.count, Best{-INFINITY, -1});
    whole(seek.x, seek.count, w, seek.ready, id, [&](int m, int b, Floats lo, Floats hi) {
      const int left = w.outputs - b * BLOCK;
      if (seek.bias != nullptr) {
        lo = lo + load_some(seek.bias + b * BLOCK, left, zeros());
        hi = hi + load_some(seek.bias + b * BLOCK + 16, left - 16, zeros());
      }
      better(lo, left, b * BLOCK, mine + m);
      better(hi, left - 16, b * BLOCK + 16, mine + m);
    });
  }

  // The best of what all threads found; -1 where no largest score is finite, or any is NaN.
  void choice(const Best* found, int count, int64_t* places) const {
    for (int m = 0; m < count; ++m) {
      Best best = found[m];
      for (int i = 1; i < pool.size(); ++i) {
        const Best& other = found[static_cast<int64_t>(i) * count + m];
        if (other.value > best.value || (other.value == best.value && other.at < best.at)) best = other;
      }
      places[m] = std::isfinite(best.value) ? best.at : -1;
    }
  }

  template <class T>
  Between<T> between_of(const Shape& s, const Layer* all, int count, const Pass& step) {
    const int64_t m = step.nodes;
    int rank = 1;
    for (int i = 0; i < count; ++i) rank = std::max(rank, all[i].low.data == nullptr ? 0 : all[i].low.outputs);
    return {qkv_.of<float>(m * (s.heads + 2 * s.kv_heads) * s.e), heads_.of<T>(place<T>(m, s.heads * s.e)),
            inner_.of<T>(place<T>(m, s.inner)), low_.of<T>(place<T>(m, rank))};
  }

  template <class T>
  void layer(const Shape& s, const Layer& l, const Pass& step, const Between<T>& between, int id) {
    float* qkv = between.qkv;
    T *heads = between.heads, *inner_rows = between.inner, *low_rows = between.low;
    const int m = step.nodes, threads = pool.size();
    Scratch& mine = own[static_cast<size_t>(id)];
    int first, last;

    // norm (every thread for itself: cheaper than a barrier) and packed projections
    T* h = mine.h.of<T>(place<T>(m, s.d));
    for (int i = 0; i < m; ++i)
      rms_norm(step.x + static_cast<int64_t>(i) * s.d, l.norm_in, s.d, s.eps, h + place<T>(i, s.d));
    const int wide = l.qkv.outputs;
    products(h, m, l.qkv, id, [&](int row, int b, Floats lo, Floats hi) {
      if (l.qkv_bias != nullptr) {
        lo = lo + load16(l.qkv_bias + b * BLOCK);
        hi = hi + load16(l.qkv_bias + b * BLOCK + 16);
      }
      float* to = qkv + static_cast<int64_t>(row) * wide + b * BLOCK;
      store16(to, lo);
      store16(to + 16, hi);
    });
    warm(l.out, threads, id);
    pool.barrier();

    // keys and values of this pass, behind the committed tokens
    share(m * s.kv_heads, threads, id, &first, &last);
    for (int i = first; i < last; ++i) {
      const int row = i / s.kv_heads, head = i % s.kv_heads, b = step.row[row], node = row - step.first_of(b);
      float* from = qkv + static_cast<int64_t>(row) * wide + (s.heads + head) * s.e;
      const int64_t at = b * s.row_stride + head * s.head_stride + (step.lengths[b] + node) * s.e;
      const int64_t angle = step.positions[row] * s.rope_dim;
      turn(from, l.k_norm, s, step.cos + angle, step.sin + angle, static_cast<Plain<T>*>(l.keys) + at);
      const float* value = from + s.kv_heads * s.e;
      for (int c = 0; c < s.e; c += 16) store16(static_cast<Plain<T>*>(l.values) + at + c, load16(value + c));
    }
    pool.barrier();

    attend(s, l, step, between, id);
    pool.barrier();

    products(heads, m, l.out, id, [&](int row, int b, Floats lo, Floats hi) {
      if (l.out_bias != nullptr) {
        lo = lo + load16(l.out_bias + b * BLOCK);
        hi = hi + load16(l.out_bias + b * BLOCK + 16);
      }
      float* x = step.x + static_cast<int64_t>(row) * s.d + b * BLOCK;
      store16(x, load16(x) + lo);
      store16(x + 16, load16(x + 16) + hi);
    });
    warm(l.up, threads, id);
    pool.barrier();

    // silu(gate) * up; their blocks lie in turn
    for (int i = 0; i < m; ++i)
      rms_norm(step.x + static_cast<int64_t>(i) * s.d, l.norm_mlp, s.d, s.eps, h + place<T>(i, s.d));
    const bool whole = l.up.data != nullptr;  // a stream adapter may stand in place of the MLP
    const int half = whole ? s.inner / BLOCK : 0;
    Sums gate, up;
    const int size = tile_of<T>(m, BLOCK);  // all widths of a layer are multiples of BLOCK
    pool.each(half, id, [&](int b) {
      for (int r = 0; r < m; r += size) {
        zero(gate, size);
        some_rows(r, m, h, l.up, 2 * b, gate);
        zero(up, size);
        const int n = some_rows(r, m, h, l.up, 2 * b + 1, up);
        for (int i = 0; i < n; ++i) {
          const Floats lo = silu(gate[i][0]) * up[i][0], hi = silu(gate[i][1]) * up[i][1];
          store32(inner_rows + place<T>(r + i, s.inner), b, lo, hi);
        }
      }
    });
    const bool beside = l.low.data != nullptr;
    if (beside)
      products(h, m, l.low, id, [&](int row, int b, Floats lo, Floats hi) {
        store32(low_rows + place<T>(row, l.low.outputs), b, silu(lo), silu(hi));
      });
    warm(l.down, threads, id);
    pool.barrier();

    pool.each(s.d / BLOCK, id, [&](int b) {
      Sums acc;
      for (int r = 0; r < m; r += size) {
        const int n = std::min(size, m - r);
        zero(acc, size);
        if (whole) some_rows(r, m, inner_rows, l.down, b, acc);
        if (beside) some_rows(r, m, low_rows, l.high, b, acc);
        for (int i = 0; i < n; ++i) {
          float* x = step.x + static_cast<int64_t>(r + i) * s.d + b * BLOCK;
          store16(x, load16(x) + acc[i][0]);
          store16(x + 16, load16(x + 16) + acc[i][1]);
        }
      }
    });
  }

  // a thread's part of attention
  template <class T>
  void attend(const Shape& s, const Layer& l, const Pass& step, const Between<T>& between, int id) {
    pool.each(step.task_count, id, [&](int i) {
      const Task& t = step.tasks[i];
      switch (s.e / 32) {
        case 1: task<T, 2>(s, l, step, between, id, t.row, t.head, t.first, t.count); break;
        case 2: task<T, 4>(s, l, step, between, id, t.row, t.head, t.first, t.count); break;
        case 3: task<T, 6>(s, l, step, between, id, t.row, t.head, t.first, t.count); break;
        default: task<T, 8>(s, l, step, between, id, t.row, t.head, t.first, t.count); break;
      }
    });
  }

  // keys that the last node of a row may see
  static int longest_of(const Step& step, int b) { return static_cast<int>(step.lengths[b]) + step.nodes_of(b); }

  // from 1 to 24 queries of a row, few enough that their scores stay in the second-level cache
  static int queries_near(const Step& step, int b) { return std::max(1, std::min(24, 131072 / longest_of(step, b))); }

  // How many queries of a row a task takes, from 1 to 24. ``even``: tasks of ``queries_near`` go evenly into the threads.
  int queries_a_task(const Shape& s, const Step& step, int b, bool even) const {
    const int group = s.heads / s.kv_heads, queries = step.nodes_of(b) * group, threads = pool.size();
    int some = queries_near(step, b);
    // turning the keys costs a task as much as three queries do: less than a node's is not worth a task of its own
    if (!even) some = std::min(some, std::max(group, (queries + threads - 1) / threads));
    // tasks as good as alike, but three, six or twelve queries are scored at a time
    const auto parts_of = [queries](int each) { return (queries + each - 1) / each; };
    some = parts_of(parts_of(some));
    if (some > 3) some = std::min((some + 2) / 3 * 3, 24);
    return some;
  }

  // The tasks of attention, and all the scratch memory that the threads need for a pass, before they begin: a job must not
  // throw.
  template <class T>
  void make_room(const Shape& s, Pass& step) {
    const int group = s.heads / s.kv_heads;
    int64_t whole = 0, most = 0, scores = 0;
    for (int b = 0; b < step.batch; ++b) {
      if (step.nodes_of(b) == 0) continue;
      const int near = queries_near(step, b);
      whole += s.kv_heads * ((step.nodes_of(b) * group + near - 1) / near);
    }
    const bool even = whole % pool.size() == 0;
    tasks_.clear();
    for (int b = 0; b < step.batch; ++b) {
      const int queries = step.nodes_of(b) * group;
      if (queries == 0) continue;
      const int some = queries_a_task(s, step, b, even);
      most = std::max<int64_t>(most, some);
      scores = std::max(scores, some * padded(longest_of(step, b)));
      for (int head = 0; head < s.kv_heads; ++head)
        for (int first = 0; first < queries; first += some) tasks_.push_back({b, head, first, std::min(some, queries - first)});
    }
    step.tasks = tasks_.data();
    step.task_count = static_cast<int32_t>(tasks_.size());
    for (Scratch& mine : own) {
      mine.h.of<T>(place<T>(step.nodes, s.d));
      mine.q.of<Factor<Plain<T>>>(most * s.e);
      mine.scores.of<float>(scores);
      mine.sums.of<Floats>(most * s.e / 16);
    }
  }

  // the room that the scores of ``span`` keys take
  static int64_t padded(int span) { return (static_cast<int64_t>(span) + 31) / 16 * 16; }

  template <class T, int NE>
  void task(const Shape& s, const Layer& l, const Pass& step, const Between<T>& between, int id, int b, int head,
            int begin, int count) {
    Scratch& mine = own[static_cast<size_t>(id)];
    const int group = s.heads / s.kv_heads, wide = l.qkv.outputs, length = static_cast<int>(step.lengths[b]);
    // no node sees a later one
    const int span = length + (begin + count - 1) / group + 1;
    const int64_t width = padded(span);
    using P = Plain<T>;
    using Q = Factor<P>;
    Q* q = mine.q.of<Q>(static_cast<int64_t>(count) * s.e);
    float* p = mine.scores.of<float>(count * width);
    const auto row_of = [&](int i) { return step.first_of(b) + (begin + i) / group; };
    for (int i = 0; i < count; ++i) {
      const int64_t row = row_of(i);
      float* from = between.qkv + row * wide + (head * group + (begin + i) % group) * s.e;
      const int64_t angle = step.positions[row] * s.rope_dim;
      turn(from, l.q_norm, s, step.cos + angle, step.sin + angle, q + i * s.e);
    }
    const P* keys = static_cast<const P*>(l.keys) + b * s.row_stride + head * s.head_stride;
    const P* values = static_cast<const P*>(l.values) + b * s.row_stride + head * s.head_stride;
    constexpr int WORDS = NE * 16 / PER_LANE<Q>;
    Turned turned[STRETCH / 16 * WORDS];
    for (int k = 0; k < span; k += STRETCH) {
      const int groups = (std::min(STRETCH, span - k) + 15) / 16;
      for (int g = 0; g < groups; ++g) {
        const int at = k + 16 * g;
        transpose_keys(keys + static_cast<int64_t>(at) * s.e, std::min(16, span - at), s.e, turned + g * WORDS);
      }
      int i = 0;
      const auto score = [&](auto queries) {
        for (; i + queries <= count; i += queries)
          scores_of<Q, queries>(q + i * s.e, s.e, turned, WORDS, groups, p + i * width + k, width);
      };
      if (SUMS >= 12) score(std::integral_constant<int, 12>{});
      score(std::integral_constant<int, 6>{});
      score(std::integral_constant<int, 3>{});
      score(std::integral_constant<int, 1>{});
    }
    // what a query sees, in text order: committed tokens, then its ancestors
    float total[32];
    for (int i = 0; i < count; ++i) {
      float* mine_p = p + i * width;
      const int row = row_of(i), from = step.first[row];
      int n = length - from + step.run[row];
      if (from > 0) std::memmove(mine_p, mine_p + from, sizeof(float) * static_cast<size_t>(n));
      for (int a = step.offsets[row] + step.run[row]; a < step.offsets[row + 1]; ++a)
        mine_p[n++] = mine_p[length + step.ancestors[a]];
      total[i] = soften<Q>(mine_p, n, s.scale);
    }
    // as many queries at a time as have room for their sums, if they see the same of the committed text
    constexpr int MANY = 24 / NE < 6 ? 24 / NE : 6;
    struct Part {
      int first, queries, from, together;
    };
    Part parts[32];
    int many = 0, longest = 0;
    for (int i = 0; i < count;) {
      int alike = 1;
      while (alike < MANY && i + alike < count && step.first[row_of(i + alike)] == step.first[row_of(i)]) ++alike;
      const int queries = alike == MANY ? MANY : alike >= 3 ? 3 : 1;
      // the first nodes of the pass that all of these queries see lie behind the committed text as if they were of it
      int common = step.nodes_of(b);
      for (int row = row_of(i); row <= row_of(i + queries - 1); ++row) common = std::min(common, step.run[row]);
      const int from = step.first[row_of(i)], together = (length - from + common) / PER_LANE<Q> * PER_LANE<Q>;
      parts[many++] = {i, queries, from, together};
      longest = std::max(longest, together);
      i += queries;
    }
    Floats* sums = mine.sums.of<Floats>(count * NE);
    std::fill(sums, sums + count * NE, zeros());
    const int64_t stride = width * PER_LANE<Q>;
    for (int j = 0; j < longest; j += NEAR)
      for (int i = 0; i < many; ++i) {
        const Part& part = parts[i];
        if (j >= part.together) continue;
        const auto gather = [&](auto queries) {
          gather_values<queries, NE>(reinterpret_cast<const Q*>(p + part.first * width) + j, stride,
                                     values + static_cast<int64_t>(part.from + j) * s.e,
                                     std::min(NEAR, part.together - j), sums + part.first * NE);
        };
        if (part.queries == MANY)
          gather(std::integral_constant<int, MANY>{});
        else if (part.queries == 3)
          gather(std::integral_constant<int, 3>{});
        else
          gather(std::integral_constant<int, 1>{});
      }
    for (const Part* part = parts; part < parts + many; ++part)
      for (int i = part->first; i < part->first + part->queries; ++i)
        finish<T, NE>(s, step, between, values, p + i * width, sums + i * NE, part->together, b, head, begin + i, total[i]);
  }

  // What query ``begin`` sees behind the first ``done`` places of the text that it sees, and its division: a head is done.
  template <class T, int NE>
  void finish(const Shape& s, const Pass& step, const Between<T>& between, const Plain<T>* values, const float* scores,
              Floats* acc, int done, int b, int head, int begin, float total) {
    using Q = Factor<Plain<T>>;
    constexpr int STEP = PER_LANE<Q>;
    const Q* p = reinterpret_cast<const Q*>(scores);  // see ``soften``
    const int group = s.heads / s.kv_heads, length = static_cast<int>(step.lengths[b]);
    const int row = step.first_of(b) + begin / group, from = step.first[row], seen = length - from;
    const int some = step.run[row] + seen, end = seen + step.offsets[row + 1] - step.offsets[row];
    const auto value_at = [&](int j) {
      const int at = j < some ? from + j : length + step.ancestors[step.offsets[row] + j - seen];
      return values + static_cast<int64_t>(at) * s.e;
    };
    for (int j = done; j < end; j += STEP) {
      Turned word[NE];
      joined<NE>(value_at(j), value_at(std::min(j + STEP, end) - 1), word);
      const auto weight = spread(p + j);
      for (int c = 0; c < NE; ++c) acc[c] = dot<Q>(acc[c], weight, word[c]);
    }
    const Floats inverse = same(1.0f / total);
    T* to = between.heads + place<T>(static_cast<int64_t>(row) * s.heads + head * group + begin % group, s.e);
    for (int c = 0; c < NE / 2; ++c) {
      in_order<Q>(&acc[2 * c], &acc[2 * c + 1]);
      store32(to, c, acc[2 * c] * inverse, acc[2 * c + 1] * inverse);
    }
  }

  Room x_, mains_, qkv_, heads_, inner_, low_, both_, root_, taking_, best_, ready_, rows_, offsets_, first_, run_, positions_;
  std::vector<int32_t> seen_;
  std::vector<Task> tasks_;
  Room draft_rows_, draft_states_, draft_z_, draft_before_, draft_scores_, draft_parts_, draft_values_;
  Room draft_places_, draft_state_, draft_noise_, draft_peaks_;
};

// w [outputs, width] row by row -> blocks; ``to`` holds ceil(outputs / 32) blocks
template <class T>
void pack(const T* w, int outputs, int width, T* to) {
  for (int b = 0; b < (outputs + BLOCK - 1) / BLOCK; ++b)
    for (int k = 0; k < width; k += PER_LANE<T>)
      for (int j = 0; j < BLOCK; ++j)
        for (int c = 0; c < PER_LANE<T>; ++c) {
          const int row = b * BLOCK + j;
          *to++ = row < outputs ? w[static_cast<int64_t>(row) * width + k + c] : T{0};
        }
}

// quantised values [outputs, width]; int8: scales float [outputs]; int4: scales, leasts half [outputs, width / 32]
void pack_narrow(const uint8_t* w, const void* scales, const uint16_t* leasts, int outputs, const Packed& to) {
  const int width = to.width, groups = width / BLOCK, halves = to.kind == INT4 ? 2 : 1, four = 4 * BLOCK;
  for (int b = 0; b < to.blocks(); ++b) {
    uint8_t* block = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(to.block(b)));
    std::memset(block, 0, static_cast<size_t>(to.block_bytes()));
    for (int j = 0; j < BLOCK && b * BLOCK + j < outputs; ++j) {
      const int64_t row = b * BLOCK + j;
      for (int k = 0; k < width; ++k) {
        const int group = k / BLOCK, quad = k % BLOCK / 4;
        uint8_t* part = block + group * (to.kind == INT4 ? GROUP_BYTES<Int4> : GROUP_BYTES<Int8>) + quad / halves * four;
        part[4 * j + k % 4] |= static_cast<uint8_t>(w[row * width + k] << (quad % halves * 4));
      }
      if (to.kind == INT8) {
        std::memcpy(block + groups * GROUP_BYTES<Int8> + 4 * j, static_cast<const float*>(scales) + row, 4);
        continue;
      }
      for (int g = 0; g < groups; ++g) {
        uint16_t* behind = reinterpret_cast<uint16_t*>(block + g * GROUP_BYTES<Int4> + 512);
        behind[j] = static_cast<const uint16_t*>(scales)[row * groups + g];
        behind[BLOCK + j] = leasts[row * groups + g];
      }
    }
  }
}

// ---- what the entries take ----------------------------------------------------------------------------------------

constexpr int MOST_THREADS = 1024;
constexpr int MOST_VALUES = 1 << 24;  // of any width, and of rows: their products with each other fit 64 bits
constexpr int WIDEST = 8192;          // of rows that embeddings are read into; see library.py

inline bool within(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }

void check_shape(const Packed& w) {
  require(within(w.kind, BF16, INT4), "a packed weight is of no known kind");
  require(within(w.outputs, 1, MOST_VALUES) && within(w.width, 1, MOST_VALUES), "a packed weight has no size that fits");
  require(w.kind != BF16 || w.width % PER_LANE<bf16> == 0, "a packed bf16 weight is of odd width");
  require(w.kind < INT8 || w.width % BLOCK == 0, "a packed quantised weight is not of whole groups");
}

void check(const Packed& w) {
  check_shape(w);
  require(w.data != nullptr, "a packed weight has no memory");
}

// weights that rows of this kind are multiplied with: of their own type, or quantised ones of any
inline bool alike(int kind, const Packed& w) { return kind < INT8 ? w.kind == kind : w.kind >= INT8; }

void check(const Packed& w, int kind, int outputs, int width) {
  check(w);
  require(alike(kind, w), "packed weights are of several kinds");
  require(w.outputs == outputs && w.width == width, "a packed weight is of another size than its place");
}

void check(const Table& table) {
  require(table.rows != nullptr && table.words > 0, "there are no embeddings");
}

void check_rows(const void* runner, const void* x, int kind, int count, const Packed* w, const void* to) {
  require(runner != nullptr && w != nullptr && x != nullptr && to != nullptr, "a pointer is null");
  check(*w);
  require(kind == BF16 || kind == FLOAT, "rows are bf16 or float32");
  require(w->kind >= INT8 || w->kind == kind, "rows and a plain weight are of different types");
  require(within(count, 0, MOST_VALUES), "that many rows do not fit");
}

void check(const Shape& s, const Step& step) {
  require(within(s.d, BLOCK, MOST_VALUES) && s.d % BLOCK == 0, "the model's width is no multiple of 32");
  require(within(s.e, 32, 128) && s.e % 32 == 0, "heads are not of 32, 64, 96 or 128 channels");
  require(within(s.heads, 1, 1 << 16) && within(s.kv_heads, 1, s.heads) && s.heads % s.kv_heads == 0,
          "heads are no multiple of the key heads");
  require(within(s.inner, 0, MOST_VALUES) && s.inner % BLOCK == 0, "the MLP's width is no multiple of 32");
  require(within(s.rope_dim, 0, s.e) && s.rope_dim % 2 == 0, "rotations are wider than heads, or odd");
  require(within(step.batch, 1, MOST_VALUES) && within(step.nodes, 1, MOST_VALUES) && step.window >= 0,
          "a step has no rows");
  require(step.cos != nullptr && step.sin != nullptr && step.starts != nullptr && step.lengths != nullptr,
          "a pointer of a step is null");
  require(step.starts[0] == 0, "the first row of a step does not start at node 0");
  for (int b = 0; b < step.batch; ++b)
    require(within(step.starts[b + 1], step.starts[b], MOST_VALUES), "the rows of a step overlap, or have too many nodes");
  require(step.starts[step.batch] == step.nodes, "the rows of a step have another number of nodes than the step");
  require(static_cast<int64_t>(step.nodes) * s.heads * s.e <= std::numeric_limits<int32_t>::max(), "a step has too many nodes");
  const int64_t capacity = s.head_stride / s.e;
  require(s.head_stride > 0 && s.head_stride % s.e == 0 && capacity <= std::numeric_limits<int32_t>::max() - 64,
          "the cache's rows are not of whole tokens");
  require(step.batch == 1 || s.row_stride >= s.kv_heads * s.head_stride, "the cache's rows overlap");
  for (int b = 0; b < step.batch; ++b)
    require(within(step.lengths[b], step.trailing != 0 && step.nodes_of(b) > 0 ? 1 : 0, capacity - step.nodes_of(b)),
            "the cache has no room for a step");
}

void check(int kind, const Shape& s, const Layer& l) {
  require(l.norm_in != nullptr && l.norm_mlp != nullptr, "a layer has no norms");
  require(l.keys != nullptr && l.values != nullptr, "a layer has no cache");
  check(l.qkv, kind, (s.heads + 2 * s.kv_heads) * s.e, s.d);
  check(l.out, kind, s.d, s.heads * s.e);
  if (l.up.data != nullptr) {
    check(l.up, kind, 2 * s.inner, s.d);
    check(l.down, kind, s.d, s.inner);
  }
  if (l.low.data != nullptr) {
    require(l.low.outputs % BLOCK == 0, "a low-rank term is not of whole blocks");
    check(l.low, kind, l.low.outputs, s.d);
    check(l.high, kind, s.d, l.low.outputs);
  }
}

void check(int kind, const void* runner, const Shape* s, const Layer* layers, int count, const Step* step) {
  require(runner != nullptr && s != nullptr && layers != nullptr && step != nullptr, "a pointer is null");
  require(within(kind, BF16, INT4), "layers are of no known kind");
  check(*s, *step);
  require(within(count, 1, 1 << 16), "there are no layers");
  // between two passes the weights have pushed these out of the caches: all are asked for before the first is waited for
  const char* first = reinterpret_cast<const char*>(layers);
  for (size_t at = 0; at < static_cast<size_t>(count) * sizeof(Layer); at += 64) ask(first + at);
  for (int i = 0; i < count; ++i) check(kind, *s, layers[i]);
}

void check(int kind, const Shape& s, const Step& step, const Ends& ends) {
  require(ends.norm != nullptr && ends.hidden != nullptr, "a pass has no end");
  require(ends.tokens != nullptr || step.x != nullptr, "a pass has no beginning");
  if (ends.tokens != nullptr) {
    check(ends.embedding);
    for (int i = 0; i < step.nodes; ++i)
      require(within(ends.tokens[i], 0, ends.embedding.words - 1), "a token is not in the vocabulary");
  }
  if (ends.chosen == nullptr) return;
  check(ends.head);
  // rows behind the last norm are of the cache's type
  require(ends.head.kind >= INT8 || (ends.head.kind == FLOAT) == (kind == FLOAT), "the head is of another type");
  require(ends.head.width == s.d, "the head is of another width");
}

void check(int kind, const Shape& s, const Step& step, const Entry& from) {
  require(from.main != nullptr && from.nodes != nullptr && from.emitted != nullptr && from.streams != nullptr &&
              from.hidden != nullptr && from.norm != nullptr,
          "a pointer of streams is null");
  require(s.d <= WIDEST, "the model is too wide for streams");
  check(from.embedding);
  require(from.inputs.outputs % BLOCK == 0, "the streams' first product is not of whole blocks");
  check(from.inputs, kind, from.inputs.outputs, 2 * s.d);
  check(from.up, kind, s.d, from.inputs.outputs);
  for (int b = 0; b < step.batch; ++b) {
    if (step.nodes_of(b) == 0) continue;
    require(step.nodes_of(b) <= from.most, "a row has more streams than there are");
    require(within(from.nodes[b], 0, static_cast<int64_t>(from.rows) - 1), "a node that is trailed is not of the pass");
    require(within(from.emitted[b], 0, from.embedding.words - 1), "a token is not in the vocabulary");
  }
}

void check(int kind, const Draft& t, int64_t root) {
  check(t.embedding);
  require(within(root, 0, t.embedding.words - 1), "the root is not in the vocabulary");
  require(within(t.d, BLOCK, WIDEST) && t.d % BLOCK == 0, "the model's width is no multiple of 32, or too wide for drafts");
  const int wide = t.token.outputs;
  require(within(wide, BLOCK, MOST_VALUES) && wide % BLOCK == 0, "the conditioner is not of whole blocks");
  check(t.token, kind, wide, t.d);
  check(t.state, kind, wide, t.d);
  check(t.carry, kind, wide, wide);
  check(t.to_state, kind, t.d, wide);
  check(t.head, kind, t.head.outputs, t.d);
  require(t.ids != nullptr, "a draft vocabulary has no tokens");
  require(t.own.outputs == 0 || t.own_ids != nullptr, "a row's own vocabulary has no tokens");
  if (t.own.outputs != 0) check(t.own, kind, t.own.outputs, t.d);
  require(within(t.depth, 1, 1 << 10) && within(t.nodes, 1, 1 << 16), "a draft has no depth or no nodes");
  require(within(t.best, 1, 1 << 16) && t.blocks >= 1, "a draft has no children");
  const int64_t most = std::max(1, std::min(t.frontier, t.nodes - 1));
  require(most * t.best <= MOST_VALUES && static_cast<int64_t>(t.depth) * t.nodes <= MOST_VALUES, "a draft is too large");
  require(!std::isnan(t.least) && !std::isnan(t.warmth) && !std::isnan(t.trust), "a draft's threshold is NaN");
}

// sizes of what structs.py mirrors, each with the place of its last member
constexpr int32_t LAYOUT[] = {
    sizeof(Packed), offsetof(Packed, kind),  sizeof(Table), offsetof(Table, words), sizeof(Layer), offsetof(Layer, values),
    sizeof(Shape),  offsetof(Shape, head_stride), sizeof(Step),  offsetof(Step, parents), sizeof(Ends), offsetof(Ends, chosen),
    sizeof(Entry),  offsetof(Entry, norm),   sizeof(Draft), offsetof(Draft, trust),
};

}  // namespace

// ``kind`` says what rows are: bf16, float32, or (layers and drafts) quantised ones beside bf16 caches and states. What
// returns an int returns a Status, or another number from 0 on.
extern "C" {

// which of FORMS in build.py this is
const char* anabranch_form() { return FORM; }

// what was wrong with this thread's last call that failed
const char* anabranch_message() { return message; }

// the numbers of LAYOUT, ``count`` of them
const int32_t* anabranch_layout(int* count) {
  *count = static_cast<int>(sizeof(LAYOUT) / sizeof(LAYOUT[0]));
  return LAYOUT;
}

// a runner of as many threads, or of as many as the system grants; how many these are
int anabranch_runner(int threads, void** runner) {
  return guarded([&] {
    require(within(threads, 1, MOST_THREADS), "a pool has from 1 to 1024 threads");
    auto* made = new Runner(threads);
    *runner = made;
    return made->pool.size();
  });
}

// ask for large pages, so that reading weights does not wait for translations of addresses
void anabranch_advise(void* memory, int64_t bytes) { madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE); }

// whether products in bf16 come out right on this processor, of more rows than one tile has: 1 or 0
int anabranch_multiplies() {
  return guarded([] {
    constexpr int ROWS = 21, OUTPUTS = 40, WIDTH = 96;
    std::vector<bf16> x(ROWS * WIDTH), w(OUTPUTS * WIDTH);
    uint32_t noise = 1;
    for (auto* values : {&x, &w})
      for (bf16& value : *values) {
        noise = noise * 1664525u + 1013904223u;
        value = to_bf16(static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-31f);
      }
    Packed packed{nullptr, OUTPUTS, WIDTH, BF16};
    Room room;
    packed.data = room.of<char>(packed.blocks() * packed.block_bytes() + AHEAD);
    pack(w.data(), OUTPUTS, WIDTH, static_cast<bf16*>(const_cast<void*>(packed.data)));
    std::vector<float> y(ROWS * OUTPUTS);
    Runner(1).linear(x.data(), ROWS, packed, nullptr, y.data());
    const auto wide = [](bf16 value) {
      const uint32_t bits = static_cast<uint32_t>(value) << 16;
      float f;
      std::memcpy(&f, &bits, 4);
      return static_cast<double>(f);
    };
    for (int m = 0; m < ROWS; ++m)
      for (int n = 0; n < OUTPUTS; ++n) {
        double sum = 0.0;
        for (size_t k = 0; k < WIDTH; ++k)
          sum += wide(x[static_cast<size_t>(m) * WIDTH + k]) * wide(w[static_cast<size_t>(n) * WIDTH + k]);
        if (!(std::fabs(sum - static_cast<double>(y[static_cast<size_t>(m) * OUTPUTS + static_cast<size_t>(n)])) < 1e-4)) return 0;
      }
    return 1;
  });
}

// bytes that a packed weight takes, into ``bytes``
int anabranch_packed_bytes(const Packed* w, int64_t* bytes) {
  return guarded([&] {
    check_shape(*w);
    *bytes = w->blocks() * w->block_bytes();
    return DONE;
  });
}

// ``w`` plain or quantised values, which have ``scales`` and in int4 ``leasts``
int anabranch_pack(const Packed* to, const void* w, const void* scales, const void* leasts) {
  return guarded([&] {
    check(*to);
    require(w != nullptr && (to->kind < INT8 || scales != nullptr) && (to->kind != INT4 || leasts != nullptr),
            "a weight to pack is null");
    void* data = const_cast<void*>(to->data);
    if (to->kind == BF16)
      pack(static_cast<const bf16*>(w), to->outputs, to->width, static_cast<bf16*>(data));
    else if (to->kind == FLOAT)
      pack(static_cast<const float*>(w), to->outputs, to->width, static_cast<float*>(data));
    else
      pack_narrow(static_cast<const uint8_t*>(w), scales, static_cast<const uint16_t*>(leasts), to->outputs, *to);
    return DONE;
  });
}

int anabranch_linear(int kind, void* runner, const void* x, int count, const Packed* w, const float* bias, float* y) {
  return guarded([&] {
    check_rows(runner, x, kind, count, w, y);
    auto* r = static_cast<Runner*>(runner);
    kind == FLOAT ? r->linear(static_cast<const float*>(x), count, *w, bias, y)
                  : r->linear(static_cast<const bf16*>(x), count, *w, bias, y);
    return DONE;
  });
}

// x [count, width] float32 -> RMS norm
int anabranch_norm(int kind, const float* x, int64_t count, int width, const float* weight, float eps, void* y) {
  return guarded([&] {
    require(x != nullptr && weight != nullptr && y != nullptr, "a pointer is null");
    require(kind == BF16 || kind == FLOAT, "normed rows are bf16 or float32");
    require(within(width, BLOCK, MOST_VALUES) && width % BLOCK == 0 && count >= 0, "a norm is not of whole blocks");
    for (int64_t i = 0; i < count; ++i)
      kind == FLOAT ? rms_norm(x + i * width, weight, width, eps, static_cast<float*>(y) + i * width)
                    : rms_norm(x + i * width, weight, width, eps, static_cast<bf16*>(y) + i * width);
    return DONE;
  });
}

// log softmax of each row of z [count, width], its ``best`` largest values and where they are, falling; of equals the
// first comes first. Where there are fewer finite scores, -inf at place 0 follows.
int anabranch_best(const float* z, int64_t count, int width, int best, float* values, int64_t* places) {
  return guarded([&] {
    require(z != nullptr && values != nullptr && places != nullptr, "a pointer is null");
    require(count >= 0 && within(width, 1, MOST_VALUES) && within(best, 1, MOST_VALUES), "there are no scores");
    for (int64_t i = 0; i < count; ++i) top(z + i * width, width, -INFINITY, best, values + i * best, places + i * best);
    return DONE;
  });
}

// places of the largest scores of rows [count], -1 where that is not finite or any is NaN; rows as for anabranch_linear
int anabranch_choose(int kind, void* runner, const void* x, int count, const Packed* w, const float* bias,
                     int64_t* places) {
  return guarded([&] {
    check_rows(runner, x, kind, count, w, places);
    auto* r = static_cast<Runner*>(runner);
    kind == FLOAT ? r->choose(static_cast<const float*>(x), count, *w, bias, places)
                  : r->choose(static_cast<const bf16*>(x), count, *w, bias, places);
    return DONE;
  });
}

// one place a row of z [count, width], drawn from softmax(z / temperature) with the noise of the rows' positions; -1 as
// for anabranch_choose
int anabranch_draw(void* runner, const float* z, int count, int width, float temperature, const uint64_t* keys,
                   int64_t* places) {
  return guarded([&] {
    require(runner != nullptr && z != nullptr && keys != nullptr && places != nullptr, "a pointer is null");
    require(within(count, 0, MOST_VALUES) && within(width, 1, MOST_VALUES), "there are no scores");
    require(temperature > 0.0f, "temperatures are above 0");
    static_cast<Runner*>(runner)->draws(z, count, width, temperature, keys, places);
    return DONE;
  });
}

// how many nodes the tree of one row has, from its stream states [depth, D]; see Runner::draft
int anabranch_draft(int kind, void* runner, const Draft* draft, const void* states, int64_t root, int64_t* tokens,
                    int64_t* parents, int64_t* depths, float* joints) {
  return guarded([&] {
    require(runner != nullptr && draft != nullptr && states != nullptr && tokens != nullptr && parents != nullptr &&
                depths != nullptr && joints != nullptr,
            "a pointer is null");
    require(within(kind, BF16, INT4), "a draft is of no known kind");
    check(kind, *draft, root);
    auto* r = static_cast<Runner*>(runner);
    const auto* narrow = static_cast<const bf16*>(states);
    if (kind == FLOAT)
      return r->draft<float>(*draft, static_cast<const float*>(states), root, tokens, parents, depths, joints);
    if (kind == BF16) return r->draft<Factor<bf16>>(*draft, narrow, root, tokens, parents, depths, joints);
    return r->draft<Group>(*draft, narrow, root, tokens, parents, depths, joints);
  });
}

// see Runner::layers; ``ends`` and ``tap`` may be null
int anabranch_layers(int kind, void* runner, const Shape* shape, const Layer* layers, int count, const Step* step,
                     const Ends* ends, float* tap, int tapped) {
  return guarded([&] {
    check(kind, runner, shape, layers, count, step);
    if (ends == nullptr)
      require(step->x != nullptr, "a pass has no rows");
    else
      check(kind, *shape, *step, *ends);
    auto* r = static_cast<Runner*>(runner);
    if (kind == FLOAT)
      r->layers<float>(*shape, layers, count, *step, ends, tap, tapped);
    else if (kind == BF16)
      r->layers<Factor<bf16>>(*shape, layers, count, *step, ends, tap, tapped);
    else
      r->layers<Group>(*shape, layers, count, *step, ends, tap, tapped);
    return DONE;
  });
}

// streams from the main rows that they trail to their states; see Runner::trail
int anabranch_trail(int kind, void* runner, const Shape* shape, const Layer* layers, int count, const Step* step,
                    const Entry* entry, void* states) {
  return guarded([&] {
    check(kind, runner, shape, layers, count, step);
    require(entry != nullptr && states != nullptr, "a pointer is null");
    check(kind, *shape, *step, *entry);
    auto* r = static_cast<Runner*>(runner);
    if (kind == FLOAT)
      r->trail<float>(*shape, layers, count, *step, *entry, static_cast<float*>(states));
    else if (kind == BF16)
      r->trail<Factor<bf16>>(*shape, layers, count, *step, *entry, static_cast<bf16*>(states));
    else
      r->trail<Group>(*shape, layers, count, *step, *entry, static_cast<bf16*>(states));
    return DONE;
  });
}

// keys and values of one row [K, capacity, E] in ``layers`` layers: what lies at start + nodes[i] goes to start + i
int anabranch_move(void* keys, void* values, int layers, int heads, int64_t layer_bytes, int64_t head_bytes,
                   int64_t token_bytes, int64_t start, const int64_t* nodes, int count) {
  return guarded([&] {
    require(keys != nullptr && values != nullptr && (nodes != nullptr || count == 0), "a pointer is null");
    require(layers >= 0 && heads >= 0 && count >= 0 && start >= 0 && token_bytes > 0, "a move has no size that fits");
    const int64_t capacity = head_bytes / token_bytes;
    for (int i = 0; i < count; ++i)
      require(within(nodes[i], i == 0 ? 0 : nodes[i - 1] + 1, capacity - start - 1),
              "nodes to move do not ascend, or lie behind the cache's end");
    const auto each = [&](auto&& done) {
      for (void* cache : {keys, values})
        for (int l = 0; l < layers; ++l)
          for (int h = 0; h < heads; ++h) {
            char* from = static_cast<char*>(cache) + l * layer_bytes + h * head_bytes + start * token_bytes;
            for (int i = 0; i < count; ++i)
              if (nodes[i] != i) done(from + nodes[i] * token_bytes, from + i * token_bytes);
          }
    };
    // they lie far apart: all are asked for before the first is waited for
    each([&](const char* from, const char* to) {
      for (int64_t i = 0; i < token_bytes; i += 64) ask(from + i), ask(to + i);
    });
    each([&](const char* from, char* to) { std::memcpy(to, from, static_cast<size_t>(token_bytes)); });
    return DONE;
  });
}

}  // extern "C"
