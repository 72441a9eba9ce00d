// AVX2 with FMA and F16C: a vector of 16 is two registers of 8. There are no bf16 products, so rows are floats rounded to
// bf16. The names are documented in simd.h; products and attention are in avx2_products.h.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace {

constexpr int TILE_ROWS = 24;
constexpr int QUANTIZED_TILE_ROWS = 24;
constexpr int ACCUMULATORS = 6;
template <class F>
constexpr bool WIDENS = false;
constexpr bool MATRIX_UNIT = false, matrix_tiles = false;
constexpr int MAX_TILE_ROWS = TILE_ROWS;

// ---- vectors -----------------------------------------------------------------------------------------------------

struct F32x16 {
  __m256 low, high;
};
struct U32x16 {
  __m256i low, high;
};
using KeyLanes = F32x16;
using Sums = F32x16[MAX_TILE_ROWS][2];

template <class P>
using Operand = std::conditional_t<std::is_same<P, bf16>::value, Rounded, P>;

inline void spin_pause() { _mm_pause(); }
inline void release_tiles() {}
inline void use_tiles(bool) {}

inline F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {a.low + b.low, a.high + b.high}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {a.low - b.low, a.high - b.high}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {a.low * b.low, a.high * b.high}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {a.low / b.low, a.high / b.high}; }
inline F32x16 mul_add(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F32x16 neg_mul_add(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

inline float reduce_max(F32x16 x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline float reduce_sum(F32x16 x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float first_lane(F32x16 x) { return _mm256_cvtss_f32(x.low); }

inline F32x16 round(F32x16 x) {
  constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, HOW), _mm256_round_ps(x.high, HOW)};
}

inline F32x16 scale_by_power(F32x16 x, F32x16 n) {
  const auto power = [](__m256 v) {
    const __m256 clamped = _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-126.0f));
    const __m256i whole = _mm256_cvtps_epi32(clamped);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
  };
  return {x.low * power(n.low), x.high * power(n.high)};
}

inline void split_exponent(F32x16 x, F32x16* mantissa, F32x16* exponent) {
  const auto part = [](__m256 v, __m256* m, __m256* e) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i fraction = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
    *m = _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3f800000)));
    *e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
  };
  part(x.low, &mantissa->low, &exponent->low);
  part(x.high, &mantissa->high, &exponent->high);
}

inline uint32_t greater(F32x16 a, F32x16 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
  return static_cast<uint32_t>(low | high << 8);
}

inline uint32_t greater_or_nan(F32x16 a, F32x16 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_NLE_UQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_NLE_UQ));
  return static_cast<uint32_t>(low | high << 8);
}

inline F32x16 select_greater(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
}

// to the nearest value of bf16
inline __m256 rounded(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// stores a[i] and b[i] side by side, rounded
inline void store_pairs(bf16* p, __m256 a, __m256 b) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(rounded(a)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(low, _mm256_castps_si256(rounded(b))));
}

