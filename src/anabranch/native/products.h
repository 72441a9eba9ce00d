// Products of rows with packed weights: y = x w'.
//
// Each row's sums run over k in an order that does not depend on the number of rows (batch-invariant). Rows are multiplied
// in tiles that share a read of a block of weights, and the threads of a job steal blocks from each other.
//
// T, the type of the rows, is Operand<bf16> or float, as the weights are, or QuantizedGroup for weights in int8 and int4.
// Compact weights are expanded to bf16 in the caches, so that their products are those of bf16 weights to the bit. Floats of GGUF
// files are expanded to float there.
#pragma once

#include <memory>
#include <new>

#include "pack.h"
#include "threads.h"
#include "vector_math.h"
#include "workspace.h"

namespace {

constexpr int MANY_ROWS = 256;        // rows multiplied by all blocks of a weight before the next ones are
constexpr int PREFETCH_BYTES = 8192;  // distance between the weights that are read and those that are prefetched
constexpr int WIDE_TILES = 4;         // more tiles multiply widened blocks of stored weights

// values in one T
template <class T>
constexpr int VALUES_PER = 1;
template <>
constexpr int VALUES_PER<QuantizedGroup> = BLOCK;

// offset of row m among rows of T with ``width`` values
template <class T>
inline int64_t row_offset(int64_t row, int width) {
  return row * (width / VALUES_PER<T>);
}

// ---- tiles --------------------------------------------------------------------------------------------------------

// True if rows of ``width`` values are multiplied in the matrix unit. This must not depend on the number of rows, since its
// sums are rounded in another order.
template <class T>
inline bool uses_matrix_tiles(int width) {
  return matrix_tiles && std::is_same<T, bf16>::value && width % BLOCK == 0;
}

template <class T>
inline int max_tile_rows(int width) {
  if (uses_matrix_tiles<T>(width)) return MAX_TILE_ROWS;
  return std::is_same<T, QuantizedGroup>::value ? QUANTIZED_TILE_ROWS : TILE_ROWS;
}

// rows per tile for ``count`` rows of ``width`` values: as few tiles as possible, of about the same size
template <class T>
inline int tile_rows(int count, int width) {
  const int tiles = (count + max_tile_rows<T>(width) - 1) / max_tile_rows<T>(width);
  return tiles == 0 ? 1 : (count + tiles - 1) / tiles;
}

// a group of a compact block -> bf16, laid out like a group of a bf16 block; prefetches the one at ``next``
inline void expand_and_prefetch(const char* group, const char* next, bf16* to) {
  for (int i = 0; i < Int4::GROUP; i += 64) prefetch(next + i);
  expand_group(reinterpret_cast<const uint8_t*>(group), to);
}

inline void clear_sums(Sums& acc, int count) {
  for (int m = 0; m < count; ++m) acc[m][0] = acc[m][1] = zero();
}

// Multiplies the tile that starts at row m of ``count`` by a block of weights; returns the number of its rows. A single tile
// prefetches the weights as it goes; of several tiles, the first two each prefetch one half of the next block, so that
// memory is busy while the others compute.
template <class W, class B, class T>
inline int multiply_rows_by(int m, int count, const T* x, int64_t stride, const char* data, int64_t bytes, int width,
                            Sums& acc) {
  const int size = tile_rows<T>(count, width), n = std::min(size, count - m), tile = m / size;
  const T* rows = x + m * stride;
  const B* block = reinterpret_cast<const B*>(data);
  if (n == count)
    multiply_tile<W, 2>(n, rows, stride, block, width, data + PREFETCH_BYTES, acc);
  else if (tile < 2)
    multiply_tile<W, 1>(n, rows, stride, block, width, data + bytes + tile * (bytes / 2), acc);
  else
    multiply_tile<W, 0>(n, rows, stride, block, width, data, acc);
  return n;
}

// Expanded blocks, kept by each thread while it multiplies tile after tile; a layer alternates between two.
class ExpandedBlocks {
 public:
  // Block b of w in ``size`` bytes, as expand(from, to) writes it for the first tile (m = 0); null if there is no memory.
  template <class Expand>
  const char* of(int m, const Packed& w, int b, int64_t size, Expand&& expand) {
    Kept& kept = kept_[b & 1];
    const char* from = w.block(b);
    if (m > 0 && kept.from == from && kept.size == size) return kept.bytes.get();
    if (kept.capacity < size) {
      kept.bytes.reset(new (std::align_val_t(64), std::nothrow) char[static_cast<size_t>(size)]);
      kept.capacity = kept.bytes ? size : 0;
    }
    kept.from = from, kept.size = size;
    if (kept.bytes) expand(from, kept.bytes.get());
    return kept.bytes.get();
  }

