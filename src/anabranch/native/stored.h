// Weights in the formats of GGUF files: rows of a file, and the same values in packed blocks.
//
// Formats of integers are of one shape. A group has 32 values of an output as unsigned integers of LOW + HIGH bits, and a weight is
//
//     scale * (value - OFFSET)   or, with a minimum,   scale * value + minimum,   in float.
//
// Scale and minimum are a half for each group, or (SUB) a half for 256 values times small integers for each 32 or 16 of them.
// The product of the two fits a float, so that packing loses nothing. With CODES a value is an index into a table.
//
// A block of 32 outputs in a format is a sequence of groups, of SUB formats 8 at a time after a head with the halves of the
// 32 outputs' scales (and minima). A group consists of
//   its low bits   lines of 128 bytes that have 4 bytes of each output; a byte has the low bits of one value (LOW = 8), or of 2
//                  or 4 that are 4 of k apart
//   its high bits  as many lines in the same way, with bytes of 8 values of 1 bit or 4 of 2
//   its scales     and then minima of the 32 outputs: halves, or (SUB) bytes, of the first 16 values, then of the others
//
// In formats of FLOATS, a group has for each of its 32 values those of the 32 outputs, as the file stores them.
#pragma once

#include <cmath>

#include "simd.h"

namespace {

// The numbers of the formats in GGUF files (GGMLQuantizationType).
enum StoredType : int32_t {
  F32 = 0, F16 = 1, BF16_VALUES = 30, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
};  // clang-format off

constexpr int CODE_OFFSET = 128;  // codes are stored as unsigned bytes
constexpr int8_t NO_CODES[16] = {};
constexpr int8_t NL_CODES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MX_CODES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// RAW_BYTES: of a file's block, which has 256 values in SUB formats and else 32
template <int LOW_BITS, int HIGH_BITS, int LESS, bool WITH_MINIMUM, int PARTS, bool SUB_SCALES, int FILE_BYTES>
struct StoredFormat {
  static constexpr bool FLOATS = false, WIDE = false;
  static constexpr int LOW = LOW_BITS, HIGH = HIGH_BITS, OFFSET = LESS, HALVES = PARTS, RAW_BYTES = FILE_BYTES;
  static constexpr bool MINIMUM = WITH_MINIMUM, SUB = SUB_SCALES, CODES = LESS == CODE_OFFSET && LOW_BITS == 4;
  static constexpr const int8_t* TABLE = NO_CODES;
  static constexpr int DIGITS = CODES ? 8 : LOW + HIGH;  // bits of what is multiplied
  static constexpr bool POWERS = false;    // scales are powers of two, in bf16
  static constexpr bool SIGNED = !WITH_MINIMUM;  // of sub-scales
  static constexpr int TOGETHER = SUB ? 8 : 1, RAW_VALUES = BLOCK * TOGETHER;
  static constexpr int VALUE_BYTES = 128 * (LOW + HIGH), PLANES = MINIMUM ? 2 : 1;
  static constexpr int SCALE_BYTES = SUB ? BLOCK * HALVES : 2 * BLOCK;  // of a group's scales, or of its minima
  static constexpr int GROUP = VALUE_BYTES + PLANES * SCALE_BYTES, HEAD = SUB ? 2 * BLOCK * PLANES : 0;

  static constexpr int CACHE_LINES = (GROUP + HEAD / TOGETHER + 63) / 64;  // of a group with its share of a head

  static constexpr int64_t head_at(int g) { return static_cast<int64_t>(g / TOGETHER) * (HEAD + TOGETHER * GROUP); }
  static constexpr int64_t group_at(int g) { return head_at(g) + HEAD + g % TOGETHER * GROUP; }
  static constexpr int64_t bytes(int width) { return head_at(width / BLOCK); }
};

template <class VALUE>
struct FloatFormat {
  using Value = VALUE;
  static constexpr bool FLOATS = true;
  static constexpr int RAW_VALUES = BLOCK, TOGETHER = 1, SIZE = static_cast<int>(sizeof(VALUE)), RAW_BYTES = BLOCK * SIZE;
  static constexpr int GROUP = BLOCK * BLOCK * SIZE;

