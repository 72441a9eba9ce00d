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
#else
constexpr int ROWS_AT_ONCE = 3, UNROLLED = 1;
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

inline __m256 float_of_half(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// total[m] += the products of one group, for the 16 outputs of vectors ``at`` and ``at`` + 1
template <class W, int ROWS>
NOINLINE void multiply_group_part(const QuantizedGroup* x, int64_t stride, const uint8_t* w, int at, __m256 (*total)[4]) {
  __m256i sum[ROWS][2];
  multiply_group<ROWS, 2>(W{}, x, stride, w + 32 * at, sum);
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
        for (int at = 0; at < 4; at += 2) multiply_group_part<W, n>(x + g + m * stride, stride, w, at, total + m);
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
    const __m256i bits = line(F::LOW + q / HIGH_EACH);
    const int up = F::LOW - F::HIGH * (q % HIGH_EACH);
    const __m256i moved = up >= 0 ? _mm256_slli_epi16(bits, up) : _mm256_srli_epi16(bits, -up);
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

// sum + the products of values 4 q to 4 q + 3 of a row and of 8 outputs' weights
template <class F>
inline __m256i add_stored_products(__m256i sum, __m256i weights, const QuantizedGroup& x, int q) {
#ifndef __AVXVNNI__
  if (F::LOW + F::HIGH <= 6 && !F::CODES) {  // two products fit 16 bits
    const __m256i pairs = _mm256_maddubs_epi16(weights, broadcast8(x.value + 4 * q));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#endif
  return add_byte_products(sum, weights, x, q);
}

// Scales and minima of 8 outputs, vector ``at``, for the values of half ``h`` of a group.
template <class F>
struct StoredScales {
  StoredScales(const uint8_t* head, const uint8_t* group, int h, int at) {
    const uint8_t* halves = (F::SUB ? head : group + F::VALUE_BYTES) + 16 * at;
    if constexpr (F::POWERS) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
      scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    } else {
      scale = float_of_half(halves);
    }
    minimum = F::MINIMUM ? float_of_half(halves + 2 * BLOCK) : _mm256_setzero_ps();
    if constexpr (F::SUB) {
      const uint8_t* sub = group + F::VALUE_BYTES + BLOCK * h + 8 * at;
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(sub));
      scale = scale * _mm256_cvtepi32_ps(F::SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
      if constexpr (F::MINIMUM) {
        const __m128i less = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(sub + F::SCALE_BYTES));
        minimum = minimum * _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(less));
      }
    }
  }
  __m256 scale, minimum;
};

// total[m] += the products of group ``w``, for the 16 outputs of vectors ``at`` and ``at`` + 1
template <class F, int ROWS>
NOINLINE void multiply_stored_part(const QuantizedGroup* x, int64_t stride, const uint8_t* head, const uint8_t* w, int at,
                                   __m256 (*total)[4]) {
  constexpr int QUADS = BLOCK / 4 / F::HALVES;
#pragma GCC unroll 2
  for (int h = 0; h < F::HALVES; ++h) {
    __m256i sum[ROWS][2];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
      sum[m][0] = sum[m][1] = _mm256_set1_epi32(offset_of<byte_offset<F>()>(x[m * stride], h, F::HALVES));
#pragma GCC unroll 8
    for (int i = 0; i < QUADS; ++i) {
      const int q = QUADS * h + i;
      const __m256i w0 = stored_quad<F>(w, q, at), w1 = stored_quad<F>(w, q, at + 1);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        sum[m][0] = add_stored_products<F>(sum[m][0], w0, x[m * stride], q);
        sum[m][1] = add_stored_products<F>(sum[m][1], w1, x[m * stride], q);
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const StoredScales<F> of(head, w, h, at + j);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        __m256& to = total[m][at + j];
        to = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m][j]) * of.scale, _mm256_set1_ps(x[m * stride].scale), to);
        if constexpr (F::MINIMUM) {
          const __m256 values = _mm256_set1_ps(sum_of(x[m * stride], h, F::HALVES));
          to = F::SUB ? _mm256_fnmadd_ps(values, of.minimum, to) : _mm256_fmadd_ps(values, of.minimum, to);
        }
      }
    }
  }
}

template <class F>
inline void multiply_stored(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char* next,
                            int lines, Sums& acc) {
  const int fetched = (F::CACHE_LINES * lines + 1) / 2;
  const int parts = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, size = (count + parts - 1) / parts;
  __m256 total[MAX_TILE_ROWS][4];
  for (int m = 0; m < count; ++m)
    for (auto& v : total[m]) v = _mm256_setzero_ps();
  for (int g = 0; g < width / BLOCK; ++g) {
    const uint8_t *head = block + F::head_at(g), *w = block + F::group_at(g);
    const char* ahead = next + F::group_at(g) * lines / 2;
    for (int i = 0; i < fetched; ++i) prefetch_for(count, ahead + 64 * i);
    for (int m = 0; m < count; m += size)
      with_constant<ROWS_AT_ONCE>(std::min(size, count - m), [&](auto n) {
        for (int at = 0; at < 4; at += 2) multiply_stored_part<F, n>(x + g + m * stride, stride, head, w, at, total + m);
      });
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
