// Packing of weights, and the memory layout of packed ones.
//
// A packed weight [outputs, width] is a sequence of blocks of 32 outputs, the last one padded with zeros. A block contains
//   bf16:  for every 2 of k the 32 outputs' pairs
//   float: for every k the 32 outputs' values
//   int8:  in groups of 32 of k, for every 4 of k the 32 outputs' values + 128 (1,024 bytes a group); after all groups the
//          outputs' scales, float
//   int4:  in groups of 32 of k, for every 8 of k the 32 outputs' values from 0 to 15, the later 4 of k in the high halves
//          of the bytes (512 bytes a group), then the outputs' scales and minima in half precision:
//          w = scale * value + minimum
//   compact: as int4, for bf16 weights: w = bf16(scale * value + minimum), multiplied by rows of bf16
//   stored: a format of GGUF files, which each block names (stored.h), multiplied by rows in int8. Before the blocks, from the
//          first byte on, there is an entry for each with its format, and its distance from the entry
//   floats: the same with blocks in formats of floats only, multiplied by rows of bf16 or float
#pragma once

#include "simd.h"
#include "status.h"
#include "stored.h"

namespace {

constexpr int MAX_VALUES = 1 << 24;  // limit of widths and numbers of rows: products of two of them fit 64 bits

// The format of a packed weight; see KINDS in library.py.
enum Kind : int32_t { BF16 = 0, FLOAT = 1, INT8 = 2, INT4 = 3, COMPACT = 4, STORED = 5, FLOATS = 6 };

// the kind of rows that multiply weights of this kind in a pass; INT8 for all quantised ones
inline Kind kind_of_rows(int kind) {
  return kind == INT4 || kind == STORED ? INT8 : kind == COMPACT || kind == FLOATS ? BF16 : static_cast<Kind>(kind);
}
inline bool quantized(int kind) { return kind_of_rows(kind) == INT8; }

// true for weights in four bits, with scales and minima
inline bool four_bits(int kind) { return kind == INT4 || kind == COMPACT; }

// true for weights whose blocks have entries
inline bool has_entries(int kind) { return kind == STORED || kind == FLOATS; }

// A block of a stored weight: its StoredType, and where it begins, relative to this entry.
struct BlockEntry {
  int32_t type, unused;
  int64_t offset;
};

struct Packed {
  const void* data;
  int32_t outputs, width, kind;

  // of weights that are not stored
  int64_t block_bytes() const {
    switch (kind) {
      case BF16: return static_cast<int64_t>(width) * BLOCK * 2;
      case FLOAT: return static_cast<int64_t>(width) * BLOCK * 4;
      case INT8: return static_cast<int64_t>(width) * BLOCK + BLOCK * 4;
      default: return static_cast<int64_t>(width / BLOCK) * Int4::GROUP;
    }
  }
  const BlockEntry& entry(int b) const { return static_cast<const BlockEntry*>(data)[b]; }
  const char* block(int b) const {
    if (has_entries(kind)) return reinterpret_cast<const char*>(&entry(b)) + entry(b).offset;
    return static_cast<const char*>(data) + b * block_bytes();
  }
  int blocks() const { return (outputs + BLOCK - 1) / BLOCK; }

