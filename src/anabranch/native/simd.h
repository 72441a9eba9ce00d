// The interface of instruction sets, and what they share. The kernels use only these names: a new instruction set needs a
// new header with everything in this list, an include in vector_math.h, and an entry of INSTRUCTION_SETS in recipe.py. There are
// avx512.h and avx2.h; tests/native/scalar.h is one in plain C++.
//
// Results of different instruction sets may differ in rounding. Within one, a row's result must not depend on how many rows
// are computed together: where a function below sums over k, the order of the sum is fixed.
//
// ---- constants ----
//   TILE_ROWS            rows that share one read of a block of weights in bf16 or float
//   QUANTIZED_TILE_ROWS  the same for weights in int8 and int4
//   MAX_TILE_ROWS        the largest number of rows that ``multiply_tile`` takes
//   MATRIX_UNIT          whether there can be a matrix unit
//   WIDENS<F>            whether blocks in the format F (stored.h) are widened for many rows
//   ACCUMULATORS         F32x16 accumulators that registers hold while attention scores are computed
//
// ---- types ----
//   F32x16               16 floats; operators + - * /
//   U32x16               16 uint32_t
//   Operand<P>           the type to which rows of P (bf16 or float) are converted before they are multiplied with weights,
//                        keys or values of P. Operand<float> is float. Operand<bf16> is bf16 or Rounded
//   QuantizedGroup       32 values of a row in int8, for weights in int8 and int4: value[i] * scale. Each header adds members
//                        of its own; products with a group that has a non-finite value are NaN
//   KeyLanes             lane i has 32 bits of key i: one Operand<float>, or PER_LANE<Operand<bf16>> of Operand<bf16>
//   Sums                 F32x16[MAX_TILE_ROWS][2]: 32 outputs of each row of a tile
//
// ---- the processor ----
//   void spin_pause()                    a hint inside a spin loop
//   bool matrix_tiles                    bf16 is multiplied in a matrix unit (AMX) where the width is a multiple of 32
//   void use_tiles(bool)                 sets ``matrix_tiles``; does nothing without a matrix unit
//   void release_tiles()                 release the calling thread's matrix tiles; empty without a matrix unit
//
// ---- floats ----
//   F32x16 zero(), broadcast(float x)
//   F32x16 mul_add(a, b, c)              a b + c, rounded once
//   F32x16 neg_mul_add(a, b, c)          c - a b, rounded once
//   F32x16 max(a, b), min(a, b)          b where a or b is NaN
//   F32x16 round(x)                      to the nearest integer, ties to even
//   F32x16 scale_by_power(x, n)          x 2^n for integers n from -126 to 127; n beyond that may be clamped; NaN for NaN
//   void split_exponent(x, *m, *e)       x = m 2^e with m in [1, 2), for normal x > 0
//   float reduce_max(x), reduce_sum(x), first_lane(x)  reduce_max: any lane, or NaN, where a lane is NaN
//   uint32_t greater(a, b)               bit i: a[i] > b[i]; false where either is NaN
//   uint32_t greater_or_nan(a, b)        bit i: a[i] > b[i], or either is NaN
//   F32x16 select_greater(a, b, x, y)    x[i] where a[i] > b[i], else y[i]
//   F32x16 keep_first(int n, x)          zero in all but the first n lanes; n may be below 0 or above 16
//
// ---- integers ----
//   U32x16 broadcast_u32(uint32_t x), iota(int x)      x in all lanes; x, x + 1, ..., x + 15
//   U32x16 add(a, b), mul(a, b), bitwise_xor(a, b), shift_right<N>(x)      modulo 2^32; logical shift
//   F32x16 to_float(x)                   rounded once, to nearest
//   U32x16 masked_load_u32(const int64_t* p, int n)    the low halves of the first n of 16 numbers, 0 elsewhere
//
// ---- memory; addresses need no alignment ----
//   F32x16 load16(const P* p)            for float, bf16, Half, int8_t
//   void store16(P* p, x)                for float, bf16 and Operand<bf16>; rounds to nearest, ties to even
//   F32x16 store_rounded(Operand<bf16>* p, x)          the same, and returns what was stored
//   void store1(P* p, float x)           one value, same types and rounding as store16; of Rounded below
//   F32x16 masked_load(const float* p, int n, other)   the first n of 16; lanes of ``other`` elsewhere
//   void masked_store(float* p, int n, x)              the first n of 16; nothing else is read or written
//   void store32(QuantizedGroup* row, int g, low, high)   quantises values 32 g to 32 g + 31 of a row: scale is the largest
//                                        absolute value / 127, 0 where that is below MIN_GROUP_MAX
//
// ---- products ----
//   void multiply_tile<W, LINES>(int count, const T* x, int64_t stride, const B* block, int width, const char* next,
//                                Sums& acc)
//       acc[m][0 .. 31] += x[m] . block for ``count`` rows, at most TILE_ROWS (QUANTIZED_TILE_ROWS, or MAX_TILE_ROWS where a
//       matrix unit is used); rows are ``stride`` values of T apart. W is bf16 or float with T = Operand<W> and B = W, or
//       Int8 with T = QuantizedGroup and B = uint8_t; blocks are laid out as pack.h writes them. Prefetches LINES
//       (0, 1 or 2) cache lines from ``next`` on for every two lines of weights.
//   void multiply_stored<F>(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width,
//                           const char* next, int lines, Sums& acc)
//       the same for a block of an int4 weight (F is Int4), or of a stored one (Stored<type>, or widened Wide<Stored<type>>; see
//       stored.h)
//   void widen(F, const uint8_t* block, int width, uint8_t* to)     a block of F -> Wide<F>, where WIDENS<F>; its products are
//                                        equal to the bit
//   void expand_group(const uint8_t* group, bf16* to)
//       a group of int4 weights, scale * value + minimum rounded to bf16, as 32 values of k of a bf16 block
//   void multiply_interleaved(count, const T* x, int64_t stride, const char* from, int groups, const char* next, Sums& acc)
//       optional: ``multiply_expanding`` (products.h) for up to INTERLEAVED_ROWS<T> rows, which expands and multiplies at
//       the same time
//
// ---- attention; T = Operand<P> of the cache's type P, E = 16 NE channels a head ----
//   broadcast_word(const T* p)           32 bits at p in all lanes, as ``dot_add`` takes them
//   F32x16 dot_add<T>(acc, a, KeyLanes b)              acc + a b; over pairs acc + a[0] b[0] + a[1] b[1]
//   void transpose_keys(const P* keys, int have, int e, KeyLanes* out)
//       16 keys of e values, one after the other -> out[d] with values d (of pairs: 2 d and 2 d + 1) of all keys; zeros for
//       keys from ``have`` on, which are not read
//   void load_pairs<NE>(const P* a, const P* b, KeyLanes (&out)[NE])
//       two cache rows as ``dot_add`` takes them beside a pair of weights; only ``a`` where PER_LANE<T> is 1
//   void unpair_sums<T>(F32x16* low, F32x16* high)     sums over ``load_pairs``'s lanes, back in the order of the channels
//   void accumulate_values<QUERIES, NE>(const T* p, int64_t p_stride, const P* v, int count, F32x16* out)
//       out[i] += sum over j of p[i][j] v[j], j ascending, in ``load_pairs``'s lanes; count is a multiple of PER_LANE<T>
//   the next two only where there can be a matrix unit, for T = bf16 and ``count`` queries, at most 32:
//   void score_in_tiles(int count, const bf16* q, int64_t stride, const KeyLanes* keys, int words, int groups, float* to,
//                       int64_t to_stride)
//       scores of ``groups`` times 16 keys, ``words`` vectors of ``transpose_keys`` each
//   void add_values_in_tiles(int count, const bf16* p, int64_t stride, const KeyLanes* values, int steps, int vectors, F32x16* sums)
//       sums[i] += the sum of the values of ``steps`` times 32 keys, weighed by p[i], in ``load_pairs``'s lanes, 16 ``vectors``
//       channels; for each 32 keys and each vector, ``values`` has a line for each of 16 pairs of keys
#pragma once

