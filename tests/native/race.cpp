// The kernels' thread pool, products, choices and passes on several threads, for ThreadSanitizer (scripts/sanitize.py):
// every result is, to the bit, that of one thread.

#include "interface.cpp"

namespace {

constexpr int D = 64, HEADS = 4, KV = 2, E = 32, INNER = 96, WORDS = 200, LAYERS = 2, CAPACITY = 64, ROWS = 5, BATCH = 3;

uint32_t noise = 1;
float draw() {
  noise = noise * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(noise)) * 0x1p-31f;
}

template <class T>
std::vector<T> drawn(int64_t count) {
  std::vector<T> made(static_cast<size_t>(count));
  for (T& value : made) {
    if constexpr (std::is_same<T, float>::value)
      value = draw();
    else
      value = to_bf16(draw());
  }
  return made;
}

struct Weight {
  std::vector<char> memory;
  Packed packed;
  Weight(int kind, int outputs, int width) : packed{nullptr, outputs, width, kind} {
    memory.resize(static_cast<size_t>(packed.blocks() * packed.block_bytes()) + 64);
    packed.data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    int status;
    if (kind == FLOAT) {
      status = anabranch_pack(&packed, drawn<float>(outputs * width).data(), nullptr, nullptr);
    } else if (kind == BF16) {
      status = anabranch_pack(&packed, drawn<bf16>(outputs * width).data(), nullptr, nullptr);
    } else {
      std::vector<uint8_t> values(static_cast<size_t>(outputs * width));
      for (auto& value : values) value = static_cast<uint8_t>(static_cast<int>(draw() * 7.0f + 8.0f));
      const std::vector<float> scales(static_cast<size_t>(outputs), 0.01f);
      const std::vector<uint16_t> halves(static_cast<size_t>(outputs * width / 32), 0x2000);
      status = anabranch_pack(&packed, values.data(), kind == INT8 ? static_cast<const void*>(scales.data()) : halves.data(),
                              halves.data());
    }
    if (status != DONE) std::abort();
  }
};

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "race: %s (%s)\n", what, anabranch_message());
  std::exit(1);
}

void* runner_of(int threads) {
  void* made = nullptr;
  expect(anabranch_runner(threads, &made) == threads, "threads");
  return made;
}

// what a pass of all layers, a product, a choice and a draw yield
std::vector<float> results(int kind, void* runner, int quantized_cache) {
  noise = 1;
  const bool floats = kind == FLOAT;
  std::vector<float> ones(D, 1.0f), angles(CAPACITY * E, 0.5f), found, x = drawn<float>(ROWS * D);
  std::vector<Weight> weights;
  std::vector<std::vector<float>> caches;
  Layer layers[LAYERS] = {};
  for (Layer& layer : layers) {
    const int sizes[6][2] = {{(HEADS + 2 * KV) * E, D}, {D, HEADS * E}, {2 * INNER, D}, {D, INNER}, {HEADS * E, D}, {D, HEADS * E}};
    Packed* places[6] = {&layer.qkv, &layer.out, &layer.up, &layer.down, &layer.cross.q, &layer.cross.out};
    for (int i = 0; i < 6; ++i) {
      weights.emplace_back(kind, sizes[i][0], sizes[i][1]);
      *places[i] = weights.back().packed;
    }
    layer.norm_in = layer.norm_mlp = layer.cross.norm = ones.data();
    layer.rope_width = E;
    layer.source = static_cast<int32_t>(&layer - layers);
    for (void** to : {&layer.keys, &layer.values}) *to = caches.emplace_back(static_cast<size_t>(BATCH * KV * CAPACITY * E)).data();
  }
  Shape shape{};
  shape.d = D, shape.heads = HEADS, shape.kv_heads = KV, shape.e = E, shape.inner = INNER, shape.rope_dim = E;
  shape.activation = SILU, shape.gated = 1, shape.eps = 1e-5f, shape.scale = 0.2f;
  shape.residual_scale = shape.embedding_scale = 1.0f;
  const int64_t cached = quantized_cache ? E + E / 8 : E;
  shape.quantized_cache = quantized_cache, shape.row_stride = KV * CAPACITY * cached, shape.head_stride = CAPACITY * cached;
  const int64_t starts[] = {0, 2, 2, ROWS}, lengths[] = {7, 0, 20}, parents[] = {-1, 0, -1, 0, 0};
  const int64_t source_sizes[] = {5, 0, 70}, cache_rows[] = {2, 0, 1};
  const auto wide_source = drawn<float>(LAYERS * KV * 70 * E);
  const auto narrow_source = drawn<bf16>(LAYERS * KV * 70 * E);
  const void* source = floats ? static_cast<const void*>(wide_source.data()) : narrow_source.data();
  const void* const sources[] = {source, nullptr, source};
  const RaggedBatch batch{BATCH, ROWS, 0, 0, CAPACITY, 0, x.data(), angles.data(), angles.data(), starts, lengths, parents,
                          nullptr, cache_rows, source_sizes, sources, sources};
  expect(anabranch_layers(kind, runner, &shape, layers, LAYERS, &batch, nullptr, nullptr, nullptr) == DONE, "layers");
  found = x;

  Weight head(kind, WORDS, D);
  const auto wide = drawn<float>(ROWS * D);
  const auto narrow = drawn<bf16>(ROWS * D);
  const void* rows = floats ? static_cast<const void*>(wide.data()) : narrow.data();
  std::vector<float> scores(ROWS * WORDS);
  std::vector<int64_t> places(2 * ROWS);
  const std::vector<uint64_t> keys{1, 2, 1, 3, 4};
  const int plain = floats ? FLOAT : BF16;
  expect(anabranch_linear(plain, runner, rows, ROWS, &head.packed, nullptr, scores.data()) == DONE, "linear");
  expect(anabranch_choose(plain, runner, rows, ROWS, &head.packed, nullptr, nullptr, places.data()) == DONE, "choose");
  if (kind < INT8) {
    const Weight copy(INT8, WORDS, D);
    const std::vector<float> bounds(WORDS + BLOCK, 10.0f);
    const Screen screen{copy.packed, bounds.data(), bounds.data()};
    std::vector<int64_t> same(ROWS);
    expect(anabranch_choose(plain, runner, rows, ROWS, &head.packed, nullptr, &screen, same.data()) == DONE, "screened");
    expect(std::equal(same.begin(), same.end(), places.begin()), "a screen finds the same token");
  }
  expect(anabranch_draw(runner, scores.data(), ROWS, WORDS, 0.7f, keys.data(), places.data() + ROWS) == DONE, "draw");
  found.insert(found.end(), scores.begin(), scores.end());
  for (const int64_t place : places) found.push_back(static_cast<float>(place));
  return found;
}

}  // namespace

int main() {
  for (const auto& [kind, quantized_cache] : {std::pair{BF16, 0}, {FLOAT, 0}, {INT8, 0}, {INT4, 0}, {BF16, 1}, {FLOAT, 1}}) {
    void* alone = runner_of(1);
    const std::vector<float> wanted = results(kind, alone, quantized_cache);
    delete static_cast<Runner*>(alone);
    for (const int threads : {2, 3, 5}) {
      void* runner = runner_of(threads);
      for (int again = 0; again < 4; ++again)
        expect(std::memcmp(results(kind, runner, quantized_cache).data(), wanted.data(), sizeof(float) * wanted.size()) == 0,
               "other results");
      delete static_cast<Runner*>(runner);
    }
  }
  for (int again = 0; again < 50; ++again) delete static_cast<Runner*>(runner_of(3));  // workers that never had a job
  std::puts("no races");
}