  // the outputs from block ``first`` on
  Packed from(int first) const {
    const void* start = has_entries(kind) ? static_cast<const void*>(&entry(first)) : block(first);
    return {start, outputs - first * BLOCK, width, kind};
  }
};

// A copy of a weight in int8, and bounds of its error for each output, padded to whole blocks: if l is the norm of the rounding
// error of a row x in int8, the output is off by at most |x| error + l size. No data: there is no copy. See screen.h.
struct Screen {
  Packed copy;
  const float *error, *size;
};

// w [outputs, width] row by row -> blocks; ``to`` has space for ceil(outputs / 32) blocks
template <class T>
void pack(const T* w, int outputs, int width, T* to) {
  for (int b = 0; b < (outputs + BLOCK - 1) / BLOCK; ++b)
    for (int k = 0; k < width; k += PER_LANE<T>)
      for (int j = 0; j < BLOCK; ++j)
        for (int c = 0; c < PER_LANE<T>; ++c) {
          const int row = b * BLOCK + j;
          *to++ = row < outputs ? w[static_cast<int64_t>(row) * width + k + c] : T{0};
        }
}

// quantised values [outputs, width]; int8: scales float [outputs]; otherwise scales and minima half [outputs, width / 32]
void pack_quantized(const uint8_t* w, const void* scales, const uint16_t* minima, const Packed& to) {
  const int width = to.width, groups = width / BLOCK, halves = to.kind == INT8 ? 1 : 2, line = 4 * BLOCK;
  const int group_bytes = to.kind == INT8 ? Int8::GROUP : Int4::GROUP;
  for (int b = 0; b < to.blocks(); ++b) {
    uint8_t* block = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(to.block(b)));
    std::memset(block, 0, static_cast<size_t>(to.block_bytes()));
    for (int j = 0; j < BLOCK && b * BLOCK + j < to.outputs; ++j) {
      const int64_t row = b * BLOCK + j;
      for (int k = 0; k < width; k += 4) {  // four values at a time, each in the low half of its byte where it has four bits
        const int quad = k % BLOCK / 4;
        uint8_t* part = block + k / BLOCK * group_bytes + quad / halves * line + 4 * j;
        uint32_t four, stored;
        std::memcpy(&four, w + row * width + k, 4);
        std::memcpy(&stored, part, 4);
        stored |= four << (quad % halves * 4);
        std::memcpy(part, &stored, 4);
      }
      if (to.kind == INT8) {
        std::memcpy(block + groups * group_bytes + 4 * j, static_cast<const float*>(scales) + row, 4);
        continue;
      }
      for (int g = 0; g < groups; ++g) {
        uint16_t* after = reinterpret_cast<uint16_t*>(block + g * group_bytes + 512);
        after[j] = static_cast<const uint16_t*>(scales)[row * groups + g];
        after[BLOCK + j] = minima[row * groups + g];
      }
    }
  }
}

// ---- stored weights -----------------------------------------------------------------------------------------------

constexpr int STORED_ALIGNMENT = 64;

inline int64_t stored_header_bytes(int blocks) {
  const int64_t bytes = blocks * static_cast<int64_t>(sizeof(BlockEntry));
  return bytes + -bytes % STORED_ALIGNMENT + (bytes % STORED_ALIGNMENT ? STORED_ALIGNMENT : 0);
}

// bytes of a block of a type
inline int64_t stored_block_bytes(int type, int width) {
  int64_t bytes = -1;
  const bool known = with_stored_type(type, [&](auto format) {
    require(width % format.RAW_VALUES == 0, "a stored weight's width is not a multiple of its format's blocks");
    bytes = format.bytes(width);
  });
  require(known, "unknown format of a stored weight");
  return bytes;
}

// bytes of a stored weight with blocks of these types
inline int64_t stored_bytes(const int32_t* types, int blocks, int width) {
  int64_t bytes = stored_header_bytes(blocks);
  for (int b = 0; b < blocks; ++b) bytes += stored_block_bytes(types[b], width);
  return bytes;
}

// Checks that a weight of floats has blocks of floats only.
inline void check_type(int kind, int type) {
  bool floats = false;
  with_stored_type(type, [&](auto format) { floats = format.FLOATS; });
  require(kind != FLOATS || floats, "a weight of floats has a block of integers");
}

// Writes the entries of an empty stored weight.
inline void write_entries(const Packed& to, const int32_t* types) {
  auto* entries = static_cast<BlockEntry*>(const_cast<void*>(to.data));
  int64_t at = stored_header_bytes(to.blocks());
  for (int b = 0; b < to.blocks(); at += stored_block_bytes(types[b], to.width), ++b) {
    check_type(to.kind, types[b]);
    entries[b] = {types[b], 0, at - b * static_cast<int64_t>(sizeof(BlockEntry))};
  }
}

// Checks the entries of a stored weight that was read from a file of ``bytes``.
inline void check_entries(const Packed& w, int64_t bytes) {
  require(bytes >= stored_header_bytes(w.blocks()), "a stored weight is cut short");
  int64_t at = stored_header_bytes(w.blocks());
  for (int b = 0; b < w.blocks(); ++b) {
    require(w.entry(b).offset == at - b * static_cast<int64_t>(sizeof(BlockEntry)), "a stored weight's blocks are not in order");
    at += stored_block_bytes(w.entry(b).type, w.width);
    check_type(w.kind, w.entry(b).type);
  }
  require(at == bytes, "a stored weight has another size");
}

