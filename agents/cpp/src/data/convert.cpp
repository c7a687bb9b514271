#include "data/convert.h"

#include <cmath>

#include "wire/half.h"

namespace edgefl {
namespace {

// A half has to be rounded once: a double that becomes a float first is rounded to odd, which leaves no tie behind.
float to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (!std::isfinite(nearest) || static_cast<double>(nearest) == value) return nearest;
  uint32_t bits;
  std::memcpy(&bits, &nearest, sizeof bits);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;
  bits |= 1;
  float odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return odd;
}

template <typename To, typename From>
To cast(From value) {
  if constexpr (std::is_same_v<To, Half> && std::is_same_v<From, double>) {
    return halved(to_odd(value));
  } else if constexpr (std::is_same_v<To, Half>) {
    return halved(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <typename T>
void scale(Tensor& values, double factor, double shift) {
  T* at = values.as<T>();
  const T by = static_cast<T>(factor), plus = static_cast<T>(shift);
  for (int64_t count = values.count(); count-- > 0; ++at) {
    *at *= by;  // two roundings: nothing is fused (-ffp-contract=off)
    *at += plus;
  }
}

}  // namespace

float widened(Half half) { return float_of_half(half.bits); }

Half halved(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7E00)};
  const float size = std::fabs(value);
  if (size >= 65520.0F) return {static_cast<uint16_t>(sign | 0x7C00)};
  if (size < 6.103515625e-05F) {  // whole multiples of 2^-24, rounded as the processor rounds: to even
    return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24))))};
  }
  const uint32_t rounded = (bits & 0x7FFFFFFF) + 0xFFF + ((bits >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded >> 13) - (112U << 10)))};
}

Tensor converted(Tensor values, DType dtype) {
  if (values.dtype == dtype) return values;
  Tensor made(dtype, values.shape);
  with_type(values.dtype, [&](auto from) {
    with_type(dtype, [&](auto to) {
      using To = decltype(to);
      To* into = made.as<To>();
      for (int64_t at = 0, count = made.count(); at < count; ++at) {
        into[at] = cast<To>(entry<decltype(from)>(values.data.data(), at));
      }
    });
  });
  return made;
}

Tensor as_read(Tensor samples, const DataSpec& spec) {
  if (samples.dtype == spec.dtype || !dtype_floats(spec.dtype)) return converted(std::move(samples), spec.dtype);
  Tensor floats = converted(std::move(samples), spec.dtype);
  if (spec.dtype == DType::f32) {
    scale<float>(floats, spec.scale, spec.shift);
  } else if (spec.dtype == DType::f64) {
    scale<double>(floats, spec.scale, spec.shift);
  } else {
    const float by = widened(halved(static_cast<float>(spec.scale)));
    const float plus = widened(halved(static_cast<float>(spec.shift)));
    for (Half *at = floats.as<Half>(), *end = at + floats.count(); at < end; ++at) {
      *at = halved(widened(halved(widened(*at) * by)) + plus);
    }
  }
  return floats;
}

Tensor filled(const Shape& shape, DType dtype, double value) {
  Tensor made(dtype, shape);
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (T *at = made.as<T>(), *end = at + made.count(); at < end; ++at) *at = cast<T>(value);
  });
  return made;
}

}  // namespace edgefl
