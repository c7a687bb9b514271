#include "engine/onnx/engine.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "engine/memory.h"
#include "engine/onnx/graph.h"
#include "engine/pages.h"

namespace edgefl {
namespace {

using ort::Owned;
using ort::api;

constexpr std::string_view kLocation = "location";
constexpr size_t kLongest = 8;  // bytes of a protobuf number between its first and its last

// Where a number of protobuf may begin that ends at `end`: the byte `plain`, or one of ten forms that mean the same.
std::vector<size_t> beginnings(std::string_view data, size_t end, uint8_t plain) {
  std::vector<size_t> found;
  const auto byte = [&data](size_t at) { return static_cast<uint8_t>(data[at]); };
  if (end > 0 && byte(end - 1) == plain) found.push_back(end - 1);
  if (end < 2 || byte(end - 1) >= 0x80) return found;
  for (size_t at = end - 2, between = 0; between <= kLongest; --at, ++between) {
    if (byte(at) == (plain | 0x80)) found.push_back(at);
    if (byte(at) < 0x80 || at == 0) break;
  }
  return found;
}

// Whether a tensor anywhere in a model may have its numbers in a file: it names the file under the key `location`, field 1
// of its message (10), a string of 8 letters. What is refused beside it is another field 1 of that name.
bool names_file(std::string_view model) {
  for (size_t at = model.find(kLocation); at != std::string_view::npos; at = model.find(kLocation, at + 1)) {
    for (const size_t length : beginnings(model, at, 8)) {
      if (!beginnings(model, length, 10).empty()) return true;
    }
  }
  return false;
}

constexpr size_t kDoubling = 0, kAsRequested = 1;  // how an arena grows
constexpr size_t kMostUnused = 4096, kGrowth = size_t{1} << 20;
constexpr int64_t kLargestBlock = INT32_MAX;

// Registers an empty arena for the sessions that are created next; false if this release of onnxruntime keeps the first one
// of a process. Sessions keep their arena, so registering another gives each graph one of its own, which ends with it.
// Segments share one: otherwise a segment could not use what the one before it has freed. `arena_bytes` of the manifest
// become one block: onnxruntime's own arena doubles block by block, and RLIMIT_DATA counts addresses that it does not use.
bool renew_arena(const Graph* graph = nullptr) {
  const int64_t planned = graph == nullptr || !graph->segments.empty() ? 0 : std::min({graph->arena_bytes, graph->planned_bytes, kLargestBlock});
  constexpr std::array keys{"max_dead_bytes_per_chunk", "arena_extend_strategy", "initial_chunk_size_bytes", "max_power_of_two_extend_bytes"};
  const std::array<size_t, keys.size()> values{kMostUnused, planned > 0 ? kDoubling : kAsRequested, static_cast<size_t>(planned), kGrowth};
  Owned memory(api().ReleaseMemoryInfo), settings(api().ReleaseArenaCfg);
  try {
    api().check(api().CreateMemoryInfo("Cpu", ort::kArenaAllocator, 0, ort::kDefaultMemory, memory.out()));
    api().check(api().CreateArenaCfgV2(keys.data(), values.data(), planned > 0 ? keys.size() : 2, settings.out()));
    api().check(api().CreateAndRegisterAllocator(ort::env(), memory.get(), settings.get()));
  } catch (const ort::Failed&) {
    return false;
  }
  return true;
}

struct ArenaEnds {  // registers another when a graph is loaded, so that the graph's own ends with it
  ~ArenaEnds() { renew_arena(); }
};

// The first bytes of session options, in which onnxruntime has flags of one byte each.
using OptionBytes = std::array<unsigned char, 96>;

// The place of the one flag that `change` clears; the size of the array if it is not one flag.
template <typename Change>
size_t cleared_by(const OptionBytes& options, const Change& change) {
  const OptionBytes before = options;
  change();
  size_t place = before.size();
  for (size_t at = 0; at < before.size(); ++at) {
    if (before[at] == options[at]) continue;
    if (place != before.size() || before[at] != 1 || options[at] != 0) return before.size();
    place = at;
  }
  return place;
}

// Both plans keep memory for longer than the arena alone. The pattern of the first run is one more block beside what that
// run took. A value that is planned into the block of a dead one keeps it from then on: a step of ResNet-18 takes 280 MiB
// in place of 185. Python turns that off by `enable_mem_reuse`, and the C API has no function for it. In the releases below
// the flag lies between those of two settings that have one. It is cleared in these alone, and where both are found.
constexpr std::string_view kKnownLayout = "1.32.";

void disable_pattern_and_reuse(ort::Object options) {
  if (std::string_view(api().version).substr(0, kKnownLayout.size()) != kKnownLayout) {
    api().check(api().DisableMemPattern(options));
    return;
  }
  auto& bytes = *reinterpret_cast<OptionBytes*>(options);
  const size_t pattern = cleared_by(bytes, [&] { api().check(api().DisableMemPattern(options)); });
  const size_t arena = cleared_by(bytes, [&] { api().check(api().DisableCpuMemArena(options)); });
  api().check(api().EnableCpuMemArena(options));
  if (pattern < bytes.size() && arena == pattern + 2 && bytes[pattern + 1] == 1) bytes[pattern + 1] = 0;
}

// Segments that run one after another, and the pages between them. Every segment reads the state that the step began with.
class SegmentedGraph : public LoadedGraph {
 public:
  SegmentedGraph(std::vector<Graph> parts, std::vector<std::unique_ptr<OnnxGraph>> loaded, const std::string& folder)
      : parts_(std::move(parts)), loaded_(std::move(loaded)), pages_(made(parts_), folder) {}

