// Products and attention with AVX2; included by avx2.h. The names are documented in simd.h.
#pragma once

#include "avx2.h"

namespace {

// ---- products -----------------------------------------------------------------------------------------------------

// 8 weights of a line; in bf16 the first (PART 0) or second k of each pair
template <int PART>
inline __m256 weights8(const float* w) {
  return _mm256_loadu_ps(w);
}

template <int PART>
inline __m256 weights8(const bf16* w) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  const __m256i one = PART == 0 ? _mm256_slli_epi32(pairs, 16)
                                : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm256_castsi256_ps(one);
}

// sum += a b in the register of the sum: GCC writes some sums into that of ``a``, and then has too few registers
inline void add_in_place(__m256& sum, __m256 a, __m256 b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }

// acc[m] += x[m] . w over k, for VECTORS vectors of 8 outputs
template <int PART, int ROWS, int VECTORS, class P>
inline void add_product(const float* x, int64_t stride, const P* w, __m256 (&acc)[ROWS][VECTORS]) {
  constexpr int STEP = PER_LANE<P>;
  if constexpr (VECTORS > ROWS) {
    __m256 value[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) value[m] = _mm256_broadcast_ss(x + m * stride + PART);
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      const __m256 weight = weights8<PART>(w + 8 * STEP * j);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) acc[m][j] = _mm256_fmadd_ps(value[m], weight, acc[m][j]);
    }
  } else {
    __m256 weight[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) weight[j] = weights8<PART>(w + 8 * STEP * j);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m256 value = _mm256_broadcast_ss(x + m * stride + PART);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) add_in_place(acc[m][j], value, weight[j]);
    }
  }
}

// calls f with ``count``, which is from 1 to LIMIT, as a constant
template <int LIMIT, class F>
inline void with_constant(int count, F&& f) {
  if constexpr (LIMIT > 1)
    if (count < LIMIT) return with_constant<LIMIT - 1>(count, f);
  f(std::integral_constant<int, LIMIT>{});
}

// sums[m] += x[m] . block over ``steps`` lines, for ROWS rows and VECTORS vectors of 8 outputs; each step prefetches
// ``bytes`` bytes from ``next`` on
template <int ROWS, int VECTORS, class P>
NOINLINE void multiply_part(const float* x, int64_t stride, const P* block, int steps, const char* next, int bytes,
                            __m256* sums) {
  constexpr int STEP = PER_LANE<P>;
  __m256 a[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) a[m][j] = sums[4 * m + j];
  for (int k = 0; k < steps; ++k) {
    const P* w = block + static_cast<int64_t>(k) * STEP * BLOCK;
    prefetch(next + static_cast<int64_t>(k) * bytes);
    if (bytes > 64) prefetch(next + static_cast<int64_t>(k) * bytes + 64);
    add_product<0, ROWS, VECTORS>(x + STEP * k, stride, w, a);
    if constexpr (STEP == 2) add_product<1, ROWS, VECTORS>(x + STEP * k, stride, w, a);
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sums[4 * m + j] = a[m][j];
}

// For bf16 and float. 64 lines of weights stay in the first-level cache while all rows are multiplied by them: two rows at
// a time for all 32 outputs, or six rows for one half of the outputs and then the other, to fit 16 registers.
template <class W, int LINES, class P>
inline void multiply_tile(int count, const Operand<P>* rows, int64_t stride, const P* block, int width, const char* next,
                          Sums& acc) {
  constexpr int STEP = PER_LANE<P>, AT_ONCE = 6, LINES_AT_ONCE = 64;
  const float* x = reinterpret_cast<const float*>(rows);
  const int all = width / STEP, left = count % AT_ONCE;
  const int passes = count / AT_ONCE * 2 + (left == 0 ? 0 : left <= 2 ? 1 : 2), bytes = 64 * LINES / passes;
  for (int from = 0; from < all; from += LINES_AT_ONCE) {
    const int steps = std::min(LINES_AT_ONCE, all - from);
    const P* w = block + static_cast<int64_t>(from) * STEP * BLOCK;
    const char* ahead = next + static_cast<int64_t>(from) * 64 * LINES;
    for (int m = 0; m < count; m += AT_ONCE) {
      const float* values = x + m * stride + STEP * from;
      __m256* sums = &acc[m][0].low;
      const auto some = [&](auto n, auto vectors) {
        for (int at = 0; at < 4; at += vectors, ahead += steps * bytes)
          multiply_part<n, vectors>(values, stride, w + 8 * STEP * at, steps, ahead, bytes, sums + at);
      };
      const int n = std::min(AT_ONCE, count - m);
      if (n <= 2)
        with_constant<2>(n, [&](auto constant) { some(constant, std::integral_constant<int, 4>{}); });
      else
        with_constant<AT_ONCE>(n, [&](auto constant) { some(constant, std::integral_constant<int, 2>{}); });
    }
  }
}

// 32 bits at p in all 8 lanes
inline __m256i broadcast8(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// Stops compilers from computing all terms of a sum before they add them, which takes more registers than there are.
inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

constexpr int ROWS_AT_ONCE = 4;

#ifdef __AVXVNNI__
template <int STORED>
constexpr int OFFSET = STORED;  // that is left in the products, see ``offset_of``

// sum[m][j] += the products of rows' values 4 q to 4 q + 3 with ``weights(q, j)``, for QUADS values of q from ``first`` on;
// weights are unsigned, of BITS bits
template <int BITS, int QUADS, int ROWS, int VECTORS, class Weights>
inline void add_products(const QuantizedGroup* x, int64_t stride, int first, Weights&& weights, __m256i (&sum)[ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int q = first; q < first + QUADS; ++q) {
    __m256i w[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) w[j] = weights(q, j);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m256i values = broadcast8(x[m * stride].value + 4 * q);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) {
        sum[m][j] = _mm256_dpbusd_avx_epi32(sum[m][j], w[j], values);
        keep_order(sum[m][j]);
      }
    }
  }
}
#else
template <int STORED>
constexpr int OFFSET = STORED == 128 ? 0 : STORED;

