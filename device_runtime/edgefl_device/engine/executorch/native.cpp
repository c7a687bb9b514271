// A C ABI over the ExecuTorch runtime, for ctypes: program in memory, inputs and outputs in the caller's memory.
//
// A call that fails returns null or -1; edgefl_error() is then what the runtime said, on the same thread. The runtime
// ends the process where a check of its own fails; on the calling thread that becomes an error like any other. On a
// thread of the pool (with more threads than one) it still ends the process.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

namespace executorch::extension::threadpool {
// In the library but in none of its headers; the layout is never looked at here.
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(uint32_t count);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace {

namespace et = executorch::runtime;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::BufferDataLoader;
using executorch::extension::MallocMemoryAllocator;

constexpr size_t kMostLog = 600;
constexpr size_t kAlignment = 64;
constexpr const char* kMethod = "forward";
constexpr int kWorkspacePerProgram = 1;

thread_local std::string said;
thread_local int depth = 0;
et::PalImpl before;

struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("a check of the runtime failed") {}
};

void keep_log(
    et_timestamp_t time, et_pal_log_level_t level, const char* file, const char* function, size_t line,
    const char* message, size_t length) {
  if (depth == 0) {
    before.emit_log_message(time, level, file, function, line, message, length);
    return;
  }
  if ((level == kError || level == kFatal) && said.size() < kMostLog) {
    said += said.empty() ? "" : "; ";
    said.append(message, length);
  }
}

void leave() {
  if (depth == 0) before.abort();
  throw Aborted();
}

// Takes over what the runtime says and how it ends; again where another user of it in this process did so meanwhile.
void claim() {
  const et::PalImpl& now = *et::get_pal_impl();
  if (now.abort == leave && now.emit_log_message == keep_log) return;
  if (now.abort != leave) before.abort = now.abort;
  if (now.emit_log_message != keep_log) before.emit_log_message = now.emit_log_message;
  et::register_pal(et::PalImpl::create(
      nullptr, leave, nullptr, nullptr, keep_log, nullptr, nullptr, __FILE__));
}

void prepare_process() {
  static const bool done = [] {
    et::runtime_init();
    // By default all programs share one workspace, which stays as large as the largest ever was.
    et::BackendOptions<1> options;
    if (options.set_option("workspace_sharing_mode", kWorkspacePerProgram) == et::Error::Ok) {
      (void)et::set_option("XnnpackBackend", options.view());
    }
    return true;
  }();
  (void)done;
}

// Runs `work`; 0 if it returned Ok, else -1 with its error in words.
template <typename Work>
int guarded(Work work) {
  claim();
  said.clear();
  std::string why;
  depth += 1;
  try {
    const et::Error error = work();
    if (error != et::Error::Ok) why = et::to_string(error);
  } catch (const std::exception& error) {
    why = error.what();
  }
  depth -= 1;
  if (why.empty()) return 0;
  said = said.empty() ? why : why + ": " + said;
  return -1;
}

struct Value {
  et::TensorInfo info;
  std::vector<TensorImpl::SizesType> sizes;
  std::vector<TensorImpl::DimOrderType> order;
  std::vector<TensorImpl::StridesType> strides;
  std::string name;

  explicit Value(const et::TensorInfo& found)
      : info(found),
        sizes(found.sizes().begin(), found.sizes().end()),
        order(found.dim_order().begin(), found.dim_order().end()),
        strides(sizes.size(), 1) {
    for (size_t at = sizes.size(); at-- > 1;) strides[at - 1] = strides[at] * sizes[at];
  }
};

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

struct Graph {
  Graph(const void* data, size_t size) : loader(data, size) {}

