// AVX-512. Values of bf16 are multiplied in pairs, in AMX tiles too, or as floats, as build.py chooses: not every processor
// that can multiply pairs (AVX512_BF16) does it faster than floats. The names are documented in simd.h.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace {

constexpr int TILE_ROWS = 14;           // 28 accumulators, 2 weights and a broadcast value use 31 of 32 registers
constexpr int QUANTIZED_TILE_ROWS = 8;  // quantised rows keep two accumulators for each output
constexpr int ACCUMULATORS = 28;

#ifdef ANABRANCH_TILES  // set by build.py
constexpr bool MATRIX_TILES = true;
#else
constexpr bool MATRIX_TILES = false;
#endif
#if defined(ANABRANCH_TILES) || defined(ANABRANCH_PAIRS)  // set by build.py
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif
constexpr const char* INSTRUCTION_SET = MATRIX_TILES ? "amx" : "avx512";
constexpr int MAX_TILE_ROWS = MATRIX_TILES ? 32 : TILE_ROWS;  // AMX: two tiles of 16 rows

// ---- vectors -----------------------------------------------------------------------------------------------------

using F32x16 = __m512;
using U32x16 = __m512i;
using KeyLanes = __m512i;
using Sums = F32x16[MAX_TILE_ROWS][2];

template <class P>
using Operand = std::conditional_t<!PAIRS && std::is_same<P, bf16>::value, Rounded, P>;

inline void spin_pause() { _mm_pause(); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline F32x16 zero() { return _mm512_setzero_ps(); }
inline F32x16 broadcast(float x) { return _mm512_set1_ps(x); }
inline F32x16 mul_add(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32x16 neg_mul_add(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fnmadd_ps(a, b, c); }
inline F32x16 max(F32x16 a, F32x16 b) { return _mm512_max_ps(a, b); }
inline F32x16 min(F32x16 a, F32x16 b) { return _mm512_min_ps(a, b); }
inline float reduce_max(F32x16 x) { return _mm512_reduce_max_ps(x); }
inline float reduce_sum(F32x16 x) { return _mm512_reduce_add_ps(x); }
inline float first_lane(F32x16 x) { return _mm512_cvtss_f32(x); }
inline F32x16 round(F32x16 x) { return _mm512_roundscale_ps(x, 0); }
inline F32x16 scale_by_power(F32x16 x, F32x16 n) { return _mm512_scalef_ps(x, n); }

inline void split_exponent(F32x16 x, F32x16* mantissa, F32x16* exponent) {
  *mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  *exponent = _mm512_getexp_ps(x);
}

inline uint32_t greater(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t greater_or_nan(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }

inline F32x16 select_greater(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), yes);
}

// two values of bf16 in each lane as floats: the first, or the second
inline __m512 first_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 second_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline __m256i to_bf16(F32x16 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}

inline F32x16 bf16_to_float(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline F32x16 load16(const bf16* p) { return bf16_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline F32x16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline F32x16 load16(const Rounded* p) { return load16(&p->value); }
inline void store16(bf16* p, F32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
inline void store16(float* p, F32x16 x) { _mm512_storeu_ps(p, x); }
inline F32x16 store_rounded(bf16* p, F32x16 x) {
  const __m256i r = to_bf16(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
  return bf16_to_float(r);
}
inline F32x16 store_rounded(Rounded* p, F32x16 x) {
  const F32x16 r = bf16_to_float(to_bf16(x));
  store16(&p->value, r);
  return r;
}
inline void store16(Rounded* p, F32x16 x) { store_rounded(p, x); }
inline void store1(bf16* p, float x) { *p = to_bf16(x); }
inline void store1(float* p, float x) { *p = x; }

inline __mmask16 mask_of(int n) { return static_cast<__mmask16>(first_lanes(n)); }
inline F32x16 masked_load(const float* p, int n, F32x16 others) { return _mm512_mask_loadu_ps(others, mask_of(n), p); }
inline void masked_store(float* p, int n, F32x16 x) { _mm512_mask_storeu_ps(p, mask_of(n), x); }
inline F32x16 keep_first(int n, F32x16 x) { return _mm512_maskz_mov_ps(mask_of(n), x); }

inline U32x16 broadcast_u32(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline U32x16 iota(int x) {
  return _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(x));
}
inline U32x16 add(U32x16 a, U32x16 b) { return _mm512_add_epi32(a, b); }
inline U32x16 mul(U32x16 a, U32x16 b) { return _mm512_mullo_epi32(a, b); }
inline U32x16 bitwise_xor(U32x16 a, U32x16 b) { return _mm512_xor_si512(a, b); }
template <int N>
inline U32x16 shift_right(U32x16 x) {
  return _mm512_srli_epi32(x, N);
}
inline F32x16 to_float(U32x16 x) { return _mm512_cvtepu32_ps(x); }

inline U32x16 masked_load_u32(const int64_t* p, int n) {
  const __m256i a = _mm512_cvtepi64_epi32(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(first_lanes(n)), p));
  const __m256i b = _mm512_cvtepi64_epi32(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(first_lanes(n) >> 8), p + 8));
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// ``sum`` is that of the values, for the minimum that int4 adds to each weight; ``offset`` is -128 sum(value), for int8
// weights, which are stored as value + 128
struct QuantizedGroup {
  int8_t value[BLOCK];
  float scale, sum;
  int32_t offset;
};

inline void set_nan(QuantizedGroup* row) {
  *row = {};
  row->scale = row->sum = std::numeric_limits<float>::quiet_NaN();
}

// The largest absolute value, or NaN if there is one: without signs, floats order like their bits, and NaN comes last.
inline float reduce_max_abs(F32x16 low, F32x16 high) {
  const __m512i each = _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(low)), _mm512_castps_si512(_mm512_abs_ps(high)));
  const __m256i eight = _mm256_max_epu32(_mm512_castsi512_si256(each), _mm512_extracti64x4_epi64(each, 1));
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

inline void store32(QuantizedGroup* row, int b, F32x16 low, F32x16 high) {
  const float most = reduce_max_abs(low, high);
  if (!(most <= FLOAT_MAX)) return set_nan(row + b);
  const F32x16 inverse = broadcast(most > MIN_GROUP_MAX ? 127.0f / most : 0.0f);
  const __m512i l = _mm512_cvtps_epi32(low * inverse), h = _mm512_cvtps_epi32(high * inverse);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row[b].value), _mm512_cvtepi32_epi8(l));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row[b].value + 16), _mm512_cvtepi32_epi8(h));
  const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(l, h));
  row[b].scale = most / 127.0f;
  row[b].sum = row[b].scale * static_cast<float>(sum);
  row[b].offset = -128 * sum;
}