// quads whose products can be summed in 16 bits
template <int BITS>
constexpr int QUADS_IN_16 = std::min(8, 32767 / (2 * 127 * ((1 << BITS) - 1)));

// sum[m][j] += factor[j] times the products, see above
template <int BITS, int QUADS, int ROWS, int VECTORS, class Weights>
inline void add_products(const QuantizedGroup* x, int64_t stride, int first, Weights&& weights, const __m256i (&factor)[VECTORS],
                         __m256i (&sum)[ROWS][VECTORS]) {
  constexpr int TOGETHER = std::min(QUADS, QUADS_IN_16<BITS>);
#pragma GCC unroll 8
  for (int from = first; from < first + QUADS; from += TOGETHER) {
    __m256i pairs[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < TOGETHER; ++i) {
      __m256i w[VECTORS];
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) w[j] = weights(from + i, j);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        const __m256i values = broadcast8(x[m * stride].value + 4 * (from + i));
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; ++j) {
          const __m256i products = _mm256_maddubs_epi16(w[j], values);
          pairs[m][j] = i == 0 ? products : _mm256_add_epi16(pairs[m][j], products);
          keep_order(pairs[m][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) sum[m][j] = _mm256_add_epi32(sum[m][j], _mm256_madd_epi16(pairs[m][j], factor[j]));
  }
}

// the same without factors; bytes stand for their values less 128
template <int BITS, int QUADS, int ROWS, int VECTORS, class Weights>
inline void add_products(const QuantizedGroup* x, int64_t stride, int first, Weights&& weights, __m256i (&sum)[ROWS][VECTORS]) {
  const __m256i one = _mm256_set1_epi16(1);
  if constexpr (BITS < 8) {
    __m256i ones[VECTORS];
    for (auto& each : ones) each = one;
    add_products<BITS, QUADS>(x, stride, first, weights, ones, sum);
  } else {
#pragma GCC unroll 8
    for (int q = first; q < first + QUADS; ++q) {
      __m256i w[VECTORS], size[VECTORS];
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) {
        w[j] = _mm256_xor_si256(weights(q, j), _mm256_set1_epi8(-128));
        size[j] = _mm256_abs_epi8(w[j]);
      }
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        const __m256i values = broadcast8(x[m * stride].value + 4 * q);
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; ++j) {
          const __m256i pairs = _mm256_maddubs_epi16(size[j], _mm256_sign_epi8(values, w[j]));
          sum[m][j] = _mm256_add_epi32(sum[m][j], _mm256_madd_epi16(pairs, one));
          keep_order(sum[m][j]);
        }
      }
    }
  }
}
#endif

inline __m256 float_of_half(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// total[m] += the products of one group of int8 weights, for the 16 outputs of vectors ``at`` and ``at`` + 1
template <int ROWS>
NOINLINE void multiply_group_part(const QuantizedGroup* x, int64_t stride, const uint8_t* w, int at, __m256 (*total)[4]) {
  __m256i sum[ROWS][2];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) sum[m][0] = sum[m][1] = _mm256_set1_epi32(offset_of<OFFSET<128>>(x[m * stride], 0, 1));
  const auto weights = [&](int q, int j) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 128 * q + 32 * (at + j)));
  };
  add_products<8, BLOCK / 4>(x, stride, 0, weights, sum);