  BufferDataLoader loader;
  std::unique_ptr<et::Program> program;
  std::vector<Value> inputs;
  std::vector<Value> outputs;
  std::vector<size_t> buffer_sizes;
  std::vector<std::unique_ptr<uint8_t, Free>> memory;
  std::vector<et::Span<uint8_t>> spans;
  MallocMemoryAllocator fixed;
  MallocMemoryAllocator temporary;
  std::unique_ptr<et::HierarchicalAllocator> planned;
  std::unique_ptr<et::MemoryManager> manager;
  std::unique_ptr<et::Method> method;
};

// A program of whose values some are rows of a port names all of them, the inputs first. Other values have no names: the
// runtime gives those of attributes alone, in the order of the program's values. A foreign program that has as many
// attributes by accident is refused for their names.
et::Error name_values(Graph& graph, const et::MethodMeta& meta) {
  const size_t inputs = graph.inputs.size();
  if (meta.num_attributes() != inputs + graph.outputs.size()) return et::Error::Ok;
  for (size_t at = 0; at < meta.num_attributes(); ++at) {
    auto info = meta.attribute_tensor_meta(at);
    if (!info.ok()) return info.error();
    (at < inputs ? graph.inputs[at] : graph.outputs[at - inputs]).name = std::string(info->name());
  }
  return et::Error::Ok;
}

et::Error describe(Graph& graph) {
  auto program = et::Program::load(&graph.loader, et::Program::Verification::InternalConsistency);
  if (!program.ok()) return program.error();
  graph.program = std::make_unique<et::Program>(std::move(program.get()));
  auto meta = graph.program->method_meta(kMethod);
  if (!meta.ok()) return meta.error();
  for (size_t at = 0; at < meta->num_inputs(); ++at) {
    auto info = meta->input_tensor_meta(at);
    if (!info.ok()) return info.error();
    graph.inputs.emplace_back(info.get());
  }
  for (size_t at = 0; at < meta->num_outputs(); ++at) {
    auto info = meta->output_tensor_meta(at);
    if (!info.ok()) return info.error();
    graph.outputs.emplace_back(info.get());
  }
  const et::Error error = name_values(graph, meta.get());
  if (error != et::Error::Ok) return error;
  for (size_t at = 0; at < meta->num_memory_planned_buffers(); ++at) {
    auto size = meta->memory_planned_buffer_size(at);
    if (!size.ok()) return size.error();
    if (size.get() < 0) return et::Error::InvalidProgram;
    graph.buffer_sizes.push_back(static_cast<size_t>(size.get()));
  }
  return et::Error::Ok;
}

et::Error prepare(Graph& graph) {
  for (const size_t size : graph.buffer_sizes) {
    void* memory = nullptr;
    if (size > SIZE_MAX / 2 || posix_memalign(&memory, kAlignment, size + kAlignment) != 0) {
      return et::Error::MemoryAllocationFailed;
    }
    graph.memory.emplace_back(static_cast<uint8_t*>(memory));
    graph.spans.emplace_back(static_cast<uint8_t*>(memory), size);
  }
  graph.planned = std::make_unique<et::HierarchicalAllocator>(
      et::Span<et::Span<uint8_t>>(graph.spans.data(), graph.spans.size()));
  graph.manager =
      std::make_unique<et::MemoryManager>(&graph.fixed, graph.planned.get(), &graph.temporary);
  auto method = graph.program->load_method(kMethod, graph.manager.get());
  if (!method.ok()) return method.error();
  graph.method = std::make_unique<et::Method>(std::move(method.get()));
  return et::Error::Ok;
}

et::Error bind(Graph& graph, void* const* inputs, void* const* outputs) {
  for (size_t at = 0; at < graph.inputs.size(); ++at) {
    Value& value = graph.inputs[at];
    TensorImpl impl(
        value.info.scalar_type(), static_cast<ssize_t>(value.sizes.size()), value.sizes.data(), inputs[at],
        value.order.data(), value.strides.data());
    const et::Error error = graph.method->set_input(et::EValue(Tensor(&impl)), at);
    if (error != et::Error::Ok) return error;
  }
  for (size_t at = 0; at < graph.outputs.size(); ++at) {
    if (graph.outputs[at].info.is_memory_planned()) continue;
    const et::Error error =
        graph.method->set_output_data_ptr(outputs[at], graph.outputs[at].info.nbytes(), at);
    if (error != et::Error::Ok) return error;
  }
  return et::Error::Ok;
}

// Outputs that lie in the program's arena go to the caller's memory, which may be that of an input: nobody reads it any
// more.
void copy_planned(Graph& graph, void* const* outputs) {
  for (size_t at = 0; at < graph.outputs.size(); ++at) {
    const et::TensorInfo& info = graph.outputs[at].info;
    if (!info.is_memory_planned() || info.nbytes() == 0) continue;
    std::memcpy(outputs[at], graph.method->get_output(at).toTensor().const_data_ptr(), info.nbytes());
  }
}

et::Error run(Graph& graph, void* const* inputs, void* const* outputs) {
  et::Error error = bind(graph, inputs, outputs);
  if (error == et::Error::Ok) error = graph.method->execute();
  if (error == et::Error::Ok) copy_planned(graph, outputs);
  return error;
}

// Instruction by instruction, with the nanoseconds of each; `count`: how many there were, more than `most` are not told.
et::Error run_timed(
    Graph& graph, void* const* inputs, void* const* outputs, int64_t* took, int64_t most, int64_t& count) {
  et::Error error = bind(graph, inputs, outputs);
  for (count = 0; error == et::Error::Ok; ++count) {
    const auto start = std::chrono::steady_clock::now();
    error = graph.method->step();
    const auto end = std::chrono::steady_clock::now();
    if (error == et::Error::EndOfMethod) {
      copy_planned(graph, outputs);
      return graph.method->reset_execution();
    }
    if (count < most) took[count] = std::chrono::nanoseconds(end - start).count();
  }
  return error;
}

const Value* value_of(const Graph* graph, int is_output, int64_t at) {
  const std::vector<Value>& values = is_output ? graph->outputs : graph->inputs;
  return at >= 0 && static_cast<size_t>(at) < values.size() ? &values[static_cast<size_t>(at)] : nullptr;
}

}  // namespace