template <class T>
inline __m512i broadcast_word(const T* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

template <class T>
inline F32x16 dot_add(F32x16 acc, __m512i a, __m512i b);

template <>
inline F32x16 dot_add<float>(F32x16 acc, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
}

template <>
inline F32x16 dot_add<Rounded>(F32x16 acc, __m512i a, __m512i b) {
  return dot_add<float>(acc, a, b);
}

template <>
inline F32x16 dot_add<bf16>(F32x16 acc, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  return _mm512_fmadd_ps(second_of(a), second_of(b), _mm512_fmadd_ps(first_of(a), first_of(b), acc));
#endif
}

// ---- products -----------------------------------------------------------------------------------------------------

// ``multiply_tile`` for exactly ROWS rows
template <class T, int ROWS, int LINES>
NOINLINE void multiply_tile_rows(const T* x, int64_t stride, const T* block, int width, const char* next, Sums& acc) {
  constexpr int STEP = PER_LANE<T>;
  __m512 a[ROWS][2];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) a[m][0] = acc[m][0], a[m][1] = acc[m][1];
  const int steps = width / STEP;
  for (int k = 0; k < steps; ++k) {
    const T* w = block + static_cast<int64_t>(k) * STEP * BLOCK;
    if (LINES > 0) prefetch(next + 64 * LINES * static_cast<int64_t>(k));
    if (LINES > 1) prefetch(next + 64 * LINES * static_cast<int64_t>(k) + 64);
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 16 * STEP);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const __m512i v = broadcast_word(x + m * stride + STEP * k);
      a[m][0] = dot_add<T>(a[m][0], v, w0);
      a[m][1] = dot_add<T>(a[m][1], v, w1);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) acc[m][0] = a[m][0], acc[m][1] = a[m][1];
}