#include <cpuid.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

using bf16 = uint16_t;

// a value in half precision
struct Half {
  uint16_t bits;
};

constexpr int BLOCK = 32;  // outputs of a packed block, and values of a quantised group

// Rows in int8 are scaled by 127 / the largest absolute value, which is infinite below this bound.
constexpr float FLOAT_MAX = std::numeric_limits<float>::max(), MIN_GROUP_MAX = 127.0f / FLOAT_MAX * 1.01f;

// Prevents inlining a kernel into its caller, whose live values would take registers from it.
#define NOINLINE __attribute__((noinline))
#define ALWAYS_INLINE __attribute__((always_inline)) inline

inline bf16 to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<bf16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// a float rounded to bf16
struct Rounded {
  float value;
};

inline void store1(Rounded* p, float x) {
  const uint32_t bits = static_cast<uint32_t>(to_bf16(x)) << 16;
  std::memcpy(&p->value, &bits, 4);
}

// values of T in 32 bits
template <class T>
constexpr int PER_LANE = 4 / static_cast<int>(sizeof(T));

// These prefetch a cache line into the first-level cache, or only into the second-level one; any address is allowed.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_second(const void* p) { __builtin_prefetch(p, 0, 2); }

// Prefetches weights that ``rows`` rows will be multiplied by. On AMD's family 26 (Zen 5) they go into the first-level cache for
// any number of rows, which is up to 15 % faster. Elsewhere only for few rows, when memory is the limit: with more it is up to a
// quarter slower (docs/log.md), since that cache tracks few misses at a time, and the loads of the rows cause misses too.
inline bool is_amd_family_26() {
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return false;
  return (a >> 8 & 15) + (a >> 20 & 255) == 26;
}
const bool PREFETCH_FIRST = is_amd_family_26();
inline void prefetch_for(int rows, const void* p) { rows <= 2 || PREFETCH_FIRST ? prefetch(p) : prefetch_second(p); }

