// The runtime ends the process where a check of its own fails; on the calling thread that becomes an error like any other.
// On a thread of the pool (with more threads than one) it still ends the process.
#include "engine/executorch/program.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

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

namespace edgefl {
namespace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using EtTensor = executorch::aten::Tensor;
using executorch::aten::TensorImpl;

constexpr size_t kMostLog = 600, kArenaAlignment = 64, kProgramAlignment = 16;
constexpr const char* kMethod = "forward";
constexpr int kWorkspacePerProgram = 1;
// They only register kernels and a delegate.
constexpr const char* kLibraries[] = {"libexecutorch_kernels_optimized", "libexecutorch_backend_xnnpack"};
#ifdef __APPLE__
constexpr const char* kSuffix = ".dylib";
#else
constexpr const char* kSuffix = ".so";
#endif

std::atomic<int> open_programs{0};
thread_local std::string said;
thread_local int depth = 0;
et::PalImpl before;

struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("a check of the runtime failed") {}
};

void keep_log(et_timestamp_t time, et_pal_log_level_t level, const char* file, const char* function, size_t line,
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
  static std::mutex once;  // several agents of a process each have a thread that comes here
  const std::lock_guard<std::mutex> lock(once);
  const et::PalImpl& now = *et::get_pal_impl();
  if (now.abort == leave && now.emit_log_message == keep_log) return;
  if (now.abort != leave) before.abort = now.abort;
  if (now.emit_log_message != keep_log) before.emit_log_message = now.emit_log_message;
  et::register_pal(et::PalImpl::create(nullptr, leave, nullptr, nullptr, keep_log, nullptr, nullptr, __FILE__));
}

// ProgramError with what the runtime said, unless `work` returns Ok.
template <typename RoundExecutor>
void guarded(RoundExecutor work) {
  claim();
  said.clear();
  std::string why;
  ++depth;
  try {
    const et::Error error = work();
    if (error != et::Error::Ok) why = et::to_string(error);
  } catch (const std::exception& error) {
    why = error.what();
  }
  --depth;
  if (!why.empty()) throw ProgramError(said.empty() ? why : why + ": " + said);
}

std::optional<DType> dtype_of_scalar(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return DType::u8;
    case ScalarType::Char: return DType::i8;
    case ScalarType::Short: return DType::i16;
    case ScalarType::Int: return DType::i32;
    case ScalarType::Long: return DType::i64;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Float: return DType::f32;
    case ScalarType::Double: return DType::f64;
    case ScalarType::Bool: return DType::boolean;
    case ScalarType::UInt16: return DType::u16;
    case ScalarType::UInt32: return DType::u32;
    case ScalarType::UInt64: return DType::u64;
    default: return std::nullopt;
  }
}

// What a call needs of a value.
struct Place {
  et::TensorInfo info;
  std::vector<TensorImpl::SizesType> sizes;
  std::vector<TensorImpl::DimOrderType> order;
  std::vector<TensorImpl::StridesType> strides;

  explicit Place(const et::TensorInfo& found)
      : info(found),
        sizes(found.sizes().begin(), found.sizes().end()),
        order(found.dim_order().begin(), found.dim_order().end()),
        strides(sizes.size(), 1) {
    for (size_t at = sizes.size(); at-- > 1;) strides[at - 1] = strides[at] * sizes[at];
  }

  ProgramValue value() const {
    ProgramValue made{dtype_of_scalar(info.scalar_type()), Shape(sizes.begin(), sizes.end()), info.is_memory_planned(), false};
    for (size_t dim = 0; dim < order.size(); ++dim) made.permuted = made.permuted || order[dim] != dim;
    return made;
  }
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Block = std::unique_ptr<void, Free>;

Block aligned_block(size_t alignment, size_t size) {
  void* memory = nullptr;
  if (size > SIZE_MAX / 2 || posix_memalign(&memory, alignment, size + alignment) != 0) throw std::bad_alloc();
  return Block(memory);
}

}  // namespace

struct Program::Parts {
  explicit Parts(Bytes artifact) : bytes(std::move(artifact)), loader(aligned(), bytes.size()) {}

  Bytes bytes;
  Block moved;
  executorch::extension::BufferDataLoader loader;
  std::unique_ptr<et::Program> program;
  std::vector<Place> in, out;
  std::vector<ProgramValue> inputs, outputs;
  std::vector<size_t> buffer_sizes;
  std::vector<Block> memory;
  std::vector<et::Span<uint8_t>> spans;
  executorch::extension::MallocMemoryAllocator fixed, temporary;
  std::unique_ptr<et::HierarchicalAllocator> planned;
  std::unique_ptr<et::MemoryManager> manager;
  std::unique_ptr<et::Method> method;

  // The runtime wants a program to begin at a multiple of 16, as memory of any size but a small one does.
  const void* aligned() {
    if (reinterpret_cast<uintptr_t>(bytes.data()) % kProgramAlignment == 0) return bytes.data();
    moved = aligned_block(kProgramAlignment, bytes.size());
    std::memcpy(moved.get(), bytes.data(), bytes.size());
    return moved.get();
  }

