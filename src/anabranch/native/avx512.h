// AVX-512. Values of bf16 are multiplied in pairs, or as floats, as recipe.py chooses: not every processor that can multiply
// pairs (AVX512_BF16) does it faster than floats. A library for pairs has AMX tiles, too, since every processor with AMX can
// multiply pairs; ``matrix_tiles`` is set where they are used. The names are documented in simd.h; products and
// attention are in avx512_products.h.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace {

constexpr int TILE_ROWS = 14;           // 28 accumulators, 2 weights and a broadcast value use 31 of 32 registers
constexpr int QUANTIZED_TILE_ROWS = 8;  // quantised rows keep two accumulators for each output
constexpr int ACCUMULATORS = 28;

// Not if values are bytes already, nor if a scale can be too large for ``scaled``.
template <class F>
constexpr bool WIDENS = F::LOW < 8 && !F::POWERS;

#ifdef ANABRANCH_PAIRS  // set by recipe.py
constexpr bool PAIRS = true;
bool matrix_tiles = false;
#else
constexpr bool PAIRS = false, matrix_tiles = false;
#endif
constexpr bool MATRIX_UNIT = PAIRS;
constexpr int MAX_TILE_ROWS = PAIRS ? 32 : TILE_ROWS;  // AMX: two tiles of 16 rows

// ---- vectors -----------------------------------------------------------------------------------------------------

using F32x16 = __m512;
using U32x16 = __m512i;
using KeyLanes = __m512i;
using Sums = F32x16[MAX_TILE_ROWS][2];

template <class P>
using Operand = std::conditional_t<!PAIRS && std::is_same<P, bf16>::value, Rounded, P>;

inline void spin_pause() { _mm_pause(); }

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

// stores a[i] and b[i] side by side, rounded
inline void store_pairs(bf16* p, F32x16 a, F32x16 b) {
#ifdef __AVX512BF16__
  alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), (__m512i)_mm512_cvtne2ps_pbh(b, a)));
#else
  const __m512i low = _mm512_cvtepu16_epi32(to_bf16(a)), high = _mm512_cvtepu16_epi32(to_bf16(b));
  _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#endif
}

inline F32x16 bf16_to_float(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline F32x16 load16(const bf16* p) { return bf16_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline F32x16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline F32x16 load16(const Rounded* p) { return load16(&p->value); }
inline F32x16 load16(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F32x16 load16(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
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

struct QuantizedGroup {
  int8_t value[BLOCK];
  float scale, sum;
  int32_t offset[2];
};

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
  set_scale(row + b, most, _mm512_reduce_add_epi32(l), _mm512_reduce_add_epi32(h));
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

}  // namespace

#include "avx512_products.h"