#pragma GCC unroll 8
  for (int j = 0; j < 2; ++j)
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
      total[m][at + j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m][j]), _mm256_set1_ps(x[m * stride].scale), total[m][at + j]);
}

template <class W, int LINES>
inline void multiply_tile(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width,
                          const char* next, Sums& acc) {
  constexpr int LINES_OF_GROUP = W::GROUP / 128 * LINES;
  const int groups = width / BLOCK, parts = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, size = (count + parts - 1) / parts;
  __m256 total[MAX_TILE_ROWS][4];
  for (int m = 0; m < count; ++m)
    for (auto& v : total[m]) v = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    const uint8_t* w = block + static_cast<int64_t>(g) * W::GROUP;
    const char* ahead = next + static_cast<int64_t>(g) * LINES_OF_GROUP * 64;
    for (int i = 0; i < LINES_OF_GROUP; ++i) prefetch_second(ahead + 64 * i);
    for (int m = 0; m < count; m += size)
      with_constant<ROWS_AT_ONCE>(std::min(size, count - m), [&](auto n) {
        for (int at = 0; at < 4; at += 2) multiply_group_part<n>(x + g + m * stride, stride, w, at, total + m);
      });
  }
  const float* scales = reinterpret_cast<const float*>(block + static_cast<int64_t>(groups) * W::GROUP);
  auto* sums = &acc[0][0].low;
  for (int m = 0; m < count; ++m)
    for (int j = 0; j < 4; ++j) sums[4 * m + j] = _mm256_fmadd_ps(total[m][j], _mm256_loadu_ps(scales + 8 * j), sums[4 * m + j]);
}

// ---- stored weights -------------------------------------------------------------------------------------------------

// Values 4 q to 4 q + 3 of 8 outputs, vector ``at``, of a group in the format F.
template <class F>
inline __m256i stored_quad(const uint8_t* group, int q, int at) {
  constexpr int LOW_EACH = 8 / F::LOW;
  const auto line = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 128 * i + 32 * at)); };
  __m256i value = line(q / LOW_EACH);
  if (F::LOW < 8) {
    value = _mm256_srli_epi16(value, F::LOW * (q % LOW_EACH));
    value = _mm256_and_si256(value, _mm256_set1_epi8(static_cast<char>((1 << F::LOW) - 1)));
  }
  if constexpr (F::HIGH > 0) {
    constexpr int HIGH_EACH = 8 / F::HIGH;
    const __m256i high = line(F::LOW + q / HIGH_EACH);
    const int up = F::LOW - F::HIGH * (q % HIGH_EACH);
    const __m256i moved = up >= 0 ? _mm256_slli_epi16(high, up) : _mm256_srli_epi16(high, -up);
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << F::HIGH) - 1) << F::LOW));
    value = _mm256_or_si256(value, _mm256_and_si256(moved, mask));
  }
  if constexpr (F::CODES) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(F::TABLE));
    const __m256i bytes = _mm256_xor_si256(_mm256_broadcastsi128_si256(codes), _mm256_set1_epi8(CODE_OFFSET - 256));
    value = _mm256_shuffle_epi8(bytes, value);
  }
  return value;
}

#ifdef __AVXVNNI__
template <class F>
constexpr bool FACTORS = false;
#else
// integers that multiply scales are factors of the integer products, which stay below 2^24
template <class F>
constexpr bool FACTORS = F::SUB && byte_offset<F>() == 0;
#endif

// 8 bytes, each as two equal numbers of 16 bits
inline __m256i twice_8(const uint8_t* bytes) {
  const __m256i eight = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  const __m256i from = _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1,  //
                                        4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
  return _mm256_shuffle_epi8(eight, from);
}

