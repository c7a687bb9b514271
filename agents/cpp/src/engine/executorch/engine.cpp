#include "engine/executorch/engine.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "engine/executorch/program.h"
#include "engine/held.h"
#include "engine/memory.h"
#include "wire/digest.h"

namespace edgefl {
namespace {

const std::string kVersion = EDGEFL_EXECUTORCH_VERSION;

std::string listed(const Port& port) { return std::string(dtype_name(port.dtype)) + " " + shown(port.shape); }

// What a program says of its values where it contradicts the manifest, or cannot be given memory for them.
void wrong_ports(const char* kind, const Ports& ports, const std::vector<ProgramValue>& values, bool planned, std::string& wrong) {
  const auto add = [&wrong](const std::string& text) { wrong += (wrong.empty() ? "" : "; ") + text; };
  if (ports.size() != values.size()) {
    add(std::to_string(ports.size()) + " " + kind + " listed, " + std::to_string(values.size()) + " in the program");
    return;
  }
  for (size_t at = 0; at < ports.size(); ++at) {
    const Port& port = ports[at];
    const ProgramValue& value = values[at];
    if (value.dtype != port.dtype || value.shape != port.shape) {
      const std::string found = value.dtype ? std::string(dtype_name(*value.dtype)) : "another type";
      add(port.name + ": " + listed(port) + " listed, " + found + " " + shown(value.shape) + " in the program");
    } else if (value.planned != planned) {
      add(port.name + ": it is in " + (planned ? "the caller's memory" : "memory that the program planned itself"));
    } else if (value.permuted) {
      add(port.name + ": it is not in row order");
    }
  }
}

// Values are matched by position, as a program names none.
class ExecuTorchGraph : public LoadedGraph {
 public:
  ExecuTorchGraph(const Graph& graph, std::unique_ptr<Program> program)
      : name_(graph.name), inputs_(graph.inputs), outputs_(graph.outputs), in_place_(graph.in_place),
        program_(std::move(program)), turns_(in_place_) {}

  Outputs run(const Tensors& feeds, const State& state) override {
    std::vector<Held> held;  // until the call is over: the program has only addresses
    std::vector<void*> sources, targets;
    State read;
    for (const Port& port : inputs_) {
      if (port.role == "state") {
        held.push_back(held_for(port, state, name_));
        read[port.name] = held.back();
        sources.push_back(held.back()->data);
      } else {
        sources.push_back(readable(fed_for(port, feeds, name_), held));
      }
    }
    Outputs outputs;
    for (const Port& port : outputs_) {
      if (port.role == "state") {
        auto target = turns_.target(port, read);
        targets.push_back(target->data);
        outputs.state[port.name] = std::move(target);
      } else {
        targets.push_back(outputs.arrays.emplace(port.name, Tensor(port.dtype, port.shape)).first->second.data.data());
      }
    }
    try {
      program_->run(sources.data(), targets.data());
    } catch (const ProgramError& error) {
      throw EngineError("executorch cannot run graph '" + name_ + "': " + error.what() + "; export the bundle again");
    }
    turns_.ran(read, outputs.state);
    return outputs;
  }

 private:
  // Aligned, and readable a little beyond its end: a copy only where it is not. A process has whole pages, so what follows
  // the end is there unless the next page is meant.
  static void* readable(const Tensor& tensor, std::vector<Held>& held) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(tensor.data.data()), end = start + tensor.nbytes();
    if (start != 0 && start % alignof(std::max_align_t) == 0 && (page - end % page) % page >= kSlack) {
      return const_cast<std::byte*>(tensor.data.data());
    }
    held.push_back(std::make_shared<HeldTensor>(tensor));
    return held.back()->data;
  }

  std::string name_;
  Ports inputs_, outputs_;
  std::vector<std::string> in_place_;
  std::unique_ptr<Program> program_;
  Turns turns_;
};

class ExecuTorchEngine : public Engine {
 public:
  explicit ExecuTorchEngine(const EngineOptions& options) {
    try {
      Program::prepare_process(options.threads);
    } catch (const ProgramError& error) {
      throw EngineError("executorch " + kVersion + " cannot work with " + std::to_string(options.threads) +
                        " threads: " + error.what() + "; choose others by `threads`");
    }
  }

  std::string name() const override { return "executorch"; }
  std::string version() const override { return kVersion; }
  std::string format() const override { return "executorch"; }

  std::unique_ptr<LoadedGraph> load(const Graph& graph, Bytes artifact) override {
    if (!graph.segments.empty()) {
      throw BundleError("graph '" + graph.name + "' is in segments, which the executorch engine does not run: export it " +
                        "with a larger memory budget, or use `engine` onnx");
    }
    // The released runtime follows a program's offsets unchecked: damaged bytes can end the process. Where the blob travels
    // packed, its digest is that of the packed bytes, and whoever unfolded it looked.
    if (graph.blob.codec.empty() && sha256_hex(artifact) != graph.blob.sha256) {
      throw BundleError("graph '" + graph.name + "' is damaged: its digest differs; fetch it again");
    }
    std::unique_ptr<Program> program;
    try {
      program = std::make_unique<Program>(std::move(artifact));
      check(graph, *program);
      program->prepare();
    } catch (const ProgramError& error) {
      throw BundleError("executorch " + kVersion + " cannot load graph '" + graph.name + "': " + error.what() +
                        "; export the bundle for this version");
    }
    release_code();  // of starting and preparing programs, which no step needs
    return std::make_unique<ExecuTorchGraph>(graph, std::move(program));
  }

  Tensor read(const EngineValue& value) const override { return dynamic_cast<const HeldTensor&>(value).copy(); }
  std::shared_ptr<EngineValue> write(Tensor tensor) const override { return std::make_shared<HeldTensor>(tensor); }
  void rest() override { give_memory_back(); }

 private:
  static void check(const Graph& graph, const Program& program) {
    std::string wrong;
    wrong_ports("inputs", graph.inputs, program.inputs(), false, wrong);
    wrong_ports("outputs", graph.outputs, program.outputs(), graph.planned_outputs, wrong);
    if (!wrong.empty()) {
      throw BundleError("graph '" + graph.name + "' and its manifest disagree on " + wrong + ": export the bundle again");
    }
    // The device took the bundle for what its manifest says: no program may allocate more than that.
    const int64_t planned = program.planned_bytes();
    if (graph.planned_bytes != 0 && planned > graph.planned_bytes) {
      throw BundleError("graph '" + graph.name + "' is listed with " + std::to_string(graph.planned_bytes) +
                        " bytes, and its program plans " + std::to_string(planned) + ": export the bundle again");
    }
  }
};

}  // namespace

std::unique_ptr<Engine> executorch_engine(const EngineOptions& options) {
  return std::make_unique<ExecuTorchEngine>(options);
}

}  // namespace edgefl
