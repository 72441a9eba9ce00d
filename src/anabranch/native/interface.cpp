// The C functions of the kernels; library.py calls them. All sources (this one and those of methods) are compiled as one
// translation unit; see recipe.py.
//
// A small model runs three hundred tiny operations per token, and dispatching them in a framework takes as long as reading
// the weights. Here a pass is one call without allocations.
//
// The kernels are batch-invariant: each row's result is bit-identical for any number of rows in a pass and any location of
// its keys in the cache. A tree of 32 nodes gives the same as 32 passes of one node, in every format. Weights and cache are
// bf16 or float32, or weights are int8 or int4 with a bf16 cache; sums and the residual stream are always float32.
//
// ``kind`` is the type of rows: bf16, float32 or (for layers and drafts) quantised with bf16 caches and states. Functions
// that return an int return a Status, or a non-negative number.

#include "interface.h"

#include <sys/mman.h>

namespace {

void check_rows(const void* runner, const void* x, int kind, int count, const Packed* w, const void* to) {
  require(runner != nullptr && w != nullptr && x != nullptr && to != nullptr, "a pointer is null");
  check(*w);
  require(kind == BF16 || kind == FLOAT, "rows are not bf16 or float32");
  require(quantized(w->kind) || w->kind == FLOATS || kind_of_rows(w->kind) == kind, "rows and a plain weight have different types");
  require(in_range(count, 0, MAX_VALUES), "the number of rows is out of range");
}

// Calls f with a null pointer to the type of rows of this kind.
template <class F>
void with_plain_type(int kind, F&& f) {
  kind == FLOAT ? f(static_cast<float*>(nullptr)) : f(static_cast<bf16*>(nullptr));
}

double to_double(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return static_cast<double>(f);
}

// checks bf16 products of more rows than a tile on this processor
bool products_are_right() {
  constexpr size_t ROWS = 21, OUTPUTS = 40, WIDTH = 96;
  std::vector<bf16> x(ROWS * WIDTH), w(OUTPUTS * WIDTH);
  uint32_t random = 1;
  for (auto* values : {&x, &w})
    for (bf16& value : *values) {
      random = random * 1664525u + 1013904223u;
      value = to_bf16(static_cast<float>(static_cast<int32_t>(random)) * 0x1p-31f);
    }
  Packed packed{nullptr, OUTPUTS, WIDTH, BF16};
  Workspace memory;
  packed.data = memory.of<char>(packed.blocks() * packed.block_bytes() + PREFETCH_BYTES);
  pack(w.data(), OUTPUTS, WIDTH, static_cast<bf16*>(const_cast<void*>(packed.data)));
  std::vector<float> y(ROWS * OUTPUTS);
  Runner runner(1);
  linear(runner, x.data(), ROWS, packed, nullptr, y.data());
  for (size_t m = 0; m < ROWS; ++m)
    for (size_t n = 0; n < OUTPUTS; ++n) {
      double sum = 0.0;
      for (size_t k = 0; k < WIDTH; ++k) sum += to_double(x[m * WIDTH + k]) * to_double(w[n * WIDTH + k]);
      if (!(std::fabs(sum - static_cast<double>(y[m * OUTPUTS + n])) < 1e-4)) return false;
    }
  return true;
}

// Calls f(from, to) for each cache row, of one batch row and some layers, that ``anabranch_move`` copies.
struct Move {
  char *keys, *values;
  int layers, heads;
  int64_t layer_bytes, head_bytes, token_bytes, start;
  const int64_t* nodes;
  int count;

  template <class F>
  void each(F&& f) const {
    for (char* cache : {keys, values})
      for (int l = 0; l < layers; ++l)
        for (int h = 0; h < heads; ++h) {
          char* from = cache + l * layer_bytes + h * head_bytes + start * token_bytes;
          for (int i = 0; i < count; ++i)
            if (nodes[i] != i) f(from + nodes[i] * token_bytes, from + i * token_bytes);
        }
  }
};

}  // namespace

extern "C" {

// its name in INSTRUCTION_SETS in recipe.py
const char* anabranch_instruction_set() { return matrix_tiles ? "amx" : ANABRANCH_KERNELS; }

// Multiplies bf16 in AMX tiles from now on, or does not; for libraries that have them. Call it before all others.
void anabranch_use_tiles(int use) { use_tiles(use != 0); }

// the error message of the calling thread's last failed call
const char* anabranch_message() { return message; }

// Creates a runner with this number of threads, or as many as the system allows; returns how many.
int anabranch_runner(int threads, void** runner) {
  return guarded([&] {
    require(in_range(threads, 1, MAX_THREADS), "the number of threads must be from 1 to 1024");
    auto* made = new Runner(threads);
    *runner = made;
    return made->pool.most();
  });
}

// Requests large pages: weights are read faster with fewer address translations.
void anabranch_advise(void* memory, int64_t bytes) { madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE); }