// the halves at p, of the scales or minima of 8 outputs
template <class F>
inline __m256 stored_halves(const uint8_t* p) {
  if constexpr (!F::POWERS) return float_of_half(p);
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// halves of 8 outputs times their integers at p, for half a group
template <bool SIGNED_BYTES>
inline __m256 times_bytes(__m256 halves, const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return halves * _mm256_cvtepi32_ps(SIGNED_BYTES ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

// total[m] += the products of ``groups`` groups from ``w`` on, for the outputs of VECTORS vectors from ``at`` on; the groups have one
// head. Prefetches ``fetched`` cache lines for each group.
template <class F, int ROWS, int VECTORS>
NOINLINE void multiply_stored_part(const QuantizedGroup* x, int64_t stride, const uint8_t* head, const uint8_t* w, int groups,
                                   int at, const char* next, int fetched, __m256 (*total)[4]) {
  constexpr int QUADS = BLOCK / 4 / F::HALVES, BITS = F::DIGITS;
  __m256 scale[VECTORS], minimum[VECTORS];
  const auto read_halves = [&](const uint8_t* from) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) {
      scale[j] = stored_halves<F>(from + 16 * (at + j));
      minimum[j] = F::MINIMUM ? stored_halves<F>(from + 2 * BLOCK + 16 * (at + j)) : _mm256_setzero_ps();
    }
  };
  if (F::SUB) read_halves(head);
  for (int g = 0; g < groups; ++g, ++x, w += F::GROUP) {
    for (int i = 0; i < fetched; ++i, next += 64) prefetch_for(ROWS, next);
    if (!F::SUB) read_halves(w + F::VALUE_BYTES);
    const auto weights = [&](int q, int j) { return stored_quad<F>(w, q, at + j); };
#pragma GCC unroll 2
    for (int h = 0; h < F::HALVES; ++h) {
      const uint8_t* sub = w + F::VALUE_BYTES + BLOCK * h + 8 * at;  // of SUB formats
      __m256i sum[ROWS][VECTORS];
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j)
          sum[m][j] = _mm256_set1_epi32(offset_of<OFFSET<byte_offset<F>()>>(x[m * stride], h, F::HALVES));
      if constexpr (FACTORS<F>) {
        __m256i factors[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) factors[j] = twice_8(sub + 8 * j);
        add_products<BITS, QUADS>(x, stride, QUADS * h, weights, factors, sum);
      } else {
        add_products<BITS, QUADS>(x, stride, QUADS * h, weights, sum);
      }
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) {
        const __m256 times = F::SUB && !FACTORS<F> ? times_bytes<F::SIGNED>(scale[j], sub + 8 * j) : scale[j];
        const __m256 plus = F::SUB && F::MINIMUM ? times_bytes<false>(minimum[j], sub + F::SCALE_BYTES + 8 * j) : minimum[j];
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          __m256& to = total[m][at + j];
          to = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m][j]) * times, _mm256_set1_ps(x[m * stride].scale), to);
          if constexpr (F::MINIMUM) {
            const __m256 values = _mm256_set1_ps(sum_of(x[m * stride], h, F::HALVES));
            to = F::SUB ? _mm256_fnmadd_ps(values, plus, to) : _mm256_fmadd_ps(values, plus, to);
          }
        }
      }
    }
  }
}

// Copies a head and the groups of F after it, as Unpacked<F>.
template <class F>
NOINLINE void unpack(const uint8_t* head, const uint8_t* w, int groups, uint8_t* to) {
  std::memcpy(to, head, F::HEAD);
  to += F::HEAD;
  for (int g = 0; g < groups; ++g, w += F::GROUP, to += Unpacked<F>::GROUP) {
#pragma GCC unroll 8
    for (int q = 0; q < BLOCK / 4; ++q)
#pragma GCC unroll 4
      for (int at = 0; at < 4; ++at)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 128 * q + 32 * at), stored_quad<F>(w, q, at));
    std::memcpy(to + Unpacked<F>::VALUE_BYTES, w + F::VALUE_BYTES, F::GROUP - F::VALUE_BYTES);
  }
}

template <class F>
inline void multiply_stored(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char* next,
                            int lines, Sums& acc) {
  constexpr int TOGETHER = 8;
  const int fetched = F::CACHE_LINES * lines, all = width / BLOCK;
  const int parts = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, size = (count + parts - 1) / parts;
  __m256 total[MAX_TILE_ROWS][4];
  for (int m = 0; m < count; ++m)
    for (auto& v : total[m]) v = _mm256_setzero_ps();
  for (int g = 0; g < all; g += TOGETHER) {
    const int groups = std::min(TOGETHER, all - g);
    const char* ahead = next + F::group_at(g) * lines / 2;
    const auto multiply = [&](auto format, const uint8_t* head, const uint8_t* w) {
      for (int m = 0; m < count; m += size)
        with_constant<ROWS_AT_ONCE>(std::min(size, count - m), [&](auto n) {
          constexpr int VECTORS = n == 1 ? 4 : 2;
          const int each = (fetched * VECTORS + 7) / 8;
          for (int at = 0; at < 4; at += VECTORS)
            multiply_stored_part<decltype(format), n, VECTORS>(x + g + m * stride, stride, head, w, groups, at,
                                                               ahead + 64 * TOGETHER * each * at / VECTORS, m == 0 ? each : 0, total + m);
        });
    };
    const uint8_t *head = block + F::head_at(g), *w = block + F::group_at(g);
    if constexpr (F::LOW < 8)
      if (parts > 2) {
        alignas(32) uint8_t unpacked[F::HEAD + TOGETHER * Unpacked<F>::GROUP];
        unpack<F>(head, w, groups, unpacked);
        multiply(Unpacked<F>{}, unpacked, unpacked + F::HEAD);
        continue;
      }
    multiply(F{}, head, w);
  }
  auto* sums = &acc[0][0].low;
  for (int m = 0; m < count; ++m)
    for (int j = 0; j < 4; ++j) sums[4 * m + j] = sums[4 * m + j] + total[m][j];
}

