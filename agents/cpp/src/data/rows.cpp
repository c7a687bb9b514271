#include "data/rows.h"

#include <cstring>
#include <utility>

namespace edgefl {
namespace {

struct MemoryRows : Rows {
  Tensor values;
  void read(int64_t row, std::byte* into) const override {
    std::memcpy(into, values.data.data() + static_cast<size_t>(row) * row_bytes(), row_bytes());
  }
};

struct MappedRows : Rows {
  std::shared_ptr<const void> owner;
  const std::byte* data = nullptr;
  std::function<void()> release;
  void read(int64_t row, std::byte* into) const override {
    std::memcpy(into, data + static_cast<size_t>(row) * row_bytes(), row_bytes());
  }
  void released() const override { release(); }
};

struct MadeRows : Rows {
  std::function<void(int64_t, std::byte*)> make;
  void read(int64_t row, std::byte* into) const override { make(row, into); }
};

struct Reshaped : Rows {
  RowsPtr inner;
  void read(int64_t row, std::byte* into) const override { inner->read(row, into); }
  void released() const override { inner->released(); }
};

struct Picked : Rows {
  RowsPtr inner;
  Indices kept;
  void read(int64_t row, std::byte* into) const override { inner->read(kept[static_cast<size_t>(row)], into); }
  void released() const override { inner->released(); }
};

void take_shape(Rows& rows, DType dtype, const Shape& shape) {
  rows.dtype = dtype;
  rows.whole = !shape.empty();
  rows.count = shape.empty() ? 0 : shape.front();
  if (!shape.empty()) rows.shape.assign(shape.begin() + 1, shape.end());
}

}  // namespace

Shape Rows::all() const {
  Shape found{count};
  found.insert(found.end(), shape.begin(), shape.end());
  return found;
}

Tensor Rows::picked(const Indices& indices) const {
  Shape wanted{static_cast<int64_t>(indices.size())};
  wanted.insert(wanted.end(), shape.begin(), shape.end());
  Tensor found(dtype, wanted);
  std::byte* into = found.data.data();
  for (const int64_t row : indices) {
    read(row, into);
    into += row_bytes();
  }
  released();
  return found;
}

RowsPtr rows_of(Tensor values) {
  auto made = std::make_shared<MemoryRows>();
  take_shape(*made, values.dtype, values.shape);
  made->values = std::move(values);
  return made;
}

RowsPtr reshaped(RowsPtr rows, Shape shape) {
  auto made = std::make_shared<Reshaped>();
  made->dtype = rows->dtype;
  made->count = rows->count;
  made->shape = std::move(shape);
  made->inner = std::move(rows);
  return made;
}

RowsPtr picked_rows(RowsPtr rows, Indices kept) {
  auto made = std::make_shared<Picked>();
  made->dtype = rows->dtype;
  made->shape = rows->shape;
  made->count = static_cast<int64_t>(kept.size());
  made->inner = std::move(rows);
  made->kept = std::move(kept);
  return made;
}

RowsPtr mapped_rows(std::shared_ptr<const void> owner, const std::byte* data, DType dtype, const Shape& shape,
                    std::function<void()> released) {
  auto made = std::make_shared<MappedRows>();
  take_shape(*made, dtype, shape);
  made->owner = std::move(owner);
  made->data = data;
  made->release = std::move(released);
  return made;
}

RowsPtr made_rows(DType dtype, Shape shape, int64_t count, std::function<void(int64_t, std::byte*)> make) {
  auto made = std::make_shared<MadeRows>();
  made->dtype = dtype;
  made->shape = std::move(shape);
  made->count = count;
  made->make = std::move(make);
  return made;
}

}  // namespace edgefl
