// AMX's tiles in plain C++, for processors without them: as Intel's manual defines the instructions that avx512.h
// uses (volume 2, TILELOADD, TDPBF16PS and so on), with the faults that the processor would raise. Included before it.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pretended {

struct Tiles {
  bool shaped = false;
  int rows[8] = {}, bytes[8] = {};
  alignas(64) uint8_t data[8][16][64] = {};

  static void fault(const char* why) {
    std::fprintf(stderr, "a processor would refuse: %s\n", why);
    std::abort();
  }

  void shape(const void* from) {
    uint8_t given[64];
    std::memcpy(given, from, 64);
    if (given[0] != 1) fault("no such palette");
    for (int i = 1; i < 16; ++i)
      if (given[i] != 0) fault("reserved bytes or a start row are set");
    for (int t = 0; t < 16; ++t) {
      const int wide = given[16 + 2 * t] | given[17 + 2 * t] << 8, high = given[48 + t];
      if (t >= 8 && (wide != 0 || high != 0)) fault("there are eight tiles");
      if (wide > 64 || high > 16 || (wide == 0) != (high == 0)) fault("a tile has at most 16 rows of 64 bytes");
      if (t < 8) rows[t] = high, bytes[t] = wide;
    }
    std::memset(data, 0, sizeof data);
    shaped = true;
  }

  void release() {
    *this = Tiles();
  }

  void check(int t) const {
    if (!shaped || rows[t] == 0) fault("this tile has no shape");
  }

  void zero(int t) {
    check(t);
    std::memset(data[t], 0, sizeof data[t]);
  }

  void load(int t, const void* base, int64_t stride) {
    check(t);
    std::memset(data[t], 0, sizeof data[t]);
    for (int r = 0; r < rows[t]; ++r)
      std::memcpy(data[t][r], static_cast<const char*>(base) + r * stride, static_cast<size_t>(bytes[t]));
  }

  void store(int t, void* base, int64_t stride) const {
    check(t);
    for (int r = 0; r < rows[t]; ++r)
      std::memcpy(static_cast<char*>(base) + r * stride, data[t][r], static_cast<size_t>(bytes[t]));
  }

  float narrow(int t, int row, int at) const {
    uint16_t half;
    std::memcpy(&half, data[t][row] + 2 * at, 2);
    const uint32_t whole = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &whole, 4);
    return std::fpclassify(value) == FP_SUBNORMAL ? 0.0f : value;
  }

  static float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x; }

  // even and odd values of k are added up apart, then together, then to what was there
  void dot(int to, int a, int b) {
    check(to), check(a), check(b);
    if (to == a || to == b || a == b) fault("a tile twice");
    if (rows[to] != rows[a] || bytes[to] != bytes[b] || bytes[a] / 4 != rows[b]) fault("shapes do not fit");
    for (int m = 0; m < rows[to]; ++m)
      for (int n = 0; n < bytes[to] / 4; ++n) {
        float even = 0.0f, odd = 0.0f, sum;
        for (int k = 0; k < rows[b]; ++k) {
          even = flushed(std::fma(narrow(a, m, 2 * k), narrow(b, k, 2 * n), even));
          odd = flushed(std::fma(narrow(a, m, 2 * k + 1), narrow(b, k, 2 * n + 1), odd));
        }
        std::memcpy(&sum, data[to][m] + 4 * n, 4);
        sum = flushed(sum + flushed(even + odd));
        std::memcpy(data[to][m] + 4 * n, &sum, 4);
      }
  }
};

inline thread_local Tiles tiles;

}  // namespace pretended

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) pretended::tiles.shape(from)
#define _tile_release() pretended::tiles.release()
#define _tile_zero(t) pretended::tiles.zero(t)
#define _tile_loadd(t, base, stride) pretended::tiles.load(t, base, stride)
#define _tile_stored(t, base, stride) pretended::tiles.store(t, base, stride)
#define _tile_dpbf16ps(to, a, b) pretended::tiles.dot(to, a, b)