  Outputs run(const Tensors& feeds, const State& state) override {
    Outputs whole;
    for (size_t at = 0; at < parts_.size(); ++at) {
      std::vector<Pages::Mapped> mapped;  // in memory while the segment runs
      PageMemory memory;
      for (const Ports* ports : {&parts_[at].inputs, &parts_[at].outputs}) {
        for (const Port& port : *ports) {
          if (port.role != "page") continue;
          mapped.push_back(pages_.mapped(port));
          memory[port.name] = mapped.back().data;
        }
      }
      Outputs outputs = loaded_[at]->run_on(feeds, state, memory);
      for (auto& [name, value] : outputs.state) whole.state[name] = std::move(value);
      for (auto& [name, array] : outputs.arrays) whole.arrays[name] = std::move(array);
    }
    return whole;
  }

 private:
  static Ports made(const std::vector<Graph>& parts) {
    Ports found;
    for (const Graph& part : parts) {
      for (const Port& port : part.outputs) {
        if (port.role == "page") found.push_back(port);
      }
    }
    return found;
  }

  std::vector<Graph> parts_;
  std::vector<std::unique_ptr<OnnxGraph>> loaded_;
  Pages pages_;
};

class OnnxEngine : public Engine {
 public:
  explicit OnnxEngine(const EngineOptions& options) : options_(options) { renew_arena(); }

  std::string name() const override { return "onnxruntime"; }
  std::string version() const override { return api().version; }
  std::string format() const override { return "onnx"; }

  std::unique_ptr<LoadedGraph> load(const Graph& graph, Bytes artifact) override {
    const ArenaEnds ends;
    const bool has_arena = renew_arena(&graph);
    if (graph.segments.empty()) return loaded(graph, artifact, false, has_arena);
    const std::vector<Bytes> artifacts = split_segments(artifact);
    artifact = Bytes();
    if (artifacts.size() != graph.segments.size()) {
      throw BundleError("graph '" + graph.name + "' has " + std::to_string(graph.segments.size()) +
                        " segments in its manifest and " + std::to_string(artifacts.size()) +
                        " in its blob; export the bundle again");
    }
    std::vector<Graph> parts;
    std::vector<std::unique_ptr<OnnxGraph>> made;
    for (size_t at = 0; at < artifacts.size(); ++at) {
      Graph part = graph;
      part.inputs = graph.segments[at].inputs;
      part.outputs = graph.segments[at].outputs;
      part.in_place = graph.segments[at].in_place;
      made.push_back(loaded(part, artifacts[at], true, true));
      parts.push_back(std::move(part));
    }
    return std::make_unique<SegmentedGraph>(std::move(parts), std::move(made), options_.pages);
  }

  Tensor read(const EngineValue& value) const override { return dynamic_cast<const HeldTensor&>(value).copy(); }
  std::shared_ptr<EngineValue> write(Tensor tensor) const override { return std::make_shared<HeldTensor>(tensor); }
  void rest() override { give_memory_back(); }

 private:
  std::unique_ptr<OnnxGraph> loaded(const Graph& graph, const Bytes& artifact, bool is_segment, bool has_arena) const {
    if (names_file(artifact)) {  // versions of onnxruntime open it
      throw BundleError("graph '" + graph.name + "' reads numbers from a file of this device, which no bundle may: export it "
                        "again with its tensors inside");
    }
    Owned session(api().ReleaseSession);
    try {
      const Owned options = session_options(has_arena);
      api().check(api().CreateSessionFromArray(ort::env(), artifact.data(), artifact.size(), options.get(), session.out()));
      release_code();  // of starting, parsing and rewriting graphs, which no step needs
      return std::make_unique<OnnxGraph>(graph, std::move(session), is_segment);
    } catch (const ort::Failed& error) {
      throw BundleError("onnxruntime " + api().version + " cannot load graph '" + graph.name + "': " + error.what() +
                        "; export the bundle for this version");
    }
  }

  Owned session_options(bool has_arena) const {
    Owned options(api().ReleaseSessionOptions);
    api().check(api().CreateSessionOptions(options.out()));
    // By their first bytes, graphs would be read in a format of onnxruntime's own, too.
    api().check(api().AddSessionConfigEntry(options.get(), "session.load_model_format", "ONNX"));
    if (has_arena) api().check(api().AddSessionConfigEntry(options.get(), "session.use_env_allocators", "1"));
    api().check(api().SetIntraOpNumThreads(options.get(), options_.threads));
    api().check(api().SetInterOpNumThreads(options.get(), 1));
    disable_pattern_and_reuse(options.get());
    api().check(api().SetSessionLogSeverityLevel(options.get(), ort::kFatal));
    return options;
  }

  EngineOptions options_;
};

}  // namespace

std::unique_ptr<Engine> onnx_engine(const EngineOptions& options) { return std::make_unique<OnnxEngine>(options); }

}  // namespace edgefl