 private:
  struct Delete {
    void operator()(char* bytes) const { operator delete[](bytes, std::align_val_t(64)); }
  };
  struct Kept {
    const char* from = nullptr;
    int64_t size = 0, capacity = 0;
    std::unique_ptr<char[], Delete> bytes;
  };
  Kept kept_[2];
};
thread_local ExpandedBlocks expanded_blocks;

// ``multiply_tile`` for groups of a compact block, each expanded in the first-level cache; prefetches the same number of groups
// from ``next`` on
template <class T>
inline void multiply_expanding(int count, const T* x, int64_t stride, const char* from, int groups, const char* next,
                               Sums& acc) {
  if constexpr (INTERLEAVED_ROWS<T> > 0)
    if (!matrix_tiles && count <= INTERLEAVED_ROWS<T>) return multiply_interleaved(count, x, stride, from, groups, next, acc);
  alignas(64) bf16 expanded[BLOCK * BLOCK];
  for (int g = 0; g < groups; ++g, from += Int4::GROUP, next += Int4::GROUP) {
    expand_and_prefetch(from, next, expanded);
    multiply_tile<bf16, 0>(count, x + g * BLOCK, stride, expanded, BLOCK, nullptr, acc);
  }
}

// Block b of a compact weight as one of bf16
inline const bf16* expanded_to_bf16(int m, const Packed& w, int b) {
  const int64_t groups = w.width / BLOCK, values = BLOCK * BLOCK;
  const auto expand = [&](const char* from, char* to) {
    for (int64_t g = 0; g < groups; ++g, from += Int4::GROUP)
      expand_and_prefetch(from, from + PREFETCH_BYTES, reinterpret_cast<bf16*>(to) + g * values);
  };
  return reinterpret_cast<const bf16*>(expanded_blocks.of(m, w, b, groups * values * 2, expand));
}

// ``multiply_rows_by`` for block b of a compact weight
template <class T>
inline int multiply_compact(int m, int count, const T* x, const Packed& w, int b, Sums& acc) {
  const int size = tile_rows<T>(count, w.width), n = std::min(size, count - m);
  const T* rows = x + static_cast<int64_t>(m) * w.width;
  const bf16* whole = n == count ? nullptr : expanded_to_bf16(m, w, b);
  if (whole != nullptr) {
    multiply_tile<bf16, 0>(n, rows, w.width, whole, w.width, nullptr, acc);
    return n;
  }
  multiply_expanding(n, rows, w.width, w.block(b), w.width / BLOCK, w.block(b) + PREFETCH_BYTES, acc);
  return n;
}

// 32 values of k of a block of floats, and of rows, as floats; prefetches ``bytes`` bytes from ``next`` on
template <class V>
inline void expand_floats(const V* from, const char* next, int64_t bytes, float* to) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(next + i);
  for (int i = 0; i < BLOCK * BLOCK; i += 16) store16(to + i, load16(from + i));
}
template <class T>
inline void row_values(const T* row, float* to) {
  for (int i = 0; i < BLOCK; i += 16) store16(to + i, load16(row + i));
}
inline void row_values(const QuantizedGroup* row, float* to) {
  for (int i = 0; i < BLOCK; i += 16) store16(to + i, load16(row->value + i) * broadcast(row->scale));
}

// acc += 32 values of k of ``count`` rows, at most MAX_TILE_ROWS, times those of a block
inline void multiply_expanded(int count, const float* values, const float* weights, Sums& acc) {
  if (count <= TILE_ROWS) return multiply_tile<float, 0>(count, values, BLOCK, weights, BLOCK, nullptr, acc);
  for (int first = 0; first < count; first += TILE_ROWS) {
    Sums part;
    const int n = std::min(TILE_ROWS, count - first);
    for (int i = 0; i < n; ++i) part[i][0] = acc[first + i][0], part[i][1] = acc[first + i][1];
    multiply_tile<float, 0>(n, values + BLOCK * first, BLOCK, weights, BLOCK, nullptr, part);
    for (int i = 0; i < n; ++i) acc[first + i][0] = part[i][0], acc[first + i][1] = part[i][1];
  }
}

