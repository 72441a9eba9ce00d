// The instruction set that this library is compiled for, and functions of 16 floats on top of it.
#pragma once

#if defined(ANABRANCH_SIMD)
#include ANABRANCH_SIMD  // a header elsewhere
#elif defined(__AVX512F__) && !defined(ANABRANCH_AVX2)
#include "avx512.h"
#else
#include "avx2.h"
#endif

#include <cmath>

namespace {

// the type in memory (as in the KV cache) of rows that are multiplied as T
template <class T>
using Storage = std::conditional_t<std::is_same<T, float>::value, float, bf16>;

// values 32 b to 32 b + 31 of a row
template <class T>
inline void store32(T* row, int b, F32x16 low, F32x16 high) {
  store16(row + b * BLOCK, low);
  store16(row + b * BLOCK + 16, high);
}

// e^x: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7. NaN stays NaN.
inline F32x16 exp(F32x16 x) {
  x = max(broadcast(-100.0f), x);
  const F32x16 n = round(x * broadcast(1.44269504f));
  F32x16 r = neg_mul_add(n, broadcast(0.693359375f), x);
  r = neg_mul_add(n, broadcast(-2.12194440e-4f), r);
  F32x16 p = broadcast(1.9875691500e-4f);
  p = mul_add(p, r, broadcast(1.3981999507e-3f));
  p = mul_add(p, r, broadcast(8.3334519073e-3f));
  p = mul_add(p, r, broadcast(4.1665795894e-2f));
  p = mul_add(p, r, broadcast(1.6666665459e-1f));
  p = mul_add(p, r, broadcast(5.0000001201e-1f));
  p = mul_add(p, r * r, r + broadcast(1.0f));
  return scale_by_power(p, n);
}

// 2^x, relative error below 3e-6: for results that are rounded to bf16
inline F32x16 exp2(F32x16 x) {
  const F32x16 n = round(x), r = x - n;
  F32x16 p = broadcast(9.57010119e-3f);
  p = mul_add(p, r, broadcast(5.59178603e-2f));
  p = mul_add(p, r, broadcast(2.40247448e-1f));
  p = mul_add(p, r, broadcast(6.93121815e-1f));
  p = mul_add(p, r, broadcast(9.99999261e-1f));
  return scale_by_power(p, n);
}

// The natural logarithm of normal numbers above 0, by Cephes' polynomial; relative error below 2e-7.
inline F32x16 log(F32x16 x) {
  F32x16 mantissa, exponent;
  split_exponent(x, &mantissa, &exponent);
  const F32x16 root = broadcast(1.41421356f);
  const F32x16 m = select_greater(mantissa, root, mantissa * broadcast(0.5f), mantissa);
  const F32x16 k = select_greater(mantissa, root, exponent + broadcast(1.0f), exponent);
  const F32x16 r = m - broadcast(1.0f), z = r * r;
  F32x16 p = broadcast(7.0376836292e-2f);
  for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                        2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = mul_add(p, r, broadcast(c));
  p = p * r * z;
  p = mul_add(k, broadcast(-2.12194440e-4f), p);
  p = neg_mul_add(z, broadcast(0.5f), p);
  return mul_add(k, broadcast(0.693359375f), r + p);
}

inline F32x16 silu(F32x16 x) {
  const F32x16 one = broadcast(1.0f);
  return x / (one + exp(zero() - x));
}

// tanh x, absolute error below 2e-7
inline F32x16 tanh(F32x16 x) {
  const F32x16 one = broadcast(1.0f);
  return one - broadcast(2.0f) / (one + exp(x + x));
}

// erf x by Abramowitz and Stegun 7.1.26, absolute error below 3e-7
inline F32x16 erf(F32x16 x) {
  const F32x16 one = broadcast(1.0f), size = max(x, zero() - x);
  const F32x16 t = one / mul_add(size, broadcast(0.3275911f), one);
  F32x16 p = broadcast(1.061405429f);
  for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = mul_add(p, t, broadcast(c));
  const F32x16 value = one - p * t * exp(zero() - size * size);
  return select_greater(zero(), x, zero() - value, value);
}

// the activations of MLPs; see Activation in plan.h
struct Silu {
  F32x16 operator()(F32x16 x) const { return silu(x); }
};
struct Gelu {
  F32x16 operator()(F32x16 x) const {
    const F32x16 half = x * broadcast(0.5f);
    return mul_add(half, erf(x * broadcast(0.70710678f)), half);
  }
};
struct GeluTanh {
  F32x16 operator()(F32x16 x) const {
    const F32x16 inner = mul_add(x * x * x, broadcast(0.044715f), x) * broadcast(1.59576912f);  // 2 sqrt(2 / pi)
    return x / (broadcast(1.0f) + exp(zero() - inner));
  }
};
struct Relu {
  F32x16 operator()(F32x16 x) const { return max(x, zero()); }
};

inline float sum_of_squares(const float* x, int n) {
  F32x16 total = zero();
  for (int i = 0; i < n; i += 16) {
    const F32x16 v = load16(x + i);
    total = mul_add(v, v, total);
  }
  return reduce_sum(total);
}

// y = RMS norm of x [n], n a multiple of 32
template <class T>
inline void rms_norm(const float* x, const float* weight, int n, float eps, T* y) {
  const F32x16 factor = broadcast(1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps));
  const auto part = [&](int i) { return load16(x + i) * factor * load16(weight + i); };
  for (int b = 0; b < n / BLOCK; ++b) store32(y, b, part(b * BLOCK), part(b * BLOCK + 16));
}

// y = LayerNorm of x [n], n a multiple of 32; ``bias`` may be null
template <class T>
inline void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, T* y) {
  F32x16 total = zero(), squares = zero();
  for (int i = 0; i < n; i += 16) total = total + load16(x + i);
  const F32x16 mean = broadcast(reduce_sum(total) / static_cast<float>(n));
  for (int i = 0; i < n; i += 16) {
    const F32x16 v = load16(x + i) - mean;
    squares = mul_add(v, v, squares);
  }
  const F32x16 factor = broadcast(1.0f / std::sqrt(reduce_sum(squares) / static_cast<float>(n) + eps));
  const auto part = [&](int i) {
    const F32x16 v = (load16(x + i) - mean) * factor * load16(weight + i);
    return bias == nullptr ? v : v + load16(bias + i);
  };
  for (int b = 0; b < n / BLOCK; ++b) store32(y, b, part(b * BLOCK), part(b * BLOCK + 16));
}

}  // namespace