  static constexpr int64_t group_at(int g) { return static_cast<int64_t>(g) * GROUP; }
  static constexpr int64_t bytes(int width) { return group_at(width / BLOCK); }
};

template <int TYPE>
struct Stored;
template <> struct Stored<F32> : FloatFormat<float> {};
template <> struct Stored<F16> : FloatFormat<Half> {};
template <> struct Stored<BF16_VALUES> : FloatFormat<bf16> {};
//                                       low high less  min  parts  sub  bytes
template <> struct Stored<Q4_0> : StoredFormat<4, 0, 8, false, 1, false, 18> {};
template <> struct Stored<Q4_1> : StoredFormat<4, 0, 0, true, 1, false, 20> {};
template <> struct Stored<Q5_0> : StoredFormat<4, 1, 16, false, 1, false, 22> {};
template <> struct Stored<Q5_1> : StoredFormat<4, 1, 0, true, 1, false, 24> {};
template <> struct Stored<Q8_0> : StoredFormat<8, 0, 128, false, 1, false, 34> {};
template <> struct Stored<Q2_K> : StoredFormat<2, 0, 0, true, 2, true, 84> {};
template <> struct Stored<Q3_K> : StoredFormat<2, 1, 4, false, 2, true, 110> {};
template <> struct Stored<Q4_K> : StoredFormat<4, 0, 0, true, 1, true, 144> {};
template <> struct Stored<Q5_K> : StoredFormat<4, 1, 0, true, 1, true, 176> {};
template <> struct Stored<Q6_K> : StoredFormat<4, 2, 32, false, 2, true, 210> {};
template <> struct Stored<IQ4_NL> : StoredFormat<4, 0, CODE_OFFSET, false, 1, false, 18> {
  static constexpr const int8_t* TABLE = NL_CODES;
};
template <> struct Stored<IQ4_XS> : StoredFormat<4, 0, CODE_OFFSET, false, 1, true, 136> {
  static constexpr const int8_t* TABLE = NL_CODES;
};
template <> struct Stored<MXFP4> : StoredFormat<4, 0, CODE_OFFSET, false, 1, false, 17> {
  static constexpr const int8_t* TABLE = MX_CODES;
  static constexpr bool POWERS = true;
};  // clang-format on

// The format F with a byte for each value (not a code)
template <class F>
struct Unpacked : StoredFormat<8, 0, F::OFFSET, F::MINIMUM, F::HALVES, F::SUB, 0> {
  static constexpr bool POWERS = F::POWERS;
  static constexpr int DIGITS = F::DIGITS;
};

// What blocks of integers are widened to, where many rows are multiplied by them. A group has a byte for each value (not a code), plus
// OFFSET if there is no minimum, 4 of each output in a line of 128 bytes; then for each half of the values the outputs' scales, and
// then minima, in float.
template <int PARTS, bool WITH_MINIMUM>
struct WideFormat {
  static constexpr bool WIDE = true, MINIMUM = WITH_MINIMUM, SUB = false, CODES = false;
  static constexpr int LOW = 8, HIGH = 0;
  static constexpr int HALVES = PARTS, OFFSET = 128, PLANES = MINIMUM ? 2 : 1;
  static constexpr int VALUE_BYTES = BLOCK * BLOCK, SCALE_BYTES = 4 * BLOCK, GROUP = VALUE_BYTES + HALVES * PLANES * SCALE_BYTES;
  static constexpr int CACHE_LINES = 8;  // of the next block, for each group

