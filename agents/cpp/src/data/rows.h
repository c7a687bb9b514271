// Arrays of local data, read row by row: in memory, in a mapped file, of a caller, or picked from another.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "data/source.h"
#include "wire/tensor.h"

namespace edgefl {

class Rows {
 public:
  DType dtype = DType::f32;
  Shape shape;        // of one row
  int64_t count = 0;  // rows
  bool whole = true;  // false: one value, no rows at all

  virtual ~Rows() = default;
  virtual void read(int64_t row, std::byte* into) const = 0;  // row_bytes() of them; DataError if it cannot
  virtual void released() const {}                            // what was read may leave memory

  int64_t row_count() const { return elements(shape); }
  size_t row_bytes() const { return static_cast<size_t>(row_count()) * dtype_bytes(dtype); }
  Shape all() const;                                          // (count, *shape)
  Tensor picked(const Indices& indices) const;                // (n, *shape)
};

using RowsPtr = std::shared_ptr<const Rows>;
using NamedRows = std::map<std::string, RowsPtr>;

RowsPtr rows_of(Tensor values);                                        // its first axis are the rows
RowsPtr reshaped(RowsPtr rows, Shape shape);                           // other axes of one row, as many entries
RowsPtr picked_rows(RowsPtr rows, Indices kept);
// Bytes in a mapped file, which `owner` keeps mapped. `shape` is that of the whole array.
RowsPtr mapped_rows(std::shared_ptr<const void> owner, const std::byte* data, DType dtype, const Shape& shape,
                    std::function<void()> released);
// Rows that are made when they are asked for.
RowsPtr made_rows(DType dtype, Shape shape, int64_t count, std::function<void(int64_t, std::byte*)> make);

}  // namespace edgefl
