// Products and attention with AVX-512, products in AMX tiles too; included by avx512.h. The names are documented in simd.h.
#pragma once

#include "avx512.h"

namespace {

// ---- products -----------------------------------------------------------------------------------------------------

// Keeps Clang from moving loads of later steps ahead of these sums, which would push sums out of registers: products of eight
// rows took 1.1 to 1.2 times as long. It emits no instruction, so the processor still overlaps the steps.
template <int ROWS, int COLUMNS, class V>
ALWAYS_INLINE void finish_step([[maybe_unused]] V (&sums)[ROWS][COLUMNS]) {
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
    for (int i = 0; i < COLUMNS; ++i) {
#ifdef __clang__
      asm volatile("" : "+v"(sums[m][i]) : : "memory");
#endif
    }
  }
}

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
    if (LINES > 0) prefetch_for(ROWS, next + 64 * LINES * static_cast<int64_t>(k));
    if (LINES > 1) prefetch_for(ROWS, next + 64 * LINES * static_cast<int64_t>(k) + 64);
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
    if (LINES > 0) prefetch_for(ROWS, next + 64 * LINES * static_cast<int64_t>(k));
    if (LINES > 1) prefetch_for(ROWS, next + 64 * LINES * static_cast<int64_t>(k) + 64);
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

inline __m512 float_of_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

template <class W, int ROWS, int LINES>
NOINLINE void multiply_tile_rows(const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char* next,
                                 Sums& acc) {
  constexpr int QUADS = BLOCK / 4;
  const int groups = width / BLOCK;
  __m512 total[ROWS][2];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    const uint8_t* w = block + static_cast<int64_t>(g) * W::GROUP;
    const QuantizedGroup* v = x + g;
    __m512i sum[ROWS][2];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) sum[m][0] = sum[m][1] = _mm512_set1_epi32(offset_of<128>(v[m * stride], 0, 1));
#pragma GCC unroll 8  // else GCC copies all sums from one step of k to the next
    for (int k = 0; k < QUADS; ++k) {
      const char* line = next + (static_cast<int64_t>(g) * QUADS + k) * 64 * LINES;
      if (LINES > 0) prefetch_for(ROWS, line);
      if (LINES > 1) prefetch_for(ROWS, line + 64);
      const __m512i w0 = _mm512_loadu_si512(w + 128 * k), w1 = _mm512_loadu_si512(w + 128 * k + 64);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        const __m512i a = broadcast_word(v[m * stride].value + 4 * k);
        sum[m][0] = dot4_add(sum[m][0], w0, a);
        sum[m][1] = dot4_add(sum[m][1], w1, a);
      }
      finish_step(sum);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const __m512 s = _mm512_set1_ps(v[m * stride].scale);
      for (int i = 0; i < 2; ++i) total[m][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][i]), s, total[m][i]);
    }
  }
  const float* scales = reinterpret_cast<const float*>(block + static_cast<int64_t>(groups) * W::GROUP);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
    for (int i = 0; i < 2; ++i) acc[m][i] = _mm512_fmadd_ps(total[m][i], _mm512_loadu_ps(scales + 16 * i), acc[m][i]);
}

// ---- compact weights ------------------------------------------------------------------------------------------------

// Scales and minima of 16 outputs, half ``i`` of a group.
struct GroupScales {
  GroupScales(const uint8_t* group, int i)
      : scale(float_of_half(group + 512 + 32 * i)), minimum(float_of_half(group + 576 + 32 * i)) {}
  __m512 scale, minimum;
};

// Expands the values of half ``i`` of a group's outputs at 8 of k, from 8 k on.
inline void expand_part(const uint8_t* group, int i, int k, const GroupScales& of, bf16* to) {
  const __m512 digits = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i w = _mm512_loadu_si512(group + 128 * k + 64 * i);
  // the value in the lowest four bits of each lane: values 0 to 3 are low halves of its bytes, 4 to 7 high ones
  const auto at = [&](__m512i shifted) {
    return _mm512_fmadd_ps(_mm512_permutexvar_ps(shifted, digits), of.scale, of.minimum);
  };
  bf16* pairs = to + (8 * k / 2) * 2 * BLOCK + 32 * i;
  store_pairs(pairs, at(w), at(_mm512_srli_epi32(w, 8)));
  store_pairs(pairs + 2 * BLOCK, at(_mm512_srli_epi32(w, 16)), at(_mm512_srli_epi32(w, 24)));
  store_pairs(pairs + 4 * BLOCK, at(_mm512_srli_epi32(w, 4)), at(_mm512_srli_epi32(w, 12)));
  store_pairs(pairs + 6 * BLOCK, at(_mm512_srli_epi32(w, 20)), at(_mm512_srli_epi32(w, 28)));
}