// ``multiply_rows_by`` for a block in a format of floats: each group is expanded in the first-level cache
template <class F, class T>
inline int multiply_floats(int m, int count, const T* x, const char* data, int width, Sums& acc) {
  const int size = tile_rows<T>(count, width), n = std::min(size, count - m), tile = m / size;
  const char* next = n == count ? data + PREFETCH_BYTES : data + F::bytes(width) + tile * (F::bytes(width) / 2);
  const int64_t fetched = n == count ? F::GROUP : tile < 2 ? F::GROUP / 2 : 0;
  const int64_t stride = row_offset<T>(1, width);
  alignas(64) float weights[BLOCK * BLOCK], values[MAX_TILE_ROWS * BLOCK];
  for (int g = 0; g < width / BLOCK; ++g, next += fetched) {
    expand_floats(reinterpret_cast<const typename F::Value*>(data + F::group_at(g)), next, fetched, weights);
    for (int i = 0; i < n; ++i) row_values(x + (m + i) * stride + row_offset<T>(1, BLOCK) * g, values + BLOCK * i);
    multiply_expanded(n, values, weights, acc);
  }
  return n;
}

// ``multiply_rows_by`` for block b of any weight; rows have w.width values
template <class T>
inline int multiply_rows(int m, int count, const T* x, const Packed& w, int b, Sums& acc) {
  using P = Storage<T>;
  if (w.kind == FLOATS) {
    int n = 0;
    with_float_type(w.entry(b).type,
                    [&](auto format) { n = multiply_floats<decltype(format)>(m, count, x, w.block(b), w.width, acc); });
    return n;
  }
  if constexpr (std::is_same<P, bf16>::value)
    if (w.kind == COMPACT) return multiply_compact(m, count, x, w, b, acc);
  return multiply_rows_by<P, P>(m, count, x, w.width, w.block(b), w.block_bytes(), w.width, acc);
}

// block b, in a format of GGUF files, widened; null if there is no memory
template <class F>
inline const uint8_t* widened(int m, const Packed& w, int b) {
  const auto expand = [&](const char* from, char* to) {
    widen(F{}, reinterpret_cast<const uint8_t*>(from), w.width, reinterpret_cast<uint8_t*>(to));
  };
  return reinterpret_cast<const uint8_t*>(expanded_blocks.of(m, w, b, Wide<F>::bytes(w.width), expand));
}

// ``multiply_rows_by`` for block b, in a format of GGUF files. Of a widened one, each tile prefetches a part of the next block.
template <class F>
inline int multiply_stored_by(int m, int count, const QuantizedGroup* x, const Packed& w, int b, Sums& acc) {
  const int size = tile_rows<QuantizedGroup>(count, w.width), n = std::min(size, count - m), tile = m / size;
  const int64_t stride = w.width / BLOCK, bytes = F::bytes(w.width);
  const QuantizedGroup* rows = x + m * stride;
  const char* data = w.block(b);
  if constexpr (WIDENS<F>)
    if (const uint8_t* wide = count > WIDE_TILES * size ? widened<F>(m, w, b) : nullptr) {
      const int64_t part = tile * Wide<F>::prefetched(w.width);
      multiply_stored<Wide<F>>(n, rows, stride, wide, w.width, data + bytes + part, part < bytes ? 1 : 0, acc);
      return n;
    }
  const auto* block = reinterpret_cast<const uint8_t*>(data);
  if (n == count)
    multiply_stored<F>(n, rows, stride, block, w.width, data + PREFETCH_BYTES, 2, acc);
  else if (tile < 2)
    multiply_stored<F>(n, rows, stride, block, w.width, data + bytes + tile * (bytes / 2), 1, acc);
  else
    multiply_stored<F>(n, rows, stride, block, w.width, data, 0, acc);
  return n;
}

inline int multiply_rows(int m, int count, const QuantizedGroup* x, const Packed& w, int b, Sums& acc) {
  if (w.kind == INT8)
    return multiply_rows_by<Int8, uint8_t>(m, count, x, w.width / BLOCK, w.block(b), w.block_bytes(), w.width, acc);
  if (w.kind == INT4) return multiply_stored_by<Int4>(m, count, x, w, b, acc);
  int n = 0;
  with_stored_type(w.entry(b).type, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::FLOATS)
      n = multiply_floats<F>(m, count, x, w.block(b), w.width, acc);
    else
      n = multiply_stored_by<F>(m, count, x, w, b, acc);
  });
  return n;
}

// y = x w' for block b: ``done(m, b, low, high)`` receives 32 outputs of one row
template <class T, class Done>
inline void multiply_block(const T* x, int count, const Packed& w, int b, Done&& done) {
  Sums acc;
  const int size = tile_rows<T>(count, w.width);
  for (int m = 0; m < count; m += size) {
    clear_sums(acc, size);
    const int n = multiply_rows(m, count, x, w, b, acc);
    for (int i = 0; i < n; ++i) done(m + i, b, acc[i][0], acc[i][1]);
  }
}

// ---- on all threads -----------------------------------------------------------------------------------------------

