// Memory that grows to the largest request and is kept, so that passes allocate nothing after the first ones.
#pragma once

#include <cstdint>
#include <limits>
#include <new>
#include <vector>

namespace {

class Workspace {
 public:
  // memory for ``count`` values of T, aligned to a cache line; invalidates what earlier requests returned
  template <class T>
  T* of(int64_t count) {
    constexpr int64_t LIMIT = std::numeric_limits<int64_t>::max() / 2 / static_cast<int64_t>(sizeof(T));
    if (count < 0 || count > LIMIT) throw std::bad_alloc();
    const size_t lines = (static_cast<size_t>(count) * sizeof(T) + 63) / 64;
    if (lines_.size() < lines) lines_.resize(lines);
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

}  // namespace
