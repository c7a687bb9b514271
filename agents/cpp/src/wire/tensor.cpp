#include "wire/tensor.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "wire/errors.h"
#include "wire/half.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

struct Kind {
  std::string_view name;
  size_t bytes;
};
constexpr std::array<Kind, 12> kKinds = {{{"bool", 1}, {"int8", 1}, {"int16", 2}, {"int32", 4}, {"int64", 8}, {"uint8", 1},
                                          {"uint16", 2}, {"uint32", 4}, {"uint64", 8}, {"float16", 2}, {"float32", 4},
                                          {"float64", 8}}};

// Shapes come from manifests that nobody vouches for: a product that wraps would be a small block for a large tensor.
size_t bytes_of(DType dtype, const Shape& shape) {
  const int64_t count = elements(shape), each = static_cast<int64_t>(dtype_bytes(dtype));
  if (count < 0 || count > std::numeric_limits<int64_t>::max() / each) throw Error("a tensor of shape " + shown(shape) + " is larger than any memory");
  return static_cast<size_t>(count * each);
}

template <typename T>
double first_of(const Tensor& tensor) {
  T value;
  std::memcpy(&value, tensor.data.data(), sizeof value);
  return static_cast<double>(value);
}

}  // namespace

size_t dtype_bytes(DType dtype) { return kKinds[static_cast<size_t>(dtype)].bytes; }
std::string_view dtype_name(DType dtype) { return kKinds[static_cast<size_t>(dtype)].name; }

DType dtype_of(std::string_view name) {
  for (size_t i = 0; i < kKinds.size(); ++i)
    if (kKinds[i].name == name) return static_cast<DType>(i);
  throw ProtocolError(in_quotes(name) + " is no element type of a port");
}

bool dtype_floats(DType dtype) { return dtype >= DType::f16; }
bool dtype_integers(DType dtype) { return dtype > DType::boolean && dtype < DType::f16; }

int64_t elements(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size == 0) return 0;
    if (size < 0 || count > std::numeric_limits<int64_t>::max() / size) {
      count = std::numeric_limits<int64_t>::max();
    } else {
      count *= size;
    }
  }
  return count;
}

std::string shown(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

Tensor::Tensor(DType type, Shape dims) : dtype(type), shape(std::move(dims)), data(bytes_of(type, shape)) {}

double Tensor::scalar() const {
  if (count() != 1) throw Error("a tensor of shape " + shown(shape) + " is no single number");
  switch (dtype) {
    case DType::boolean:
    case DType::u8: return first_of<uint8_t>(*this);
    case DType::i8: return first_of<int8_t>(*this);
    case DType::i16: return first_of<int16_t>(*this);
    case DType::i32: return first_of<int32_t>(*this);
    case DType::i64: return first_of<int64_t>(*this);
    case DType::u16: return first_of<uint16_t>(*this);
    case DType::u32: return first_of<uint32_t>(*this);
    case DType::u64: return first_of<uint64_t>(*this);
    case DType::f16: return float_of_half(*as<uint16_t>());
    case DType::f32: return first_of<float>(*this);
    case DType::f64: return first_of<double>(*this);
  }
  return 0.0;
}

bool Tensor::operator==(const Tensor& other) const {
  return dtype == other.dtype && shape == other.shape && data == other.data;
}

}  // namespace edgefl
