// The graphs and the weights of a round, brought in when they are needed, and what they took.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "round/trainer.h"

namespace edgefl {

// Milliseconds since it was made.
class Stopwatch {
 public:
  double ms() const { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began_).count(); }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

class GraphLoader {
 public:
  GraphLoader(Engine& engine, const Manifest& manifest, const RoundHost& host)
      : engine_(engine), manifest_(manifest), host_(host) {}

  const Graph& spec(const std::string& name) const { return manifest_.graph(name); }
  std::unique_ptr<LoadedGraph> load(const Graph& graph);
  // The `weights` inputs of a graph from those of `units`; BundleError if one is missing or has another shape.
  void give_weights(const Graph& graph, const std::vector<std::string>& units, Tensors& feeds) const;
  // One run of a loaded graph; milliseconds go to `took`, and to the host.
  Outputs timed(LoadedGraph& graph, const Tensors& feeds, const State& state, std::vector<double>& took) const;

  // One run of a graph that no step repeats.
  Outputs run_once(const Graph& graph, const Tensors& feeds, const State& state);

  double load_ms = 0.0;

 private:
  Engine& engine_;
  const Manifest& manifest_;
  const RoundHost& host_;
};

double total_of(const std::vector<double>& values);
double median_of(std::vector<double> values);  // 0 of none

}  // namespace edgefl
