#include "wire/manifest.h"

#include <algorithm>
#include <limits>

#include "wire/manifest_check.h"
#include "wire/packing.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr int64_t kVersion = 1, kSegmented = 3, kPlanned = 4, kHeldOut = 5;

Port read_port(const Packable& value) {
  Fields fields(value, "port");
  Port port;
  port.name = fields.text("name");
  port.role = fields.text("role");
  port.dtype = dtype_of(fields.text("dtype"));
  port.shape = fields.integers("shape");
  port.mask = fields.integer("mask", 0);
  if (!fields.is_nil("ignored")) port.ignored = fields.integer("ignored");
  return port;
}

Ports read_ports(const Fields& fields, std::string_view key) {
  Ports ports;
  fields.each(key, [&](const Packable& value) { ports.push_back(read_port(value)); });
  return ports;
}

Variant read_variant(const Packable& value) {
  Fields fields(value, "variant");
  return {fields.text("name"), read_ref(fields.at("blob"), "variant.blob"), fields.integer("raw"), fields.text("sha256")};
}

Segment read_segment(const Packable& value) {
  Fields fields(value, "segment");
  return {read_ports(fields, "inputs"), read_ports(fields, "outputs"), fields.texts("in_place", false)};
}

Graph read_graph(const Packable& value) {
  Fields fields(value, "graph");
  Graph graph;
  graph.name = fields.text("name");
  graph.format = fields.text("format");
  if (graph.format != "onnx" && graph.format != "executorch")
    throw ProtocolError("graph.format is " + in_quotes(graph.format) + ", not onnx or executorch");
  graph.blob = read_ref(fields.at("blob"), "graph.blob");
  graph.inputs = read_ports(fields, "inputs");
  graph.outputs = read_ports(fields, "outputs");
  graph.memory_budget = fields.integer("memory_budget", 0);
  graph.planned_bytes = fields.integer("planned_bytes", 0);
  graph.arena_bytes = fields.integer("arena_bytes", 0);
  graph.in_place = fields.texts("in_place", false);
  graph.metrics = fields.texts("metrics", false);
  graph.activations = fields.text("activations", "float32");
  fields.each("variants", [&](const Packable& each) { graph.variants.push_back(read_variant(each)); }, false);
  fields.each("segments", [&](const Packable& each) { graph.segments.push_back(read_segment(each)); }, false);
  graph.planned_outputs = fields.flag("planned_outputs", false);
  graph.least_runtime = fields.text("least_runtime", "");
  return graph;
}

Phase read_phase(const Packable& value) {
  Fields fields(value, "phase");
  Phase phase;
  phase.name = fields.text("name");
  phase.graph = fields.text("graph");
  phase.steps = fields.integer("steps");
  phase.over_data = fields.flag("over_data", false);
  fields.each(
      "shorter",
      [&](const Packable& each) {
        Fields bucket(each, "phase.shorter");
        phase.shorter.push_back({bucket.integer("length"), bucket.text("graph")});
      },
      false);
  return phase;
}

Reader read_reader(const Packable& value) {
  Fields fields(value, "data.reader");
  const std::string kind = fields.text("kind");
  if (kind == "image") return ImageSpec{fields.integer("white", 255)};
  if (kind == "table") {
    TableSpec table{fields.texts("columns"), fields.text("label"), fields.numbers("mean", false), fields.numbers("deviation", false), {}};
    fields.entries(
        "others",
        [&](const std::string& name, const Packable& columns) {
          for (const Packable* each : to_list(columns, "data.reader.others"))
            table.others[name].push_back(to_text(*each, "data.reader.others"));
        },
        false);
    return table;
  }
  if (kind == "series")
    return SeriesSpec{fields.texts("columns"),       fields.integer("window"),           fields.integer("step"),
                      fields.text("label", ""),      fields.numbers("mean", false),      fields.numbers("deviation", false),
                      fields.flag("channels_last", false)};
  if (kind == "sound")
    return SoundSpec{fields.integer("rate"), fields.integer("length"), fields.integer("mels", 0), fields.integer("window", 0),
                     fields.integer("step", 0), fields.text("features", "")};
  if (kind == "text") {
    TextSpec text;
    if (!fields.is_nil("tokenizer")) text.tokenizer = read_ref(fields.at("tokenizer"), "data.reader.tokenizer");
    text.mask = fields.text("mask", "");
    text.text = fields.text("text", "text");
    text.label = fields.text("label", "label");
    return text;
  }
  throw ProtocolError("data.reader.kind is " + in_quotes(kind) + ", which this device does not know");
}

