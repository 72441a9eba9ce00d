// Layers of a decoder for a few rows at a time, bf16 weights, on x86 with AVX-512.
//
// Why not a library: between two tokens a small model does three hundred tiny operations, and dispatching them costs as
// much as reading its weights. Here a pass is one call: threads meet at six barriers a layer and nothing is allocated.
//
// Every output is a sum in an order that does not depend on how many rows a pass has, nor on where a key lies in the
// cache: a product accumulates over k for each row by itself, and attention runs over the keys that a row sees, in
// text order. So a tree of 32 nodes yields, to the bit, what 32 passes of one node yield, in bf16 too.
//
// B batch rows, N nodes a row, M = B N, D model width, H query heads, K kv heads, E head width, I inner width, R rank.

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using bf16 = uint16_t;

constexpr int AHEAD = 8192;  // bytes of weights asked for in advance: memory answers late
constexpr int BLOCK = 32;  // outputs of a packed block: two vectors
constexpr int TILE = 8;    // rows that share a read of the weights from the first-level cache

// ---- numbers ------------------------------------------------------------------------------------------------------

inline bf16 to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<bf16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline __m256i to_bf16(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}

inline __m512 from_bf16(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

// acc + a.even * b.even + a.odd * b.odd over pairs of bf16
inline __m512 dot(__m512 acc, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)),
                        acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)),
                         acc);
#endif
}

// e^x: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// ---- threads ------------------------------------------------------------------------------------------------------

// A job runs on all threads at once; the caller is thread 0. Workers spin for a moment between jobs and then sleep.
class Pool {
 public:
  explicit Pool(int threads) : size_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
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
    if (size_ == 1) return job(0);
    call_ = [](void* context, int id) { (*static_cast<Job*>(context))(id); };
    context_ = const_cast<void*>(static_cast<const void*>(&job));
    left_.store(size_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      turn_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    wait([this] { return left_.load(std::memory_order_acquire) == 0; });
  }

  // all threads of a job meet here
  void barrier() {
    if (size_ == 1) return;
    const int round = round_.load(std::memory_order_relaxed);
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
      _mm_pause();
      if (spins > 4000) std::this_thread::yield();  // someone else needs the processor
    }
  }

  void work(int id) {
    int seen = 0;
    for (;;) {
      int spins = 0;
      while (turn_.load(std::memory_order_acquire) == seen) {
        _mm_pause();
        if (++spins > 8000) {
          std::unique_lock<std::mutex> lock(mutex_);
          wake_.wait(lock, [&] { return turn_.load() != seen; });
        }
      }
      seen = turn_.load(std::memory_order_acquire);
      if (ending_) return;
      call_(context_, id);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  int size_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<int> turn_{0};
  alignas(64) std::atomic<int> left_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

// the part of [0, count) that is thread id's
inline void share(int count, int threads, int id, int* first, int* last) {
  *first = static_cast<int>(static_cast<int64_t>(count) * id / threads);
  *last = static_cast<int>(static_cast<int64_t>(count) * (id + 1) / threads);
}

// ---- products -----------------------------------------------------------------------------------------------------

// acc[m][32] += x[m] . block, for ROWS rows of bf16 pairs; the order of the sum is that of k, whatever ROWS is. Asks for
// LINES cache lines at ``next`` for every pair.
template <int ROWS, int LINES>
inline void tile(const bf16* x, int64_t stride, const bf16* block, int width, const char* next,
                 __m512 (&acc)[TILE][2]) {
  __m512 a[ROWS][2];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) a[m][0] = acc[m][0], a[m][1] = acc[m][1];
  const int pairs = width / 2;
  for (int k = 0; k < pairs; ++k) {
    const bf16* w = block + static_cast<int64_t>(k) * 2 * BLOCK;
    if (LINES > 0) _mm_prefetch(next + 64 * LINES * static_cast<int64_t>(k), _MM_HINT_T0);
    if (LINES > 1) _mm_prefetch(next + 64 * LINES * static_cast<int64_t>(k) + 64, _MM_HINT_T0);
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + BLOCK);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      int pair;
      std::memcpy(&pair, x + m * stride + 2 * k, 4);
      const __m512i both = _mm512_set1_epi32(pair);
      a[m][0] = dot(a[m][0], both, w0);
      a[m][1] = dot(a[m][1], both, w1);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) acc[m][0] = a[m][0], acc[m][1] = a[m][1];
}

template <int LINES>
inline void rows(int count, const bf16* x, int64_t stride, const bf16* block, int width, const char* next,
                 __m512 (&acc)[TILE][2]) {
  switch (count) {
    case 1: return tile<1, LINES>(x, stride, block, width, next, acc);
    case 2: return tile<2, LINES>(x, stride, block, width, next, acc);
    case 3: return tile<3, LINES>(x, stride, block, width, next, acc);
    case 4: return tile<4, LINES>(x, stride, block, width, next, acc);
    case 5: return tile<5, LINES>(x, stride, block, width, next, acc);
    case 6: return tile<6, LINES>(x, stride, block, width, next, acc);
    case 7: return tile<7, LINES>(x, stride, block, width, next, acc);
    default: return tile<8, LINES>(x, stride, block, width, next, acc);
  }
}

