#include "agent/rounds/bounds.h"

#include <algorithm>

#include "wire/errors.h"
#include "wire/printable.h"
#include "wire/releases.h"

namespace edgefl {
namespace {

constexpr int64_t kLeastBytes = 32 << 20;  // any device is trusted to have: blobs have headers and constants
constexpr int64_t kSlack = 2;              // a unit's blob may hold more than one graph reads
constexpr const char* kRemedy = "give it more (--memory), or a tier that needs less";

int64_t sum(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }

int64_t bytes_of(const Ports& ports) {
  int64_t total = 0;
  for (const Port& port : ports) total = sum(total, port.nbytes());
  return total;
}

std::string size_of(int64_t bytes) { return size_text(static_cast<double>(bytes)); }

void check(const BlobRef& ref, int64_t most, const std::string& what, const std::string& remedy) {
  const int64_t unfolded = std::max(ref.size, ref.raw);
  if (unfolded > most)
    throw RoundDeclined("no-memory", what + " (" + ref.sha256.substr(0, 12) + ") has " + size_of(unfolded) + " where at most " + size_of(most) + " are of use: " + remedy);
}

}  // namespace

void check_manifest_size(const BlobRef& ref, const Limits& limits) {
  check(ref, limits.max_manifest_bytes, "its manifest", "raise limits.max_manifest_bytes");
}

void check_runtime(const Manifest& manifest, const Engine& engine) {
  for (const Graph& graph : manifest.graphs)
    if (!graph.least_runtime.empty() && is_older(engine.version(), graph.least_runtime))
      throw RoundDeclined("no-format", "expected " + engine.name() + " " + graph.least_runtime + " or newer for tier " + in_quotes(manifest.tier) + ", found " +
                                           engine.version() + "; install that release, or build this agent with it");
}

void check_graphs(const Manifest& manifest, int64_t memory_bytes) {
  const int64_t most = std::max(memory_bytes, kLeastBytes);
  for (const BlobRef& ref : manifest.blobs()) check(ref, most, "a blob of the bundle", kRemedy);
  const Graph* largest = nullptr;
  for (const Graph* graph : manifest.of_round()) {
    for (const auto& [name, ports] : {std::pair("reads", &graph->inputs), std::pair("gives", &graph->outputs)})
      if (const int64_t needed = bytes_of(*ports); needed > most)
        throw RoundDeclined("no-memory", "graph " + in_quotes(graph->name) + " " + name + " " + size_of(needed) + " at once, and this device offers " + size_of(memory_bytes) + ": " + kRemedy);
    if (largest == nullptr || graph->planned_bytes > largest->planned_bytes) largest = graph;
  }
  if (largest->planned_bytes > memory_bytes)
    throw RoundDeclined("no-memory", "graph " + in_quotes(largest->name) + " of tier " + in_quotes(manifest.tier) + " needs " + size_of(largest->planned_bytes) +
                                         ", and this device offers " + size_of(memory_bytes) + ": give it more (--memory), or a tier that needs less: its "
                                         "`memory_bytes` in the federation's file keeps smaller devices out");
}

void check_weights(const Job& job, const Manifest& manifest) {
  int64_t read = 0;
  for (const Graph* graph : manifest.of_round()) read = std::max(read, bytes_of(graph->inputs_of("weights")));
  const int64_t most = read > INT64_MAX / kSlack - (1 << 20) ? INT64_MAX : kSlack * read + (1 << 20);
  std::vector<std::string> units = manifest.suffix;
  for (const FrozenChunk& chunk : manifest.prefix) units.insert(units.end(), chunk.units.begin(), chunk.units.end());
  for (const std::string& unit : units)
    for (const BlobRef& ref : job.line(unit)) check(ref, most, "a blob of weights", "have the server publish what the bundle reads");
}

void check_steps(const Manifest& manifest, int64_t rows, const Limits& limits) {
  int64_t steps = 0;
  for (const int64_t each : manifest.steps_with(rows)) steps = sum(steps, each);
  if (steps > limits.max_steps)
    throw RoundDeclined("too-much-work", "the round has " + std::to_string(steps) + " local steps, and this device makes " + std::to_string(limits.max_steps) +
                                             " at most: raise limits.max_steps, or have the server ask for fewer");
}

}  // namespace edgefl