// Writes 32 or fewer rows of a file, ``raw_rows``, to block b; returns false if a scale is not finite.
inline bool pack_stored_block(const uint8_t* const* raw_rows, int count, const Packed& to, int b) {
  bool finite = true;
  uint8_t* block = reinterpret_cast<uint8_t*>(const_cast<char*>(to.block(b)));
  with_stored_type(to.entry(b).type, [&](auto format) {
    using F = decltype(format);
    if (count < BLOCK) std::memset(block, 0, static_cast<size_t>(F::bytes(to.width)));
    for (int g = 0; g < to.width / BLOCK; ++g)
      for (int j = 0; j < count; ++j) {
        GroupOf<F> group;
        read_group<F>(raw_rows[j], g, &group);
        finite = finite && is_finite<F>(group);
        put_group<F>(group, block, g, j);
      }
  });
  return finite;
}

// the weights of an output [width]
inline void unpack_stored(const Packed& w, int output, float* to) {
  const int b = output / BLOCK;
  const uint8_t* block = reinterpret_cast<const uint8_t*>(w.block(b));
  with_stored_type(w.entry(b).type, [&](auto format) {
    using F = decltype(format);
    for (int g = 0; g < w.width / BLOCK; ++g) to_floats<F>(get_group<F>(block, g, output % BLOCK), to + g * BLOCK);
  });
}

// the weights of a row of a file [width]
template <class F>
inline void unpack_raw(const uint8_t* row, int width, float* to) {
  for (int g = 0; g < width / BLOCK; ++g) {
    GroupOf<F> group;
    read_group<F>(row, g, &group);
    to_floats<F>(group, to + g * BLOCK);
  }
}

// ---- copies -------------------------------------------------------------------------------------------------------

inline void copy_stored_output(const Packed& from, int output, const Packed& to, int place) {
  const uint8_t* source = reinterpret_cast<const uint8_t*>(from.block(output / BLOCK));
  uint8_t* target = reinterpret_cast<uint8_t*>(const_cast<char*>(to.block(place / BLOCK)));
  with_stored_type(from.entry(output / BLOCK).type, [&](auto format) {
    using F = decltype(format);
    for (int g = 0; g < from.width / BLOCK; ++g)
      put_group<F>(get_group<F>(source, g, output % BLOCK), target, g, place % BLOCK);
  });
}

// Copies outputs of a weight to another of its kind and width, from output ``first`` on. Not for weights in four bits: blocks of
// the others are sequences of lines with four bytes of each output, except for stored ones.
void copy_outputs(const Packed& from, const int64_t* outputs, int count, const Packed& to, int first) {
  constexpr int WORD = 4;
  for (int i = 0; has_entries(from.kind) && i < count; ++i)
    copy_stored_output(from, static_cast<int>(outputs[i]), to, first + i);
  if (has_entries(from.kind)) return;
  for (int i = 0; i < count; ++i) {
    const int output = static_cast<int>(outputs[i]), place = first + i;
    const char* source = from.block(output / BLOCK) + WORD * (output % BLOCK);
    char* target = const_cast<char*>(to.block(place / BLOCK)) + WORD * (place % BLOCK);
    for (int64_t at = 0; at < from.block_bytes(); at += WORD * BLOCK) std::memcpy(target + at, source + at, WORD);
  }
}

// ---- checks -------------------------------------------------------------------------------------------------------

void check_shape(const Packed& w) {
  require(in_range(w.kind, BF16, FLOATS), "unknown kind of packed weight");
  require(in_range(w.outputs, 1, MAX_VALUES) && in_range(w.width, 1, MAX_VALUES), "a packed weight's size is out of range");
  require(w.kind != BF16 || w.width % PER_LANE<bf16> == 0, "a packed bf16 weight has an odd width");
  require(w.kind < INT8 || w.width % BLOCK == 0, "a packed quantised weight's width is not a multiple of 32");
}

void check(const Packed& w) {
  check_shape(w);
  require(w.data != nullptr, "a packed weight has no memory");
}

// a screen of w, if there is one
void check(const Screen& screen, const Packed& w) {
  if (screen.copy.data == nullptr) return;
  check(screen.copy);
  require(!quantized(w.kind) && screen.copy.kind == INT8, "a screen is not an int8 copy of a weight that is not quantised");
  require(screen.copy.outputs == w.outputs && screen.copy.width == w.width, "a screen has another size than its weight");
  require(screen.error != nullptr && screen.size != nullptr, "a screen has no bounds");
}

// true if w can be used in a pass of this kind: both multiply the same rows
inline bool matches(int kind, const Packed& w) { return kind_of_rows(kind) == kind_of_rows(w.kind); }

void check(const Packed& w, int kind, int outputs, int width) {
  check(w);
  require(matches(kind, w), "weights of different types in one pass");
  require(w.outputs == outputs && w.width == width, "a packed weight has the wrong size");
}

}  // namespace