inline void expand_group(const uint8_t* group, bf16* to) {
  const __m256i digit = _mm256_set1_epi32(15);
  for (int j = 0; j < 4; ++j) {
    const __m256 scale = float_of_half(group + 512 + 16 * j), minimum = float_of_half(group + 576 + 16 * j);
#pragma GCC unroll 4
    for (int k = 0; k < BLOCK / 8; ++k) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 128 * k + 32 * j));
      // the value at one place of each lane: values 0 to 3 are low halves of its bytes, 4 to 7 high ones
      const auto at = [&](__m256i shifted) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(shifted, digit)), scale, minimum);
      };
      bf16* pairs = to + 8 * k / 2 * 2 * BLOCK + 16 * j;
      store_pairs(pairs, at(w), at(_mm256_srli_epi32(w, 8)));
      store_pairs(pairs + 2 * BLOCK, at(_mm256_srli_epi32(w, 16)), at(_mm256_srli_epi32(w, 24)));
      store_pairs(pairs + 4 * BLOCK, at(_mm256_srli_epi32(w, 4)), at(_mm256_srli_epi32(w, 12)));
      store_pairs(pairs + 6 * BLOCK, at(_mm256_srli_epi32(w, 20)), at(_mm256_srli_epi32(w, 28)));
    }
  }
}

// ---- attention ----------------------------------------------------------------------------------------------------

template <class P>
inline void transpose_keys(const P* keys, int have, int e, KeyLanes* out) {
  for (int part = 0; part < e; part += 8)
    for (int side = 0; side < 2; ++side) {
      __m256 r[8], t[8];
      for (int i = 0; i < 8; ++i) {
        const P* key = keys + static_cast<int64_t>(8 * side + i) * e + part;
        if constexpr (std::is_same<P, bf16>::value)
          r[i] = 8 * side + i < have ? load8(key) : _mm256_setzero_ps();
        else
          r[i] = 8 * side + i < have ? _mm256_loadu_ps(key) : _mm256_setzero_ps();
      }
      for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
      }
      for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
      }
      for (int i = 0; i < 4; ++i) {
        KeyLanes *first = out + part + i, *second = out + part + 4 + i;
        (side == 0 ? first->low : first->high) = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
        (side == 0 ? second->low : second->high) = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
      }
    }
}

template <int NE, class P>
inline void load_pairs(const P* one, const P*, KeyLanes (&out)[NE]) {
  for (int c = 0; c < NE; ++c) out[c] = load16(one + 16 * c);
}
template <class T>
inline void unpair_sums(F32x16*, F32x16*) {}

// as many accumulators at a time as registers hold
template <int QUERIES, int NE, class T, class P>
inline void accumulate_values(const T* p, int64_t p_stride, const P* v, int count, F32x16* out) {
  constexpr int AT_ONCE = QUERIES == 1 && NE % 4 == 0 ? 4 : QUERIES <= 3 ? 2 : 1;
  for (int c = 0; c < NE; c += AT_ONCE) {
    F32x16 a[QUERIES][AT_ONCE];
#pragma GCC unroll 16
    for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 16
      for (int n = 0; n < AT_ONCE; ++n) a[i][n] = out[i * NE + c + n];
    for (int j = 0; j < count; ++j) {
      const P* row = v + (static_cast<int64_t>(j) * NE + c) * 16;
#pragma GCC unroll 16
      for (int n = 0; n < AT_ONCE; ++n) {
        const F32x16 value = load16(row + 16 * n);
#pragma GCC unroll 16
        for (int i = 0; i < QUERIES; ++i) a[i][n] = mul_add(broadcast_word(p + i * p_stride + j), value, a[i][n]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 16
      for (int n = 0; n < AT_ONCE; ++n) out[i * NE + c + n] = a[i][n];
  }
}

}  // namespace