inline void expand_group(const uint8_t* group, bf16* to) {
  for (int i = 0; i < 2; ++i) {
    const GroupScales of(group, i);
#pragma GCC unroll 4
    for (int k = 0; k < BLOCK / 8; ++k) expand_part(group, i, k, of, to);
  }
}

#ifdef ANABRANCH_PAIRS
template <>
constexpr int INTERLEAVED_ROWS<bf16> = 12;  // with more, sums and expansion need more registers than there are

// ``multiply_interleaved`` for exactly ROWS rows. While a group is multiplied, the next one is expanded between its steps: the
// processor multiplies pairs in half of its vector units, and expands in all of them.
template <int ROWS>
NOINLINE void multiply_interleaved_rows(const bf16* x, int64_t stride, const char* from, int groups, const char* next, Sums& acc) {
  constexpr int STEPS = BLOCK / PER_LANE<bf16>;
  alignas(64) bf16 expanded[2][BLOCK * BLOCK];
  __m512 a[ROWS][2];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) a[m][0] = acc[m][0], a[m][1] = acc[m][1];
  const auto multiply = [&](int g, int k) __attribute__((always_inline)) {
    const bf16 *w = expanded[g & 1] + k * PER_LANE<bf16> * BLOCK, *v = x + g * BLOCK + k * PER_LANE<bf16>;
    const __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + BLOCK);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const __m512i value = broadcast_word(v + m * stride);
      a[m][0] = dot_add<bf16>(a[m][0], value, w0);
      a[m][1] = dot_add<bf16>(a[m][1], value, w1);
    }
    finish_step(a);
  };
  const auto prefetch_group = [&] {
    for (int i = 0; i < Int4::GROUP; i += 64) prefetch_for(ROWS, next + i);
    next += Int4::GROUP;
  };
  const uint8_t* group = reinterpret_cast<const uint8_t*>(from);
  expand_group(group, expanded[0]);
  for (int g = 0; g + 1 < groups; ++g) {
    group += Int4::GROUP;
    prefetch_group();
    for (int i = 0; i < 2; ++i) {
      const GroupScales of(group, i);
#pragma GCC unroll 4
      for (int k = 0; k < BLOCK / 8; ++k) {
        expand_part(group, i, k, of, expanded[(g + 1) & 1]);
        const int step = STEPS / 2 * i + 2 * k;
        multiply(g, step), multiply(g, step + 1);
      }
    }
  }
  prefetch_group();
#pragma GCC unroll 4
  for (int k = 0; k < STEPS; ++k) multiply(groups - 1, k);
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) acc[m][0] = a[m][0], acc[m][1] = a[m][1];
}

template <int ROWS = INTERLEAVED_ROWS<bf16>>
inline void multiply_interleaved(int count, const bf16* x, int64_t stride, const char* from, int groups, const char* next,
                                 Sums& acc) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return multiply_interleaved<ROWS - 1>(count, x, stride, from, groups, next, acc);
  multiply_interleaved_rows<ROWS>(x, stride, from, groups, next, acc);
}
#endif

// ---- stored weights -------------------------------------------------------------------------------------------------

// Values 4 q to 4 q + 3 of 16 outputs, half ``i``, of a group in the format F.
template <class F>
inline __m512i stored_quad(const uint8_t* group, int q, int i) {
  constexpr int LOW_EACH = 8 / F::LOW;
  const __m512i low = _mm512_loadu_si512(group + 128 * (q / LOW_EACH) + 64 * i);
  const int shift = F::LOW * (q % LOW_EACH);
  __m512i value = low;
  if (F::LOW < 8) {
    value = shift == 0 ? low : _mm512_srli_epi16(low, static_cast<unsigned>(shift));
    value = _mm512_and_si512(value, _mm512_set1_epi8(static_cast<char>((1 << F::LOW) - 1)));
  }
  if constexpr (F::HIGH > 0) {
    constexpr int HIGH_EACH = 8 / F::HIGH;
    const __m512i bits = _mm512_loadu_si512(group + 128 * (F::LOW + q / HIGH_EACH) + 64 * i);
    const int up = F::LOW - F::HIGH * (q % HIGH_EACH);
    const __m512i moved = up >= 0 ? _mm512_slli_epi16(bits, static_cast<unsigned>(up >= 0 ? up : 0))
                                  : _mm512_srli_epi16(bits, static_cast<unsigned>(up < 0 ? -up : 0));
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << F::HIGH) - 1) << F::LOW));
    value = _mm512_ternarylogic_epi32(value, moved, mask, 0xf8);  // value | (moved & mask)
  }
  if constexpr (F::CODES) {
    alignas(64) static constexpr auto bytes = [] {
      struct {
        uint8_t of[64];
      } table{};
      for (int c = 0; c < 64; ++c) table.of[c] = static_cast<uint8_t>(F::TABLE[c % 16] + CODE_OFFSET);
      return table;
    }();
    value = _mm512_shuffle_epi8(_mm512_load_si512(bytes.of), value);
  }
  return value;
}

