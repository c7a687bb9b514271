#include "engine/onnx/api.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <vector>

#ifdef EDGEFL_HAS_ORT_HEADER
#include <onnxruntime_c_api.h>
#define EDGEFL_ORT_CHECK(name, place, result, arguments) \
  static_assert(offsetof(OrtApi, name) == (place) * sizeof(void*), "another place in onnxruntime's table: " #name);
EDGEFL_ORT_FUNCTIONS(EDGEFL_ORT_CHECK)
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 == 10 && ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64 == 13);
static_assert(OrtArenaAllocator == 1 && OrtMemTypeDefault == 0 && ORT_LOGGING_LEVEL_FATAL == 4);
#endif

namespace edgefl::ort {
namespace {

// Bool, int8 to int64, uint8 to uint64, float16, float32, float64.
constexpr std::array<int, 12> kTypes = {9, 3, 5, 6, 7, 2, 4, 12, 13, 10, 1, 11};
#ifdef __APPLE__
constexpr const char* kPlaces[] = {EDGEFL_ONNXRUNTIME_LIBRARY, "libonnxruntime.dylib"};
#else
constexpr const char* kPlaces[] = {EDGEFL_ONNXRUNTIME_LIBRARY, "libonnxruntime.so.1", "libonnxruntime.so"};
#endif

constexpr const char* kSilence = "ORT_DISABLE_TELEMETRY";

struct Base {  // what the library's one entry point gives
  const void* const* (*table)(uint32_t version);
  const char* (*version)();
};

Api loaded() {
  // Else it tells its makers which graphs are loaded on this device.
  if (const char* said = getenv(kSilence); said == nullptr || *said == '\0') setenv(kSilence, "1", 1);
  std::string why;
  void* library = nullptr;
  for (const char* place : kPlaces) {
    if (*place != '\0' && (library = dlopen(place, RTLD_NOW | RTLD_LOCAL)) != nullptr) break;
    if (const char* text = dlerror()) why = text;
  }
  using Entry = const Base* (*)();
  const auto entry = library == nullptr ? nullptr : reinterpret_cast<Entry>(dlsym(library, "OrtGetApiBase"));
  if (entry == nullptr) {
    throw EngineError("onnxruntime cannot be loaded (" + why + "): put its library beside this program's other libraries, or "
                      "use `engine` executorch");
  }
  const Base* base = entry();
  const void* const* table = base->table(kApiVersion);
  if (table == nullptr) {
    throw EngineError("onnxruntime " + std::string(base->version()) + " is older than 1." + std::to_string(kApiVersion) +
                      ", which this agent needs: install a newer one");
  }
  Api made{};
#define EDGEFL_ORT_TAKE(name, place, result, arguments) \
  made.name = reinterpret_cast<result(*) arguments>(const_cast<void*>(table[place]));
  EDGEFL_ORT_FUNCTIONS(EDGEFL_ORT_TAKE)
#undef EDGEFL_ORT_TAKE
  made.version = base->version();
  return made;
}

}  // namespace

void Api::check(Status status) const {
  if (status == nullptr) return;
  const std::string text = GetErrorMessage(status);
  ReleaseStatus(status);
  throw Failed(text);
}

const Api& api() {
  static const Api made = loaded();  // never released: its threads may outlive whoever would
  return made;
}

Object env() {
  static const Object made = [] {
    Object object = nullptr;
    api().check(api().CreateEnv(kFatal, "edgefl", &object));  // what fails is thrown, too: in a log it would come twice
    return object;
  }();
  return made;
}

int type_number(DType dtype) { return kTypes[static_cast<size_t>(dtype)]; }
bool is_type(int number, DType dtype) { return type_number(dtype) == number; }

}  // namespace edgefl::ort