extern "C" {

const char* edgefl_error() { return said.c_str(); }

int edgefl_threads(uint32_t count) {
  return guarded([count] {
    prepare_process();
    auto* pool = executorch::extension::threadpool::get_threadpool();
    return pool != nullptr && pool->_unsafe_reset_threadpool(count) ? et::Error::Ok : et::Error::OutOfResources;
  });
}

// `data` stays the caller's and must outlive the graph; 16-byte aligned. Null on failure. Nothing is allocated for a
// call before edgefl_prepare.
void* edgefl_open(const void* data, size_t size) {
  prepare_process();
  auto graph = std::make_unique<Graph>(data, size);
  return guarded([&graph] { return describe(*graph); }) == 0 ? graph.release() : nullptr;
}

int edgefl_prepare(void* graph) {
  return guarded([graph] { return prepare(*static_cast<Graph*>(graph)); });
}

int64_t edgefl_count(const void* graph, int is_output) {
  const auto* opened = static_cast<const Graph*>(graph);
  return static_cast<int64_t>(is_output ? opened->outputs.size() : opened->inputs.size());
}

// The element type as ExecuTorch numbers it; `rank`, `sizes` (valid as long as the graph), and whether the program plans
// the memory of this value itself or lays it out in another order than rows first. -1: there is no such value.
int edgefl_value(
    const void* graph, int is_output, int64_t at, int64_t* rank, const int32_t** sizes, int* planned, int* permuted) {
  const Value* value = value_of(static_cast<const Graph*>(graph), is_output, at);
  if (value == nullptr) return -1;
  *rank = static_cast<int64_t>(value->sizes.size());
  *sizes = value->sizes.data();
  *planned = value->info.is_memory_planned() ? 1 : 0;
  *permuted = 0;
  for (size_t dim = 0; dim < value->order.size(); ++dim) {
    if (value->order[dim] != dim) *permuted = 1;
  }
  return static_cast<int>(value->info.scalar_type());
}

// The name of a value, "" where the program names none; valid as long as the graph. Null: there is no such value.
const char* edgefl_name(const void* graph, int is_output, int64_t at) {
  const Value* value = value_of(static_cast<const Graph*>(graph), is_output, at);
  return value == nullptr ? nullptr : value->name.c_str();
}

// Bytes of the arena that the program planned when it was exported.
int64_t edgefl_planned_bytes(const void* graph) {
  int64_t sum = 0;
  for (const size_t size : static_cast<const Graph*>(graph)->buffer_sizes) sum += static_cast<int64_t>(size);
  return sum;
}

// One call. `inputs` and `outputs`: a pointer for each value; an output may be the memory of an input.
int edgefl_run(void* graph, void* const* inputs, void* const* outputs) {
  return guarded([=] { return run(*static_cast<Graph*>(graph), inputs, outputs); });
}

// One call as above, each instruction by itself. How many there are, or -1; `took` has nanoseconds of at most `most`.
int64_t edgefl_run_timed(void* graph, void* const* inputs, void* const* outputs, int64_t* took, int64_t most) {
  int64_t count = 0;
  const int failed =
      guarded([&] { return run_timed(*static_cast<Graph*>(graph), inputs, outputs, took, most, count); });
  return failed == 0 ? count : -1;
}

void edgefl_close(void* graph) { delete static_cast<Graph*>(graph); }

}  // extern "C"
