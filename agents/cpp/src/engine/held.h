// State as an engine of the CPU holds it: a tensor in memory that may be read a little beyond its end.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "engine/engine.h"

namespace edgefl {

constexpr size_t kAlignment = 64;  // where it begins
constexpr size_t kSlack = 64;      // kernels of XNNPACK may read so far beyond the end of an input

struct HeldTensor : EngineValue {
  DType dtype;
  Shape shape;
  size_t nbytes;
  std::byte* data;

  HeldTensor(DType type, Shape dims);                 // not filled; EngineError if there is no memory
  explicit HeldTensor(const Tensor& tensor);          // a copy
  ~HeldTensor() override { std::free(data); }
  HeldTensor(const HeldTensor&) = delete;
  HeldTensor& operator=(const HeldTensor&) = delete;

  bool fits(const Port& port) const { return dtype == port.dtype && shape == port.shape; }
  Tensor copy() const;
};

using Held = std::shared_ptr<HeldTensor>;

// What `state` holds for a port; BundleError for what is not there, or is another tensor than the graph takes.
Held held_for(const Port& port, const State& state, const std::string& graph);
// What `feeds` holds for a port, the same.
const Tensor& fed_for(const Port& port, const Tensors& feeds, const std::string& graph);

// Where a graph writes its state: in place where the manifest says so, else by turns into one of two sets of buffers.
class Turns {
 public:
  explicit Turns(const std::vector<std::string>& in_place) : in_place_(in_place) {}
  Held target(const Port& port, const State& read);
  // After a run: what was read is where the next one may write.
  void ran(const State& read, const State& written);

 private:
  const std::vector<std::string>& in_place_;
  State made_, spare_;
};

}  // namespace edgefl
