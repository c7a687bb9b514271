// What feeds the ports of a graph, by role: batches, facts about the data, scalars and noise. All of it is a function of the
// seed and the number of the step.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/batches.h"
#include "data/source.h"
#include "wire/manifest.h"

namespace edgefl {

// DataError or BundleError if `tensor` is not what `port` takes.
void check_port(const Port& port, const Tensor& tensor);
// BundleError if an input of `graph` is in neither.
void check_complete(const Graph& graph, const Tensors& feeds, const std::function<bool(const std::string&)>& in_state);
// Those of one role, by label.
Tensors labelled(Tensors& arrays, const std::string& role);
// `rows` of an input beside x, or of the samples themselves; BundleError if the manifest does not describe it.
Tensor other_rows(const FittedData& data, const Port& port, const Indices& rows);
// "0.x" -> (0, "x").
std::pair<int64_t, std::string> stream_and_part(const Port& port);

class RoundInputs {
 public:
  // `features` takes the place of the samples where units before the trained ones have seen them already; may be null.
  RoundInputs(const Manifest& manifest, uint64_t seed, const FittedData& data, std::map<std::string, double> hyper,
        std::function<Tensor(const Indices&)> features);

  // What any function may read: scalars of the task, facts about the data, and noise of its own (draw `number`).
  void give(const Graph& graph, int64_t number, Tensors& feeds);
  // Batches of a step, each stream's of the size that the ports of `whole` have, cut to those of `graph`.
  void give_batches(const Graph& whole, const Graph& graph, int64_t step, Tensors& feeds);
  // The batch of a step of a pass over the data, with its mask.
  void give_pass(const Graph& graph, int64_t step, Tensors& feeds) const;
  // Tokens of the longest sample in the batches that `graph` reads in a step.
  int64_t longest(const Graph& graph, int64_t step);

 private:
  Indices drawn(int64_t stream, int64_t rows, int64_t step);
  Tensor part(const Port& port, const Indices& rows) const;
  const std::vector<int64_t>& lengths();

  uint64_t seed_;
  const FittedData& data_;
  std::map<std::string, double> hyper_;
  std::string draws_;
  std::function<Tensor(const Indices&)> features_;
  std::vector<int64_t> edges_;  // the lengths that there are graphs for beside the whole one, ascending
  std::optional<std::vector<int64_t>> lengths_;
  std::vector<int64_t> buckets_;
  std::map<int64_t, Batches> batches_;  // by their rows
  std::optional<Tensors> facts_;
};

}  // namespace edgefl