// The format of int8 weights, and the bytes that a group of 32 values of k takes in a block; see pack.h.
struct Int8 {
  static constexpr int GROUP = 1024;
};

// the largest number of rows for which ``multiply_interleaved`` is faster than expanding first; 0: there is no such function
template <class T>
constexpr int INTERLEAVED_ROWS = 0;

// Sets the members of a QuantizedGroup besides its values, given the largest absolute value and the sum of those in int8:
// ``sum`` is that of the values, for the minimum that int4 adds to each weight; ``offset`` is -128 times the sum in int8 of the
// first half of the values, and of the second, for int8 weights, which are stored as value + 128.
template <class Group>
inline void set_scale(Group* group, float most, int32_t first, int32_t second) {
  group->scale = most / 127.0f;
  group->sum = group->scale * static_cast<float>(first + second);
  group->offset[0] = -128 * first, group->offset[1] = -128 * second;
}

// -OFFSET times the sum of the values in int8, of all or of half ``h``
template <int OFFSET, class Group>
inline int32_t offset_of(const Group& group, int h, int halves) {
  static_assert(OFFSET == 0 || 128 % OFFSET == 0, "offsets are powers of two");
  const int32_t whole = halves == 2 ? group.offset[h] : group.offset[0] + group.offset[1];
  return OFFSET == 0 ? 0 : whole >> (OFFSET == 0 ? 0 : __builtin_ctz(128 / (OFFSET == 0 ? 1 : OFFSET)));  // no remainder
}

// the sum of the values, of all or of half ``h``
template <class Group>
inline float sum_of(const Group& group, int h, int halves) {
  return halves == 1 ? group.sum : group.scale * (static_cast<float>(group.offset[h]) * (-1.0f / 128.0f));
}

template <class Group>
inline void set_nan(Group* group) {
  *group = {};
  group->scale = group->sum = std::numeric_limits<float>::quiet_NaN();
}

// a mask of the first ``n`` of 16 lanes, a bit each
inline uint32_t first_lanes(int n) { return n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u; }

}  // namespace