  static constexpr int64_t head_at(int) { return 0; }
  static constexpr int64_t group_at(int g) { return static_cast<int64_t>(g) * GROUP; }
  static constexpr int64_t scales_at(int h) { return VALUE_BYTES + h * PLANES * SCALE_BYTES; }
  static constexpr int64_t bytes(int width) { return group_at(width / BLOCK); }
  // the bytes of the next block that a tile prefetches, at half of CACHE_LINES a group
  static constexpr int64_t prefetched(int width) { return static_cast<int64_t>(width / BLOCK) * 64 * CACHE_LINES / 2; }
};
template <class F>
using Wide = WideFormat<F::HALVES, F::MINIMUM>;

// Weights that are quantised here, to four bits with a scale and a minimum for each group, have this format, too.
using Int4 = Stored<Q4_1>;

// Calls f(Stored<type>{}); returns false for an unknown type.
template <class F>
inline bool with_stored_type(int type, F&& f) {
  switch (type) {
    case F32: return f(Stored<F32>{}), true;
    case F16: return f(Stored<F16>{}), true;
    case BF16_VALUES: return f(Stored<BF16_VALUES>{}), true;
    case Q4_0: return f(Stored<Q4_0>{}), true;
    case Q4_1: return f(Stored<Q4_1>{}), true;
    case Q5_0: return f(Stored<Q5_0>{}), true;
    case Q5_1: return f(Stored<Q5_1>{}), true;
    case Q8_0: return f(Stored<Q8_0>{}), true;
    case Q2_K: return f(Stored<Q2_K>{}), true;
    case Q3_K: return f(Stored<Q3_K>{}), true;
    case Q4_K: return f(Stored<Q4_K>{}), true;
    case Q5_K: return f(Stored<Q5_K>{}), true;
    case Q6_K: return f(Stored<Q6_K>{}), true;
    case IQ4_NL: return f(Stored<IQ4_NL>{}), true;
    case IQ4_XS: return f(Stored<IQ4_XS>{}), true;
    case MXFP4: return f(Stored<MXFP4>{}), true;
    default: return false;
  }
}

// the same for a format of floats
template <class F>
inline bool with_float_type(int type, F&& f) {
  switch (type) {
    case F32: return f(Stored<F32>{}), true;
    case F16: return f(Stored<F16>{}), true;
    case BF16_VALUES: return f(Stored<BF16_VALUES>{}), true;
    default: return false;
  }
}

// ---- rows of a file -----------------------------------------------------------------------------------------------

// A group of an output: values (codes: indices), the halves of scale and minimum, and the integers that multiply them for the
// first 16 values and for the others.
struct RawGroup {
  uint8_t value[BLOCK];
  uint16_t scale, minimum;
  uint8_t sub[2], sub_minimum[2];
};

// the same in a format of FLOATS
template <class VALUE>
struct FloatGroup {
  VALUE value[BLOCK];
};

template <class F, bool FLOATS = F::FLOATS>
struct GroupType {
  using type = RawGroup;
};
template <class F>
struct GroupType<F, true> {
  using type = FloatGroup<typename F::Value>;
};
template <class F>
using GroupOf = typename GroupType<F>::type;

inline uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

// value i is the low half of byte i, or the high one of byte i - 16
inline void read_halves(const uint8_t* bytes, uint8_t* value) {
  for (int i = 0; i < 16; ++i) value[i] = bytes[i] & 15, value[16 + i] = bytes[i] >> 4;
}

inline void add_bits(const uint8_t* bytes, uint8_t* value) {
  for (int i = 0; i < BLOCK; ++i) value[i] = static_cast<uint8_t>(value[i] | (bytes[i / 8] >> (i % 8) & 1) << 4);
}

inline void read(Stored<Q4_0>, const uint8_t* raw, int, RawGroup* to) { to->scale = half_at(raw), read_halves(raw + 2, to->value); }

inline void read(Stored<Q4_1>, const uint8_t* raw, int, RawGroup* to) {
  to->scale = half_at(raw), to->minimum = half_at(raw + 2);
  read_halves(raw + 4, to->value);
}

inline void read(Stored<Q5_0>, const uint8_t* raw, int, RawGroup* to) {
  to->scale = half_at(raw);
  read_halves(raw + 6, to->value), add_bits(raw + 2, to->value);
}

inline void read(Stored<Q5_1>, const uint8_t* raw, int, RawGroup* to) {
  to->scale = half_at(raw), to->minimum = half_at(raw + 2);
  read_halves(raw + 8, to->value), add_bits(raw + 4, to->value);
}

inline void read(Stored<Q8_0>, const uint8_t* raw, int, RawGroup* to) {
  to->scale = half_at(raw);
  for (int i = 0; i < BLOCK; ++i) to->value[i] = raw[2 + i] ^ 0x80;  // value + 128
}

inline void read(Stored<IQ4_NL>, const uint8_t* raw, int, RawGroup* to) { read(Stored<Q4_0>{}, raw, 0, to); }

inline void read(Stored<MXFP4>, const uint8_t* raw, int, RawGroup* to) {
  const int e = raw[0];  // 2^(e - 128), of which the first two are not normal
  to->scale = static_cast<uint16_t>(e < 2 ? 0x20 << e : (e - 1) << 7);
  read_halves(raw + 1, to->value);
}

// two bits of each value; eight groups of 32 in 64 bytes
inline void read_pairs(const uint8_t* bytes, int g, uint8_t* value) {
  for (int i = 0; i < BLOCK; ++i) value[i] = bytes[g / 4 * BLOCK + i] >> (2 * (g % 4)) & 3;
}

inline void read(Stored<Q2_K>, const uint8_t* raw, int g, RawGroup* to) {
  to->scale = half_at(raw + 80), to->minimum = half_at(raw + 82);
  read_pairs(raw + 16, g, to->value);
  for (int h = 0; h < 2; ++h) to->sub[h] = raw[2 * g + h] & 15, to->sub_minimum[h] = raw[2 * g + h] >> 4;
}

inline void read(Stored<Q3_K>, const uint8_t* raw, int g, RawGroup* to) {
  to->scale = half_at(raw + 108);
  read_pairs(raw + 32, g, to->value);
  for (int i = 0; i < BLOCK; ++i) to->value[i] = static_cast<uint8_t>(to->value[i] | (raw[i] >> g & 1) << 2);
  const uint8_t* scales = raw + 96;
  for (int h = 0; h < 2; ++h) {
    const int k = 2 * g + h, low = scales[k % 8] >> (4 * (k / 8)) & 15, high = scales[8 + k % 4] >> (2 * (k / 4)) & 3;
    to->sub[h] = static_cast<uint8_t>((low | high << 4) - 32);
  }
}

// scales and minima of 6 bits in 12 bytes
inline void read_sixes(const uint8_t* bytes, int g, RawGroup* to) {
  const int scale = g < 4 ? bytes[g] & 63 : (bytes[g + 4] & 15) | (bytes[g - 4] >> 6) << 4;
  const int minimum = g < 4 ? bytes[g + 4] & 63 : bytes[g + 4] >> 4 | (bytes[g] >> 6) << 4;
  to->sub[0] = to->sub[1] = static_cast<uint8_t>(scale), to->sub_minimum[0] = to->sub_minimum[1] = static_cast<uint8_t>(minimum);
}

inline void read(Stored<Q4_K>, const uint8_t* raw, int g, RawGroup* to) {
  to->scale = half_at(raw), to->minimum = half_at(raw + 2);
  read_sixes(raw + 4, g, to);
  for (int i = 0; i < BLOCK; ++i) to->value[i] = raw[16 + g / 2 * BLOCK + i] >> (4 * (g % 2)) & 15;
}

inline void read(Stored<Q5_K>, const uint8_t* raw, int g, RawGroup* to) {
  to->scale = half_at(raw), to->minimum = half_at(raw + 2);
  read_sixes(raw + 4, g, to);
  for (int i = 0; i < BLOCK; ++i)
    to->value[i] = static_cast<uint8_t>((raw[48 + g / 2 * BLOCK + i] >> (4 * (g % 2)) & 15) | (raw[16 + i] >> g & 1) << 4);
}

inline void read(Stored<Q6_K>, const uint8_t* raw, int g, RawGroup* to) {
  to->scale = half_at(raw + 208);
  read_pairs(raw + 128, g, to->value);
  const uint8_t* low = raw + g / 4 * 64 + g % 2 * BLOCK;
  const int shift = g % 4 / 2 * 4;
  for (int i = 0; i < BLOCK; ++i) to->value[i] = static_cast<uint8_t>((low[i] >> shift & 15) | to->value[i] << 4);
  for (int h = 0; h < 2; ++h) to->sub[h] = raw[192 + 2 * g + h];
}

inline void read(Stored<IQ4_XS>, const uint8_t* raw, int g, RawGroup* to) {
  to->scale = half_at(raw);
  const int low = raw[4 + g / 2] >> (4 * (g % 2)) & 15, high = half_at(raw + 2) >> (2 * g) & 3;
  to->sub[0] = to->sub[1] = static_cast<uint8_t>((low | high << 4) - 32);
  read_halves(raw + 8 + 16 * g, to->value);
}

template <class F>
inline int64_t raw_row_bytes(int width) {
  return static_cast<int64_t>(width / F::RAW_VALUES) * F::RAW_BYTES;
}

// group g of a row
template <class F>
inline void read_group(const uint8_t* row, int g, GroupOf<F>* to) {
  if constexpr (F::FLOATS)
    std::memcpy(to, row + static_cast<int64_t>(g) * F::RAW_BYTES, F::RAW_BYTES);
  else
    read(F{}, row + static_cast<int64_t>(g / F::TOGETHER) * F::RAW_BYTES, g % F::TOGETHER, to);
}

// ---- values -------------------------------------------------------------------------------------------------------

inline float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return exponent == 31 ? std::numeric_limits<float>::quiet_NaN() : bits & 0x8000 ? -size : size;
}

