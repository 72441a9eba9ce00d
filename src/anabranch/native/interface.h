// Dispatch on the kind of rows, shared by all C functions.
#pragma once

#include "pass.h"

namespace {

template <class T>
struct RowType {
  using type = T;
};

// Calls f with RowType<T>, where T is the type of the rows between the products of layers of this kind.
template <class F>
inline auto with_row_type(int kind, F&& f) {
  const Kind rows = kind_of_rows(kind);
  if (rows == FLOAT) return f(RowType<float>{});
  if (rows == BF16) return f(RowType<Operand<bf16>>{});
  return f(RowType<QuantizedGroup>{});
}

}  // namespace
