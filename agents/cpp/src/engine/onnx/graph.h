// One session of onnxruntime and its manifest entry.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/held.h"
#include "engine/onnx/api.h"
#include "engine/onnx/rows.h"

namespace edgefl {

using PageMemory = std::map<std::string, std::byte*>;  // of ports of the role `page`, by name

// Inputs are matched by name, outputs by position: ONNX allows no name on both sides. State that the graph rewrites is
// written into the memory that it is read from where the manifest allows it; the rest moves between two sets of buffers.
class OnnxGraph : public LoadedGraph {
 public:
  // `shrinks`: a run ends with giving the shared arena's memory back to the system. BundleError if session and ports differ.
  OnnxGraph(const Graph& graph, ort::Owned session, bool shrinks);

  Outputs run(const Tensors& feeds, const State& state) override { return run_on(feeds, state, {}); }
  // The same with memory for ports of pages.
  Outputs run_on(const Tensors& feeds, const State& state, const PageMemory& pages);

 private:
  struct Arg {  // an input or output of the session
    std::string name;
    size_t port = 0;  // in inputs_ or outputs_
    std::optional<RowsOf> rows;
    Shape shape;  // of rows, as the graph takes them: as many entries as they have
  };

  std::vector<Arg> described(bool inputs, std::string& wrong) const;
  void check(Arg& arg, const Port& port, size_t at, bool is_input, std::string& wrong) const;
  void bind(const ort::Owned& binding, bool is_input, const Arg& arg, const Port& port, std::byte* data,
            std::vector<ort::Owned>& values) const;

  std::string name_;
  Ports inputs_, outputs_;
  std::vector<std::string> in_place_;
  ort::Owned session_, memory_, run_options_;
  std::vector<Arg> in_, out_;
  Turns turns_;
};

}  // namespace edgefl