// a thread's part of a product; many rows are multiplied MANY_ROWS at a time, so that the pages of their outputs stay in the
// TLB while block after block of weights is read
template <class T, class Done>
void multiply(ThreadPool& pool, const T* x, int count, const Packed& w, int thread, Done&& done) {
  const int blocks = static_cast<int>(w.blocks());
  const int rows = static_cast<int64_t>(count) * blocks < MAX_VALUES ? MANY_ROWS : count;
  if (count <= rows) {
    pool.parallel_for(blocks, thread, [&](int b) { multiply_block(x, count, w, b, done); });
    return;
  }
  pool.parallel_for((count + rows - 1) / rows * blocks, thread, [&](int i) {
    const int first = i / blocks * rows;
    multiply_block(x + row_offset<T>(first, w.width), std::min(rows, count - first), w, i % blocks,
                   [&](int row, int b, F32x16 low, F32x16 high) { done(first + row, b, low, high); });
  });
}

// ``multiply`` that divides the rows among the threads too, for weights of few blocks
template <class T, class Done>
void multiply_tiles(ThreadPool& pool, const T* x, int count, const Packed& w, int thread, Done&& done) {
  const int blocks = w.blocks(), size = tile_rows<T>(count, w.width);
  pool.parallel_for((count + size - 1) / size * blocks, thread, [&](int i) {
    const int first = i / blocks * size;
    multiply_block(x + row_offset<T>(first, w.width), std::min(size, count - first), w, i % blocks,
                   [&](int row, int b, F32x16 low, F32x16 high) { done(first + row, b, low, high); });
  });
}

// Prefetches the start of a thread's part of a weight, before a barrier: memory is busy while threads wait.
inline void prefetch_weight(const Packed& w, int threads, int thread) {
  if (w.data == nullptr) return;
  int first, last;
  split_range(w.blocks(), threads, thread, &first, &last);
  const char* from = w.block(first);
  for (int i = 0; i < PREFETCH_BYTES; i += 64) prefetch(from + i);
}

// adds the bias (may be null) of block b, which has ``left`` outputs
inline void add_bias(const float* bias, int b, int left, F32x16* low, F32x16* high) {
  if (bias == nullptr) return;
  *low = *low + masked_load(bias + b * BLOCK, left, zero());
  *high = *high + masked_load(bias + b * BLOCK + 16, left - 16, zero());
}

// stores the first ``left`` of 32 outputs
inline void store_outputs(float* to, int left, F32x16 low, F32x16 high) {
  masked_store(to, left, low);
  masked_store(to + 16, left - 16, high);
}

// ---- rows of another type -----------------------------------------------------------------------------------------

// converts a row
template <class P, class T>
inline void convert_row(const P* x, int width, T* y) {
  for (int b = 0; b < width / BLOCK; ++b) store32(y, b, load16(x + b * BLOCK), load16(x + b * BLOCK + 16));
  const int left = width % BLOCK;
  if (left == 0) return;
  P part[BLOCK] = {};  // only unquantised types can have widths that are not multiples of 32
  T as[BLOCK];
  std::copy(x + width - left, x + width, part);
  store32(as, 0, load16(part), load16(part + 16));
  if constexpr (!std::is_same<T, QuantizedGroup>::value) std::copy(as, as + left, y + width - left);
}

// memory for rows of P, converted for multiplication by w; null if they need no conversion
template <class P>
void* conversion_buffer(Workspace& memory, int count, const Packed& w) {
  if (quantized(w.kind)) return memory.of<QuantizedGroup>(row_offset<QuantizedGroup>(count, w.width));
  return std::is_same<Operand<P>, P>::value ? nullptr : memory.of<Operand<P>>(static_cast<int64_t>(count) * w.width);
}

template <class T, class P, class Done>
void multiply_as(ThreadPool& pool, const P* x, int count, const Packed& w, void* buffer, int thread, Done&& done) {
  const T* rows;
  if constexpr (std::is_same<T, P>::value) {
    rows = x;
  } else {
    T* to = static_cast<T*>(buffer);
    int first, last;
    split_range(count, pool.size(), thread, &first, &last);
    for (int i = first; i < last; ++i)
      convert_row(x + static_cast<int64_t>(i) * w.width, w.width, to + row_offset<T>(i, w.width));
    pool.barrier();
    rows = to;
  }
  multiply(pool, rows, count, w, thread, done);
}

// a thread's part of a product of rows of P, converted in ``buffer`` first
template <class P, class Done>
void multiply_converted(ThreadPool& pool, const P* x, int count, const Packed& w, void* buffer, int thread, Done&& done) {
  if (!quantized(w.kind))
    multiply_as<Operand<P>>(pool, x, count, w, buffer, thread, done);
  else
    multiply_as<QuantizedGroup>(pool, x, count, w, buffer, thread, done);
}

}  // namespace
