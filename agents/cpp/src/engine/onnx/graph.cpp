#include "engine/onnx/graph.h"

#include <algorithm>
#include <set>
#include <utility>

#include "wire/errors.h"

namespace edgefl {
namespace {

using ort::Owned;
using ort::api;

void add(std::string& wrong, const std::string& text) { wrong += (wrong.empty() ? "" : "; ") + text; }

std::string arg_name(const Owned& session, size_t at, bool is_input) {
  ort::Object allocator = nullptr;
  char* text = nullptr;
  api().check(api().GetAllocatorWithDefaultOptions(&allocator));
  api().check((is_input ? api().SessionGetInputName : api().SessionGetOutputName)(session.get(), at, allocator, &text));
  std::string name = text;
  api().check(api().AllocatorFree(allocator, text));
  return name;
}

// Whether the parts are all rows of an output, in order, none missing and none twice.
bool cover(const std::vector<RowsOf>& parts, int64_t count) {
  int64_t at = 0;
  for (const RowsOf& part : parts) {
    if (part.start != at || part.stop <= at) return false;
    at = part.stop;
  }
  return at == count;
}

std::byte* memory_of(const Tensor& tensor) {
  static std::byte nothing[kAlignment];  // an address of an empty tensor
  return tensor.data.empty() ? nothing : const_cast<std::byte*>(tensor.data.data());
}

}  // namespace

OnnxGraph::OnnxGraph(const Graph& graph, Owned session, bool shrinks)
    : name_(graph.name), inputs_(graph.inputs), outputs_(graph.outputs), in_place_(graph.in_place),
      session_(std::move(session)), memory_(api().ReleaseMemoryInfo), run_options_(api().ReleaseRunOptions),
      turns_(in_place_) {
  api().check(api().CreateCpuMemoryInfo(ort::kDeviceAllocator, ort::kDefaultMemory, memory_.out()));
  if (shrinks) {
    api().check(api().CreateRunOptions(run_options_.out()));
    api().check(api().AddRunConfigEntry(run_options_.get(), "memory.enable_memory_arena_shrinkage", "cpu:0"));
  }
  std::string wrong;
  in_ = described(true, wrong);
  out_ = described(false, wrong);
  if (!wrong.empty()) {
    throw BundleError("graph '" + name_ + "' and its manifest disagree on " + wrong + ": export the bundle again");
  }
}

std::vector<OnnxGraph::Arg> OnnxGraph::described(bool inputs, std::string& wrong) const {
  const Ports& ports = inputs ? inputs_ : outputs_;
  size_t count = 0;
  api().check((inputs ? api().SessionGetInputCount : api().SessionGetOutputCount)(session_.get(), &count));
  std::vector<Arg> args;
  std::set<size_t> found;
  std::vector<std::vector<RowsOf>> parts(ports.size() + 1);
  size_t next = 0;
  for (size_t at = 0; at < count; ++at) {
    Arg arg{arg_name(session_, at, inputs), 0, std::nullopt, {}};
    arg.rows = rows_in(arg.name);
    if (inputs) {
      const std::string& name = arg.rows ? arg.rows->whole : arg.name;
      arg.port = std::find_if(ports.begin(), ports.end(), [&](const Port& port) { return port.name == name; }) - ports.begin();
    } else {  // rows of one whole behind each other are one port
      const bool same = !args.empty() && arg.rows && args.back().rows && args.back().rows->whole == arg.rows->whole;
      arg.port = same ? args.back().port : next++;
    }
    if (arg.port >= ports.size()) {
      add(wrong, inputs ? arg.name : std::to_string(next) + " outputs instead of " + std::to_string(ports.size()));
      continue;
    }
    found.insert(arg.port);
    if (arg.rows) parts[arg.port].push_back(*arg.rows);
    check(arg, ports[arg.port], at, inputs, wrong);
    args.push_back(std::move(arg));
  }
  for (size_t at = 0; at < ports.size(); ++at) {
    if (found.count(at) == 0) add(wrong, ports[at].name);
    if (!inputs && !parts[at].empty() && !cover(parts[at], ports[at].shape.empty() ? 0 : ports[at].shape.front())) {
      add(wrong, ports[at].name + ": rows that are not all of it");
    }
  }
  return args;
}

// What onnxruntime says of a port, or of rows of it, where it contradicts the manifest. Unknown sizes contradict nothing,
// but of rows, which are bound to memory by them. A graph may take rows as another shape of as many entries.
void OnnxGraph::check(Arg& arg, const Port& port, size_t at, bool is_input, std::string& wrong) const {
  Shape wanted = port.shape;
  if (arg.rows) {
    const bool within = port.role == "state" && !wanted.empty() && arg.rows->start < arg.rows->stop && arg.rows->stop <= wanted[0];
    if (!within) {
      add(wrong, arg.name + ": no rows of the state that the manifest lists");
      return;
    }
    wanted[0] = arg.rows->stop - arg.rows->start;
  }
  Owned info(api().ReleaseTypeInfo);
  api().check((is_input ? api().SessionGetInputTypeInfo : api().SessionGetOutputTypeInfo)(session_.get(), at, info.out()));
  ort::Object tensor = nullptr;  // lives as long as the info
  api().check(api().CastTypeInfoToTensorInfo(info.get(), &tensor));
  int type = 0;
  Shape shape;
  if (tensor != nullptr) {
    size_t rank = 0;
    api().check(api().GetTensorElementType(tensor, &type));
    api().check(api().GetDimensionsCount(tensor, &rank));
    shape.resize(rank);
    api().check(api().GetDimensions(tensor, shape.data(), rank));
  }
  bool alike = tensor != nullptr && ort::is_type(type, port.dtype);
  if (alike && arg.rows) {
    alike = elements(shape) == elements(wanted);  // none of a shape with unknown sizes
    arg.shape = shape;
  } else if (alike) {
    alike = shape.size() == wanted.size();
    for (size_t dim = 0; alike && dim < shape.size(); ++dim) alike = shape[dim] == wanted[dim] || shape[dim] < 0;
  }
  if (!alike) {
    add(wrong, arg.name + ": " + std::string(dtype_name(port.dtype)) + " " + shown(wanted) + " listed, type " +
                   std::to_string(type) + " " + shown(shape) + " in the graph");
  }
}

void OnnxGraph::bind(const Owned& binding, bool is_input, const Arg& arg, const Port& port, std::byte* data,
                     std::vector<Owned>& values) const {
  Shape shape = port.shape;
  if (arg.rows) {
    shape[0] = 1;
    data += static_cast<size_t>(arg.rows->start * elements(shape)) * dtype_bytes(port.dtype);
    shape = arg.shape;
  }
  values.emplace_back(api().ReleaseValue);
  const size_t nbytes = static_cast<size_t>(elements(shape)) * dtype_bytes(port.dtype);
  api().check(api().CreateTensorWithDataAsOrtValue(memory_.get(), data, nbytes, shape.data(), shape.size(),
                                                   ort::type_number(port.dtype), values.back().out()));
  api().check((is_input ? api().BindInput : api().BindOutput)(binding.get(), arg.name.c_str(), values.back().get()));
}

Outputs OnnxGraph::run_on(const Tensors& feeds, const State& state, const PageMemory& pages) {
  State read;
  Outputs outputs;
  std::vector<Owned> values;  // before the binding, which is let go of first
  values.reserve(in_.size() + out_.size());
  Owned binding(api().ReleaseIoBinding);
  try {
    api().check(api().CreateIoBinding(session_.get(), binding.out()));
    for (const Arg& arg : in_) {
      const Port& port = inputs_[arg.port];
      std::byte* data = nullptr;
      if (port.role == "state") {
        const Held held = held_for(port, state, name_);
        read[port.name] = held;
        data = held->data;
      } else {
        data = port.role == "page" ? pages.at(port.name) : memory_of(fed_for(port, feeds, name_));
      }
      bind(binding, true, arg, port, data, values);
    }
    for (const Arg& arg : out_) {
      const Port& port = outputs_[arg.port];
      std::byte* data = nullptr;
      if (port.role == "state") {
        auto& target = outputs.state[port.name];
        if (!target) target = turns_.target(port, read);
        data = std::static_pointer_cast<HeldTensor>(target)->data;
      } else if (port.role == "page") {
        data = pages.at(port.name);
      } else {
        data = memory_of(outputs.arrays.emplace(port.name, Tensor(port.dtype, port.shape)).first->second);
      }
      bind(binding, false, arg, port, data, values);
    }
    api().check(api().RunWithBinding(session_.get(), run_options_.get(), binding.get()));
  } catch (const ort::Failed& error) {
    throw EngineError("onnxruntime cannot run graph '" + name_ + "': " + error.what());
  }
  turns_.ran(read, outputs.state);
  return outputs;
}

}  // namespace edgefl
