#include "wire/bytes/patches.h"

#include <cmath>

#include "wire/errors.h"
#include "wire/half.h"
#include "wire/printable.h"
#include "wire/bytes/safetensors.h"

namespace edgefl {
namespace {

constexpr const char* kScales = "/scales";

[[noreturn]] void unfit(const std::string& why) {
  throw BundleError("a patch does not fit the weights it is for: " + why + "; the server must publish it again");
}

void check(const std::string& name, const Tensor& change, const Tensors& weights) {
  const auto old = weights.find(name);
  if (old == weights.end()) unfit("the weights have no tensor " + in_quotes(name));
  const DType wanted = change.dtype == DType::i8 ? DType::f32 : change.dtype;
  if (change.shape != old->second.shape || old->second.dtype != wanted)
    unfit("tensor " + in_quotes(name) + " is " + std::string(dtype_name(change.dtype)) + " " + shown(change.shape) + ", for one of " +
          std::string(dtype_name(old->second.dtype)) + " " + shown(old->second.shape));
}

// Each operation is rounded to float32 by itself: the build forbids fusing (-ffp-contract=off).
void move(const std::string& name, Tensor& weight, const Tensor& codes, float step) {
  float* values = weight.as<float>();
  const int8_t* code = codes.as<int8_t>();
  bool finite = true;
  for (int64_t i = 0, count = weight.count(); i < count; ++i) {
    const float change = static_cast<float>(code[i]) * step;
    values[i] = values[i] + change;
    finite = finite && std::isfinite(values[i]);
  }
  if (!finite) unfit("tensor " + in_quotes(name) + " would hold NaN or infinity");
}

}  // namespace

Tensors patched(Tensors weights, std::string_view patch) {
  Tensors changes;
  try {
    changes = load_tensors(patch, 0);
  } catch (const ProtocolError& error) {
    unfit(error.what());
  }
  const auto node = changes.extract(kScales);
  int64_t coded = 0;
  for (const auto& [name, change] : changes) coded += change.dtype == DType::i8;
  if (node.empty() || node.mapped().dtype != DType::f32 || node.mapped().shape != Shape{coded})
    unfit("it should hold " + std::to_string(coded) + " float32 scales");
  const float* scale = node.mapped().as<float>();
  for (int64_t i = 0; i < coded; ++i)
    if (!std::isfinite(scale[i])) unfit("a scale is not finite");
  for (const auto& [name, change] : changes) check(name, change, weights);
  for (auto& [name, change] : changes) {  // by ascending name, as the scales are
    if (change.dtype == DType::i8) {
      move(name, weights[name], change, *scale++ / 127.0f);
    } else {
      weights[name] = std::move(change);
    }
  }
  return weights;
}

Tensors widened(Tensors weights) {
  for (auto& [name, tensor] : weights) {
    if (tensor.dtype != DType::f16) continue;
    Tensor wide(DType::f32, tensor.shape);
    const uint16_t* halves = tensor.as<uint16_t>();
    float* values = wide.as<float>();
    for (int64_t i = 0, count = wide.count(); i < count; ++i) values[i] = float_of_half(halves[i]);
    tensor = std::move(wide);
  }
  return weights;
}

}  // namespace edgefl
