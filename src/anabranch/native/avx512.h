// AVX-512, with products of bf16 in pairs where the processor has them, and in AMX's tiles where it has those.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace {

constexpr int TILE = 14;           // 28 sums, 2 weights and a value fill the registers
constexpr int QUANTISED_TILE = 8;  // quantised rows keep two sums for each output
constexpr int SUMS = 28;           // sums that registers have room for beside their factors

#ifdef ANABRANCH_TILES  // see build.py for who may use them
constexpr bool TILES = true;
#else
constexpr bool TILES = false;
#endif
constexpr const char* FORM = TILES ? "amx" : "avx512";
constexpr int MOST = TILES ? 32 : TILE;  // rows that share a read; with tiles two of 16 rows

// ---- 16 numbers ---------------------------------------------------------------------------------------------------

using Floats = __m512;
using Words = __m512i;
using Turned = __m512i;
using Sums = Floats[MOST][2];  // of 32 outputs for the rows of a tile

template <class P>
using Factor = P;

inline void pause() { _mm_pause(); }
inline void ask(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats same(float x) { return _mm512_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float first(Floats x) { return _mm512_cvtss_f32(x); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 0); }
inline Floats scaled(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }  // x 2^n

// x = mantissa 2^exponent with a mantissa from 1 to 2
inline void split(Floats x, Floats* mantissa, Floats* exponent) {
  *mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  *exponent = _mm512_getexp_ps(x);
}

inline uint32_t above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// the same, and where either is NaN
inline uint32_t above_or_nan(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }

inline Floats where_above(Floats a, Floats b, Floats yes, Floats no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), yes);
}

inline __m256i to_bf16(Floats x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}

inline Floats widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Floats load16(const bf16* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline Floats load16(const float* p) { return _mm512_loadu_ps(p); }
inline void store16(bf16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
inline void store16(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats store_rounded(bf16* p, Floats x) {  // and what stands there now
  const __m256i r = to_bf16(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
  return widened(r);
}
inline void store1(bf16* p, float x) { *p = to_bf16(x); }
inline void store1(float* p, float x) { *p = x; }

// the first ``n`` of 16 alone
inline __mmask16 mask_of(int n) { return static_cast<__mmask16>(lanes(n)); }
inline Floats load_some(const float* p, int n, Floats others) { return _mm512_mask_loadu_ps(others, mask_of(n), p); }
inline void store_some(float* p, int n, Floats x) { _mm512_mask_storeu_ps(p, mask_of(n), x); }
inline Floats only(int n, Floats x) { return _mm512_maskz_mov_ps(mask_of(n), x); }

inline Words words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Words count_from(int x) {
  return _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(x));
}
inline Words plus(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words times(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words differ(Words a, Words b) { return _mm512_xor_si512(a, b); }
template <int N>
inline Words shifted(Words x) {
  return _mm512_srli_epi32(x, N);
}
inline Floats floats(Words x) { return _mm512_cvtepu32_ps(x); }

// the first ``n`` of 16 numbers
inline Words load_words(const int64_t* p, int n) {
  const __m256i a = _mm512_cvtepi64_epi32(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(lanes(n)), p));
  const __m256i b = _mm512_cvtepi64_epi32(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(lanes(n) >> 8), p + 8));
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// 32 values of a row in int8: scale * value[i]; for weights whose zero is not at 0 their sum, and -128 sum(value)
struct Group {
  int8_t value[BLOCK];
  float scale, sum;
  int32_t offset;
};

// a group that makes NaN of every product
inline void no_number(Group* row) {
  *row = {};
  row->scale = row->sum = std::numeric_limits<float>::quiet_NaN();
}

// The largest absolute value; NaN if there is one: without signs, floats are ordered as their bits are, and NaN is last.
inline float largest_size(Floats low, Floats high) {
  const __m512i each = _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(low)), _mm512_castps_si512(_mm512_abs_ps(high)));
  const __m256i eight = _mm256_max_epu32(_mm512_castsi512_si256(each), _mm512_extracti64x4_epi64(each, 1));
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

inline void store32(Group* row, int b, Floats low, Floats high) {
  const float most = largest_size(low, high);
  if (!(most <= LARGEST)) return no_number(row + b);
  const Floats inverse = same(most > SMALLEST ? 127.0f / most : 0.0f);
  const __m512i l = _mm512_cvtps_epi32(low * inverse), h = _mm512_cvtps_epi32(high * inverse);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row[b].value), _mm512_cvtepi32_epi8(l));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row[b].value + 16), _mm512_cvtepi32_epi8(h));
  const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(l, h));
  row[b].scale = most / 127.0f;
  row[b].sum = row[b].scale * static_cast<float>(sum);
  row[b].offset = -128 * sum;
}