  et::Error describe() {
    auto loaded = et::Program::load(&loader, et::Program::Verification::InternalConsistency);
    if (!loaded.ok()) return loaded.error();
    program = std::make_unique<et::Program>(std::move(loaded.get()));
    auto meta = program->method_meta(kMethod);
    if (!meta.ok()) return meta.error();
    for (size_t at = 0; at < meta->num_inputs(); ++at) {
      auto info = meta->input_tensor_meta(at);
      if (!info.ok()) return info.error();
      in.emplace_back(info.get());
      inputs.push_back(in.back().value());
    }
    for (size_t at = 0; at < meta->num_outputs(); ++at) {
      auto info = meta->output_tensor_meta(at);
      if (!info.ok()) return info.error();
      out.emplace_back(info.get());
      outputs.push_back(out.back().value());
    }
    for (size_t at = 0; at < meta->num_memory_planned_buffers(); ++at) {
      auto size = meta->memory_planned_buffer_size(at);
      if (!size.ok()) return size.error();
      if (size.get() < 0) return et::Error::InvalidProgram;
      buffer_sizes.push_back(static_cast<size_t>(size.get()));
    }
    return et::Error::Ok;
  }

  et::Error prepare() {
    for (const size_t size : buffer_sizes) {
      memory.push_back(aligned_block(kArenaAlignment, size));
      spans.emplace_back(static_cast<uint8_t*>(memory.back().get()), size);
    }
    planned = std::make_unique<et::HierarchicalAllocator>(et::Span<et::Span<uint8_t>>(spans.data(), spans.size()));
    manager = std::make_unique<et::MemoryManager>(&fixed, planned.get(), &temporary);
    auto loaded = program->load_method(kMethod, manager.get());
    if (!loaded.ok()) return loaded.error();
    method = std::make_unique<et::Method>(std::move(loaded.get()));
    return et::Error::Ok;
  }

  et::Error run(void* const* sources, void* const* targets) {
    for (size_t at = 0; at < in.size(); ++at) {
      Place& place = in[at];
      TensorImpl impl(place.info.scalar_type(), static_cast<ssize_t>(place.sizes.size()), place.sizes.data(), sources[at],
                      place.order.data(), place.strides.data());
      const et::Error error = method->set_input(et::EValue(EtTensor(&impl)), at);
      if (error != et::Error::Ok) return error;
    }
    for (size_t at = 0; at < out.size(); ++at) {
      if (out[at].info.is_memory_planned()) continue;
      const et::Error error = method->set_output_data_ptr(targets[at], out[at].info.nbytes(), at);
      if (error != et::Error::Ok) return error;
    }
    const et::Error error = method->execute();
    if (error == et::Error::Ok) copy_planned(targets);
    return error;
  }

  // Outputs that lie in the arena go to the caller's memory, which may be that of an input: nobody reads it any more.
  void copy_planned(void* const* targets) {
    for (size_t at = 0; at < out.size(); ++at) {
      const et::TensorInfo& info = out[at].info;
      if (!info.is_memory_planned() || info.nbytes() == 0) continue;
      std::memcpy(targets[at], method->get_output(at).toTensor().const_data_ptr(), info.nbytes());
    }
  }
};

void Program::prepare_process(int threads) {
  static std::mutex once;
  const std::lock_guard<std::mutex> lock(once);
  static bool done = false;
  static int pool_threads = 0;  // of the one pool that kernels and delegates share, which open programs hold on to
  if (!done) {
    for (const char* name : kLibraries) {
      if (dlopen((std::string(name) + kSuffix).c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
        throw EngineError(std::string("a library of ExecuTorch cannot be loaded: ") + dlerror() +
                          "; put it beside this program's other libraries");
      }
    }
    et::runtime_init();
    // By default all programs share one workspace, which stays as large as the largest ever was.
    et::BackendOptions<1> options;
    if (options.set_option("workspace_sharing_mode", kWorkspacePerProgram) == et::Error::Ok) {
      (void)et::set_option("XnnpackBackend", options.view());
    }
    done = true;
  }
  if (pool_threads == threads) return;
  if (open_programs > 0) {
    throw ProgramError(std::to_string(open_programs) + " programs are open that work with " + std::to_string(pool_threads));
  }
  guarded([threads] {
    auto* pool = executorch::extension::threadpool::get_threadpool();
    const bool changed = pool != nullptr && pool->_unsafe_reset_threadpool(static_cast<uint32_t>(threads));
    return changed ? et::Error::Ok : et::Error::OutOfResources;
  });
  pool_threads = threads;
}

Program::Program(Bytes artifact) : parts_(std::make_unique<Parts>(std::move(artifact))) {
  guarded([this] { return parts_->describe(); });
  ++open_programs;
}

Program::~Program() { --open_programs; }

const std::vector<ProgramValue>& Program::inputs() const { return parts_->inputs; }
const std::vector<ProgramValue>& Program::outputs() const { return parts_->outputs; }

int64_t Program::planned_bytes() const {
  int64_t sum = 0;
  for (const size_t size : parts_->buffer_sizes) sum += static_cast<int64_t>(size);
  return sum;
}

void Program::prepare() {
  guarded([this] { return parts_->prepare(); });
}

void Program::run(void* const* inputs, void* const* outputs) {
  guarded([=] { return parts_->run(inputs, outputs); });
}

}  // namespace edgefl