// Rows from ``m`` on, up to a tile of ``count``. One tile reads its weights from memory as it goes; where there are
// several, the first two ask for half of the next block each, so that memory works while the later ones compute.
inline int some_rows(int m, int count, const bf16* x, int64_t stride, const bf16* block, int width,
                     __m512 (&acc)[TILE][2]) {
  const int n = std::min(TILE, count - m);
  const bf16* from = x + m * stride;
  const char* here = reinterpret_cast<const char*>(block);
  if (count <= TILE)
    rows<2>(n, from, stride, block, width, here + AHEAD, acc);
  else if (m < 2 * TILE)
    rows<1>(n, from, stride, block, width, here + 2 * BLOCK * static_cast<int64_t>(width) + m / TILE * 32 * width, acc);
  else
    rows<0>(n, from, stride, block, width, here, acc);
  return n;
}

// A packed weight [outputs, width]: blocks of 32 outputs, in each for every pair of k its 32 pairs
struct Packed {
  const bf16* data;
  int32_t outputs, width;
  const bf16* block(int b) const { return data + static_cast<int64_t>(b) * width * BLOCK; }
  int blocks() const { return (outputs + BLOCK - 1) / BLOCK; }
};

// ask for where thread id's part of a weight begins, before a barrier: memory works while threads wait
inline void warm(const Packed& w, int threads, int id) {
  if (w.data == nullptr) return;
  int first, last;
  share(w.blocks(), threads, id, &first, &last);
  const char* from = reinterpret_cast<const char*>(w.block(first));
  for (int i = 0; i < AHEAD; i += 64) _mm_prefetch(from + i, _MM_HINT_T0);
}

inline void zero(__m512 (&acc)[TILE][2]) {
  for (auto& row : acc) row[0] = row[1] = _mm512_setzero_ps();
}

// y = x w' for blocks [first, last): ``done(m, b, low, high)`` takes 32 outputs of one row
template <class Done>
inline void product(const bf16* x, int64_t stride, int count, const Packed& w, int first, int last, Done&& done) {
  __m512 acc[TILE][2];
  for (int b = first; b < last; ++b) {
    for (int m = 0; m < count; m += TILE) {
      zero(acc);
      const int n = some_rows(m, count, x, stride, w.block(b), w.width, acc);
      for (int i = 0; i < n; ++i) done(m + i, b, acc[i][0], acc[i][1]);
    }
  }
}

inline void store_part(float* to, int left, __m512 low, __m512 high) {
  const auto mask = [](int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); };
  _mm512_mask_storeu_ps(to, mask(left), low);
  _mm512_mask_storeu_ps(to + 16, mask(left - 16), high);
}

// ---- a layer ------------------------------------------------------------------------------------------------------

struct Layer {
  const float *norm_in, *norm_mlp, *q_norm, *k_norm, *qkv_bias, *out_bias;
  Packed qkv, out, up, down, low, high;  // low, high: a low-rank term beside the MLP (data null: none)
  bf16 *keys, *values;                   // of the first row in use: [K, capacity, E]
};

struct Shape {
  int32_t d, heads, kv_heads, e, inner, rope_dim;
  float eps, scale;
  int64_t row_stride, head_stride;  // of the cache, in elements
};

struct Step {
  int32_t batch, nodes;
  float* x;                     // [B N, D], in and out
  const float *cos, *sin;       // [B N, rope_dim]
  const int32_t *lengths;       // committed tokens [B]
  const int32_t *offsets, *ancestors;  // of node i of [B N]: ancestors[offsets[i] : offsets[i + 1]], itself last
  const int32_t *first;         // where what a node sees of the committed text begins [B N]
};

inline float sum_of_squares(const float* x, int n) {
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    total = _mm512_fmadd_ps(v, v, total);
  }
  return _mm512_reduce_add_ps(total);
}

inline void rms_norm(const float* x, const float* weight, int n, float eps, bf16* y) {
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += 16) {
    const __m512 v = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), _mm512_loadu_ps(weight + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), to_bf16(v));
  }
}

// a head in place: norm it (where the model does), turn it, round it
inline void turn(float* v, const float* norm, const Shape& s, const float* cos, const float* sin, bf16* to) {
  if (norm != nullptr) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(v, s.e) / static_cast<float>(s.e) + s.eps);
    for (int i = 0; i < s.e; ++i) v[i] = v[i] * factor * norm[i];
  }
  const int half = s.rope_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    to[i] = to_bf16(a * cos[i] - b * sin[i]);
    to[i + half] = to_bf16(b * cos[i + half] + a * sin[i + half]);
  }
  for (int i = s.rope_dim; i < s.e; ++i) to[i] = to_bf16(v[i]);
}

