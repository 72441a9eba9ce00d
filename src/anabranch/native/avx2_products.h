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
      for (int j = 0; j < VECTORS; ++j) acc[m][j] = _mm256_fmadd_ps(value, weight[j], acc[m][j]);
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

// ``multiply_group``: sum[m] = the integer products of one group, for VECTORS vectors of 8 outputs
#ifdef __AVXVNNI__
// UNROLLED: steps of k. GCC copies all sums at each step if the loop is not unrolled, and reloads the weights for each row if it
// is unrolled by 8
constexpr int ROWS_AT_ONCE = 4, UNROLLED = 4;

inline __m256i add_products(__m256i sum, __m256i weights, __m256i values) {
  return _mm256_dpbusd_avx_epi32(sum, weights, values);
}
inline __m256i whole_sum(__m256i sum) { return sum; }
#else
constexpr int ROWS_AT_ONCE = 3, UNROLLED = 1;

// two by two, in 16 bits: a sum of 16 products of at most 15 * 127 fits into these
inline __m256i add_products(__m256i sum, __m256i weights, __m256i values) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, values));
}
inline __m256i whole_sum(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

// sum + the products of values 4 k to 4 k + 3 of a row and of 8 outputs' weights, in bytes
inline __m256i add_byte_products(__m256i sum, __m256i weights, const QuantizedGroup& x, int k) {
#ifdef __AVXVNNI__
  return add_products(sum, weights, broadcast8(x.value + 4 * k));
#else
  const __m256i even = _mm256_and_si256(weights, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(weights, 8);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, broadcast8(x.wide + 4 * k)));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, broadcast8(x.wide + 4 * k + 2)));
#endif
}

template <int ROWS, int VECTORS>
inline void multiply_group(Int8, const QuantizedGroup* x, int64_t stride, const uint8_t* w, __m256i (&sum)[ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[m][j] = _mm256_set1_epi32(offset_of<128>(x[m * stride], 0, 1));
#pragma GCC unroll UNROLLED
  for (int k = 0; k < BLOCK / 4; ++k) {
#ifdef __AVXVNNI__
    __m256i weights[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j)
      weights[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 128 * k + 32 * j));
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m256i values = broadcast8(x[m * stride].value + 4 * k);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) sum[m][j] = add_products(sum[m][j], weights[j], values);
    }
#else
    const __m256i low = _mm256_set1_epi16(0xff);
    __m256i even[VECTORS], odd[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 128 * k + 32 * j));
      even[j] = _mm256_and_si256(both, low);
      odd[j] = _mm256_srli_epi16(both, 8);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const int16_t* value = x[m * stride].wide + 4 * k;
      const __m256i first = broadcast8(value), second = broadcast8(value + 2);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) {
        sum[m][j] = _mm256_add_epi32(sum[m][j], _mm256_madd_epi16(even[j], first));
        sum[m][j] = _mm256_add_epi32(sum[m][j], _mm256_madd_epi16(odd[j], second));
      }
    }
#endif
  }
}

template <int ROWS, int VECTORS>
inline void multiply_group(Int4, const QuantizedGroup* x, int64_t stride, const uint8_t* w, __m256i (&sum)[ROWS][VECTORS]) {
  const __m256i half = _mm256_set1_epi8(15);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[m][j] = _mm256_setzero_si256();
#pragma GCC unroll UNROLLED
  for (int k = 0; k < BLOCK / 8; ++k) {
    __m256i low[VECTORS], high[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 128 * k + 32 * j));
      low[j] = _mm256_and_si256(both, half);
      high[j] = _mm256_and_si256(_mm256_srli_epi16(both, 4), half);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const int8_t* value = x[m * stride].value + 8 * k;
      const __m256i first = broadcast8(value), second = broadcast8(value + 4);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) sum[m][j] = add_products(add_products(sum[m][j], low[j], first), high[j], second);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[m][j] = whole_sum(sum[m][j]);
}

inline __m256 float_of_half(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// total[m] += the products of one group, for the 16 outputs of vectors ``at`` and ``at`` + 1
template <class W, int ROWS>
NOINLINE void multiply_group_part(const QuantizedGroup* x, int64_t stride, const uint8_t* w, int at, __m256 (*total)[4]) {
  constexpr bool NARROW = std::is_same<W, Int4>::value;
  __m256i sum[ROWS][2];
  multiply_group<ROWS, 2>(W{}, x, stride, w + 32 * at, sum);
#pragma GCC unroll 8
  for (int j = 0; j < 2; ++j) {
    __m256 scale, minimum;
    if (NARROW) scale = float_of_half(w + 512 + 16 * (at + j)), minimum = float_of_half(w + 576 + 16 * (at + j));
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m256 s = _mm256_set1_ps(x[m * stride].scale), f = _mm256_cvtepi32_ps(sum[m][j]);
      __m256& to = total[m][at + j];
      if (NARROW) {
        to = _mm256_fmadd_ps(f * scale, s, to);
        to = _mm256_fmadd_ps(_mm256_set1_ps(x[m * stride].sum), minimum, to);
      } else {
        to = _mm256_fmadd_ps(f, s, to);
      }
    }
  }
}

