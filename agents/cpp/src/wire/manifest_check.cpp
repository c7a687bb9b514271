#include "wire/manifest_check.h"

#include <algorithm>
#include <set>

#include "wire/digest.h"
#include "wire/errors.h"
#include "wire/printable.h"
#include "wire/releases.h"

namespace edgefl {
namespace {

constexpr const char* kAgain = "; export the bundle again";
const std::set<std::string> kRoles = {"weights", "state", "carry", "batch", "data", "noise", "hyper", "update", "metric", "record", "page"};

[[noreturn]] void refuse(const std::string& why) { throw BundleError(why + kAgain); }

// The name that a list holds twice, "" if none.
std::string twice(const Ports& ports) {
  std::set<std::string> seen;
  for (const Port& port : ports)
    if (!seen.insert(port.name).second) return port.name;
  return "";
}

bool consistent(const Port& port) {
  if (kRoles.count(port.role) == 0 || port.name.substr(0, port.name.find('.')) != port.role) return false;
  if (port.mask != 0 && (port.mask < 0 || port.dtype != DType::u8 || port.shape != Shape{port.mask / 8 + (port.mask % 8 != 0)})) return false;
  if (port.role == "batch") {
    const std::string label = port.label();
    const size_t dot = label.find('.');
    const bool numbered = dot != std::string::npos && dot >= 1 && dot <= 3 && dot + 1 < label.size() &&
                          label.find_first_not_of("0123456789") == dot;
    if (!numbered) return false;
  }
  return std::all_of(port.shape.begin(), port.shape.end(), [](int64_t size) { return size >= 0; });
}

const Port* find(const Ports& ports, const std::string& name) {
  const auto found = std::find_if(ports.begin(), ports.end(), [&](const Port& port) { return port.name == name; });
  return found == ports.end() ? nullptr : &*found;
}

bool holds(const Ports& ports, const Port& port) { return std::find(ports.begin(), ports.end(), port) != ports.end(); }

// Why the segments of a graph, run in their order, are not the graph; "" if they are.
std::string disorder(const Graph& graph) {
  Ports made;
  std::set<std::string> rewritten;
  const std::set<std::string> in_place(graph.in_place.begin(), graph.in_place.end());
  for (const Segment& segment : graph.segments) {
    for (const Ports* ports : {&segment.inputs, &segment.outputs})
      if (const std::string name = twice(*ports); !name.empty()) return "one has " + in_quotes(name) + " twice";
    for (const Port& port : segment.inputs) {
      if (!holds(graph.inputs, port) && !holds(made, port))
        return "one reads " + in_quotes(port.name) + ", which neither the graph has nor an earlier one leaves";
      if (rewritten.count(port.name) != 0) return "one reads " + in_quotes(port.name) + ", which an earlier one has written over";
    }
    for (const Port& port : segment.outputs) {
      if (find(made, port.name) != nullptr) return "two leave " + in_quotes(port.name);
      if (port.role != "page" && !holds(graph.outputs, port)) return "one leaves " + in_quotes(port.name) + ", which is no output of the graph";
    }
    for (const std::string& name : segment.in_place) {
      const Port* port = find(segment.outputs, name);
      if (port == nullptr || !holds(segment.inputs, *port) || in_place.count(name) == 0)
        return "one is to write " + in_quotes(name) + " in place, which it or the graph does not";
      rewritten.insert(name);
    }
    made.insert(made.end(), segment.outputs.begin(), segment.outputs.end());
  }
  for (const Port& port : graph.outputs)
    if (!holds(made, port)) return "none leaves " + in_quotes(port.name);
  return "";
}

void check_ports(const Graph& graph, const Ports& ports, bool pages) {
  for (const Port& port : ports) {
    if (!consistent(port)) refuse("port " + in_quotes(port.name) + " of graph " + in_quotes(graph.name) + " is inconsistent");
    if (!pages && port.role == "page")
      refuse("the segments of graph " + in_quotes(graph.name) + " do not fit together: it has none, and the port " + in_quotes(port.name));
  }
}

void check_variants(const Graph& graph) {
  std::set<std::string> names;
  for (const Variant& variant : graph.variants) {
    const bool sound = !variant.name.empty() && is_printable(variant.name) && variant.raw > 0 && variant.blob.codec.empty() && is_hex(variant.sha256, 64);
    if (!sound) refuse("variant " + in_quotes(variant.name) + " of graph " + in_quotes(graph.name) + " is inconsistent");
    names.insert(variant.name);
  }
  if (graph.variants.size() > 8 || names.size() < graph.variants.size())
    refuse("the variants of graph " + in_quotes(graph.name) + " are more than 8, or two have one name");
}

void check_graph(const Graph& graph) {
  for (const Ports* ports : {&graph.inputs, &graph.outputs})
    if (const std::string name = twice(*ports); !name.empty()) refuse("graph " + in_quotes(graph.name) + " has port " + in_quotes(name) + " twice");
  const bool segmented = !graph.segments.empty();
  check_ports(graph, graph.inputs, segmented);
  check_ports(graph, graph.outputs, segmented);
  for (const Segment& segment : graph.segments) {
    check_ports(graph, segment.inputs, true);
    check_ports(graph, segment.outputs, true);
  }
  for (const std::string& name : graph.in_place) {
    const Port* port = find(graph.inputs, name);
    if (port == nullptr || port->role != "state" || !holds(graph.outputs, *port))
      refuse("graph " + in_quotes(graph.name) + " is to write " + in_quotes(name) + " in place, which it does not read and return as one state port");
  }
  check_variants(graph);
  if (!graph.least_runtime.empty() && !is_release(graph.least_runtime))
    refuse("graph " + in_quotes(graph.name) + " needs release " + in_quotes(graph.least_runtime) + " of its runtime, which should be numbers with dots between them");
  if (graph.planned_bytes < 0) refuse("graph " + in_quotes(graph.name) + " is planned to need " + std::to_string(graph.planned_bytes) + " bytes");
  if (segmented)
    if (const std::string why = disorder(graph); !why.empty()) refuse("the segments of graph " + in_quotes(graph.name) + " do not fit together: " + why);
}

void check_phases(const Manifest& m) {
  for (const Phase& phase : m.phases) {
    m.graph(phase.graph);
    int64_t last = 0;
    for (const Bucket& bucket : phase.shorter) {
      m.graph(bucket.graph);
      if (bucket.length <= last) refuse("phase " + in_quotes(phase.name) + " has graphs for lengths that should ascend from 1 on");
      last = bucket.length;
    }
    if (phase.over_data) m.pass_rows(phase);
    if (phase.steps < 0) refuse("batch and steps of a manifest must be positive");
  }
}

std::string problem_of(const std::vector<std::string>& columns, const std::vector<double>& mean, const std::vector<double>& deviation) {
  if (columns.empty() || std::set<std::string>(columns.begin(), columns.end()).size() < columns.size()) return "columns: at least one, each once";
  for (const auto* numbers : {&mean, &deviation})
    if (!numbers->empty() && numbers->size() != columns.size())
      return "it has " + std::to_string(numbers->size()) + " numbers for " + std::to_string(columns.size()) + " columns";
  if (std::find(deviation.begin(), deviation.end(), 0.0) != deviation.end()) return "a deviation is 0";
  return "";
}

std::string problem_of(const Reader& reader) {
  if (const auto* image = std::get_if<ImageSpec>(&reader)) return image->white > 0 && image->white <= 255 ? "" : "white is " + std::to_string(image->white) + ", of 1 to 255";
  if (const auto* table = std::get_if<TableSpec>(&reader)) return problem_of(table->columns, table->mean, table->deviation);
  if (const auto* series = std::get_if<SeriesSpec>(&reader)) {
    if (series->window < 1 || series->step < 1) return "window and step are at least 1";
    return problem_of(series->columns, series->mean, series->deviation);
  }
  if (const auto* sound = std::get_if<SoundSpec>(&reader)) {
    if (sound->rate < 1 || sound->length < 1 || (sound->mels != 0 && (sound->window < 1 || sound->step < 1))) return "rate, length, window and step are at least 1";
    if (sound->mels < 0 || (sound->mels != 0 && sound->window > sound->length)) return "its mels cannot be made";
  }
  return "";
}

void check_data(const Manifest& m) {
  std::set<std::string> names = {"x", "y", "mask", "sample"};
  for (const Input& input : m.data.others)
    if (!names.insert(input.name).second) refuse("the inputs beside x: each has a name of its own, and none is called x, y, mask, sample");
  const auto& classes = m.data.names;
  const std::set<std::string> different(classes.begin(), classes.end());
  if (!classes.empty() && (different.size() != classes.size() || static_cast<int64_t>(classes.size()) != m.data.classes))
    refuse("the data have " + std::to_string(m.data.classes) + " classes and " + std::to_string(different.size()) + " different names for them");
  if (const std::string why = problem_of(m.data.reader); !why.empty()) refuse("the reader of a manifest cannot be used: " + why);
  if (const auto* sound = std::get_if<SoundSpec>(&m.data.reader); sound != nullptr && !sound->features.empty()) m.graph(sound->features);
}

}  // namespace

void check_manifest(const Manifest& m) {
  if (m.graphs.empty()) refuse("the manifest lists no graphs");
  for (const std::string& name : {m.start, m.finish, m.evaluate}) m.graph(name);
  for (const FrozenChunk& chunk : m.prefix) m.graph(chunk.graph);
  if (!m.personalize.empty()) m.graph(m.personalize);
  check_phases(m);
  for (const Graph& graph : m.graphs) {
    check_graph(graph);
    if (graph.planned_outputs && (graph.format != "executorch" || !graph.segments.empty()))
      refuse("graph " + in_quotes(graph.name) + " has planned outputs, which only a program of format executorch has, and none in segments");
    if (graph.planned_outputs && m.v != 4 && m.v != 5) refuse("graph " + in_quotes(graph.name) + " has planned outputs in a manifest of version " + std::to_string(m.v) + ", which is 4 then");
    if (!graph.segments.empty() && m.v != 3 && m.v != 5) refuse("graph " + in_quotes(graph.name) + " has segments in a manifest of version " + std::to_string(m.v) + ", which is 3 then");
  }
  if (m.split.has_value() != (m.v == 5)) refuse("tier " + in_quotes(m.tier) + " divides the rows by version " + std::to_string(m.v) + " of a manifest, which is 5 then and only then");
  check_data(m);
  std::vector<std::string> shown = {m.model, m.program, m.tier, m.exchange};
  for (const Input& input : m.data.others) shown.push_back(input.name);
  for (const Graph& graph : m.graphs) shown.push_back(graph.name);
  shown.insert(shown.end(), m.data.names.begin(), m.data.names.end());
  for (const std::string& name : shown)
    if (!is_printable(name)) refuse("the name " + in_quotes(name) + " in a manifest cannot be shown");
  if (m.batch <= 0) refuse("batch and steps of a manifest must be positive");
  if (m.carry_exchanges < 0) refuse("a carry cannot be good for " + std::to_string(m.carry_exchanges) + " rounds");
}

}  // namespace edgefl