// 1 if bf16 products are correct on this processor, else 0
int anabranch_multiplies() {
  return guarded([] { return products_are_right() ? 1 : 0; });
}

// stores the size of a packed weight in ``bytes``
int anabranch_packed_bytes(const Packed* w, int64_t* bytes) {
  return guarded([&] {
    check_shape(*w);
    require(!has_entries(w->kind), "the size of a stored weight depends on its blocks");
    *bytes = w->blocks() * w->block_bytes();
    return DONE;
  });
}

// w: unquantised values, or quantised ones with ``scales`` and, in four bits, ``minima``
int anabranch_pack(const Packed* to, const void* w, const void* scales, const void* minima) {
  return guarded([&] {
    check(*to);
    require(!has_entries(to->kind), "a stored weight is packed from a file's rows");
    require(w != nullptr && (to->kind < INT8 || scales != nullptr) && (!four_bits(to->kind) || minima != nullptr),
            "a weight to pack is null");
    void* data = const_cast<void*>(to->data);
    if (to->kind == BF16)
      pack(static_cast<const bf16*>(w), to->outputs, to->width, static_cast<bf16*>(data));
    else if (to->kind == FLOAT)
      pack(static_cast<const float*>(w), to->outputs, to->width, static_cast<float*>(data));
    else
      pack_quantized(static_cast<const uint8_t*>(w), scales, static_cast<const uint16_t*>(minima), *to);
    return DONE;
  });
}

// stores the size of a stored weight with ``blocks`` blocks of these types in ``bytes``
int anabranch_stored_bytes(const int32_t* types, int blocks, int width, int64_t* bytes) {
  return guarded([&] {
    require(types != nullptr && in_range(blocks, 1, MAX_VALUES) && in_range(width, BLOCK, MAX_VALUES), "a stored weight has no size");
    *bytes = stored_bytes(types, blocks, width);
    return DONE;
  });
}

// Makes memory an empty stored weight with blocks of these types.
int anabranch_start_stored(const Packed* to, const int32_t* types) {
  return guarded([&] {
    check(*to);
    require(has_entries(to->kind) && types != nullptr, "a stored weight has no types");
    write_entries(*to, types);
    return DONE;
  });
}

// Checks a stored weight that was read from a file of ``bytes``.
int anabranch_check_stored(const Packed* w, int64_t bytes) {
  return guarded([&] {
    check(*w);
    require(has_entries(w->kind), "not a stored weight");
    check_entries(*w, bytes);
    return DONE;
  });
}

// Writes rows ``order`` (null: all) of a file's tensor to every ``every``-th block of a stored weight from ``first`` on; 1, or 0 if
// a scale is not finite.
int anabranch_pack_stored(void* runner, const Packed* to, int first, int every, int type, const uint8_t* raw, int64_t row_bytes,
                          const int64_t* order, int count) {
  return guarded([&] {
    require(runner != nullptr && raw != nullptr && in_range(count, 1, to->outputs), "there are no rows to store");
    check(*to);
    const int blocks = (count + BLOCK - 1) / BLOCK;
    require(has_entries(to->kind) && first >= 0 && every >= 1 && first + (blocks - 1) * every < to->blocks(), "there is no room");
    for (int i = 0; i < blocks; ++i) require(to->entry(first + i * every).type == type, "a block has another format");
    std::atomic<int> finite{1};
    Runner& self = ready(runner);
    self.pool.run([&](int thread) {
      self.pool.parallel_for(blocks, thread, [&](int i) {
        const uint8_t* rows[BLOCK];
        const int have = std::min(BLOCK, count - i * BLOCK);
        for (int j = 0; j < have; ++j) rows[j] = raw + (order == nullptr ? i * BLOCK + j : order[i * BLOCK + j]) * row_bytes;
        if (!pack_stored_block(rows, have, *to, first + i * every)) finite = 0;
      });
    });
    return finite.load();
  });
}

// the weights of outputs of a stored weight: y [count, width]
int anabranch_unpack_stored(const Packed* w, const int64_t* outputs, int count, float* y) {
  return guarded([&] {
    require(w != nullptr && outputs != nullptr && y != nullptr && count >= 0, "a pointer is null");
    check(*w);
    require(has_entries(w->kind), "not a stored weight");
    for (int i = 0; i < count; ++i) require(in_range(outputs[i], 0, w->outputs - 1), "an output is out of range");
    for (int i = 0; i < count; ++i) unpack_stored(*w, static_cast<int>(outputs[i]), y + static_cast<int64_t>(i) * w->width);
    return DONE;
  });
}

