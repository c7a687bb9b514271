// One round on the device, for any manifest: the door between the link (who brings bytes and keeps them) and the engine
// (who computes). The runner knows graphs, roles and ports, and no method by name.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/source.h"
#include "engine/engine.h"
#include "wire/errors.h"
#include "wire/manifest.h"
#include "wire/tensor.h"

namespace edgefl {

struct StepReport {
  std::string stage;  // "forward <k>", "train"
  int64_t step = 0, steps = 0;
  double loss = 0.0;  // mean so far; NaN if there is none
  double step_ms = 0.0;
};

// A checkpoint that was kept. `tensor(name)` reads one at a time.
struct KeptCheckpoint {
  int64_t step = 0;
  std::map<std::string, double> sums;
  std::string basis;
  std::vector<std::string> names;
  std::function<Tensor(const std::string& name)> tensor;
};

// Where blobs come from, and where a round is kept. Each may throw RoundAborted, RoundDeclined, BundleError or StoreError,
// which the runner lets pass.
struct RoundHost {
  // The artifact of a graph, checked and unfolded.
  std::function<Bytes(const BlobRef& ref)> artifact;
  // Weights of some units by global name, patched and widened to float32: fetched when it is called, and not before.
  std::function<Tensors(const std::vector<std::string>& units)> weights;
  // Before every group of rows and every step: throws if the round is over, or rests as long as the owner's rules say.
  std::function<void()> between;
  // A step, or a group of rows, took so many milliseconds.
  std::function<void(double ms)> worked;
  // Reads the memory behind the run of a graph that no step repeats.
  std::function<void()> measured;
  std::function<void(const StepReport&)> watch;
  // Room for a file of so many bytes in `folder`; throws where there is none.
  std::function<void(int64_t nbytes)> room;
  std::function<std::optional<KeptCheckpoint>()> kept;
  // Keep it whole or not at all, in place of any other. `tensor(name)` is called once for each name, one after the other.
  std::function<void(int64_t step, const std::map<std::string, double>& sums, const std::string& basis,
                     const std::vector<std::string>& names, const std::function<Tensor(const std::string&)>& tensor)>
      save;
};

struct RoundRequest {
  const Manifest* manifest = nullptr;
  uint64_t seed = 0;
  int64_t samples = 0;                  // the first so many rows; 0: all
  std::map<std::string, double> hyper;  // Round.hyper, over the manifest's
  Tensors carry;                        // by label; what is not there is zeros
  std::string origin;                   // names the carry; part of the checkpoint's basis
  std::string record_tag;               // what a record belongs to
  std::string folder;                   // for records: record-<k>.bin, record-<k>.meta
  int64_t checkpoint_steps = 5;
};

struct RoundResult {
  Tensors update;                        // by label
  std::map<std::string, int64_t> masks;  // those of the update that are packed masks, with their entries
  Tensors carry;                         // by label; empty: nothing is kept
  std::map<std::string, double> metrics;
  int64_t samples = 0;
  int64_t steps = 0;
  double step_ms = 0, forward_ms = 0, load_ms = 0;  // median, totals
};

// The whole round. Killed and run again with what `save` kept, it gives the same bits.
RoundResult run_round(Engine& engine, const RoundRequest& request, const FittedData& data, const RoundHost& host);

// Load a graph of one batch port and one record port: it makes samples of rows (DataParts::graph). `graph` outlives it.
std::function<Tensor(const Tensor&)> load_row_graph(Engine& engine, const Graph& graph, Bytes artifact);

}  // namespace edgefl
