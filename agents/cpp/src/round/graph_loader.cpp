#include "round/graph_loader.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "round/inputs.h"

namespace edgefl {

std::unique_ptr<LoadedGraph> GraphLoader::load(const Graph& graph) {
  const Stopwatch watch;
  auto loaded = engine_.load(graph, host_.artifact(graph.blob));
  load_ms += watch.ms();
  return loaded;
}

void GraphLoader::give_weights(const Graph& graph, const std::vector<std::string>& units, Tensors& feeds) const {
  Tensors weights = host_.weights(units);
  for (const Port& port : graph.inputs) {
    if (port.role != "weights") continue;
    const auto found = weights.find(port.label());
    if (found == weights.end()) {
      throw BundleError("graph '" + graph.name + "' wants '" + port.label() + "', which the round's weights do not hold");
    }
    check_port(port, found->second);
    feeds[port.name] = std::move(found->second);
  }
}

Outputs GraphLoader::timed(LoadedGraph& graph, const Tensors& feeds, const State& state, std::vector<double>& took) const {
  const Stopwatch watch;
  Outputs outputs = graph.run(feeds, state);
  took.push_back(watch.ms());
  if (host_.worked) host_.worked(took.back());
  return outputs;
}

Outputs GraphLoader::run_once(const Graph& graph, const Tensors& feeds, const State& state) {
  const std::unique_ptr<LoadedGraph> loaded = load(graph);
  Outputs outputs = loaded->run(feeds, state);
  if (host_.measured) host_.measured();  // while the engine holds what the run took
  return outputs;
}

double total_of(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

double median_of(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace edgefl