// the weights of rows of a file's tensor: y [count, width]
int anabranch_raw_rows(int type, const uint8_t* raw, int64_t rows, int width, const int64_t* wanted, int count, float* y) {
  return guarded([&] {
    require(raw != nullptr && wanted != nullptr && y != nullptr && count >= 0, "a pointer is null");
    stored_block_bytes(type, width);
    for (int i = 0; i < count; ++i) require(in_range(wanted[i], 0, rows - 1), "a row is out of range");
    with_stored_type(type, [&](auto format) {
      using F = decltype(format);
      for (int i = 0; i < count; ++i)
        unpack_raw<F>(raw + wanted[i] * raw_row_bytes<F>(width), width, y + static_cast<int64_t>(i) * width);
    });
    return DONE;
  });
}

// Copies ``count`` outputs of a packed weight to another one, from output ``first`` on; see copy_outputs.
int anabranch_copy_outputs(const Packed* from, const int64_t* outputs, int count, const Packed* to, int first) {
  return guarded([&] {
    require(from != nullptr && to != nullptr && outputs != nullptr, "a pointer is null");
    check(*from), check(*to);
    require(from->kind == to->kind && from->width == to->width && !four_bits(from->kind), "outputs of another format");
    require(in_range(count, 0, to->outputs) && in_range(first, 0, to->outputs - count), "there is no room for the outputs");
    for (int i = 0; i < count; ++i) {
      require(in_range(outputs[i], 0, from->outputs - 1), "an output is out of range");
      if (has_entries(from->kind))
        require(from->entry(static_cast<int>(outputs[i]) / BLOCK).type == to->entry((first + i) / BLOCK).type, "outputs of another format");
    }
    copy_outputs(*from, outputs, count, *to, first);
    return DONE;
  });
}

// y = x w' + bias, float32
int anabranch_linear(int kind, void* runner, const void* x, int count, const Packed* w, const float* bias, float* y) {
  return guarded([&] {
    check_rows(runner, x, kind, count, w, y);
    with_plain_type(kind, [&](auto* p) {
      linear(ready(runner), static_cast<decltype(p)>(const_cast<void*>(x)), count, *w, bias, y);
    });
    return DONE;
  });
}

// y = LayerNorm (``layer``) or RMS norm of x [count, width] float32; ``bias`` may be null, and is for an RMS norm
int anabranch_norm(int kind, const float* x, int64_t count, int width, const float* weight, const float* bias, int layer,
                   float eps, void* y) {
  return guarded([&] {
    require(x != nullptr && weight != nullptr && y != nullptr, "a pointer is null");
    require(kind == BF16 || kind == FLOAT, "the output of a norm is not bf16 or float32");
    require(in_range(width, BLOCK, MAX_VALUES) && width % BLOCK == 0 && count >= 0, "a norm's width is not in whole blocks");
    with_plain_type(kind, [&](auto* p) {
      Shape s{};
      s.d = width, s.layer_norm = layer, s.eps = eps;
      for (int64_t i = 0; i < count; ++i)
        normalize(s, x + i * width, weight, bias, static_cast<decltype(p)>(y) + i * width);
    });
    return DONE;
  });
}

// see top_log_softmax, for each row of z [count, width]
int anabranch_best(const float* z, int64_t count, int width, int best, float* values, int64_t* places) {
  return guarded([&] {
    require(z != nullptr && values != nullptr && places != nullptr, "a pointer is null");
    require(count >= 0 && in_range(width, 1, MAX_VALUES) && in_range(best, 1, MAX_VALUES), "there are no scores");
    for (int64_t i = 0; i < count; ++i)
      top_log_softmax(z + i * width, width, -INFINITY, best, values + i * best, places + i * best);
    return DONE;
  });
}

// The index of the largest output of each row [count], the first among equals; -1 if it is not finite or any is NaN.
// ``screen`` may be null, and is if there is a bias.
int anabranch_choose(int kind, void* runner, const void* x, int count, const Packed* w, const float* bias,
                     const Screen* screen, int64_t* places) {
  return guarded([&] {
    check_rows(runner, x, kind, count, w, places);
    require(screen == nullptr || bias == nullptr, "a weight with a bias has a screen");
    const Screen used = screen == nullptr ? Screen{} : *screen;
    check(used, *w);
    with_plain_type(kind, [&](auto* p) {
      choose(ready(runner), static_cast<decltype(p)>(const_cast<void*>(x)), count, *w, bias, used, places);
    });
    return DONE;
  });
}

