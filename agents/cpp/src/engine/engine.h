// What the round runner asks of an engine. State stays inside the engine between calls.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "wire/errors.h"
#include "wire/manifest.h"
#include "wire/tensor.h"

namespace edgefl {

// A tensor that the engine holds; only the engine knows what it is.
struct EngineValue {
  virtual ~EngineValue() = default;
};

using State = std::map<std::string, std::shared_ptr<EngineValue>>;  // by port name: "state.weights.head.bias"

struct Outputs {
  State state;     // still inside the engine
  Tensors arrays;  // everything else, by port name
};

// A graph that is ready to run.
class LoadedGraph {
 public:
  virtual ~LoadedGraph() = default;
  // Runs once. `feeds` holds every input that is not state, by port name; further entries of `state` are ignored, as are
  // further feeds. `state` is used up where the graph rewrites it (Graph::in_place). EngineError if the engine fails.
  virtual Outputs run(const Tensors& feeds, const State& state) = 0;
};

// A runtime for one format of graphs.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string name() const = 0;     // "onnxruntime", "executorch": as Hello.engines has it
  virtual std::string version() const = 0;
  virtual std::string format() const = 0;   // "onnx", "executorch"
  // BundleError if the artifact is damaged, or its ports differ from the manifest's. Takes graphs in segments too.
  virtual std::unique_ptr<LoadedGraph> load(const Graph& graph, Bytes artifact) = 0;
  // A copy of one tensor of the state, for a checkpoint; and back.
  virtual Tensor read(const EngineValue& value) const = 0;
  virtual std::shared_ptr<EngineValue> write(Tensor tensor) const = 0;
  // Give memory back that only a round needs.
  virtual void rest() {}
};

struct EngineOptions {
  int threads = 1;
  std::string pages;  // folder for what graphs in segments keep on the disk; "": the system's for temporary files
};

// The engine for a format; EngineError, which names those that are there, if it is not built in.
std::unique_ptr<Engine> make_engine(const std::string& format, const EngineOptions& options);

// Formats whose engines are built in, the preferred one first.
std::vector<std::string> built_engines();

}  // namespace edgefl