// 16 keys of E bf16 -> pairs by dimension: out[d] holds pair d of the 16 keys
inline void transpose_keys(const bf16* keys, int have, int e, __m512i* out) {
  for (int part = 0; part < e / 2; part += 16) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i)
      r[i] = i < have ? _mm512_loadu_si512(keys + static_cast<int64_t>(i) * e + 2 * part) : _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
      r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
      r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
      r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
      r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
      t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
      t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
      t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
      out[part + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
      out[part + 4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
      out[part + 8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
      out[part + 12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
  }
}

template <int QUERIES>
inline void scores_of(const bf16* q, int64_t stride, const __m512i* keys, int pairs, float* to, int64_t to_stride) {
  __m512 acc[QUERIES];
  for (auto& a : acc) a = _mm512_setzero_ps();
  for (int d = 0; d < pairs; ++d) {
    const __m512i k = keys[d];
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i) {
      int pair;
      std::memcpy(&pair, q + i * stride + 2 * d, 4);
      acc[i] = dot(acc[i], _mm512_set1_epi32(pair), k);
    }
  }
  for (int i = 0; i < QUERIES; ++i) _mm512_storeu_ps(to + i * to_stride, acc[i]);
}

// softmax without its division; returns the sum. ``p`` is padded to whole vectors
inline float soften(float* p, int n, float scale) {
  const __m512 low = _mm512_set1_ps(-INFINITY);
  __m512 most = low;
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = static_cast<__mmask16>(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
    most = _mm512_max_ps(most, _mm512_mask_loadu_ps(low, mask, p + i));
  }
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most)), s = _mm512_set1_ps(scale);
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = static_cast<__mmask16>(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
    const __m512 v = _mm512_mul_ps(_mm512_sub_ps(_mm512_mask_loadu_ps(top, mask, p + i), top), s);
    const __m512 e = _mm512_maskz_mov_ps(mask, exponential(v));
    _mm512_mask_storeu_ps(p + i, mask, e);
    total = _mm512_add_ps(total, e);
  }
  return _mm512_reduce_add_ps(total);
}

// out[i] += sum_j p[i][j] v[j], j in order, for QUERIES rows and NE vectors of E
template <int QUERIES, int NE>
inline void gather_values(const float* p, int64_t p_stride, const bf16* v, int count, __m512 (&acc)[QUERIES][NE]) {
  for (int j = 0; j < count; ++j) {
    const bf16* row = v + static_cast<int64_t>(j) * NE * 16;
    __m512 value[NE];
#pragma GCC unroll 8
    for (int c = 0; c < NE; ++c) value[c] = from_bf16(row + 16 * c);
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i) {
      const __m512 w = _mm512_set1_ps(p[i * p_stride + j]);
#pragma GCC unroll 8
      for (int c = 0; c < NE; ++c) acc[i][c] = _mm512_fmadd_ps(w, value[c], acc[i][c]);
    }
  }
}

inline __mmask16 tail(int left) { return static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1); }

void top(const float* z, int width, int best, float* values, int64_t* places) {
  int have = 0;
  float least = -INFINITY;
  __m512 most = _mm512_set1_ps(-INFINITY);
  const __m512 low = most;
  for (int i = 0; i < width; i += 16) {
    const __m512 v = _mm512_mask_loadu_ps(low, tail(width - i), z + i);
    most = _mm512_max_ps(most, v);
    __mmask16 more = have < best ? tail(width - i) : _mm512_cmp_ps_mask(v, _mm512_set1_ps(least), _CMP_GT_OQ);
    for (; more != 0; more = static_cast<__mmask16>(more & (more - 1))) {
      const int at = i + __builtin_ctz(more);
      if (have == best && !(z[at] > least)) continue;
      int place = have < best ? have++ : best - 1;
      for (; place > 0 && values[place - 1] < z[at]; --place) {
        values[place] = values[place - 1];
        places[place] = places[place - 1];
      }
      values[place] = z[at];
      places[place] = at;
      if (have == best) least = values[best - 1];
    }
  }
  const __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < width; i += 16) {
    const __m512 v = _mm512_mask_loadu_ps(highest, tail(width - i), z + i);
    total = _mm512_add_ps(total, _mm512_maskz_mov_ps(tail(width - i), exponential(_mm512_sub_ps(v, highest))));
  }
  const float scale = std::log(_mm512_reduce_add_ps(total)) + _mm512_cvtss_f32(highest);
  for (int i = 0; i < best; ++i) values[i] -= scale;
}

// ---- drafts -------------------------------------------------------------------------------------------------------

// How stream states become candidates: z_j = silu(A z_{j-1} + U E[parent] + C s_j), score = head . (s_j + W z_j)
struct Draft {
  const bf16* embedding;              // E [vocabulary, D]
  Packed token, state, carry, to_state, head, own;
  const int64_t *ids, *own_ids;       // token ids of the rows of head and own
  int32_t d, depth, best, nodes, frontier;
};