// The same for values of bf16 as floats. The weights are read twice: 28 accumulators leave no registers for the second values
// of the pairs while the first ones are multiplied.
template <class W, int ROWS, int LINES>
NOINLINE void multiply_tile_rows(const Rounded* x, int64_t stride, const bf16* block, int width, const char* next, Sums& acc) {
  __m512 a[ROWS][2];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) a[m][0] = acc[m][0], a[m][1] = acc[m][1];
  const auto add = [&](const Rounded* value, __m512 w0, __m512 w1) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const __m512 v = _mm512_set1_ps(value[m * stride].value);
      a[m][0] = _mm512_fmadd_ps(v, w0, a[m][0]);
      a[m][1] = _mm512_fmadd_ps(v, w1, a[m][1]);
    }
  };
  for (int k = 0; k < width / 2; ++k) {
    const bf16* w = block + static_cast<int64_t>(k) * 2 * BLOCK;
    if (LINES > 0) prefetch(next + 64 * LINES * static_cast<int64_t>(k));
    if (LINES > 1) prefetch(next + 64 * LINES * static_cast<int64_t>(k) + 64);
    add(x + 2 * k, first_of(_mm512_loadu_si512(w)), first_of(_mm512_loadu_si512(w + BLOCK)));
    add(x + 2 * k + 1, second_of(_mm512_loadu_si512(w)), second_of(_mm512_loadu_si512(w + BLOCK)));
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) acc[m][0] = a[m][0], acc[m][1] = a[m][1];
}

// acc + the sums of 4 products each: a in unsigned bytes, b in signed ones
inline __m512i dot4_add(__m512i acc, __m512i a, __m512i b) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(acc, a, b);
#else
  const __m512i low = _mm512_set1_epi16(0xff), one = _mm512_set1_epi16(1);
  const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
  const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
  acc = _mm512_add_epi32(acc, _mm512_madd_epi16(even, one));
  return _mm512_add_epi32(acc, _mm512_madd_epi16(odd, one));
#endif
}

template <class W, int ROWS, int LINES>
NOINLINE void multiply_tile_rows(const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char* next,
                                 Sums& acc) {
  constexpr bool NARROW = std::is_same<W, Int4>::value;
  constexpr int PAIRS = GROUP_BYTES<W> / 128;
  const int groups = width / BLOCK;
  const __m512i half = _mm512_set1_epi8(15);
  __m512 total[ROWS][2];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    const uint8_t* w = block + static_cast<int64_t>(g) * GROUP_BYTES<W>;
    const QuantizedGroup* v = x + g;
    __m512i sum[ROWS][2];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
      sum[m][0] = sum[m][1] = NARROW ? _mm512_setzero_si512() : _mm512_set1_epi32(v[m * stride].offset);
    for (int k = 0; k < PAIRS; ++k) {
      const char* line = next + (static_cast<int64_t>(g) * PAIRS + k) * 64 * LINES;
      if (LINES > 0) prefetch(line);
      if (LINES > 1) prefetch(line + 64);
      if (NARROW && k == PAIRS - 1) break;
      const __m512i w0 = _mm512_loadu_si512(w + 128 * k), w1 = _mm512_loadu_si512(w + 128 * k + 64);
      if (NARROW) {
        const __m512i low0 = _mm512_and_si512(w0, half), low1 = _mm512_and_si512(w1, half);
        const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(w0, 4), half);
        const __m512i high1 = _mm512_and_si512(_mm512_srli_epi16(w1, 4), half);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          const __m512i a = broadcast_word(v[m * stride].value + 8 * k), b = broadcast_word(v[m * stride].value + 8 * k + 4);
          sum[m][0] = dot4_add(dot4_add(sum[m][0], low0, a), high0, b);
          sum[m][1] = dot4_add(dot4_add(sum[m][1], low1, a), high1, b);
        }
      } else {
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          const __m512i a = broadcast_word(v[m * stride].value + 4 * k);
          sum[m][0] = dot4_add(sum[m][0], w0, a);
          sum[m][1] = dot4_add(sum[m][1], w1, a);
        }
      }
    }
    const auto of_half = [](const uint8_t* p) {
      return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    __m512 scale[2], minimum[2];
    if (NARROW)
      for (int i = 0; i < 2; ++i) scale[i] = of_half(w + 512 + 32 * i), minimum[i] = of_half(w + 576 + 32 * i);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m512 s = _mm512_set1_ps(v[m * stride].scale);
      for (int i = 0; i < 2; ++i) {
        const __m512 f = _mm512_cvtepi32_ps(sum[m][i]);
        if (NARROW) {
          total[m][i] = _mm512_fmadd_ps(_mm512_mul_ps(f, scale[i]), s, total[m][i]);
          total[m][i] = _mm512_fmadd_ps(_mm512_set1_ps(v[m * stride].sum), minimum[i], total[m][i]);
        } else {
          total[m][i] = _mm512_fmadd_ps(f, s, total[m][i]);
        }
      }
    }
  }
  const float* scales = reinterpret_cast<const float*>(block + static_cast<int64_t>(groups) * GROUP_BYTES<W>);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
    for (int i = 0; i < 2; ++i)
      acc[m][i] = NARROW ? _mm512_add_ps(acc[m][i], total[m][i])
                         : _mm512_fmadd_ps(total[m][i], _mm512_loadu_ps(scales + 16 * i), acc[m][i]);
}