// Scales and minima of 16 outputs, half ``i``, for the values of half ``h`` of a group.
template <class F>
struct StoredScales {
  StoredScales(const uint8_t* head, const uint8_t* group, int h, int i) {
    const uint8_t* at = F::SUB ? head : group + F::VALUE_BYTES;
    if constexpr (F::POWERS)
      scale = bf16_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32 * i)));
    else
      scale = float_of_half(at + 32 * i);
    minimum = F::MINIMUM ? float_of_half(at + 2 * BLOCK + 32 * i) : _mm512_setzero_ps();
    if constexpr (F::SUB) {
      const uint8_t* sub = group + F::VALUE_BYTES + BLOCK * h + 16 * i;
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(sub));
      scale *= _mm512_cvtepi32_ps(F::SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
      if constexpr (F::MINIMUM) {
        const __m128i less = _mm_loadu_si128(reinterpret_cast<const __m128i*>(sub + F::SCALE_BYTES));
        minimum *= _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(less));
      }
    }
  }
  __m512 scale, minimum;
};

template <int HALVES, bool MINIMUM>
struct StoredScales<WideFormat<HALVES, MINIMUM>> {
  StoredScales(const uint8_t*, const uint8_t* group, int h, int i) {
    using F = WideFormat<HALVES, MINIMUM>;
    const uint8_t* at = group + F::scales_at(h) + 64 * i;
    scale = _mm512_loadu_ps(at);
    minimum = MINIMUM ? _mm512_loadu_ps(at + F::SCALE_BYTES) : _mm512_setzero_ps();
  }
  __m512 scale, minimum;
};

template <class F>
NOINLINE void widen(F, const uint8_t* block, int width, uint8_t* to) {
  using W = Wide<F>;
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(F::MINIMUM ? 0 : W::OFFSET - F::OFFSET));
  for (int g = 0; g < width / BLOCK; ++g, to += W::GROUP) {
    const uint8_t *head = block + F::head_at(g), *group = block + F::group_at(g);
#pragma GCC unroll 8
    for (int q = 0; q < BLOCK / 4; ++q)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
        _mm512_storeu_si512(to + 128 * q + 64 * i, _mm512_add_epi8(stored_quad<F>(group, q, i), offset));
#pragma GCC unroll 2
    for (int h = 0; h < F::HALVES; ++h)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const StoredScales<F> of(head, group, h, i);
        uint8_t* at = to + W::scales_at(h) + 64 * i;
        _mm512_storeu_ps(at, of.scale);
        if constexpr (F::MINIMUM) _mm512_storeu_ps(at + W::SCALE_BYTES, F::SUB ? -of.minimum : of.minimum);
      }
  }
}

// 1.5 * 2^23, and its bits: with an integer between -2^22 and 2^22 added to the bits, they are the float BASE plus the integer.
constexpr float BASE = 12582912.0f;
constexpr int BASE_BITS = 0x4b400000;

// sum * scale, rounded once. Sums of WIDE formats begin with BASE_BITS, so that they are not converted: a scale has at most 19 bits
// (11 of a half, 8 of an integer), which makes BASE * scale exact.
template <class F>
inline __m512 scaled(__m512i sum, __m512 scale) {
  if constexpr (F::WIDE) return _mm512_fmsub_ps(_mm512_castsi512_ps(sum), scale, _mm512_mul_ps(_mm512_set1_ps(BASE), scale));
  return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
}

