// Numbers of one type as another, as numpy's astype and in-place arithmetic make them.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>

#include "wire/errors.h"
#include "wire/manifest.h"
#include "wire/tensor.h"

namespace edgefl {

struct Half {  // the bits of a float16
  uint16_t bits;
};

float widened(Half half);
Half halved(float value);  // rounded to the nearest, ties to even; what is too large becomes infinite

// Calls `use` with a zero of the C++ type that `dtype` has in memory.
template <typename Use>
auto with_type(DType dtype, Use use) {
  switch (dtype) {
    case DType::boolean: return use(bool{});
    case DType::i8: return use(int8_t{});
    case DType::i16: return use(int16_t{});
    case DType::i32: return use(int32_t{});
    case DType::i64: return use(int64_t{});
    case DType::u8: return use(uint8_t{});
    case DType::u16: return use(uint16_t{});
    case DType::u32: return use(uint32_t{});
    case DType::u64: return use(uint64_t{});
    case DType::f16: return use(Half{});
    case DType::f32: return use(float{});
    case DType::f64: return use(double{});
  }
  throw ProtocolError("a tensor has an element type that this agent does not know");
}

// Entry `at` of bytes that need not be aligned; a half as float.
template <typename T>
auto entry(const std::byte* data, int64_t at) {
  T value;
  std::memcpy(&value, data + at * static_cast<int64_t>(sizeof(T)), sizeof(T));
  if constexpr (std::is_same_v<T, Half>) {
    return widened(value);
  } else {
    return value;
  }
}

Tensor converted(Tensor values, DType dtype);            // astype
Tensor as_read(Tensor samples, const DataSpec& spec);    // integers become x * scale + shift where floats are read
Tensor filled(const Shape& shape, DType dtype, double value);

}  // namespace edgefl