// 32 bits at p in all lanes
template <class T>
inline __m512i spread(const T* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// acc + a b, in bf16 over pairs: acc + a.even * b.even + a.odd * b.odd
template <class T>
inline Floats dot(Floats acc, __m512i a, __m512i b);

template <>
inline Floats dot<float>(Floats acc, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
}

template <>
inline Floats dot<bf16>(Floats acc, __m512i a, __m512i b) {
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

// ---- products -----------------------------------------------------------------------------------------------------

// acc[m][32] += x[m] . block, for ROWS rows; the order of the sum is that of k, whatever ROWS is. Asks for LINES cache
// lines at ``next`` for every two lines of weights.
template <class T, int ROWS, int LINES>
OWN void rows_of_tile(const T* x, int64_t stride, const T* block, int width, const char* next, Sums& acc) {
  constexpr int STEP = PER_LANE<T>;
  __m512 a[ROWS][2];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) a[m][0] = acc[m][0], a[m][1] = acc[m][1];
  const int steps = width / STEP;
  for (int k = 0; k < steps; ++k) {
    const T* w = block + static_cast<int64_t>(k) * STEP * BLOCK;
    if (LINES > 0) ask(next + 64 * LINES * static_cast<int64_t>(k));
    if (LINES > 1) ask(next + 64 * LINES * static_cast<int64_t>(k) + 64);
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 16 * STEP);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const __m512i v = spread(x + m * stride + STEP * k);
      a[m][0] = dot<T>(a[m][0], v, w0);
      a[m][1] = dot<T>(a[m][1], v, w1);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) acc[m][0] = a[m][0], acc[m][1] = a[m][1];
}