struct Candidate {
  int64_t token;
  float joint;
  int32_t parent;  // place among the expanded nodes of the level above
};

struct Scratch {
  std::vector<bf16> h, q;
  std::vector<float> scores;
};

class Runner {
 public:
  explicit Runner(int threads) : pool(threads), own(static_cast<size_t>(threads)) {}
  Pool pool;
  std::vector<Scratch> own;
  std::vector<float> qkv;
  std::vector<bf16> heads, inner, low, draft_rows, draft_z, draft_before, draft_c;
  std::vector<float> scores, parts, fixed, values;
  std::vector<int64_t> places;

  void layers(const Shape& s, const Layer* all, int count, const Step& step) {
    const int64_t m = static_cast<int64_t>(step.batch) * step.nodes;
    const int wide = (s.heads + 2 * s.kv_heads) * s.e;
    qkv.resize(m * wide);
    heads.resize(m * s.heads * s.e);
    inner.resize(m * s.inner);
    int rank = 0;
    for (int i = 0; i < count; ++i) rank = std::max(rank, all[i].low.data == nullptr ? 0 : all[i].low.outputs);
    low.resize(m * std::max(rank, 1));
    pool.run([&](int id) {
      for (int i = 0; i < count; ++i) {
        layer(s, all[i], step, id);
        if (i + 1 < count) warm(all[i + 1].qkv, pool.size(), id);
        pool.barrier();
      }
    });
  }

