// Named tensors: an element type, a shape, and bytes in C order, little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace edgefl {

enum class DType : uint8_t { boolean, i8, i16, i32, i64, u8, u16, u32, u64, f16, f32, f64 };

size_t dtype_bytes(DType dtype);
std::string_view dtype_name(DType dtype);         // as numpy and manifests call it: "float32"
DType dtype_of(std::string_view name);            // of a numpy name; ProtocolError for another
bool dtype_floats(DType dtype);
bool dtype_integers(DType dtype);                 // signed or not; bool is none

using Shape = std::vector<int64_t>;               // [] for a scalar

int64_t elements(const Shape& shape);             // exact for what fits; else, and below 0, INT64_MAX, so it can be compared
std::string shown(const Shape& shape);            // "(3, 32, 32)"

// Owns its bytes. `data.size()` is `elements(shape) * dtype_bytes(dtype)`.
struct Tensor {
  DType dtype = DType::f32;
  Shape shape;
  std::vector<std::byte> data;

  Tensor() = default;
  Tensor(DType type, Shape dims);                 // zeros; Error for more bytes than there can be

  size_t nbytes() const { return data.size(); }
  int64_t count() const { return elements(shape); }
  template <typename T>
  T* as() { return reinterpret_cast<T*>(data.data()); }
  template <typename T>
  const T* as() const { return reinterpret_cast<const T*>(data.data()); }
  double scalar() const;                          // the one entry, as a number; of a 0-d or one-entry tensor
  bool operator==(const Tensor& other) const;     // type, shape and bits
};

using Tensors = std::map<std::string, Tensor>;    // by name, in the ascending order of its bytes

}  // namespace edgefl
