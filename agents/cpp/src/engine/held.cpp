#include "engine/held.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire/errors.h"

namespace edgefl {
namespace {

[[noreturn]] void refuse(const Port& port, DType dtype, const Shape& shape, const std::string& graph) {
  throw BundleError("graph '" + graph + "' takes " + std::string(dtype_name(port.dtype)) + " " + shown(port.shape) + " at '" +
                    port.name + "', and was given " + std::string(dtype_name(dtype)) + " " + shown(shape) +
                    ": the values do not belong to this bundle");
}

[[noreturn]] void missing(const Port& port, const std::string& graph) {
  throw BundleError("graph '" + graph + "' reads '" + port.name +
                    "', which nobody feeds there (see the roles in docs/protocol.md); export the bundle again");
}

}  // namespace

HeldTensor::HeldTensor(DType type, Shape dims) : dtype(type), shape(std::move(dims)) {
  const auto count = static_cast<uint64_t>(elements(shape));
  if (count > SIZE_MAX / 16) throw EngineError("a tensor of shape " + shown(shape) + " is larger than any memory");
  nbytes = static_cast<size_t>(count) * dtype_bytes(dtype);
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, nbytes + kSlack) != 0) {
    throw EngineError("there is no memory for " + std::to_string(nbytes) + " bytes of state: give this device a smaller tier");
  }
  data = static_cast<std::byte*>(memory);
}

HeldTensor::HeldTensor(const Tensor& tensor) : HeldTensor(tensor.dtype, tensor.shape) {
  if (nbytes != 0) std::memcpy(data, tensor.data.data(), nbytes);
}

Tensor HeldTensor::copy() const {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.data.assign(data, data + nbytes);
  return tensor;
}

Held held_for(const Port& port, const State& state, const std::string& graph) {
  const auto found = state.find(port.name);
  auto held = found == state.end() ? nullptr : std::dynamic_pointer_cast<HeldTensor>(found->second);
  if (!held) missing(port, graph);
  if (!held->fits(port)) refuse(port, held->dtype, held->shape, graph);
  return held;
}

const Tensor& fed_for(const Port& port, const Tensors& feeds, const std::string& graph) {
  const auto found = feeds.find(port.name);
  if (found == feeds.end()) missing(port, graph);
  if (found->second.dtype != port.dtype || found->second.shape != port.shape) {
    refuse(port, found->second.dtype, found->second.shape, graph);
  }
  return found->second;
}

Held Turns::target(const Port& port, const State& read) {
  const auto source = read.find(port.name);
  const bool is_read = source != read.end();
  if (is_read && std::find(in_place_.begin(), in_place_.end(), port.name) != in_place_.end()) {
    return std::static_pointer_cast<HeldTensor>(source->second);
  }
  const auto spare = spare_.find(port.name);
  if (spare != spare_.end()) {
    auto held = std::static_pointer_cast<HeldTensor>(spare->second);
    spare_.erase(spare);
    // Whoever calls again with state that was used up must not have it written while it is read.
    if (held->fits(port) && !(is_read && source->second == held)) return held;
  }
  return std::make_shared<HeldTensor>(port.dtype, port.shape);
}

void Turns::ran(const State& read, const State& written) {
  spare_.clear();
  for (const auto& [name, value] : written) {
    const auto source = read.find(name);
    const auto made = made_.find(name);
    // Only what this graph made itself: the first state may be read again, by another graph.
    const bool ours = source != read.end() && made != made_.end() && made->second == source->second;
    if (ours && source->second != value) spare_[name] = source->second;
  }
  made_ = written;
}

}  // namespace edgefl
