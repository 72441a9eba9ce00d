// AVX2 with FMA and F16C: 16 numbers are two vectors of 8. There are 16 registers, so that three rows of a block of 32
// outputs share a read of its weights, or six rows of half of it; and no products of bf16, so that rows are kept as floats
// that bf16 could hold.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace {

constexpr const char* FORM = "avx2";
constexpr int TILE = 24;
constexpr int QUANTISED_TILE = 24;
constexpr int SUMS = 6;  // sums that registers have room for beside their factors
constexpr bool TILES = false;
constexpr int MOST = TILE;

// ---- 16 numbers ---------------------------------------------------------------------------------------------------

struct Floats {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};
using Turned = Floats;
using Sums = Floats[MOST][2];  // of 32 outputs for the rows of a tile

// a float that bf16 could hold
struct Rounded {
  float value;
};

template <class P>
using Factor = std::conditional_t<std::is_same<P, bf16>::value, Rounded, P>;

inline void pause() { _mm_pause(); }
inline void ask(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void drop_tiles() {}

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {  // c - a b
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

inline float largest(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline float sum(Floats x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float first(Floats x) { return _mm256_cvtss_f32(x.low); }

inline Floats nearest(Floats x) {
  constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, HOW), _mm256_round_ps(x.high, HOW)};
}

// x 2^n, n taken to be from -126 to 127 if it is not
inline Floats scaled(Floats x, Floats n) {
  const auto power = [](__m256 v) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-126.0f)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
  };
  return {x.low * power(n.low), x.high * power(n.high)};
}

// x = mantissa 2^exponent with a mantissa from 1 to 2, for numbers above 0 that are not tiny
inline void split(Floats x, Floats* mantissa, Floats* exponent) {
  const auto part = [](__m256 v, __m256* m, __m256* e) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i fraction = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
    *m = _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3f800000)));
    *e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
  };
  part(x.low, &mantissa->low, &exponent->low);
  part(x.high, &mantissa->high, &exponent->high);
}

inline uint32_t above(Floats a, Floats b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
  return static_cast<uint32_t>(low | high << 8);
}

// the same, and where either is NaN
inline uint32_t above_or_nan(Floats a, Floats b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_NLE_UQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_NLE_UQ));
  return static_cast<uint32_t>(low | high << 8);
}

inline Floats where_above(Floats a, Floats b, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
}

