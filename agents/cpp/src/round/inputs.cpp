#include "round/inputs.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "data/convert.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

int64_t rows_of_port(const Port& port) {
  if (port.shape.empty()) return 1;  // no batch fits a scalar
  if (port.shape.front() < 1) throw BundleError("'" + port.name + "' reads a batch of no rows; export the bundle again");
  return port.shape.front();
}

// The beginning of each of `rows`, as long as the port is.
Tensor cut(const Tensor& rows, const Port& port) {
  bool within = rows.shape.size() >= port.shape.size();
  Shape wanted = rows.shape;
  for (size_t axis = 0; within && axis < port.shape.size(); ++axis) wanted[axis] = std::min(wanted[axis], port.shape[axis]);
  if (!within || wanted == rows.shape) return rows;
  Tensor found(rows.dtype, wanted);
  const size_t size = dtype_bytes(rows.dtype), rank = wanted.size();
  const size_t run = static_cast<size_t>(wanted.back()) * size;  // entries that lie together
  Shape place(rank, 0);
  for (std::byte *into = found.data.data(), *end = into + found.nbytes(); into < end; into += run) {
    int64_t from = 0;
    for (size_t axis = 0; axis < rank; ++axis) from = from * rows.shape[axis] + place[axis];
    std::memcpy(into, rows.data.data() + static_cast<size_t>(from) * size, run);
    for (size_t axis = rank - 1; axis-- > 0 && ++place[axis] == wanted[axis];) place[axis] = 0;
  }
  return found;
}

}  // namespace

void check_port(const Port& port, const Tensor& tensor) {
  if (tensor.dtype == port.dtype && tensor.shape == port.shape) return;
  const std::string text = port.name + " should be " + std::string(dtype_name(port.dtype)) + " " + shown(port.shape) +
                           ", found " + std::string(dtype_name(tensor.dtype)) + " " + shown(tensor.shape) +
                           ": the data or the weights do not belong to this bundle";
  if (port.role == "batch") throw DataError(text);
  throw BundleError(text);
}

void check_complete(const Graph& graph, const Tensors& feeds, const std::function<bool(const std::string&)>& in_state) {
  std::string hungry;
  for (const Port& port : graph.inputs) {
    const bool there = port.role == "state" ? !in_state || in_state(port.name) : feeds.count(port.name) != 0;
    if (!there) hungry += (hungry.empty() ? "'" : ", '") + port.name + "'";
  }
  if (!hungry.empty()) {
    throw BundleError("graph '" + graph.name + "' reads " + hungry +
                      ", which nobody feeds there (see the roles in docs/protocol.md); export the bundle again");
  }
}

Tensors labelled(Tensors& arrays, const std::string& role) {
  Tensors found;
  for (auto& [name, tensor] : arrays) {
    if (name.compare(0, role.size() + 1, role + ".") == 0) found[name.substr(role.size() + 1)] = std::move(tensor);
  }
  return found;
}

std::pair<int64_t, std::string> stream_and_part(const Port& port) {
  const std::string label = port.label();
  const size_t dot = label.find('.');
  try {
    return {std::stoll(label.substr(0, dot)), dot == std::string::npos ? "" : label.substr(dot + 1)};
  } catch (const std::logic_error&) {
    throw BundleError("port '" + port.name + "' is of no batch; export the bundle again");
  }
}

Tensor other_rows(const FittedData& data, const Port& port, const Indices& rows) {
  const std::string name = stream_and_part(port).second;
  if (data.has_other(name)) return data.other(name, rows);
  if (name == "sample") return data.rows(rows);
  throw BundleError("a graph reads '" + port.name + "', and the manifest describes no input '" + name +
                    "' of the local data; export the bundle again");
}

RoundInputs::RoundInputs(const Manifest& manifest, uint64_t seed, const FittedData& data, std::map<std::string, double> hyper,
             std::function<Tensor(const Indices&)> features)
    : seed_(seed), data_(data), hyper_(std::move(hyper)), draws_(manifest.draws), features_(std::move(features)) {
  std::set<int64_t> edges;
  for (const Phase& phase : manifest.phases) {
    for (const Bucket& bucket : phase.shorter) edges.insert(bucket.length);
  }
  edges_.assign(edges.begin(), edges.end());
}