DataSpec read_data(const Packable& value) {
  Fields fields(value, "data");
  DataSpec data;
  data.shape = fields.integers("shape");
  data.dtype = dtype_of(fields.text("dtype"));
  data.classes = fields.integer("classes");
  data.scale = fields.number("scale", 1.0);
  data.shift = fields.number("shift", 0.0);
  data.below = fields.integer("below", 0);
  fields.each(
      "others",
      [&](const Packable& each) {
        Fields other(each, "data.others");
        data.others.push_back({other.text("name"), other.integers("shape"), dtype_of(other.text("dtype")), other.integer("below", 0)});
      },
      false);
  data.names = fields.texts("names", false);
  if (!fields.is_nil("reader")) data.reader = read_reader(fields.at("reader"));
  return data;
}

Manifest read_manifest(const Fields& fields) {
  Manifest m;
  m.v = fields.integer("v", kVersion);
  m.model = fields.text("model");
  m.program = fields.text("program");
  m.tier = fields.text("tier");
  m.exchange = fields.text("exchange", "");
  m.parameters = fields.integer("parameters");
  m.data = read_data(fields.at("data"));
  m.batch = fields.integer("batch");
  m.draws = fields.text("draws");
  if (m.draws != "walk" && m.draws != "draw" && m.draws != "length")
    throw ProtocolError("draws is " + in_quotes(m.draws) + ", which this device does not know");
  fields.each("prefix", [&](const Packable& each) {
    Fields chunk(each, "prefix");
    m.prefix.push_back({chunk.texts("units"), chunk.text("graph")});
  });
  m.suffix = fields.texts("suffix");
  m.start = fields.text("start");
  m.finish = fields.text("finish");
  m.evaluate = fields.text("evaluate");
  m.personalize = fields.text("personalize", "");
  fields.each("phases", [&](const Packable& each) { m.phases.push_back(read_phase(each)); });
  m.carry_exchanges = fields.integer("carry_exchanges", 0);
  m.carry_needed = fields.flag("carry_needed", false);
  m.carry_any_tier = fields.flag("carry_any_tier", false);
  m.hyper = fields.scalars("hyper");
  fields.each("graphs", [&](const Packable& each) { m.graphs.push_back(read_graph(each)); });
  if (!fields.is_nil("sources")) m.sources = read_ref(fields.at("sources"), "sources");
  if (fields.has("split")) {
    Fields split(fields.at("split"), "split");
    const std::string part = split.text("part");
    if (part != "train" && part != "held-out") throw ProtocolError("split.part is " + in_quotes(part) + ", which this device does not know");
    const int64_t seed = split.integer("seed");
    const double share = split.number("share");
    if (seed < 0 || !(share > 0.0 && share < 1.0)) throw ProtocolError("split has a share from 0 to 1 and a seed of at least 0");
    m.split = Split{share, static_cast<uint64_t>(seed), part == "held-out"};
  }
  m.codec = fields.text("codec");
  m.codec_version = fields.integer("codec_version");
  return m;
}

}  // namespace

std::string Port::label() const {
  const size_t dot = name.find('.');
  return dot == std::string::npos ? "" : name.substr(dot + 1);
}

int64_t Port::nbytes() const {
  const int64_t count = elements(shape), each = static_cast<int64_t>(dtype_bytes(dtype));
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  return count > most / each ? most : count * each;
}

bool Port::operator==(const Port& other) const {
  return name == other.name && role == other.role && dtype == other.dtype && shape == other.shape && mask == other.mask &&
         ignored == other.ignored;
}

static Ports of_role(const Ports& ports, std::string_view role) {
  Ports found;
  std::copy_if(ports.begin(), ports.end(), std::back_inserter(found), [&](const Port& port) { return port.role == role; });
  return found;
}

