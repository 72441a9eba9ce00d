// An instruction set in plain C++, written from the list in simd.h alone: it shows that the list is complete, and stands in
// for instruction sets that this machine does not have. Operand<bf16> is bf16, taken in pairs.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

constexpr int TILE_ROWS = 5, QUANTIZED_TILE_ROWS = 3, MAX_TILE_ROWS = 5, ACCUMULATORS = 7;
template <class F>
constexpr bool WIDENS = false;
constexpr bool MATRIX_UNIT = false, matrix_tiles = false;

// ---- types --------------------------------------------------------------------------------------------------------

struct F32x16 {
  float lane[16];
};
struct U32x16 {
  uint32_t lane[16];
};
using KeyLanes = U32x16;
using Sums = F32x16[MAX_TILE_ROWS][2];

template <class P>
using Operand = P;

struct QuantizedGroup {
  int8_t value[BLOCK];
  float scale;
};

template <class F>
inline F32x16 each(F&& f) {
  F32x16 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = f(i);
  return y;
}

template <class F>
inline U32x16 each_u32(F&& f) {
  U32x16 y;
  for (int i = 0; i < 16; ++i) y.lane[i] = f(i);
  return y;
}

template <class F>
inline uint32_t mask(F&& f) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(f(i) ? 1 : 0) << i;
  return bits;
}

