#include "round/forward.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/memory.h"
#include "round/inputs.h"

namespace edgefl {
namespace {

const Port& only(const std::vector<const Port*>& ports, const std::string& graph) {
  if (ports.size() != 1) {
    throw BundleError("graph '" + graph + "' should have one tensor in and one out, found " + std::to_string(ports.size()) +
                      "; export it again");
  }
  return *ports.front();
}

std::string path_of(const RoundRequest& request, size_t index) {
  return request.folder + "/record-" + std::to_string(index) + ".bin";
}

// One chunk: its units are fetched, run over all rows in fixed groups, and dropped. The last group is filled by wrap-around,
// so that batch statistics are those of a full group. `source`: the record before it; null: the data.
std::unique_ptr<ActivationRecord> chunk(size_t index, GraphLoader& graphs, const RoundRequest& request, const FittedData& data,
                              const ActivationRecord* source, const RoundHost& host, std::vector<double>& took) {
  const FrozenChunk& listed = request.manifest->prefix[index];
  const Graph& spec = graphs.spec(listed.graph);
  std::vector<const Port*> flowing, others, records;
  for (const Port& port : spec.inputs) {
    if (port.role == "batch") (port.label() == "0.x" ? flowing : others).push_back(&port);
  }
  for (const Port& port : spec.outputs) {
    if (port.role == "record") records.push_back(&port);
  }
  const Port &in = only(flowing, spec.name), &out = only(records, spec.name);
  if (in.shape.empty() || in.shape.front() < 1 || out.shape.empty() || out.shape.front() != in.shape.front()) {
    throw BundleError("graph '" + spec.name + "' reads or gives no rows, or gives others than it reads; export it again");
  }
  Tensors feeds;
  graphs.give_weights(spec, listed.units, feeds);
  const auto graph = graphs.load(spec);
  const int64_t rows = data.size(), group = in.shape.front();
  Shape shape = out.shape;
  shape.front() = rows;
  if (host.room) host.room(elements(shape) * static_cast<int64_t>(dtype_bytes(out.dtype)));
  auto record = ActivationRecord::create(path_of(request, index), shape, out.dtype, request.record_tag);
  for (int64_t start = 0; start < rows; start += group) {
    if (host.between) host.between();
    Indices indices(static_cast<size_t>(group));
    for (int64_t at = 0; at < group; ++at) indices[static_cast<size_t>(at)] = (start + at) % rows;
    for (const Port* port : others) {
      feeds[port->name] = other_rows(data, *port, indices);
      check_port(*port, feeds[port->name]);
    }
    feeds[in.name] = source == nullptr ? data.rows(indices) : source->rows(indices);
    check_port(in, feeds[in.name]);
    check_complete(spec, feeds, nullptr);
    const Outputs outputs = graphs.timed(*graph, feeds, {}, took);
    record->write(start, outputs.arrays.at(out.name), std::min(group, rows - start));
    if (host.watch) {
      host.watch({"forward " + std::to_string(index + 1), std::min(start + group, rows), rows,
                  std::numeric_limits<double>::quiet_NaN(), 0.0});
    }
  }
  record->seal();
  return record;
}

}  // namespace

std::unique_ptr<ActivationRecord> run_forward(GraphLoader& graphs, const RoundRequest& request, const FittedData& data,
                                    const RoundHost& host, std::vector<double>& took) {
  const size_t chunks = request.manifest->prefix.size();
  std::unique_ptr<ActivationRecord> source;
  size_t first = 0;
  for (size_t index = chunks; index-- > 0 && first == 0;) {
    source = ActivationRecord::reopen(path_of(request, index), request.record_tag);
    if (source && source->count() != data.size()) source.reset();  // the local data have changed since
    if (source) first = index + 1;
  }
  for (size_t index = first; index < chunks; ++index) {
    auto following = chunk(index, graphs, request, data, source.get(), host, took);
    trim_memory();
    if (source) source->remove();
    source = std::move(following);
  }
  return source;
}

}  // namespace edgefl