inline __m256 load8(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline F32x16 load16(const bf16* p) { return {load8(p), load8(p + 8)}; }
inline F32x16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32x16 load16(const Rounded* p) { return load16(&p->value); }
inline F32x16 load16(const Half* p) {
  const auto eight = [&](int i) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))); };
  return {eight(0), eight(8)};
}
inline F32x16 load16(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

inline void store16(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline void store16(Rounded* p, F32x16 x) { store16(&p->value, F32x16{rounded(x.low), rounded(x.high)}); }
inline F32x16 store_rounded(Rounded* p, F32x16 x) {
  const F32x16 y{rounded(x.low), rounded(x.high)};
  store16(&p->value, y);
  return y;
}
inline void store16(bf16* p, F32x16 x) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(rounded(x.low)), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(rounded(x.high)), 16);
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
inline void store1(float* p, float x) { *p = x; }
inline void store1(bf16* p, float x) { *p = to_bf16(x); }

// a mask of the first ``n`` of 8 lanes
inline __m256i mask_of(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F32x16 masked_load(const float* p, int n, F32x16 others) {
  if (n >= 16) return load16(p);
  const __m256i low = mask_of(n), high = mask_of(n - 8);
  return {_mm256_blendv_ps(others.low, _mm256_maskload_ps(p, low), _mm256_castsi256_ps(low)),
          _mm256_blendv_ps(others.high, _mm256_maskload_ps(p + 8, high), _mm256_castsi256_ps(high))};
}
inline void masked_store(float* p, int n, F32x16 x) {
  if (n >= 16) return store16(p, x);
  _mm256_maskstore_ps(p, mask_of(n), x.low);
  _mm256_maskstore_ps(p + 8, mask_of(n - 8), x.high);
}
inline F32x16 keep_first(int n, F32x16 x) {
  if (n >= 16) return x;
  return {_mm256_and_ps(x.low, _mm256_castsi256_ps(mask_of(n))), _mm256_and_ps(x.high, _mm256_castsi256_ps(mask_of(n - 8)))};
}

inline U32x16 broadcast_u32(uint32_t x) {
  const __m256i eight = _mm256_set1_epi32(static_cast<int>(x));
  return {eight, eight};
}
inline U32x16 add(U32x16 a, U32x16 b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline U32x16 mul(U32x16 a, U32x16 b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline U32x16 bitwise_xor(U32x16 a, U32x16 b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int N>
inline U32x16 shift_right(U32x16 x) {
  return {_mm256_srli_epi32(x.low, N), _mm256_srli_epi32(x.high, N)};
}
inline U32x16 iota(int x) {
  return add({_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)},
              broadcast_u32(static_cast<uint32_t>(x)));
}
inline F32x16 to_float(U32x16 x) {
  // both halves of a word convert exactly to float; their sum is rounded once
  const auto part = [](__m256i v) {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(v, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
  };
  return {part(x.low), part(x.high)};
}

inline U32x16 masked_load_u32(const int64_t* p, int n) {
  int32_t each[16] = {};
  for (int i = 0; i < std::min(n, 16); ++i) each[i] = static_cast<int32_t>(p[i]);
  const auto* at = reinterpret_cast<const __m256i*>(each);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}

// ---- rows ---------------------------------------------------------------------------------------------------------

struct QuantizedGroup {
  int8_t value[BLOCK];
  float scale, sum;
  int32_t offset[2];
};

// The largest absolute value, or NaN if there is one: without signs, floats order like their bits, and NaN comes last.
inline float reduce_max_abs(F32x16 low, F32x16 high) {
  const auto bits = [](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); };
  const __m256i eight = _mm256_max_epu32(_mm256_max_epu32(bits(low.low), bits(low.high)),
                                         _mm256_max_epu32(bits(high.low), bits(high.high)));
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

inline void store32(QuantizedGroup* row, int b, F32x16 low, F32x16 high) {
  const float most = reduce_max_abs(low, high);
  if (!(most <= FLOAT_MAX)) return set_nan(row + b);
  const F32x16 inverse = broadcast(most > MIN_GROUP_MAX ? 127.0f / most : 0.0f);
  const auto whole = [](F32x16 x) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    return _mm256_permute4x64_epi64(both, 0xd8);
  };
  const __m256i l = whole(low * inverse), h = whole(high * inverse);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(l, h), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row[b].value), bytes);
  const auto sum = [](__m256i x) {
    const __m256i eight = _mm256_madd_epi16(x, _mm256_set1_epi16(1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
  };
  set_scale(row + b, most, sum(l), sum(h));
}

inline F32x16 broadcast_word(const Rounded* p) { return broadcast(p->value); }
inline F32x16 broadcast_word(const float* p) { return broadcast(*p); }
template <class T>
inline F32x16 dot_add(F32x16 acc, F32x16 a, F32x16 b) {
  return mul_add(a, b, acc);
}

}  // namespace

#include "avx2_products.h"