  // Candidates level by level into tokens, joints, parents [depth, nodes - 1], their number a level into counts [depth].
  // A level's best nodes come first, and as many of them are expanded as may have children among the best ``nodes`` - 1
  // of all, up to ``frontier``: a child is no more probable than its parent.
  void draft(const Draft& t, const bf16* states, int64_t root, int64_t* tokens, float* joints, int64_t* parents,
             int64_t* counts) {
    const int keep = t.nodes - 1, wide = t.token.outputs, words = t.head.outputs, own_words = t.own.outputs;
    const int width = words + own_words, most = std::max(t.frontier, 1);
    const float eps = 1.1920929e-7f;
    std::vector<bf16>&e = draft_rows, &z = draft_z, &before = draft_before, &c = draft_c;
    e.resize(static_cast<size_t>(most) * t.d);
    c.resize(static_cast<size_t>(most) * t.d);
    z.resize(static_cast<size_t>(most) * wide);
    before.assign(static_cast<size_t>(most) * wide, 0);
    scores.resize(static_cast<size_t>(most) * width);
    parts.resize(static_cast<size_t>(most) * wide);
    fixed.resize(static_cast<size_t>(wide));
    values.resize(static_cast<size_t>(most) * t.best);
    places.resize(static_cast<size_t>(most) * t.best);
    std::vector<float> joint{0.0f}, all;
    std::vector<int64_t> token{root};
    std::vector<Candidate> level;
    const std::vector<float> ones(static_cast<size_t>(t.d), 1.0f);
    std::fill(counts, counts + t.depth, 0);
    pool.run([&](int id) {
      int first, last;
      const int threads = pool.size();
      for (int depth = 0; depth < t.depth; ++depth) {
        const int rows = static_cast<int>(token.size());
        if (rows == 0) return;
        const bf16* state = states + static_cast<int64_t>(depth) * t.d;
        // parents' embeddings at unit RMS
        share(rows, threads, id, &first, &last);
        for (int i = first; i < last; ++i) {
          alignas(64) float row[8192];
          const bf16* from = t.embedding + token[static_cast<size_t>(i)] * t.d;
          for (int j = 0; j < t.d; j += 16) _mm512_store_ps(row + j, from_bf16(from + j));
          rms_norm(row, ones.data(), t.d, eps, e.data() + static_cast<int64_t>(i) * t.d);
        }
        pool.barrier();
        share(t.token.blocks(), threads, id, &first, &last);
        product(state, t.d, 1, t.state, first, last, [&](int, int b, __m512 lo, __m512 hi) {
          _mm512_storeu_ps(fixed.data() + b * BLOCK, lo);
          _mm512_storeu_ps(fixed.data() + b * BLOCK + 16, hi);
        });
        product(e.data(), t.d, rows, t.token, first, last, [&](int m, int b, __m512 lo, __m512 hi) {
          float* to = parts.data() + static_cast<int64_t>(m) * wide + b * BLOCK;
          _mm512_storeu_ps(to, _mm512_add_ps(lo, _mm512_loadu_ps(fixed.data() + b * BLOCK)));
          _mm512_storeu_ps(to + 16, _mm512_add_ps(hi, _mm512_loadu_ps(fixed.data() + b * BLOCK + 16)));
        });
        product(before.data(), wide, depth == 0 ? 0 : rows, t.carry, first, last,
                [&](int m, int b, __m512 lo, __m512 hi) {
                  float* to = parts.data() + static_cast<int64_t>(m) * wide + b * BLOCK;
                  _mm512_storeu_ps(to, _mm512_add_ps(lo, _mm512_loadu_ps(to)));
                  _mm512_storeu_ps(to + 16, _mm512_add_ps(hi, _mm512_loadu_ps(to + 16)));
                });
        for (int b = first; b < last; ++b)
          for (int m = 0; m < rows; ++m)
            for (int j = b * BLOCK; j < (b + 1) * BLOCK; j += 16) {
              const __m512 v = silu(_mm512_loadu_ps(parts.data() + static_cast<int64_t>(m) * wide + j));
              _mm256_storeu_si256(reinterpret_cast<__m256i*>(z.data() + static_cast<int64_t>(m) * wide + j), to_bf16(v));
            }
        pool.barrier();
        share(t.to_state.blocks(), threads, id, &first, &last);
        product(z.data(), wide, rows, t.to_state, first, last, [&](int m, int b, __m512 lo, __m512 hi) {
          auto* to = reinterpret_cast<__m256i*>(c.data() + static_cast<int64_t>(m) * t.d + b * BLOCK);
          _mm256_storeu_si256(to, to_bf16(_mm512_add_ps(lo, from_bf16(state + b * BLOCK))));
          _mm256_storeu_si256(to + 1, to_bf16(_mm512_add_ps(hi, from_bf16(state + b * BLOCK + 16))));
        });
        pool.barrier();
        const auto score = [&](const Packed& w, int offset) {
          share(w.blocks(), threads, id, &first, &last);
          product(c.data(), t.d, rows, w, first, last, [&](int m, int b, __m512 lo, __m512 hi) {
            store_part(scores.data() + static_cast<int64_t>(m) * width + offset + b * BLOCK, w.outputs - b * BLOCK, lo, hi);
          });
        };
        score(t.head, 0);
        if (own_words > 0) score(t.own, words);
        pool.barrier();
        share(rows, threads, id, &first, &last);
        for (int i = first; i < last; ++i)
          top(scores.data() + static_cast<int64_t>(i) * width, width, t.best, values.data() + static_cast<int64_t>(i) * t.best,
              places.data() + static_cast<int64_t>(i) * t.best);
        pool.barrier();
        if (id == 0) {
          level.clear();
          for (int i = 0; i < rows * t.best; ++i) {
            const int64_t at = places[static_cast<size_t>(i)];
            level.push_back({at < words ? t.ids[at] : t.own_ids[at - words],
                             joint[static_cast<size_t>(i / t.best)] + values[static_cast<size_t>(i)], i / t.best});
          }
          std::stable_sort(level.begin(), level.end(),
                           [](const Candidate& a, const Candidate& b) { return a.joint > b.joint; });
          if (static_cast<int>(level.size()) > keep) level.resize(static_cast<size_t>(keep));
          counts[depth] = static_cast<int64_t>(level.size());
          for (size_t i = 0; i < level.size(); ++i) {
            tokens[depth * keep + static_cast<int>(i)] = level[i].token;
            joints[depth * keep + static_cast<int>(i)] = level[i].joint;
            parents[depth * keep + static_cast<int>(i)] = level[i].parent;
            all.push_back(level[i].joint);
          }
          float least = -INFINITY;
          if (static_cast<int>(all.size()) > keep) {
            std::nth_element(all.begin(), all.begin() + keep - 1, all.end(), std::greater<float>());
            least = all[static_cast<size_t>(keep - 1)];
          }
          joint.clear();
          token.clear();
          for (const Candidate& node : level) {
            if (static_cast<int>(token.size()) == most || !(node.joint > least)) break;
            std::memcpy(before.data() + token.size() * static_cast<size_t>(wide),
                        z.data() + static_cast<size_t>(node.parent) * static_cast<size_t>(wide), sizeof(bf16) * static_cast<size_t>(wide));
            token.push_back(node.token);
            joint.push_back(node.joint);
          }
        }
        pool.barrier();
      }
    });
  }

  void linear(const bf16* x, int count, const Packed& w, const float* bias, float* y) {
    pool.run([&](int id) {
      int first, last;
      share(w.blocks(), pool.size(), id, &first, &last);
      product(x, w.width, count, w, first, last, [&](int m, int b, __m512 lo, __m512 hi) {
        const int left = w.outputs - b * BLOCK;
        if (bias != nullptr) {
          alignas(64) float part[BLOCK] = {};
          std::memcpy(part, bias + b * BLOCK, sizeof(float) * static_cast<size_t>(std::min(left, BLOCK)));
          lo = _mm512_add_ps(lo, _mm512_load_ps(part));
          hi = _mm512_add_ps(hi, _mm512_load_ps(part + 16));
        }
        store_part(y + static_cast<int64_t>(m) * w.outputs + b * BLOCK, left, lo, hi);
      });
    });
  }