void RoundInputs::give(const Graph& graph, int64_t number, Tensors& feeds) {
  int64_t place = 0;
  for (const Port& port : graph.inputs) {
    if (port.role == "data") {
      if (!facts_) facts_ = data_.facts();
      const auto fact = facts_->find(port.label());
      if (fact == facts_->end()) {
        throw BundleError("graph '" + graph.name + "' asks for '" + port.name + "' of the local data, which this device " +
                          "cannot tell; export the bundle for data like these, or install a newer edgefl");
      }
      check_port(port, fact->second);
      feeds[port.name] = fact->second;
    } else if (port.role == "hyper") {
      const auto value = hyper_.find(port.label());
      if (value == hyper_.end()) {
        throw BundleError("the round sets no value for '" + port.name + "'; the server must announce it");
      }
      feeds[port.name] = filled(port.shape, port.dtype, value->second);
    } else if (port.role == "noise") {
      feeds[port.name] = noise(seed_, number, place++, port.shape, port.dtype);
    }
  }
}

void RoundInputs::give_batches(const Graph& whole, const Graph& graph, int64_t step, Tensors& feeds) {
  for (const Port& port : whole.inputs) {
    if (port.role != "batch") continue;
    const auto [stream, name] = stream_and_part(port);
    if (name == "mask") continue;
    Tensor rows = part(port, drawn(stream, rows_of_port(port), step));
    if (&graph != &whole) {
      const auto shorter = std::find_if(graph.inputs.begin(), graph.inputs.end(),
                                        [&port = port](const Port& each) { return each.name == port.name; });
      if (shorter != graph.inputs.end()) {
        rows = cut(rows, *shorter);
        check_port(*shorter, rows);
      }
    }
    feeds[port.name] = std::move(rows);
  }
}

void RoundInputs::give_pass(const Graph& graph, int64_t step, Tensors& feeds) const {
  for (const Port& port : graph.inputs) {
    if (port.role != "batch") continue;
    const int64_t rows = rows_of_port(port);
    if (stream_and_part(port).second == "mask") {
      Tensor mask = pass_mask(data_.size(), rows, step);
      check_port(port, mask);
      feeds[port.name] = std::move(mask);
    } else {
      feeds[port.name] = part(port, pass_rows(data_.size(), rows, step));
    }
  }
}

int64_t RoundInputs::longest(const Graph& graph, int64_t step) {
  std::map<int64_t, int64_t> streams;
  for (const Port& port : graph.inputs) {
    if (port.role == "batch") streams[stream_and_part(port).first] = rows_of_port(port);
  }
  int64_t most = 0;
  for (const auto& [stream, rows] : streams) {
    for (const int64_t row : drawn(stream, rows, step)) most = std::max(most, lengths()[static_cast<size_t>(row)]);
  }
  return most;
}

const std::vector<int64_t>& RoundInputs::lengths() {
  if (!lengths_) lengths_ = data_.lengths();
  return *lengths_;
}

Indices RoundInputs::drawn(int64_t stream, int64_t rows, int64_t step) {
  auto found = batches_.find(rows);
  if (found == batches_.end()) {
    if (!edges_.empty() && buckets_.empty()) {
      for (const int64_t length : lengths()) {
        buckets_.push_back(std::lower_bound(edges_.begin(), edges_.end(), length) - edges_.begin());
      }
    }
    found = batches_.try_emplace(rows, seed_, data_.size(), rows, draws_, buckets_).first;
  }
  return found->second.rows(stream, step);
}

Tensor RoundInputs::part(const Port& port, const Indices& rows) const {
  const std::string name = stream_and_part(port).second;
  Tensor found = name == "y" ? data_.labels(rows)
                 : name == "x" ? (features_ ? features_(rows) : data_.rows(rows))
                               : other_rows(data_, port, rows);
  check_port(port, found);
  return found;
}

}  // namespace edgefl