// to the nearest that bf16 could hold
inline __m256 rounded(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline __m256 load8(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline Floats load16(const bf16* p) { return {load8(p), load8(p + 8)}; }
inline Floats load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load16(const Rounded* p) { return load16(&p->value); }

inline void store16(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline void store16(Rounded* p, Floats x) { store16(&p->value, Floats{rounded(x.low), rounded(x.high)}); }
inline Floats store_rounded(Rounded* p, Floats x) {  // and what stands there now
  const Floats y{rounded(x.low), rounded(x.high)};
  store16(&p->value, y);
  return y;
}
inline void store16(bf16* p, Floats x) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(rounded(x.low)), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(rounded(x.high)), 16);
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
inline void store1(float* p, float x) { *p = x; }
inline void store1(bf16* p, float x) { *p = to_bf16(x); }
inline void store1(Rounded* p, float x) {
  const uint32_t bits = static_cast<uint32_t>(to_bf16(x)) << 16;
  std::memcpy(p, &bits, 4);
}

// the first ``n`` of 8 alone
inline __m256i mask_of(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats load_some(const float* p, int n, Floats others) {
  if (n >= 16) return load16(p);
  const __m256i low = mask_of(n), high = mask_of(n - 8);
  return {_mm256_blendv_ps(others.low, _mm256_maskload_ps(p, low), _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(others.high, _mm256_maskload_ps(p + 8, high), _mm256_castsi256_ps(high))};
}
inline void store_some(float* p, int n, Floats x) {
  if (n >= 16) return store16(p, x);
  _mm256_maskstore_ps(p, mask_of(n), x.low);
  _mm256_maskstore_ps(p + 8, mask_of(n - 8), x.high);
}
inline Floats only(int n, Floats x) {
  if (n >= 16) return x;
  return {_mm256_and_ps(x.low, _mm256_castsi256_ps(mask_of(n))), _mm256_and_ps(x.high, _mm256_castsi256_ps(mask_of(n - 8)))};
}

inline Words words(uint32_t x) {
  const __m256i eight = _mm256_set1_epi32(static_cast<int>(x));
  return {eight, eight};
}
inline Words plus(Words a, Words b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Words times(Words a, Words b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline Words differ(Words a, Words b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int N>
inline Words shifted(Words x) {
  return {_mm256_srli_epi32(x.low, N), _mm256_srli_epi32(x.high, N)};
}
inline Words count_from(int x) {
  return plus({_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)},
              words(static_cast<uint32_t>(x)));
}
inline Floats floats(Words x) {
  // both halves of a word are exact; their sum is rounded once
  const auto part = [](__m256i v) {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(v, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
  };
  return {part(x.low), part(x.high)};
}

// the first ``n`` of 16 numbers
inline Words load_words(const int64_t* p, int n) {
  int32_t each[16] = {};
  for (int i = 0; i < std::min(n, 16); ++i) each[i] = static_cast<int32_t>(p[i]);
  const auto* at = reinterpret_cast<const __m256i*>(each);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// 32 values of a row in int8: scale * value[i]; for weights whose zero is not at 0 their sum, and -128 sum(value)
struct Group {
  int8_t value[BLOCK];
  int16_t wide[BLOCK];  // the same, of every 4 the first and third, then the others
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
  const auto bits = [](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); };
  const __m256i eight = _mm256_max_epu32(_mm256_max_epu32(bits(low.low), bits(low.high)),
                                         _mm256_max_epu32(bits(high.low), bits(high.high)));
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

inline void store32(Group* row, int b, Floats low, Floats high) {
  const float most = largest_size(low, high);
  if (!(most <= LARGEST)) return no_number(row + b);
  const Floats inverse = same(most > SMALLEST ? 127.0f / most : 0.0f);
  const auto whole = [](Floats x) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    return _mm256_permute4x64_epi64(both, 0xd8);
  };
  const __m256i l = whole(low * inverse), h = whole(high * inverse);
  const auto apart = [](__m256i x) { return _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(x, 0xd8), 0xd8); };
  auto* wide = reinterpret_cast<__m256i*>(row[b].wide);
  _mm256_storeu_si256(wide, apart(l));
  _mm256_storeu_si256(wide + 1, apart(h));
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(l, h), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row[b].value), bytes);
  const __m256i eight = _mm256_madd_epi16(_mm256_add_epi16(l, h), _mm256_set1_epi16(1));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  const int32_t sum = _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
  row[b].scale = most / 127.0f;
  row[b].sum = row[b].scale * static_cast<float>(sum);
  row[b].offset = -128 * sum;
}

inline Floats spread(const Rounded* p) { return same(p->value); }
inline Floats spread(const float* p) { return same(*p); }
template <class T>
inline Floats dot(Floats acc, Floats a, Floats b) {
  return fma(a, b, acc);
}

// ---- products -----------------------------------------------------------------------------------------------------

// 8 weights of a line: in bf16 those of the pairs' first (PART 0) or second k
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

// calls f with ``count``, which is from 1 to MOST_OF, as a constant
template <int MOST_OF, class F>
inline void with_constant(int count, F&& f) {
  if constexpr (MOST_OF > 1)
    if (count < MOST_OF) return with_constant<MOST_OF - 1>(count, f);
  f(std::integral_constant<int, MOST_OF>{});
}

// sums[m] += x[m] . block over ``steps`` lines, for ROWS rows and VECTORS vectors of 8 outputs; asks for ``bytes``
// at ``next`` a step
template <int ROWS, int VECTORS, class P>
OWN void some_of_tile(const float* x, int64_t stride, const P* block, int steps, const char* next, int bytes, __m256* sums) {
  constexpr int STEP = PER_LANE<P>;
  __m256 a[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) a[m][j] = sums[4 * m + j];
  for (int k = 0; k < steps; ++k) {
    const P* w = block + static_cast<int64_t>(k) * STEP * BLOCK;
    ask(next + static_cast<int64_t>(k) * bytes);
    if (bytes > 64) ask(next + static_cast<int64_t>(k) * bytes + 64);
    add_product<0, ROWS, VECTORS>(x + STEP * k, stride, w, a);
    if constexpr (STEP == 2) add_product<1, ROWS, VECTORS>(x + STEP * k, stride, w, a);
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sums[4 * m + j] = a[m][j];
}

// acc[m][32] += x[m] . block for ``count`` rows; the order of the sum is that of k, whatever their count is. Asks for
// LINES cache lines at ``next`` for every two lines of weights. A stretch of weights stays in the first-level cache while
// six rows after the other are multiplied with it, one half of the outputs and then the other; registers have room for
// all outputs' sums of two rows.
template <class W, int LINES, class P>
inline void tile(int count, const Factor<P>* rows, int64_t stride, const P* block, int width, const char* next, Sums& acc) {
  constexpr int STEP = PER_LANE<P>, AT_ONCE = 6, STRETCH = 64;
  const float* x = reinterpret_cast<const float*>(rows);
  const int all = width / STEP, left = count % AT_ONCE;
  const int passes = count / AT_ONCE * 2 + (left == 0 ? 0 : left <= 2 ? 1 : 2), bytes = 64 * LINES / passes;
  for (int from = 0; from < all; from += STRETCH) {
    const int steps = std::min(STRETCH, all - from);
    const P* w = block + static_cast<int64_t>(from) * STEP * BLOCK;
    const char* asked = next + static_cast<int64_t>(from) * 64 * LINES;
    for (int m = 0; m < count; m += AT_ONCE) {
      const float* values = x + m * stride + STEP * from;
      __m256* sums = &acc[m][0].low;
      const auto some = [&](auto n, auto vectors) {
        for (int at = 0; at < 4; at += vectors, asked += steps * bytes)
          some_of_tile<n, vectors>(values, stride, w + 8 * STEP * at, steps, asked, bytes, sums + at);
      };
      const int n = std::min(AT_ONCE, count - m);
      if (n <= 2)
        with_constant<2>(n, [&](auto constant) { some(constant, std::integral_constant<int, 4>{}); });
      else
        with_constant<AT_ONCE>(n, [&](auto constant) { some(constant, std::integral_constant<int, 2>{}); });
    }
  }
}

// 32 bits at p in all lanes
inline __m256i spread8(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// sum[m] = the products of one group, whole numbers, for VECTORS vectors of 8 outputs
template <int ROWS, int VECTORS>
inline void multiply_group(Int8, const Group* x, int64_t stride, const uint8_t* w, __m256i (&sum)[ROWS][VECTORS]) {
  const __m256i low = _mm256_set1_epi16(0xff);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[m][j] = _mm256_set1_epi32(x[m * stride].offset);
#pragma GCC unroll 1
  for (int k = 0; k < BLOCK / 4; ++k) {
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
      const __m256i first = spread8(value), second = spread8(value + 2);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) {
        sum[m][j] = _mm256_add_epi32(sum[m][j], _mm256_madd_epi16(even[j], first));
        sum[m][j] = _mm256_add_epi32(sum[m][j], _mm256_madd_epi16(odd[j], second));
      }
    }
  }
}

// 16 products of two numbers, below 16 and of at most 127, fit into 16 bits
template <int ROWS, int VECTORS>
inline void multiply_group(Int4, const Group* x, int64_t stride, const uint8_t* w, __m256i (&sum)[ROWS][VECTORS]) {
  const __m256i half = _mm256_set1_epi8(15);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[m][j] = _mm256_setzero_si256();
#pragma GCC unroll 1
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
      const __m256i first = spread8(value), second = spread8(value + 4);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) {
        sum[m][j] = _mm256_add_epi16(sum[m][j], _mm256_maddubs_epi16(low[j], first));
        sum[m][j] = _mm256_add_epi16(sum[m][j], _mm256_maddubs_epi16(high[j], second));
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[m][j] = _mm256_madd_epi16(sum[m][j], _mm256_set1_epi16(1));
}

// total[m] += the products of one group, for the 16 outputs of vectors ``at`` and the next
template <class W, int ROWS>
OWN void some_of_group(const Group* x, int64_t stride, const uint8_t* w, int at, __m256 (*total)[4]) {
  constexpr bool NARROW = std::is_same<W, Int4>::value;
  __m256i sum[ROWS][2];
  multiply_group<ROWS, 2>(W{}, x, stride, w + 32 * at, sum);
#pragma GCC unroll 8
  for (int j = 0; j < 2; ++j) {
    const auto of_half = [&](int from) {
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + from + 16 * (at + j))));
    };
    __m256 scale, least;
    if (NARROW) scale = of_half(512), least = of_half(576);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m256 s = _mm256_set1_ps(x[m * stride].scale), f = _mm256_cvtepi32_ps(sum[m][j]);
      __m256& to = total[m][at + j];
      if (NARROW) {
        to = _mm256_fmadd_ps(f * scale, s, to);
        to = _mm256_fmadd_ps(_mm256_set1_ps(x[m * stride].sum), least, to);
      } else {
        to = _mm256_fmadd_ps(f, s, to);
      }
    }
  }
}

