#include "agent/rounds/executor.h"

#include <algorithm>
#include <cmath>

#include "agent/rounds/bounds.h"
#include "data/split.h"
#include "engine/memory.h"
#include "wire/bytes/patches.h"
#include "wire/bytes/safetensors.h"
#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {

void RoundExecutor::run(const Job& job) {
  most_bytes = anonymous_bytes();
  const int64_t idle_bytes = most_bytes;
  if (const std::string why = owner.forbidden(); !why.empty()) throw RoundDeclined("policy", "the policy of this device does not allow it: " + why);
  const Manifest manifest = manifest_of(job);
  const std::shared_ptr<FittedData> fitted = fit_rows(data, manifest, parts_of(manifest));
  RestoredCarry start = take_up(store, job, manifest, dropped);
  const int64_t rows = job.samples > 0 ? std::min(job.samples, fitted->size()) : fitted->size();
  check_steps(manifest, rows, limits);
  int64_t steps = 0;
  for (const int64_t each : manifest.steps_with(rows)) steps += each;
  begins(job, rows, steps, fitted->skipped());
  RoundRequest request;
  request.manifest = &manifest;
  request.seed = static_cast<uint64_t>(job.seed);
  request.samples = job.samples;
  request.hyper = job.hyper;
  request.carry = std::move(start.arrays);
  request.origin = start.origin;
  request.record_tag = job.record_tag();
  request.folder = store.folder();
  request.checkpoint_steps = limits.checkpoint_steps;
  RoundControl guard(limits, owner, aborted);
  RoundResult result = run_round(engine, request, *fitted, host_of(job, guard));
  compare(job, manifest, most_bytes - idle_bytes);
  hand_over(job, manifest, std::move(result), idle_bytes);
}

// Tells people if the round took more memory than planned. The server learns it from the update.
void RoundExecutor::compare(const Job& job, const Manifest& manifest, int64_t used) const {
  int64_t planned = 0;
  for (const Graph* graph : manifest.of_round()) planned = std::max(planned, graph->planned_bytes);
  if (planned == 0 || used <= planned) return;
  exceeded("round " + std::to_string(job.round) + " took " + size_text(static_cast<double>(used)) + ", tier " + in_quotes(job.tier) + " is planned at " +
           size_text(static_cast<double>(planned)) + "; offer less memory to get a smaller tier");
}

Manifest RoundExecutor::manifest_of(const Job& job) {
  if (job.tries > limits.attempts)
    throw RoundDeclined("crashed", "the work on round " + std::to_string(job.round) + " was begun " + std::to_string(limits.attempts) +
                                       " times (limits.attempts), and each time its process ended: this device leaves it");
  if (job.format != engine.format())
    throw RoundDeclined("no-format", "tier " + in_quotes(job.tier) + " is offered in format " + job.format + ", and this device's engine runs " + engine.format() +
                                         ": have the server export that too (formats = [\"" + job.format + "\", \"" + engine.format() +
                                         "\"] in [export]), or start the device with another --engine");
  check_manifest_size(job.bundle, limits);
  trust.check_bundle(job.bundle.sha256, job.signature, job.format);
  Manifest manifest = decode_manifest(fetcher.get(job.bundle));
  for (const Graph& graph : manifest.graphs)
    if (graph.format != engine.format()) throw ProtocolError("the bundle holds " + graph.format + " graphs, this device runs " + engine.format());
  check_runtime(manifest, engine);
  check_graphs(manifest, memory_bytes);
  check_weights(job, manifest);
  return manifest;
}

Tensors RoundExecutor::weights_of(const Job& job, const std::vector<std::string>& units) {
  std::vector<BlobRef> all;
  std::string missing;
  for (const std::string& unit : units) {
    const auto& line = job.line(unit);
    if (line.empty()) missing += (missing.empty() ? "" : ", ") + in_quotes(unit);
    all.insert(all.end(), line.begin(), line.end());
  }
  if (!missing.empty()) throw BundleError("round " + std::to_string(job.round) + " announces no weights for units " + missing + "; export the bundle again");
  // One request for all of it: a store that is nearly full must not drop one part to make room for another.
  fetcher.bring(all);
  Tensors weights;
  for (const std::string& unit : units) {
    const auto& line = job.line(unit);
    Tensors whole = widened(load_tensors(fetcher.get(line[0])));
    for (size_t i = 1; i < line.size(); ++i) whole = patched(std::move(whole), fetcher.get(line[i]));
    for (auto& [name, tensor] : whole) weights[name] = std::move(tensor);
  }
  return weights;
}

DataParts RoundExecutor::parts_of(const Manifest& manifest) {
  DataParts parts;
  parts.blob = [this](const BlobRef& ref) { return fetcher.get(ref); };
  parts.graph = [this, &manifest](const std::string& name) {
    const Graph& graph = manifest.graph(name);
    return load_row_graph(engine, graph, fetcher.get(graph.blob));
  };
  parts.between = [this] {
    if (aborted()) throw RoundAborted("the round ended while the local data were read");
  };
  return parts;
}

RoundHost RoundExecutor::host_of(const Job& job, RoundControl& guard) {
  RoundHost host;
  host.artifact = [this](const BlobRef& ref) { return fetcher.get(ref); };
  host.weights = [this, &job](const std::vector<std::string>& units) { return weights_of(job, units); };
  host.between = [&guard] { guard.between(); };
  host.worked = [this, &guard](double ms) {
    guard.worked(ms);
    most_bytes = std::max(most_bytes, anonymous_bytes());  // the engine keeps what a step took
  };
  host.measured = [this] { most_bytes = std::max(most_bytes, anonymous_bytes()); };
  host.watch = [this, &job](const StepReport& step) { watch(job, step); };
  host.room = [this](int64_t nbytes) {
    try {
      store.make_room_beside(nbytes);
    } catch (const StoreError& error) {
      throw RoundDeclined("too-much-work", error.what());
    }
  };
  host.kept = [this, &job] { return store.checkpoint(job.nonce); };
  host.save = [this, &job](int64_t step, const auto& sums, const std::string& basis, const auto& names, const auto& tensor) {
    store.save_checkpoint(job.nonce, step, sums, basis, names, tensor);
  };
  return host;
}

void RoundExecutor::hand_over(const Job& job, const Manifest& manifest, RoundResult result, int64_t idle_bytes) {
  const Traffic received = fetcher.take_received();
  Update update;
  update.run = job.run;
  update.round = job.round;
  update.device = device;
  update.nonce = job.nonce;
  update.tier = job.tier;
  update.model_version = job.model_version;
  update.samples = result.samples;
  update.metrics = result.metrics;
  update.profile = {result.step_ms, result.forward_ms, result.load_ms, idle_bytes, most_bytes, received.payload, received.wire, fetcher.take_mirrored()};
  update.codec = manifest.codec;
  update.codec_version = manifest.codec_version;
  // An update is as large as what was trained: each form of it goes as soon as the next is made.
  update.tensors = dump_tensors(result.update, result.masks);
  result.update.clear();
  std::optional<Bytes> carry;
  if (!result.carry.empty()) carry = dump_tensors(result.carry);
  result.carry.clear();
  Outgoing outgoing{job.run, job.round, job.nonce, encode(update), job.ask, job.shard};
  update.tensors = Bytes();
  store.finish_job(std::move(outgoing), carry, carry_name(job, manifest));
}

}  // namespace edgefl