// ``multiply_stored`` for exactly ROWS rows
template <class F, int ROWS>
NOINLINE void multiply_stored_rows(const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char* next,
                                   int lines, Sums& acc) {
  constexpr int QUADS = BLOCK / 4 / F::HALVES;
  __m512 total[ROWS][2];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
  for (int g = 0; g < width / BLOCK; ++g) {
    const uint8_t *head = block + F::head_at(g), *w = block + F::group_at(g);
    const QuantizedGroup* v = x + g;
    const char* ahead = next + (F::WIDE ? 64 * F::CACHE_LINES * g : F::group_at(g)) * lines / 2;
#pragma GCC unroll 2
    for (int h = 0; h < F::HALVES; ++h) {
      __m512i sum[ROWS][2];
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) {
        constexpr int OFFSET = byte_offset<F>(), BEGIN = F::WIDE ? BASE_BITS : 0;
        sum[m][0] = sum[m][1] = _mm512_set1_epi32(BEGIN + offset_of<OFFSET>(v[m * stride], h, F::HALVES));
      }
#pragma GCC unroll 8
      for (int i = 0; i < QUADS; ++i) {
        const int q = QUADS * h + i;
#pragma GCC unroll 4
        for (int line = q * F::CACHE_LINES / 8; line < (q + 1) * F::CACHE_LINES / 8; ++line) {
          if (lines == 2) prefetch_for(ROWS, ahead + 64 * line);
          if (lines == 1 && line % 2 == 0) prefetch_for(ROWS, ahead + 32 * line);
        }
        const __m512i w0 = stored_quad<F>(w, q, 0), w1 = stored_quad<F>(w, q, 1);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          const __m512i a = broadcast_word(v[m * stride].value + 4 * q);
          sum[m][0] = dot4_add(sum[m][0], w0, a);
          sum[m][1] = dot4_add(sum[m][1], w1, a);
        }
        finish_step(sum);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const StoredScales<F> of(head, w, h, i);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
          const __m512 s = _mm512_set1_ps(v[m * stride].scale);
          total[m][i] = _mm512_fmadd_ps(scaled<F>(sum[m][i], of.scale), s, total[m][i]);
          if constexpr (F::MINIMUM) {
            const __m512 values = _mm512_set1_ps(sum_of(v[m * stride], h, F::HALVES));
            total[m][i] = F::SUB ? _mm512_fnmadd_ps(values, of.minimum, total[m][i])
                                 : _mm512_fmadd_ps(values, of.minimum, total[m][i]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
    for (int i = 0; i < 2; ++i) acc[m][i] = _mm512_add_ps(acc[m][i], total[m][i]);
}

template <class F, int ROWS = QUANTIZED_TILE_ROWS>
inline void multiply_stored(int count, const QuantizedGroup* x, int64_t stride, const uint8_t* block, int width, const char* next,
                            int lines, Sums& acc) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return multiply_stored<F, ROWS - 1>(count, x, stride, block, width, next, lines, acc);
  multiply_stored_rows<F, ROWS>(x, stride, block, width, next, lines, acc);
}

// ---- tiles --------------------------------------------------------------------------------------------------------

#ifdef ANABRANCH_PAIRS
inline void use_tiles(bool use) { matrix_tiles = use; }

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

// Sums of up to 32 rows and 32 columns in tiles 0 to 3. The second 16 columns lie behind the first; the second 16 rows are
// left out where there are none.
inline void load_sums(int rows, const void* from, int64_t stride) {
  const char *first = static_cast<const char*>(from), *second = first + 16 * stride;
  _tile_loadd(0, first, stride);
  _tile_loadd(1, first + 64, stride);
  if (rows > 16) {
    _tile_loadd(2, second, stride);
    _tile_loadd(3, second + 64, stride);
  }
}

inline void store_sums(int rows, void* to, int64_t stride, int columns = 32) {
  char *first = static_cast<char*>(to), *second = first + 16 * stride;
  _tile_stored(0, first, stride);
  if (rows > 16) _tile_stored(2, second, stride);
  if (columns <= 16) return;
  _tile_stored(1, first + 64, stride);
  if (rows > 16) _tile_stored(3, second + 64, stride);
}

// Adds the products of 32 values of each row with two weight tiles of 16 columns.
inline void add_products(int rows, const bf16* x, int64_t stride, const void* one, const void* other, int line) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(bf16));
  _tile_loadd(4, x, bytes);
  _tile_loadd(6, one, line);
  _tile_loadd(7, other, line);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (rows > 16) {
    _tile_loadd(5, x + 16 * stride, bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// ``multiply_tile`` in AMX tiles, 32 values of k at a time. Packed blocks have the layout of weight tiles: a line of 128
// bytes for each pair of k, one half for each 16 outputs.
template <int LINES>
inline void multiply_amx(int count, const bf16* x, int64_t stride, const bf16* block, int width, const char* next,
                         Sums& acc) {
  constexpr int LINE = 2 * BLOCK * static_cast<int>(sizeof(bf16));
  configure_tiles(count);
  memory_barrier(acc);
  load_sums(count, acc, LINE);
  for (int k = 0; k < width; k += BLOCK) {
    const bf16* weights = block + static_cast<int64_t>(k) * BLOCK;
    for (int i = 0; i < 16 * LINES; ++i) prefetch(next + 32 * LINES * static_cast<int64_t>(k) + 64 * i);
    add_products(count, x + k, stride, weights, weights + BLOCK, LINE);
  }
  store_sums(count, acc, LINE);
}

inline void score_in_tiles(int count, const bf16* q, int64_t stride, const KeyLanes* keys, int words, int groups, float* to,
                           int64_t to_stride) {
  configure_tiles(count);
  memory_barrier(keys);
  for (int g = 0; g < groups; g += 2) {
    const KeyLanes* one = keys + g * words;
    const KeyLanes* other = g + 1 < groups ? one + words : one;  // the last of an odd number is multiplied twice
    _tile_zero(0);
    _tile_zero(1);
    if (count > 16) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int d = 0; d < words; d += 16) add_products(count, q + 2 * d, stride, one + d, other + d, 64);
    store_sums(count, to + 16 * g, to_stride * static_cast<int64_t>(sizeof(float)), other == one ? 16 : 32);
  }
  memory_barrier(to);
}

inline void add_values_in_tiles(int count, const bf16* p, int64_t stride, const KeyLanes* values, int steps, int vectors,
                                F32x16* sums) {
  const int64_t line = vectors * static_cast<int64_t>(sizeof(F32x16));
  configure_tiles(count);
  memory_barrier(values);
  for (int c = 0; c < vectors; c += 2) {
    load_sums(count, sums + c, line);
    for (int step = 0; step < steps; ++step) {
      const KeyLanes* pairs = values + 16 * (step * vectors + c);
      add_products(count, p + BLOCK * step, stride, pairs, pairs + 16, 64);
    }
    store_sums(count, sums + c, line);
  }
  memory_barrier(sums);
}
#else
inline void release_tiles() {}
inline void use_tiles(bool) {}
#endif

template <class W, int LINES, int ROWS, class T, class P>
inline void multiply_tile_of(int count, const T* x, int64_t stride, const P* block, int width, const char* next, Sums& acc) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return multiply_tile_of<W, LINES, ROWS - 1>(count, x, stride, block, width, next, acc);
  multiply_tile_rows<W, ROWS, LINES>(x, stride, block, width, next, acc);
}

template <class W, int LINES, class T, class P>
inline void multiply_tile(int count, const T* x, int64_t stride, const P* block, int width, const char* next, Sums& acc) {
#ifdef ANABRANCH_PAIRS
  if constexpr (std::is_same<T, bf16>::value)
    if (matrix_tiles && width % BLOCK == 0) return multiply_amx<LINES>(count, x, stride, block, width, next, acc);
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

// Inlined whatever its number of callers: 8 nodes over 4,000 tokens take 8 % longer where GCC decides not to.
template <int QUERIES, int NE, class T, class P>
ALWAYS_INLINE void accumulate_values(const T* p, int64_t p_stride, const P* v, int count, F32x16* out) {
  constexpr int STEP = PER_LANE<T>;
  __m512 acc[QUERIES][NE];
#pragma GCC unroll 16
  for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < NE; ++c) acc[i][c] = out[i * NE + c];
  for (int j = 0; j < count; j += STEP) {
    const P* row = v + static_cast<int64_t>(j) * NE * 16;
    __m512i value[NE];
    load_pairs<NE>(row, row + NE * 16, value);
#pragma GCC unroll 16
    for (int i = 0; i < QUERIES; ++i) {
      const __m512i w = broadcast_word(p + i * p_stride + j);
#pragma GCC unroll 16
      for (int c = 0; c < NE; ++c) acc[i][c] = dot_add<T>(acc[i][c], w, value[c]);
    }
    finish_step(acc);
  }
#pragma GCC unroll 16
  for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 16
    for (int c = 0; c < NE; ++c) out[i * NE + c] = acc[i][c];
}

}  // namespace