template <class W, int LINES>
inline void tile(int count, const Group* x, int64_t stride, const uint8_t* block, int width, const char* next, Sums& acc) {
  constexpr bool NARROW = std::is_same<W, Int4>::value;
  constexpr int AT_ONCE = 3, ASKED = GROUP_BYTES<W> / 128 * LINES;
  const int groups = width / BLOCK, parts = (count + AT_ONCE - 1) / AT_ONCE, size = (count + parts - 1) / parts;
  __m256 total[MOST][4];
  for (int m = 0; m < count; ++m)
    for (auto& v : total[m]) v = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    const uint8_t* w = block + static_cast<int64_t>(g) * GROUP_BYTES<W>;
    for (int i = 0; i < ASKED; ++i) ask(next + (static_cast<int64_t>(g) * ASKED + i) * 64);
    for (int m = 0; m < count; m += size)
      with_constant<AT_ONCE>(std::min(size, count - m), [&](auto n) {
        for (int at = 0; at < 4; at += 2) some_of_group<W, n>(x + g + m * stride, stride, w, at, total + m);
      });
  }
  const float* scales = reinterpret_cast<const float*>(block + static_cast<int64_t>(groups) * GROUP_BYTES<W>);
  auto* sums = &acc[0][0].low;
  for (int m = 0; m < count; ++m)
    for (int j = 0; j < 4; ++j)
      sums[4 * m + j] = NARROW ? sums[4 * m + j] + total[m][j]
                               : _mm256_fmadd_ps(total[m][j], _mm256_loadu_ps(scales + 8 * j), sums[4 * m + j]);
}

