// Error handling: no exception leaves the library. A C function returns a Status, and the message is kept per thread.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

namespace {

// See NO_MEMORY in library.py.
enum Status : int32_t { DONE = 0, NO_MEMORY = -1, REFUSED = -2 };

// the message of the calling thread's last failed call
thread_local char message[256] = "";

// an invalid argument
struct Refusal {
  const char* what;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw Refusal{what};
}

inline bool in_range(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

inline int32_t failed(Status status, const char* what) {
  std::snprintf(message, sizeof(message), "%s", what);
  return status;
}

// calls f, which returns a non-negative number, and turns exceptions into a status
template <class F>
inline int32_t guarded(F&& f) noexcept {
  try {
    return f();
  } catch (const Refusal& refusal) {
    return failed(REFUSED, refusal.what);
  } catch (const std::bad_alloc&) {
    return failed(NO_MEMORY, "out of memory");
  } catch (const std::length_error&) {
    return failed(NO_MEMORY, "more memory than a process can address");
  } catch (const std::exception& error) {
    return failed(REFUSED, error.what());
  }
}

}  // namespace
