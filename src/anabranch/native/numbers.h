// What all processors' headers share: how numbers and packed weights lie in memory.
//
// A header for a processor gives
//   Floats       16 floats at once, with + - * /, and functions of them
//   Words        16 numbers of 32 bits
//   Factor<P>    what rows of P are turned into for products with weights of P; their order of sums is that of k
//   Group        32 values of a row in int8, for products with quantised weights
//   Turned       what 16 keys are turned into, so that queries can be multiplied with all of them
//   tile()       sums of 32 outputs for some rows, of a block of weights
//   TILE         how many rows that takes at a time, and QUANTISED_TILE with quantised weights
// and kernels.cpp is written in terms of these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

using bf16 = uint16_t;

constexpr int BLOCK = 32;  // outputs of a packed block

// What rows in int8 can be scaled from: 127 divided by less than SMALLEST is infinite.
constexpr float LARGEST = std::numeric_limits<float>::max(), SMALLEST = 127.0f / LARGEST * 1.01f;

// a function that keeps the registers for itself
#define OWN __attribute__((noinline))

inline bf16 to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<bf16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// values of T in the 32 bits that one lane takes in at a time
template <class T>
constexpr int PER_LANE = 4 / static_cast<int>(sizeof(T));

// Weights in int8 and int4, in groups of 32 values of k. A block of 32 outputs holds for each group
//   int8: for every 4 of k the 32 outputs' values + 128, 1,024 bytes; behind all groups the outputs' scales, float
//   int4: for every 8 of k the 32 outputs' values from 0 to 15, those of the later 4 in the high halves, 512 bytes;
//         then the outputs' scales and their least values in half precision: w = scale * value + least
struct Int8 {};
struct Int4 {};

template <class W>
constexpr int GROUP_BYTES = 1024;
template <>
constexpr int GROUP_BYTES<Int4> = 640;

// the first ``n`` of 16 lanes, a bit each
inline uint32_t lanes(int n) { return n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u; }

}  // namespace