// ---- attention ----------------------------------------------------------------------------------------------------

// 16 keys of E values -> out[d] holds value d of the 16 keys
template <class P>
inline void transpose_keys(const P* keys, int have, int e, Turned* out) {
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
        Turned *first = out + part + i, *second = out + part + 4 + i;
        (side == 0 ? first->low : first->high) = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
        (side == 0 ? second->low : second->high) = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
      }
    }
}

// a row of E values; pairs are not what is multiplied here
template <int NE, class P>
inline void joined(const P* one, const P*, Turned (&out)[NE]) {
  for (int c = 0; c < NE; ++c) out[c] = load16(one + 16 * c);
}
template <class T>
inline void in_order(Floats*, Floats*) {}

// out[i] += sum_j p[i][j] v[j], j in order, for QUERIES rows and NE sums of E, as many at a time as registers hold
template <int QUERIES, int NE, class T, class P>
inline void gather_values(const T* p, int64_t p_stride, const P* v, int count, Floats* out) {
  constexpr int AT_ONCE = QUERIES == 1 && NE % 4 == 0 ? 4 : QUERIES <= 3 ? 2 : 1;
  for (int c = 0; c < NE; c += AT_ONCE) {
    Floats a[QUERIES][AT_ONCE];
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
      for (int n = 0; n < AT_ONCE; ++n) a[i][n] = out[i * NE + c + n];
    for (int j = 0; j < count; ++j) {
      const P* row = v + (static_cast<int64_t>(j) * NE + c) * 16;
#pragma GCC unroll 8
      for (int n = 0; n < AT_ONCE; ++n) {
        const Floats value = load16(row + 16 * n);
#pragma GCC unroll 8
        for (int i = 0; i < QUERIES; ++i) a[i][n] = fma(spread(p + i * p_stride + j), value, a[i][n]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
      for (int n = 0; n < AT_ONCE; ++n) out[i * NE + c + n] = a[i][n];
  }
}

}  // namespace