Ports Graph::inputs_of(std::string_view role) const { return of_role(inputs, role); }
Ports Graph::outputs_of(std::string_view role) const { return of_role(outputs, role); }

const std::string& Phase::graph_for(int64_t length) const {
  for (const Bucket& bucket : shorter)
    if (bucket.length >= length) return bucket.graph;
  return graph;
}

const Graph& Manifest::graph(std::string_view name) const {
  for (const Graph& each : graphs)
    if (each.name == name) return each;
  throw BundleError("the manifest names graph " + in_quotes(name) + " but does not list it; export the bundle again");
}

int64_t Manifest::pass_rows(const Phase& phase) const {
  for (const Port& port : graph(phase.graph).inputs_of("batch"))
    if (port.label() == "0.x" && !port.shape.empty() && port.shape[0] > 0) return port.shape[0];
  throw BundleError("phase " + in_quotes(phase.name) + " passes over the data, and graph " + in_quotes(phase.graph) +
                    " reads no rows of them as 'batch.0.x'; export the bundle again");
}

std::vector<int64_t> Manifest::steps_with(int64_t samples) const {
  std::vector<int64_t> steps;
  for (const Phase& phase : phases) {
    const int64_t rows = phase.over_data ? pass_rows(phase) : 1;
    steps.push_back(phase.over_data ? samples / rows + (samples % rows != 0) : phase.steps);
  }
  return steps;
}

std::vector<const Graph*> Manifest::of_round() const {
  std::vector<std::string> names;
  for (const FrozenChunk& chunk : prefix) names.push_back(chunk.graph);
  names.push_back(start);
  for (const Phase& phase : phases) {
    names.push_back(phase.graph);
    for (const Bucket& bucket : phase.shorter) names.push_back(bucket.graph);
  }
  names.push_back(finish);
  std::vector<const Graph*> found;
  for (const std::string& name : names) {
    const Graph* each = &graph(name);
    if (std::find(found.begin(), found.end(), each) == found.end()) found.push_back(each);
  }
  return found;
}

std::vector<BlobRef> Manifest::blobs() const {
  std::vector<BlobRef> refs;
  for (const Graph& graph : graphs) refs.push_back(graph.blob);
  for (const Graph& graph : graphs)
    for (const Variant& variant : graph.variants) refs.push_back(variant.blob);
  if (sources) refs.push_back(*sources);
  if (const auto* text = std::get_if<TextSpec>(&data.reader); text != nullptr && text->tokenizer) refs.push_back(*text->tokenizer);
  return refs;
}

Manifest decode_manifest(std::string_view data) {
  Manifest manifest;
  try {
    Packed packed(data);
    Fields fields(packed.root(), "manifest");
    const int64_t version = fields.integer("v", kVersion);
    if (version != kVersion && version != kSegmented && version != kPlanned && version != kHeldOut)
      throw BundleError("the manifest has version " + std::to_string(version) + ", this runtime reads 1, 3, 4 and 5: install a matching edgefl");
    manifest = read_manifest(fields);
  } catch (const BundleError&) {
    throw;
  } catch (const ProtocolError& error) {
    throw BundleError(std::string("the manifest is malformed: ") + error.what() + "; export the bundle again");
  }
  check_manifest(manifest);
  return manifest;
}

std::vector<Bytes> split_segments(std::string_view blob) {
  try {
    Packed packed(blob);
    const auto parts = to_list(packed.root(), "segments");
    if (parts.size() != 2 || to_text(*parts[0], "segments") != "edgefl-segments")
      throw BundleError("a blob that should hold the segments of a graph holds something else; export the bundle again");
    std::vector<Bytes> artifacts;
    for (const Packable* each : to_list(*parts[1], "segments")) artifacts.push_back(to_bytes(*each, "segment"));
    return artifacts;
  } catch (const BundleError&) {
    throw;
  } catch (const ProtocolError& error) {
    throw BundleError(std::string("the segments of a graph cannot be read: ") + error.what() + "; export the bundle again");
  }
}

}  // namespace edgefl