// One index for each row of z [count, width], sampled from softmax(z / temperature) with the noise of the rows' keys; -1 as
// for anabranch_choose.
int anabranch_draw(void* runner, const float* z, int count, int width, float temperature, const uint64_t* keys,
                   int64_t* places) {
  return guarded([&] {
    require(runner != nullptr && z != nullptr && keys != nullptr && places != nullptr, "a pointer is null");
    require(in_range(count, 0, MAX_VALUES) && in_range(width, 1, MAX_VALUES), "there are no scores");
    require(temperature > 0.0f, "the temperature is not above 0");
    sample(ready(runner), z, count, width, temperature, keys, places);
    return DONE;
  });
}

// The Gumbel noise of ``count`` tokens, each at the position whose key has these halves.
int anabranch_gumbels(const int64_t* low, const int64_t* high, const int64_t* tokens, int64_t count, float* noise) {
  return guarded([&] {
    require(count >= 0, "the count is negative");
    require(count == 0 || (low != nullptr && high != nullptr && tokens != nullptr && noise != nullptr), "a pointer is null");
    for (int64_t i = 0; i < count; i += 16) {
      const int n = static_cast<int>(std::min<int64_t>(count - i, 16));
      const U32x16 of_key[] = {masked_load_u32(low + i, n), masked_load_u32(high + i, n)};
      masked_store(noise + i, n, gumbel(masked_load_u32(tokens + i, n), of_key[0], of_key[1]));
    }
    return DONE;
  });
}

// see run_pass and run_with_rider; ``ends``, ``rider`` and ``taps`` may be null
int anabranch_layers(int kind, void* runner, const Shape* shape, const Layer* layers, int count, const RaggedBatch* batch,
                     const Ends* ends, const Rider* rider, const Taps* taps) {
  return guarded([&] {
    check(kind, runner, shape, layers, count, batch, rider == nullptr || rider->prunes() ? 0 : rider->streams.count);
    if (ends == nullptr)
      require(batch->x != nullptr && rider == nullptr, "a pass has no tokens and no rows");
    else
      check(kind, *shape, *batch, *ends);
    const Taps none{}, &tapped = taps == nullptr ? none : *taps;
    int64_t prefill = 0;
    for (int b = 0; ends != nullptr && ends->prefill != nullptr && b < batch->batch; ++b) prefill += ends->prefill[b];
    check(tapped, count, static_cast<int>(batch->nodes - prefill));
    if (rider != nullptr) check(kind, *shape, layers, count, *batch, *ends, *rider);
    with_row_type(kind, [&](auto row_type) {
      using T = typename decltype(row_type)::type;
      Runner& self = ready(runner);
      if (rider == nullptr)
        run_pass<T>(self, *shape, layers, count, *batch, ends, tapped);
      else
        run_with_rider<T>(self, *shape, layers, count, *batch, *ends, *rider, tapped);
    });
    return DONE;
  });
}

// Copies, in keys and values of one batch row [K, capacity, E] and ``layers`` layers, start + nodes[i] to start + i.
int anabranch_move(void* keys, void* values, int layers, int heads, int64_t layer_bytes, int64_t head_bytes,
                   int64_t token_bytes, int64_t start, const int64_t* nodes, int count) {
  return guarded([&] {
    require(keys != nullptr && values != nullptr && (nodes != nullptr || count == 0), "a pointer is null");
    require(layers >= 0 && heads >= 0 && count >= 0 && start >= 0 && token_bytes > 0, "the size of a move is out of range");
    const int64_t capacity = head_bytes / token_bytes;
    for (int i = 0; i < count; ++i)
      require(in_range(nodes[i], i == 0 ? 0 : nodes[i - 1] + 1, capacity - start - 1),
              "nodes to move do not ascend, or are beyond the cache's end");
    const Move move{static_cast<char*>(keys), static_cast<char*>(values), layers, heads, layer_bytes, head_bytes,
                    token_bytes, start, nodes, count};
    // the rows are far apart: prefetch all before waiting for the first
    move.each([&](const char* from, const char* to) {
      for (int64_t i = 0; i < token_bytes; i += 64) prefetch(from + i), prefetch(to + i);
    });
    move.each([&](const char* from, char* to) { std::memcpy(to, from, static_cast<size_t>(token_bytes)); });
    return DONE;
  });
}

}  // extern "C"