 private:
  void layer(const Shape& s, const Layer& l, const Step& step, int id) {
    const int m = step.batch * step.nodes, threads = pool.size();
    Scratch& mine = own[static_cast<size_t>(id)];
    int first, last;

    // norm (every thread for itself: cheaper than a barrier) and packed projections
    mine.h.resize(static_cast<size_t>(m) * s.d);
    for (int i = 0; i < m; ++i)
      rms_norm(step.x + static_cast<int64_t>(i) * s.d, l.norm_in, s.d, s.eps, mine.h.data() + static_cast<int64_t>(i) * s.d);
    const int wide = l.qkv.outputs;
    share(l.qkv.blocks(), threads, id, &first, &last);
    product(mine.h.data(), s.d, m, l.qkv, first, last, [&](int row, int b, __m512 lo, __m512 hi) {
      if (l.qkv_bias != nullptr) {
        lo = _mm512_add_ps(lo, _mm512_loadu_ps(l.qkv_bias + b * BLOCK));
        hi = _mm512_add_ps(hi, _mm512_loadu_ps(l.qkv_bias + b * BLOCK + 16));
      }
      float* to = qkv.data() + static_cast<int64_t>(row) * wide + b * BLOCK;
      _mm512_storeu_ps(to, lo);
      _mm512_storeu_ps(to + 16, hi);
    });
    warm(l.out, threads, id);
    pool.barrier();

    // keys and values of this pass, behind the committed tokens
    share(m * s.kv_heads, threads, id, &first, &last);
    for (int i = first; i < last; ++i) {
      const int row = i / s.kv_heads, head = i % s.kv_heads, b = row / step.nodes, node = row % step.nodes;
      float* from = qkv.data() + static_cast<int64_t>(row) * wide + (s.heads + head) * s.e;
      const int64_t place = b * s.row_stride + head * s.head_stride + (step.lengths[b] + node) * static_cast<int64_t>(s.e);
      turn(from, l.k_norm, s, step.cos + static_cast<int64_t>(row) * s.rope_dim,
           step.sin + static_cast<int64_t>(row) * s.rope_dim, l.keys + place);
      const float* value = from + s.kv_heads * s.e;
      for (int c = 0; c < s.e; ++c) l.values[place + c] = to_bf16(value[c]);
    }
    pool.barrier();

    attend(s, l, step, id);
    pool.barrier();

    share(l.out.blocks(), threads, id, &first, &last);
    product(heads.data(), s.heads * s.e, m, l.out, first, last, [&](int row, int b, __m512 lo, __m512 hi) {
      if (l.out_bias != nullptr) {
        lo = _mm512_add_ps(lo, _mm512_loadu_ps(l.out_bias + b * BLOCK));
        hi = _mm512_add_ps(hi, _mm512_loadu_ps(l.out_bias + b * BLOCK + 16));
      }
      float* x = step.x + static_cast<int64_t>(row) * s.d + b * BLOCK;
      _mm512_storeu_ps(x, _mm512_add_ps(_mm512_loadu_ps(x), lo));
      _mm512_storeu_ps(x + 16, _mm512_add_ps(_mm512_loadu_ps(x + 16), hi));
    });
    warm(l.up, threads, id);
    pool.barrier();

    // silu(gate) * up; their blocks lie in turn
    for (int i = 0; i < m; ++i)
      rms_norm(step.x + static_cast<int64_t>(i) * s.d, l.norm_mlp, s.d, s.eps, mine.h.data() + static_cast<int64_t>(i) * s.d);
    const bool whole = l.up.data != nullptr;  // a stream adapter may stand in place of the MLP
    const int half = whole ? s.inner / BLOCK : 0;
    share(half, threads, id, &first, &last);
    __m512 gate[TILE][2], up[TILE][2];
    for (int b = first; b < last; ++b) {
      for (int r = 0; r < m; r += TILE) {
        zero(gate);
        some_rows(r, m, mine.h.data(), s.d, l.up.block(2 * b), s.d, gate);
        zero(up);
        const int n = some_rows(r, m, mine.h.data(), s.d, l.up.block(2 * b + 1), s.d, up);
        for (int i = 0; i < n; ++i) {
          auto* to = reinterpret_cast<__m256i*>(inner.data() + static_cast<int64_t>(r + i) * s.inner + b * BLOCK);
          _mm256_storeu_si256(to, to_bf16(_mm512_mul_ps(silu(gate[i][0]), up[i][0])));
          _mm256_storeu_si256(to + 1, to_bf16(_mm512_mul_ps(silu(gate[i][1]), up[i][1])));
        }
      }
    }
    const bool beside = l.low.data != nullptr;
    if (beside) {
      share(l.low.blocks(), threads, id, &first, &last);
      product(mine.h.data(), s.d, m, l.low, first, last, [&](int row, int b, __m512 lo, __m512 hi) {
        auto* to = reinterpret_cast<__m256i*>(low.data() + static_cast<int64_t>(row) * l.low.outputs + b * BLOCK);
        _mm256_storeu_si256(to, to_bf16(silu(lo)));
        _mm256_storeu_si256(to + 1, to_bf16(silu(hi)));
      });
    }
    warm(l.down, threads, id);
    pool.barrier();

    share(s.d / BLOCK, threads, id, &first, &last);
    __m512 acc[TILE][2];
    for (int b = first; b < last; ++b) {
      for (int r = 0; r < m; r += TILE) {
        const int n = std::min(TILE, m - r);
        zero(acc);
        if (whole) some_rows(r, m, inner.data(), s.inner, l.down.block(b), s.inner, acc);
        if (beside) some_rows(r, m, low.data(), l.low.outputs, l.high.block(b), l.high.width, acc);
        for (int i = 0; i < n; ++i) {
          float* x = step.x + static_cast<int64_t>(r + i) * s.d + b * BLOCK;
          _mm512_storeu_ps(x, _mm512_add_ps(_mm512_loadu_ps(x), acc[i][0]));
          _mm512_storeu_ps(x + 16, _mm512_add_ps(_mm512_loadu_ps(x + 16), acc[i][1]));
        }
      }
    }
  }

