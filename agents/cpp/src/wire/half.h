// float16 as float32, exactly.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace edgefl {

inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3FF;
  if (exponent == 0) {  // subnormal: mantissa * 2^-24
    const float value = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace edgefl