// ---- tiles --------------------------------------------------------------------------------------------------------

#ifdef ANABRANCH_TILES
// Tiles 0 to 3 accumulate 16 rows by 16 outputs each, 4 and 5 have 16 rows of 32 values, 6 and 7 the weights. This is the
// number of rows for which the calling thread's tiles are configured; 0: they are not.
thread_local int configured_rows = 0;

// Completes stores before tiles are loaded: the compiler does not know that loading them reads memory.
inline void memory_barrier(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

inline void configure_tiles(int rows) {
  if (rows == configured_rows) return;
  struct alignas(64) {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int first = std::min(rows, 16), second = rows - first;
  const int of[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(of[i]);
    config.bytes[i] = of[i] == 0 ? 0 : 64;
  }
  memory_barrier(&config);
  _tile_loadconfig(&config);
  configured_rows = rows;
}

// Waiting threads release their tiles, which the system would otherwise save at every context switch.
inline void release_tiles() {
  if (configured_rows != 0) _tile_release();
  configured_rows = 0;
}

// ``multiply_tile`` in AMX tiles, 32 values of k at a time. Packed blocks have the layout of weight tiles: a line of 128
// bytes for each pair of k, one half for each 16 outputs.
template <int LINES>
inline void multiply_amx(int count, const bf16* x, int64_t stride, const bf16* block, int width, const char* next,
                         Sums& acc) {
  constexpr int LINE = 2 * BLOCK * static_cast<int>(sizeof(bf16));
  const int64_t row = stride * static_cast<int64_t>(sizeof(bf16));
  configure_tiles(count);
  memory_barrier(acc);
  _tile_loadd(0, &acc[0][0], LINE);
  _tile_loadd(1, &acc[0][1], LINE);
  if (count > 16) {
    _tile_loadd(2, &acc[16][0], LINE);
    _tile_loadd(3, &acc[16][1], LINE);
  }
  for (int k = 0; k < width; k += BLOCK) {
    const bf16* weights = block + static_cast<int64_t>(k) * BLOCK;
    for (int i = 0; i < 16 * LINES; ++i) prefetch(next + 32 * LINES * static_cast<int64_t>(k) + 64 * i);
    _tile_loadd(4, x + k, row);
    _tile_loadd(6, weights, LINE);
    _tile_loadd(7, weights + BLOCK, LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (count > 16) {
      _tile_loadd(5, x + 16 * stride + k, row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, &acc[0][0], LINE);
  _tile_stored(1, &acc[0][1], LINE);
  if (count > 16) {
    _tile_stored(2, &acc[16][0], LINE);
    _tile_stored(3, &acc[16][1], LINE);
  }
}
#else
inline void release_tiles() {}
#endif

template <class W, int LINES, int ROWS, class T, class P>
inline void multiply_tile_of(int count, const T* x, int64_t stride, const P* block, int width, const char* next, Sums& acc) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return multiply_tile_of<W, LINES, ROWS - 1>(count, x, stride, block, width, next, acc);
  multiply_tile_rows<W, ROWS, LINES>(x, stride, block, width, next, acc);
}

template <class W, int LINES, class T, class P>
inline void multiply_tile(int count, const T* x, int64_t stride, const P* block, int width, const char* next, Sums& acc) {
#ifdef ANABRANCH_TILES
  if constexpr (std::is_same<T, bf16>::value)
    if (width % BLOCK == 0) return multiply_amx<LINES>(count, x, stride, block, width, next, acc);
#endif
  constexpr int ROWS = std::is_same<T, QuantizedGroup>::value ? QUANTIZED_TILE_ROWS : TILE_ROWS;
  multiply_tile_of<W, LINES, ROWS>(count, x, stride, block, width, next, acc);
}

// ---- attention ----------------------------------------------------------------------------------------------------

// 16 words of 32 bits of up to 16 keys: out[i] has word i of each
inline void transpose_words(const void* keys, int have, int64_t bytes, __m512i* out) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i)
    r[i] = i < have ? _mm512_loadu_si512(static_cast<const char*>(keys) + i * bytes) : _mm512_setzero_si512();
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
    out[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    out[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

template <class P>
inline void transpose_keys(const P* keys, int have, int e, KeyLanes* out) {
  const int64_t bytes = static_cast<int64_t>(e) * static_cast<int64_t>(sizeof(P));
  for (int from = 0; from < e; from += 16 * PER_LANE<P>) {
    __m512i words[16];
    transpose_words(keys + from, have, bytes, words);
    for (int i = 0; i < 16; ++i)
      if constexpr (PER_LANE<Operand<P>> == PER_LANE<P>) {
        *out++ = words[i];
      } else {
        *out++ = _mm512_castps_si512(first_of(words[i]));
        *out++ = _mm512_castps_si512(second_of(words[i]));
      }
  }
}

// Of every 32 channels, the first vector of pairs has 0-3, 8-11, 16-19, 24-27 and the second one the others.
template <int NE, class P>
inline void load_pairs(const P* one, const P* two, KeyLanes (&out)[NE]) {
  if constexpr (PER_LANE<Operand<P>> == 1) {
#pragma GCC unroll 8
    for (int c = 0; c < NE; ++c) out[c] = _mm512_castps_si512(load16(one + 16 * c));
  } else {
#pragma GCC unroll 4
    for (int c = 0; c < NE / 2; ++c) {
      const __m512i a = _mm512_loadu_si512(one + 32 * c), b = _mm512_loadu_si512(two + 32 * c);
      out[2 * c] = _mm512_unpacklo_epi16(a, b);
      out[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
    }
  }
}

template <class T>
inline void unpair_sums(F32x16* low, F32x16* high) {
  if (PER_LANE<T> == 1) return;
  const __m512 a = *low, b = *high;
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(a, b, 0xee);
  *low = _mm512_shuffle_f32x4(ab, ab, 0xd8);
  *high = _mm512_shuffle_f32x4(cd, cd, 0xd8);
}

template <int QUERIES, int NE, class T, class P>
inline void accumulate_values(const T* p, int64_t p_stride, const P* v, int count, F32x16* out) {
  constexpr int STEP = PER_LANE<T>;
  __m512 acc[QUERIES][NE];
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < NE; ++c) acc[i][c] = out[i * NE + c];
  for (int j = 0; j < count; j += STEP) {
    const P* row = v + static_cast<int64_t>(j) * NE * 16;
    __m512i value[NE];
    load_pairs<NE>(row, row + NE * 16, value);
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i) {
      const __m512i w = broadcast_word(p + i * p_stride + j);
#pragma GCC unroll 8
      for (int c = 0; c < NE; ++c) acc[i][c] = dot_add<T>(acc[i][c], w, value[c]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < NE; ++c) out[i * NE + c] = acc[i][c];
}

}  // namespace