inline F32x16 operator+(F32x16 a, F32x16 b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
inline F32x16 operator-(F32x16 a, F32x16 b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
inline F32x16 operator*(F32x16 a, F32x16 b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
inline F32x16 operator/(F32x16 a, F32x16 b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }

// ---- the processor ------------------------------------------------------------------------------------------------

inline void spin_pause() {}
inline void release_tiles() {}
inline void use_tiles(bool) {}

// ---- floats -------------------------------------------------------------------------------------------------------

inline F32x16 broadcast(float x) { return each([&](int) { return x; }); }
inline F32x16 zero() { return broadcast(0.0f); }
inline F32x16 mul_add(F32x16 a, F32x16 b, F32x16 c) {
  return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline F32x16 neg_mul_add(F32x16 a, F32x16 b, F32x16 c) {
  return each([&](int i) { return std::fma(-a.lane[i], b.lane[i], c.lane[i]); });
}
inline F32x16 max(F32x16 a, F32x16 b) { return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline F32x16 min(F32x16 a, F32x16 b) { return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline F32x16 round(F32x16 x) { return each([&](int i) { return std::nearbyint(x.lane[i]); }); }
inline F32x16 scale_by_power(F32x16 x, F32x16 n) {
  return each([&](int i) {
    const float power = n.lane[i] > -126.0f ? std::min(n.lane[i], 127.0f) : -126.0f;
    return std::ldexp(x.lane[i], static_cast<int>(power));
  });
}
inline void split_exponent(F32x16 x, F32x16* mantissa, F32x16* exponent) {
  for (int i = 0; i < 16; ++i) {
    int power;
    mantissa->lane[i] = 2.0f * std::frexp(x.lane[i], &power);
    exponent->lane[i] = static_cast<float>(power - 1);
  }
}
inline float reduce_max(F32x16 x) {
  float y = x.lane[0];
  for (const float v : x.lane) y = v > y ? v : y;
  return y;
}
inline float reduce_sum(F32x16 x) {
  float y = 0.0f;
  for (const float v : x.lane) y += v;
  return y;
}
inline float first_lane(F32x16 x) { return x.lane[0]; }
inline uint32_t greater(F32x16 a, F32x16 b) {
  return mask([&](int i) { return a.lane[i] > b.lane[i]; });
}
inline uint32_t greater_or_nan(F32x16 a, F32x16 b) {
  return mask([&](int i) { return !(a.lane[i] <= b.lane[i]); });
}
inline F32x16 select_greater(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
  return each([&](int i) { return a.lane[i] > b.lane[i] ? x.lane[i] : y.lane[i]; });
}
inline F32x16 keep_first(int n, F32x16 x) { return each([&](int i) { return i < n ? x.lane[i] : 0.0f; }); }

// ---- integers -----------------------------------------------------------------------------------------------------

inline U32x16 broadcast_u32(uint32_t x) { return each_u32([&](int) { return x; }); }
inline U32x16 iota(int x) { return each_u32([&](int i) { return static_cast<uint32_t>(x + i); }); }
inline U32x16 add(U32x16 a, U32x16 b) { return each_u32([&](int i) { return a.lane[i] + b.lane[i]; }); }
inline U32x16 mul(U32x16 a, U32x16 b) { return each_u32([&](int i) { return a.lane[i] * b.lane[i]; }); }
inline U32x16 bitwise_xor(U32x16 a, U32x16 b) { return each_u32([&](int i) { return a.lane[i] ^ b.lane[i]; }); }
template <int N>
inline U32x16 shift_right(U32x16 x) {
  return each_u32([&](int i) { return x.lane[i] >> N; });
}
inline F32x16 to_float(U32x16 x) { return each([&](int i) { return static_cast<float>(x.lane[i]); }); }
inline U32x16 masked_load_u32(const int64_t* p, int n) {
  return each_u32([&](int i) { return i < n ? static_cast<uint32_t>(p[i]) : 0u; });
}

// ---- memory -------------------------------------------------------------------------------------------------------

inline float widened(float x) { return x; }
inline float widened(int8_t x) { return static_cast<float>(x); }
inline float widened(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float widened(Half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const int whole = exponent == 0 ? fraction : fraction + 1024, power = std::max(exponent, 1) - 25;
  return std::ldexp(static_cast<float>(x.bits & 0x8000 ? -whole : whole), power);
}
inline void store1(float* p, float x) { *p = x; }
inline void store1(bf16* p, float x) { *p = to_bf16(x); }
template <class P>
inline F32x16 load16(const P* p) {
  return each([&](int i) { return widened(p[i]); });
}
template <class P>
inline void store16(P* p, F32x16 x) {
  for (int i = 0; i < 16; ++i) store1(p + i, x.lane[i]);
}
inline F32x16 store_rounded(bf16* p, F32x16 x) {
  store16(p, x);
  return load16(p);
}
inline F32x16 masked_load(const float* p, int n, F32x16 other) {
  return each([&](int i) { return i < n ? p[i] : other.lane[i]; });
}
inline void masked_store(float* p, int n, F32x16 x) {
  for (int i = 0; i < std::min(n, 16); ++i) p[i] = x.lane[i];
}
inline void store32(QuantizedGroup* row, int g, F32x16 low, F32x16 high) {
  float largest = 0.0f;
  for (const F32x16& half : {low, high})
    for (const float v : half.lane) largest = std::fabs(v) <= largest ? largest : std::fabs(v);
  for (const F32x16& half : {low, high})
    for (const float v : half.lane)
      if (std::isnan(v)) largest = v;
  QuantizedGroup& group = row[g] = {};
  group.scale = largest <= FLOAT_MAX ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
  if (!(largest <= FLOAT_MAX)) return;
  const float inverse = largest > MIN_GROUP_MAX ? 127.0f / largest : 0.0f;
  for (int i = 0; i < BLOCK; ++i) {
    const float v = i < 16 ? low.lane[i] : high.lane[i - 16];
    group.value[i] = static_cast<int8_t>(std::nearbyint(v * inverse));
  }
}

// ---- products -----------------------------------------------------------------------------------------------------

template <class W, int LINES, class P>
inline void multiply_tile(int count, const P* x, int64_t stride, const P* block, int width, const char*, Sums& acc) {
  constexpr int PAIR = PER_LANE<P>;
  for (int m = 0; m < count; ++m)
    for (int j = 0; j < BLOCK; ++j)
      for (int k = 0; k < width; ++k) {
        const float w = widened(block[(static_cast<int64_t>(k / PAIR) * BLOCK + j) * PAIR + k % PAIR]);
        float& sum = acc[m][j / 16].lane[j % 16];
        sum = std::fma(widened(x[m * stride + k]), w, sum);
      }
}

template <class W, int LINES>
inline void multiply_tile(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char*,
                          Sums& acc) {
  const int groups = width / BLOCK;
  for (int m = 0; m < count; ++m)
    for (int j = 0; j < BLOCK; ++j) {
      float total = 0.0f, scale;
      for (int g = 0; g < groups; ++g) {
        const QuantizedGroup& row = x[m * stride + g];
        const uint8_t* group = block + static_cast<int64_t>(g) * W::GROUP;
        int products = 0;
        for (int k = 0; k < BLOCK; ++k) products += row.value[k] * (group[k / 4 * 128 + 4 * j + k % 4] - 128);
        total += row.scale * static_cast<float>(products);
      }
      std::memcpy(&scale, block + static_cast<int64_t>(groups) * W::GROUP + 4 * j, 4);
      acc[m][j / 16].lane[j % 16] += scale * total;
    }
}

// scale times (value - offset), and the minimum, of each weight
template <class F>
inline void multiply_stored(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char*, int,
                            Sums& acc) {
  for (int m = 0; m < count; ++m)
    for (int j = 0; j < BLOCK; ++j)
      for (int g = 0; g < width / BLOCK; ++g) {
        float weights[BLOCK];
        to_floats<F>(get_group<F>(block, g, j), weights);
        float& sum = acc[m][j / 16].lane[j % 16];
        const QuantizedGroup& row = x[m * stride + g];
        for (int k = 0; k < BLOCK; ++k) sum += row.scale * static_cast<float>(row.value[k]) * weights[k];
      }
}

inline void expand_group(const uint8_t* group, bf16* to) {
  for (int j = 0; j < BLOCK; ++j) {
    float weights[BLOCK];
    to_floats<Int4>(get_group<Int4>(group, 0, j), weights);
    for (int k = 0; k < BLOCK; ++k) to[(k / 2 * BLOCK + j) * 2 + k % 2] = to_bf16(weights[k]);
  }
}

// ---- attention ----------------------------------------------------------------------------------------------------

template <class T>
inline U32x16 broadcast_word(const T* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return broadcast_u32(word);
}

template <class T>
inline F32x16 dot_add(F32x16 acc, U32x16 a, KeyLanes b) {
  for (int i = 0; i < 16; ++i) {
    T x[PER_LANE<T>], y[PER_LANE<T>];
    std::memcpy(x, &a.lane[i], 4);
    std::memcpy(y, &b.lane[i], 4);
    for (int c = 0; c < PER_LANE<T>; ++c) acc.lane[i] = std::fma(widened(x[c]), widened(y[c]), acc.lane[i]);
  }
  return acc;
}

template <class P>
inline void transpose_keys(const P* keys, int have, int e, KeyLanes* out) {
  for (int d = 0; d < e / PER_LANE<P>; ++d)
    for (int i = 0; i < 16; ++i) {
      out[d].lane[i] = 0;
      if (i < have) std::memcpy(&out[d].lane[i], keys + static_cast<int64_t>(i) * e + PER_LANE<P> * d, 4);
    }
}

template <int NE, class P>
inline void load_pairs(const P* a, const P* b, KeyLanes (&out)[NE]) {
  for (int c = 0; c < 16 * NE; ++c) {
    const P pair[2] = {a[c], b[c]};
    std::memcpy(&out[c / 16].lane[c % 16], pair, 4);
  }
}

template <class T>
inline void unpair_sums(F32x16*, F32x16*) {}

template <int QUERIES, int NE, class T>
inline void accumulate_values(const T* p, int64_t p_stride, const T* v, int count, F32x16* out) {
  for (int j = 0; j < count; j += PER_LANE<T>) {
    const T* row = v + static_cast<int64_t>(j) * NE * 16;
    KeyLanes pair[NE];
    load_pairs<NE>(row, row + (PER_LANE<T> - 1) * NE * 16, pair);
    for (int i = 0; i < QUERIES; ++i)
      for (int c = 0; c < NE; ++c)
        out[i * NE + c] = dot_add<T>(out[i * NE + c], broadcast_word(p + i * p_stride + j), pair[c]);
  }
}

}  // namespace