inline float bf16_to_float32(bf16 bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline float value_to_float(float value) { return value; }
inline float value_to_float(Half value) { return half_to_float(value.bits); }
inline float value_to_float(bf16 value) { return bf16_to_float32(value); }

template <class F>
inline float scale_to_float(uint16_t bits) {
  return F::POWERS ? bf16_to_float32(bits) : half_to_float(bits);
}

// the sub-scale in a byte
template <class F>
inline float sub_to_float(uint8_t byte) {
  return F::SIGNED ? static_cast<float>(static_cast<int8_t>(byte)) : static_cast<float>(byte);
}

template <class F>
inline bool is_finite(const RawGroup& group) {
  const auto finite = [](uint16_t half) { return (half & 0x7c00) != 0x7c00; };
  return F::POWERS || (finite(group.scale) && (!F::MINIMUM || finite(group.minimum)));
}

template <class F, class V>
inline bool is_finite(const FloatGroup<V>& group) {
  return std::all_of(group.value, group.value + BLOCK, [](V value) { return std::isfinite(value_to_float(value)); });
}

// the weights of a group
template <class F>
inline void to_floats(const RawGroup& group, float* to) {
  const float whole = scale_to_float<F>(group.scale), least = F::MINIMUM ? half_to_float(group.minimum) : 0.0f;
  float scale[2], minimum[2];
  for (int h = 0; h < 2; ++h) {
    scale[h] = F::SUB ? whole * sub_to_float<F>(group.sub[h]) : whole;
    minimum[h] = F::SUB ? -(least * static_cast<float>(group.sub_minimum[h])) : least;
  }
  for (int i = 0; i < BLOCK; ++i) {
    const int value = F::CODES ? F::TABLE[group.value[i]] : group.value[i] - F::OFFSET, h = i / 16;
    to[i] = F::MINIMUM ? std::fma(scale[h], static_cast<float>(value), minimum[h]) : scale[h] * static_cast<float>(value);
  }
}

template <class F, class V>
inline void to_floats(const FloatGroup<V>& group, float* to) {
  for (int i = 0; i < BLOCK; ++i) to[i] = value_to_float(group.value[i]);
}

// ---- blocks -------------------------------------------------------------------------------------------------------

// Where a value's low (or, SHIFT = 0 and BITS = HIGH, high) bits are: 4 values of an output share a word in line ``q / (8 / BITS)``.
template <int BITS>
inline void put_bits(uint8_t* lines, int j, const uint8_t* value, int shift) {
  constexpr int EACH = 8 / BITS;  // values of 4 of k in a word
  for (int line = 0; line < BITS; ++line) {
    uint8_t word[4] = {};
    for (int part = 0; part < EACH; ++part)
      for (int c = 0; c < 4; ++c)
        word[c] = static_cast<uint8_t>(word[c] | (value[4 * (line * EACH + part) + c] >> shift & ((1 << BITS) - 1)) << (BITS * part));
    std::memcpy(lines + 128 * line + 4 * j, word, 4);
  }
}

template <int BITS>
inline void add_lines(const uint8_t* lines, int j, uint8_t* value, int shift) {
  constexpr int EACH = 8 / BITS;
  for (int i = 0; i < BLOCK; ++i) {
    const int q = i / 4, byte = lines[128 * (q / EACH) + 4 * j + i % 4];
    value[i] = static_cast<uint8_t>(value[i] | (byte >> (BITS * (q % EACH)) & ((1 << BITS) - 1)) << shift);
  }
}

// Writes group g of output j of a block.
template <class F>
inline void put_group(const RawGroup& group, uint8_t* block, int g, int j) {
  uint8_t* to = block + F::group_at(g);
  put_bits<F::LOW>(to, j, group.value, 0);
  if constexpr (F::HIGH > 0) put_bits<F::HIGH>(to + 128 * F::LOW, j, group.value, F::LOW);
  uint8_t* scales = to + F::VALUE_BYTES;
  uint8_t* halves = F::SUB ? block + F::head_at(g) : scales;
  std::memcpy(halves + 2 * j, &group.scale, 2);
  if (F::MINIMUM) std::memcpy(halves + 2 * BLOCK + 2 * j, &group.minimum, 2);
  for (int h = 0; F::SUB && h < F::HALVES; ++h) {
    scales[BLOCK * h + j] = group.sub[h];
    if (F::MINIMUM) scales[F::SCALE_BYTES + BLOCK * h + j] = group.sub_minimum[h];
  }
}

template <class F, class V>
inline void put_group(const FloatGroup<V>& group, uint8_t* block, int g, int j) {
  uint8_t* to = block + F::group_at(g);
  for (int i = 0; i < BLOCK; ++i) std::memcpy(to + F::SIZE * (i * BLOCK + j), &group.value[i], F::SIZE);
}

// the same in a format of integers, whose group begins at ``from``
template <class F>
inline void get_integers(const uint8_t* block, const uint8_t* from, int g, int j, RawGroup* to) {
  add_lines<F::LOW>(from, j, to->value, 0);
  if constexpr (F::HIGH > 0) add_lines<F::HIGH>(from + 128 * F::LOW, j, to->value, F::LOW);
  const uint8_t* scales = from + F::VALUE_BYTES;
  const uint8_t* halves = F::SUB ? block + F::head_at(g) : scales;
  to->scale = half_at(halves + 2 * j);
  if (F::MINIMUM) to->minimum = half_at(halves + 2 * BLOCK + 2 * j);
  for (int h = 0; F::SUB && h < 2; ++h) {
    const int at = F::HALVES == 2 ? BLOCK * h + j : j;
    to->sub[h] = scales[at];
    if (F::MINIMUM) to->sub_minimum[h] = scales[F::SCALE_BYTES + at];
  }
}

// Reads group g of output j of a block.
template <class F>
inline GroupOf<F> get_group(const uint8_t* block, int g, int j) {
  GroupOf<F> group{};
  const uint8_t* from = block + F::group_at(g);
  if constexpr (F::FLOATS) {
    for (int i = 0; i < BLOCK; ++i) std::memcpy(&group.value[i], from + F::SIZE * (i * BLOCK + j), F::SIZE);
  } else {
    get_integers<F>(block, from, g, j, &group);
  }
  return group;
}

// A weight in a block is scale * (value or code - byte_offset) + minimum.
template <class F>
constexpr int byte_offset() {
  return F::MINIMUM ? 0 : F::OFFSET;
}

}  // namespace