template <class W, int LINES>
inline void multiply_tile(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width,
                          const char* next, Sums& acc) {
  constexpr bool NARROW = std::is_same<W, Int4>::value;
  constexpr int LINES_OF_GROUP = GROUP_BYTES<W> / 128 * LINES;
  const int groups = width / BLOCK, parts = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, size = (count + parts - 1) / parts;
  __m256 total[MAX_TILE_ROWS][4];
  for (int m = 0; m < count; ++m)
    for (auto& v : total[m]) v = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    const uint8_t* w = block + static_cast<int64_t>(g) * GROUP_BYTES<W>;
    const char* ahead = next + static_cast<int64_t>(g) * LINES_OF_GROUP * 64;
    for (int i = 0; i < LINES_OF_GROUP; ++i) NARROW ? prefetch_for(count, ahead + 64 * i) : prefetch_second(ahead + 64 * i);
    for (int m = 0; m < count; m += size)
      with_constant<ROWS_AT_ONCE>(std::min(size, count - m), [&](auto n) {
        for (int at = 0; at < 4; at += 2) multiply_group_part<W, n>(x + g + m * stride, stride, w, at, total + m);
      });
  }
  const float* scales = reinterpret_cast<const float*>(block + static_cast<int64_t>(groups) * GROUP_BYTES<W>);
  auto* sums = &acc[0][0].low;
  for (int m = 0; m < count; ++m)
    for (int j = 0; j < 4; ++j)
      sums[4 * m + j] = NARROW ? sums[4 * m + j] + total[m][j]
                               : _mm256_fmadd_ps(total[m][j], _mm256_loadu_ps(scales + 8 * j), sums[4 * m + j]);
}

// total += the products of an expanded group, for the 16 outputs of vectors ``at`` and ``at`` + 1
template <class F>
inline void multiply_expanded_part(const QuantizedGroup& x, const ExpandedGroup& group, int at, __m256* total) {
  const __m256 s = _mm256_set1_ps(x.scale);
  for (int h = 0; h < F::HALVES; ++h) {
    __m256i sum[2];
    sum[0] = sum[1] = _mm256_set1_epi32(offset_of<byte_offset<F>()>(x, h, F::HALVES));
    for (int k = 8 / F::HALVES * h; k < 8 / F::HALVES * (h + 1); ++k)
      for (int j = 0; j < 2; ++j) {
        const auto* at_k = reinterpret_cast<const __m256i*>(group.value + 128 * k + 32 * (at + j));
        sum[j] = add_byte_products(sum[j], _mm256_load_si256(at_k), x, k);
      }
    for (int j = 0; j < 2; ++j) {
      const __m256 scale = _mm256_load_ps(group.scale[h] + 8 * (at + j)), f = _mm256_cvtepi32_ps(sum[j]);
      total[at + j] = _mm256_fmadd_ps(f * scale, s, total[at + j]);
      if (!F::MINIMUM) continue;
      const __m256 minimum = _mm256_load_ps(group.minimum[h] + 8 * (at + j));
      total[at + j] = _mm256_fmadd_ps(_mm256_set1_ps(sum_of(x, h, F::HALVES)), minimum, total[at + j]);
    }
  }
}

// Groups are expanded to bytes first, for all rows.
template <class F, int LINES>
inline void multiply_stored(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char* next,
                            Sums& acc) {
  constexpr int FETCHED = F::GROUP / 128 * LINES;
  ExpandedGroup group;
  __m256 total[MAX_TILE_ROWS][4];
  for (int m = 0; m < count; ++m)
    for (auto& v : total[m]) v = _mm256_setzero_ps();
  for (int g = 0; g < width / BLOCK; ++g) {
    expand_stored<F>(block, g, &group);
    for (int i = 0; i < FETCHED; ++i) prefetch_for(count, next + (static_cast<int64_t>(g) * FETCHED + i) * 64);
    for (int m = 0; m < count; ++m)
      for (int at = 0; at < 4; at += 2) multiply_expanded_part<F>(x[m * stride + g], group, at, total[m]);
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
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
      for (int n = 0; n < AT_ONCE; ++n) a[i][n] = out[i * NE + c + n];
    for (int j = 0; j < count; ++j) {
      const P* row = v + (static_cast<int64_t>(j) * NE + c) * 16;
#pragma GCC unroll 8
      for (int n = 0; n < AT_ONCE; ++n) {
        const F32x16 value = load16(row + 16 * n);
#pragma GCC unroll 8
        for (int i = 0; i < QUERIES; ++i) a[i][n] = mul_add(broadcast_word(p + i * p_stride + j), value, a[i][n]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
      for (int n = 0; n < AT_ONCE; ++n) out[i * NE + c + n] = a[i][n];
  }
}

}  // namespace