  // Tasks are (row of the batch, kv head, some of its queries). A query is (node, head of the group).
  void attend(const Shape& s, const Layer& l, const Step& step, int id) {
    const int group = s.heads / s.kv_heads, queries = step.nodes * group, threads = pool.size();
    // few enough queries a task that their scores stay in the second-level cache, and tasks enough for all threads
    int longest = 0;
    for (int b = 0; b < step.batch; ++b) longest = std::max(longest, step.lengths[b] + step.nodes);
    int some = std::max(1, std::min(24, 131072 / longest));
    if (step.batch * s.kv_heads * ((queries + some - 1) / some) % threads != 0)
      some = std::min(some, (queries + threads - 1) / threads);
    const int parts = (queries + some - 1) / some, tasks = step.batch * s.kv_heads * parts;
    int first, last;
    share(tasks, threads, id, &first, &last);
    for (int t = first; t < last; ++t) {
      const int part = t % parts, head = t / parts % s.kv_heads, b = t / parts / s.kv_heads;
      const int low_query = part * some, count = std::min(some, queries - low_query);
      switch (s.e / 32) {
        case 1: task<2>(s, l, step, id, b, head, low_query, count); break;
        case 2: task<4>(s, l, step, id, b, head, low_query, count); break;
        case 3: task<6>(s, l, step, id, b, head, low_query, count); break;
        default: task<8>(s, l, step, id, b, head, low_query, count); break;
      }
    }
  }

  template <int NE>
  void task(const Shape& s, const Layer& l, const Step& step, int id, int b, int head, int begin, int count) {
    Scratch& mine = own[static_cast<size_t>(id)];
    const int group = s.heads / s.kv_heads, wide = l.qkv.outputs, length = step.lengths[b];
    const int span = length + step.nodes;
    const int64_t width = (span + 31) / 16 * 16;
    mine.q.resize(static_cast<size_t>(count) * s.e);
    mine.scores.resize(static_cast<size_t>(count) * width);
    const auto row_of = [&](int i) { return b * step.nodes + (begin + i) / group; };
    for (int i = 0; i < count; ++i) {
      const int64_t row = row_of(i);
      float* from = qkv.data() + row * wide + (head * group + (begin + i) % group) * s.e;
      turn(from, l.q_norm, s, step.cos + row * s.rope_dim, step.sin + row * s.rope_dim, mine.q.data() + i * s.e);
    }
    const bf16* keys = l.keys + b * s.row_stride + head * s.head_stride;
    const bf16* values = l.values + b * s.row_stride + head * s.head_stride;
    __m512i turned[NE * 8];
    for (int k = 0; k < span; k += 16) {
      transpose_keys(keys + static_cast<int64_t>(k) * s.e, std::min(16, span - k), s.e, turned);
      int i = 0;
      for (; i + 8 <= count; i += 8)
        scores_of<8>(mine.q.data() + i * s.e, s.e, turned, NE * 8, mine.scores.data() + i * width + k, width);
      for (; i + 3 <= count; i += 3)
        scores_of<3>(mine.q.data() + i * s.e, s.e, turned, NE * 8, mine.scores.data() + i * width + k, width);
      for (; i < count; ++i)
        scores_of<1>(mine.q.data() + i * s.e, s.e, turned, NE * 8, mine.scores.data() + i * width + k, width);
    }
    // what a query sees, in text order: committed tokens, then its ancestors
    std::vector<float>& p = mine.scores;
    float total[32];
    for (int i = 0; i < count; ++i) {
      float* mine_p = p.data() + i * width;
      const int row = row_of(i), from = step.first[row], seen = length - from;
      if (from > 0) std::memmove(mine_p, mine_p + from, sizeof(float) * static_cast<size_t>(seen));
      int n = seen;
      for (int a = step.offsets[row]; a < step.offsets[row + 1]; ++a) mine_p[n++] = mine_p[from + seen + step.ancestors[a]];
      total[i] = soften(mine_p, n, s.scale);
    }
    constexpr int TOGETHER = 16 / NE > 1 ? 16 / NE : 1;
    for (int i = 0; i < count;) {
      bool alike = i + TOGETHER <= count;
      for (int c = 1; alike && c < TOGETHER; ++c) alike = step.first[row_of(i + c)] == step.first[row_of(i)];
      const int n = alike ? TOGETHER : 1;
      if (alike)
        values_of<TOGETHER, NE>(s, l, step, values, p.data() + i * width, width, b, head, begin + i, total + i);
      else
        values_of<1, NE>(s, l, step, values, p.data() + i * width, width, b, head, begin + i, total + i);
      i += n;
    }
  }