// acc + sums of 4 products: bytes of a from 0 to 255, of b signed
inline __m512i dot4(__m512i acc, __m512i a, __m512i b) {
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
OWN void rows_of_tile(const Group* x, int64_t stride, const uint8_t* block, int width, const char* next, Sums& acc) {
  constexpr bool NARROW = std::is_same<W, Int4>::value;
  constexpr int PAIRS = GROUP_BYTES<W> / 128;
  const int groups = width / BLOCK;
  const __m512i half = _mm512_set1_epi8(15);
  __m512 total[ROWS][2];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    const uint8_t* w = block + static_cast<int64_t>(g) * GROUP_BYTES<W>;
    const Group* v = x + g;
    __m512i sum[ROWS][2];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
      sum[m][0] = sum[m][1] = NARROW ? _mm512_setzero_si512() : _mm512_set1_epi32(v[m * stride].offset);
    for (int k = 0; k < PAIRS; ++k) {
      const char* line = next + (static_cast<int64_t>(g) * PAIRS + k) * 64 * LINES;
      if (LINES > 0) ask(line);
      if (LINES > 1) ask(line + 64);
      if (NARROW && k == PAIRS - 1) break;
      const __m512i w0 = _mm512_loadu_si512(w + 128 * k), w1 = _mm512_loadu_si512(w + 128 * k + 64);
      if (NARROW) {
        const __m512i low0 = _mm512_and_si512(w0, half), low1 = _mm512_and_si512(w1, half);
        const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(w0, 4), half);
        const __m512i high1 = _mm512_and_si512(_mm512_srli_epi16(w1, 4), half);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          const __m512i a = spread(v[m * stride].value + 8 * k), b = spread(v[m * stride].value + 8 * k + 4);
          sum[m][0] = dot4(dot4(sum[m][0], low0, a), high0, b);
          sum[m][1] = dot4(dot4(sum[m][1], low1, a), high1, b);
        }
      } else {
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          const __m512i a = spread(v[m * stride].value + 4 * k);
          sum[m][0] = dot4(sum[m][0], w0, a);
          sum[m][1] = dot4(sum[m][1], w1, a);
        }
      }
    }
    const auto of_half = [](const uint8_t* p) {
      return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    __m512 scale[2], least[2];
    if (NARROW)
      for (int i = 0; i < 2; ++i) scale[i] = of_half(w + 512 + 32 * i), least[i] = of_half(w + 576 + 32 * i);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m512 s = _mm512_set1_ps(v[m * stride].scale);
      for (int i = 0; i < 2; ++i) {
        const __m512 f = _mm512_cvtepi32_ps(sum[m][i]);
        if (NARROW) {
          total[m][i] = _mm512_fmadd_ps(_mm512_mul_ps(f, scale[i]), s, total[m][i]);
          total[m][i] = _mm512_fmadd_ps(_mm512_set1_ps(v[m * stride].sum), least[i], total[m][i]);
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
// The shape of this thread's tiles: 0 to 3 take the sums of 16 rows and 16 outputs each, 4 and 5 the rows, 16 of 32 values
// each, 6 and 7 the weights. ``rows``: 0 where there is none yet.
thread_local int shaped_for = 0;

// what was written is in memory where a compiler believes that ``p`` is read: it does not know what tiles are loaded from
inline void written(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

inline void shape_tiles(int rows) {
  if (rows == shaped_for) return;
  struct alignas(64) {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  const int first = std::min(rows, 16), second = rows - first;
  const int of[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; ++i) {
    shape.rows[i] = static_cast<uint8_t>(of[i]);
    shape.bytes[i] = of[i] == 0 ? 0 : 64;
  }
  written(&shape);
  _tile_loadconfig(&shape);
  shaped_for = rows;
}

// a thread that waits keeps no tiles: whoever takes its processor would have to save them
inline void drop_tiles() {
  if (shaped_for != 0) _tile_release();
  shaped_for = 0;
}

// acc[m][32] += x[m] . block for up to 32 rows, 32 values of k at a time; see ``tile``. A packed block is what a tile of
// weights is to be: a line a pair of k, and half a line of 128 bytes for 16 outputs.
template <int LINES>
inline void tiles(int count, const bf16* x, int64_t stride, const bf16* block, int width, const char* next, Sums& acc) {
  constexpr int LINE = 2 * BLOCK * static_cast<int>(sizeof(bf16));
  const int64_t row = stride * static_cast<int64_t>(sizeof(bf16));
  shape_tiles(count);
  written(acc);
  _tile_loadd(0, &acc[0][0], LINE);
  _tile_loadd(1, &acc[0][1], LINE);
  if (count > 16) {
    _tile_loadd(2, &acc[16][0], LINE);
    _tile_loadd(3, &acc[16][1], LINE);
  }
  for (int k = 0; k < width; k += BLOCK) {
    const bf16* weights = block + static_cast<int64_t>(k) * BLOCK;
    for (int i = 0; i < 16 * LINES; ++i) ask(next + 32 * LINES * static_cast<int64_t>(k) + 64 * i);
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
inline void drop_tiles() {}
#endif

template <class W, int LINES, int ROWS, class T, class P>
inline void tile_of_rows(int count, const T* x, int64_t stride, const P* block, int width, const char* next, Sums& acc) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return tile_of_rows<W, LINES, ROWS - 1>(count, x, stride, block, width, next, acc);
  rows_of_tile<W, ROWS, LINES>(x, stride, block, width, next, acc);
}

// acc[m][32] += x[m] . block for ``count`` rows
template <class W, int LINES, class T, class P>
inline void tile(int count, const T* x, int64_t stride, const P* block, int width, const char* next, Sums& acc) {
#ifdef ANABRANCH_TILES
  if constexpr (std::is_same<T, bf16>::value)
    if (width % BLOCK == 0) return tiles<LINES>(count, x, stride, block, width, next, acc);
#endif
  constexpr int ROWS = std::is_same<T, Group>::value ? QUANTISED_TILE : TILE;
  tile_of_rows<W, LINES, ROWS>(count, x, stride, block, width, next, acc);
}

// ---- attention ----------------------------------------------------------------------------------------------------

// 16 keys of E values -> 32 bits of all keys together: out[d] holds value d (in bf16: pair d) of the 16 keys
template <class T>
inline void transpose_keys(const T* keys, int have, int e, __m512i* out) {
  for (int part = 0; part < e / PER_LANE<T>; part += 16) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i)
      r[i] = i < have ? _mm512_loadu_si512(keys + static_cast<int64_t>(i) * e + PER_LANE<T> * part) : _mm512_setzero_si512();
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

// Two rows of E values as vectors of pairs: of every 32 values the pairs 0-3, 8-11, 16-19, 24-27, then the others
template <int NE>
inline void joined(const bf16* one, const bf16* two, __m512i (&out)[NE]) {
#pragma GCC unroll 4
  for (int c = 0; c < NE / 2; ++c) {
    const __m512i a = _mm512_loadu_si512(one + 32 * c), b = _mm512_loadu_si512(two + 32 * c);
    out[2 * c] = _mm512_unpacklo_epi16(a, b);
    out[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
  }
}

// one row, where pairs are not what is multiplied
template <int NE>
inline void joined(const float* one, const float*, Turned (&out)[NE]) {
#pragma GCC unroll 8
  for (int c = 0; c < NE; ++c) out[c] = _mm512_loadu_si512(one + 16 * c);
}

// sums over pairs in the order of values again
template <class T>
inline void in_order(Floats* low, Floats* high) {
  if (PER_LANE<T> == 1) return;
  const __m512 a = *low, b = *high;
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(a, b, 0xee);
  *low = _mm512_shuffle_f32x4(ab, ab, 0xd8);
  *high = _mm512_shuffle_f32x4(cd, cd, 0xd8);
}

// out[i] += sum_j p[i][j] v[j], j in order, for QUERIES rows and NE vectors of E. bf16 is taken in pairs of j, whose sums
// stand as in ``joined``; ``count`` is even then.
template <int QUERIES, int NE, class T>
inline void gather_values(const T* p, int64_t p_stride, const T* v, int count, Floats* out) {
  constexpr int STEP = PER_LANE<T>;
  __m512 acc[QUERIES][NE];
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < NE; ++c) acc[i][c] = out[i * NE + c];
  for (int j = 0; j < count; j += STEP) {
    const T* row = v + static_cast<int64_t>(j) * NE * 16;
    __m512i value[NE];
    joined<NE>(row, row + NE * 16, value);
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i) {
      const __m512i w = spread(p + i * p_stride + j);
#pragma GCC unroll 8
      for (int c = 0; c < NE; ++c) acc[i][c] = dot<T>(acc[i][c], w, value[c]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < NE; ++c) out[i * NE + c] = acc[i][c];
}

}  // namespace
