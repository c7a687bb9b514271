// The manifest: what a tier downloads, graph by graph, and how a device is to call it (docs/protocol.md, The manifest).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "wire/blob_ref.h"
#include "wire/tensor.h"

namespace edgefl {

struct Port {
  std::string name;  // "weights.head.bias"
  std::string role;  // "weights"
  DType dtype = DType::f32;
  Shape shape;
  int64_t mask = 0;                // entries of a packed mask; 0: it is none
  std::optional<int64_t> ignored;  // of labels: a number beside the classes that counts for nothing

  std::string label() const;  // "head.bias"
  int64_t nbytes() const;     // saturates at INT64_MAX
  bool operator==(const Port& other) const;
};

using Ports = std::vector<Port>;

struct Segment {
  Ports inputs, outputs;
  std::vector<std::string> in_place;
};

struct Variant {
  std::string name;
  BlobRef blob;
  int64_t raw = 0;
  std::string sha256;
};

struct Graph {
  std::string name;
  std::string format;  // "onnx" or "executorch"
  BlobRef blob;
  Ports inputs, outputs;
  int64_t memory_budget = 0;
  int64_t planned_bytes = 0;
  int64_t arena_bytes = 0;        // of these, what onnxruntime's arena takes; 0: unknown
  std::vector<std::string> in_place;
  std::vector<std::string> metrics;
  std::string activations = "float32";
  std::vector<Variant> variants;  // a device may pass them over
  std::vector<Segment> segments;  // empty: the blob is one artifact
  bool planned_outputs = false;   // each output lies in memory that the program planned
  std::string least_runtime;      // first release of the format's runtime that loads it; "": unknown

  Ports inputs_of(std::string_view role) const;
  Ports outputs_of(std::string_view role) const;
};

struct FrozenChunk {
  std::vector<std::string> units;
  std::string graph;
};

struct Bucket {
  int64_t length = 0;
  std::string graph;
};

struct Phase {
  std::string name, graph;
  int64_t steps = 0;
  bool over_data = false;
  std::vector<Bucket> shorter;

  // The graph for a batch whose longest sample has `length` tokens.
  const std::string& graph_for(int64_t length) const;
};

struct Input {
  std::string name;
  Shape shape;
  DType dtype = DType::f32;
  int64_t below = 0;
};

struct ImageSpec {
  int64_t white = 255;
};
struct TableSpec {
  std::vector<std::string> columns;
  std::string label;
  std::vector<double> mean, deviation;
  std::map<std::string, std::vector<std::string>> others;
};
struct SeriesSpec {
  std::vector<std::string> columns;
  int64_t window = 0, step = 0;
  std::string label;
  std::vector<double> mean, deviation;
  bool channels_last = false;
};
struct SoundSpec {
  int64_t rate = 0, length = 0, mels = 0, window = 0, step = 0;
  std::string features;  // a graph of the bundle
};
struct TextSpec {
  std::optional<BlobRef> tokenizer;
  std::string mask, text = "text", label = "label";
};
using Reader = std::variant<std::monostate, ImageSpec, TableSpec, SeriesSpec, SoundSpec, TextSpec>;

struct DataSpec {
  Shape shape;  // of one sample
  DType dtype = DType::f32;
  int64_t classes = 0;
  double scale = 1.0, shift = 0.0;
  int64_t below = 0;
  std::vector<Input> others;
  std::vector<std::string> names;
  Reader reader;
};

// Division of the local rows into training rows and held-out rows, and the part that a bundle uses.
struct Split {
  double share = 0.0;  // of the held-out rows
  uint64_t seed = 0;
  bool held_out = false;
};

struct Manifest {
  int64_t v = 1;
  std::string model, program, tier, exchange;
  int64_t parameters = 0;
  DataSpec data;
  int64_t batch = 0;
  std::string draws;  // "walk", "draw" or "length"
  std::vector<FrozenChunk> prefix;
  std::vector<std::string> suffix;
  std::string start, finish, evaluate, personalize;
  std::vector<Phase> phases;
  int64_t carry_exchanges = 0;
  bool carry_needed = false;
  bool carry_any_tier = false;  // a carry of another tier may be used
  std::map<std::string, double> hyper;
  std::vector<Graph> graphs;
  std::optional<BlobRef> sources;
  std::optional<Split> split;
  std::string codec;
  int64_t codec_version = 0;

  const Graph& graph(std::string_view name) const;             // BundleError if it is not listed
  const std::string& format() const { return graphs.front().format; }
  std::vector<int64_t> steps_with(int64_t samples) const;      // local steps of each phase
  int64_t pass_rows(const Phase& phase) const;                 // rows of each step over the data
  std::vector<const Graph*> of_round() const;                  // those that a round runs, each once
  std::vector<BlobRef> blobs() const;
};

// BundleError if it is malformed, of another version, or inconsistent.
Manifest decode_manifest(std::string_view data);

// The artifacts of a graph in segments; BundleError if `blob` is no such blob.
std::vector<Bytes> split_segments(std::string_view blob);

}  // namespace edgefl