  template <int QUERIES, int NE>
  void values_of(const Shape& s, const Layer&, const Step& step, const bf16* values, const float* p, int64_t width, int b,
                 int head, int begin, const float* total) {
    const int group = s.heads / s.kv_heads, length = step.lengths[b];
    __m512 acc[QUERIES][NE];
    for (auto& row : acc)
      for (auto& v : row) v = _mm512_setzero_ps();
    const int from = step.first[b * step.nodes + begin / group], seen = length - from;
    gather_values<QUERIES, NE>(p, width, values + static_cast<int64_t>(from) * s.e, seen, acc);
    for (int i = 0; i < QUERIES; ++i) {
      const int node = (begin + i) / group, row = b * step.nodes + node;
      const float* weight = p + i * width + seen;
      for (int a = step.offsets[row]; a < step.offsets[row + 1]; ++a) {
        const bf16* value = values + static_cast<int64_t>(length + step.ancestors[a]) * s.e;
        const __m512 w = _mm512_set1_ps(*weight++);
        for (int c = 0; c < NE; ++c) acc[i][c] = _mm512_fmadd_ps(w, from_bf16(value + 16 * c), acc[i][c]);
      }
      const __m512 inverse = _mm512_set1_ps(1.0f / total[i]);
      bf16* to = heads.data() + (static_cast<int64_t>(row) * s.heads + head * group + (begin + i) % group) * s.e;
      for (int c = 0; c < NE; ++c)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16 * c), to_bf16(_mm512_mul_ps(acc[i][c], inverse)));
    }
  }
};

}  // namespace

extern "C" {

void* anabranch_runner(int threads) { return new Runner(threads); }
void anabranch_free(void* runner) { delete static_cast<Runner*>(runner); }

// ask for large pages, so that reading weights does not wait for translations of addresses
void anabranch_advise(void* memory, int64_t bytes) { madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE); }

// w [outputs, width] row by row -> blocks; ``to`` holds ceil(outputs / 32) * 32 * width values
void anabranch_pack(const bf16* w, int outputs, int width, bf16* to) {
  const int blocks = (outputs + BLOCK - 1) / BLOCK;
  for (int b = 0; b < blocks; ++b)
    for (int k = 0; k < width; k += 2)
      for (int j = 0; j < BLOCK; ++j)
        for (int c = 0; c < 2; ++c) {
          const int row = b * BLOCK + j;
          *to++ = row < outputs ? w[static_cast<int64_t>(row) * width + k + c] : bf16{0};
        }
}

void anabranch_linear(void* runner, const bf16* x, int count, const bf16* packed, int outputs, int width,
                      const float* bias, float* y) {
  static_cast<Runner*>(runner)->linear(x, count, Packed{packed, outputs, width}, bias, y);
}

// x [count, width] float32 -> RMS norm in bf16
void anabranch_norm(const float* x, int count, int width, const float* weight, float eps, bf16* y) {
  for (int64_t i = 0; i < count; ++i) rms_norm(x + i * width, weight, width, eps, y + i * width);
}

// log softmax of each row of z [count, width], its ``best`` largest values and where they are, falling; of equals the
// first comes first
void anabranch_best(const float* z, int count, int width, int best, float* values, int64_t* places) {
  for (int64_t i = 0; i < count; ++i) top(z + i * width, width, best, values + i * best, places + i * best);
}

// the tree of one row from its stream states [depth, D]; see Runner::draft
void anabranch_draft(void* runner, const Draft* draft, const bf16* states, int64_t root, int64_t* tokens, float* joints,
                     int64_t* parents, int64_t* counts) {
  static_cast<Runner*>(runner)->draft(*draft, states, root, tokens, joints, parents, counts);
}

void anabranch_layers(void* runner, const Shape* shape, const Layer* layers, int count, const Step* step) {
  static_cast<Runner*>(runner)->layers(*shape, layers, count, *step);
}

}
