// What all C functions share: rows by their kind.
#pragma once

#include "pass.h"

namespace {

template <class T>
struct RowType {
  using type = T;
};

// Calls f with the type of the rows between two products of layers of this kind: as RowType<T>.
template <class F>
inline auto with_row_type(int kind, F&& f) {
  if (kind == FLOAT) return f(RowType<float>{});
  if (kind == BF16) return f(RowType<Operand<bf16>>{});
  return f(RowType<QuantizedGroup>{});
}

}  // namespace
