// As much of onnxruntime's C API as this agent calls. Its functions stand in one table, whose order never changes: a
// function has its place from the release that brought it, and later ones are added behind. So the places below are all that
// is needed of it, and no header of onnxruntime is; where there is one (EDGEFL_ONNXRUNTIME_INCLUDE), the build compares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "wire/errors.h"
#include "wire/tensor.h"

namespace edgefl::ort {

using Object = void*;   // of onnxruntime: an environment, a session, a value, ...
using Status = void*;   // null: it went well

// X(name, place in the table, result, arguments)
#define EDGEFL_ORT_FUNCTIONS(X)                                                                            \
  X(GetErrorMessage, 2, const char*, (const void*))                                                        \
  X(CreateEnv, 3, Status, (int, const char*, Object*))                                                     \
  X(CreateSessionFromArray, 8, Status, (Object, const void*, size_t, Object, Object*))                     \
  X(CreateSessionOptions, 10, Status, (Object*))                                                           \
  X(DisableMemPattern, 17, Status, (Object))                                                               \
  X(EnableCpuMemArena, 18, Status, (Object))                                                               \
  X(DisableCpuMemArena, 19, Status, (Object))                                                              \
  X(SetSessionLogSeverityLevel, 22, Status, (Object, int))                                                 \
  X(SetIntraOpNumThreads, 24, Status, (Object, int))                                                       \
  X(SetInterOpNumThreads, 25, Status, (Object, int))                                                       \
  X(SessionGetInputCount, 30, Status, (Object, size_t*))                                                   \
  X(SessionGetOutputCount, 31, Status, (Object, size_t*))                                                  \
  X(SessionGetInputTypeInfo, 33, Status, (Object, size_t, Object*))                                        \
  X(SessionGetOutputTypeInfo, 34, Status, (Object, size_t, Object*))                                       \
  X(SessionGetInputName, 36, Status, (Object, size_t, Object, char**))                                     \
  X(SessionGetOutputName, 37, Status, (Object, size_t, Object, char**))                                    \
  X(CreateRunOptions, 39, Status, (Object*))                                                               \
  X(CreateTensorWithDataAsOrtValue, 49, Status, (Object, void*, size_t, const int64_t*, size_t, int, Object*)) \
  X(CastTypeInfoToTensorInfo, 55, Status, (Object, Object*))                                               \
  X(GetTensorElementType, 60, Status, (Object, int*))                                                      \
  X(GetDimensionsCount, 61, Status, (Object, size_t*))                                                     \
  X(GetDimensions, 62, Status, (Object, int64_t*, size_t))                                                 \
  X(CreateMemoryInfo, 68, Status, (const char*, int, int, int, Object*))                                   \
  X(CreateCpuMemoryInfo, 69, Status, (int, int, Object*))                                                  \
  X(AllocatorFree, 76, Status, (Object, void*))                                                            \
  X(GetAllocatorWithDefaultOptions, 78, Status, (Object*))                                                 \
  X(ReleaseStatus, 93, void, (Object))                                                                     \
  X(ReleaseMemoryInfo, 94, void, (Object))                                                                 \
  X(ReleaseSession, 95, void, (Object))                                                                    \
  X(ReleaseValue, 96, void, (Object))                                                                      \
  X(ReleaseRunOptions, 97, void, (Object))                                                                 \
  X(ReleaseTypeInfo, 98, void, (Object))                                                                   \
  X(ReleaseSessionOptions, 100, void, (Object))                                                            \
  X(AddSessionConfigEntry, 130, Status, (Object, const char*, const char*))                                \
  X(RunWithBinding, 133, Status, (Object, Object, Object))                                                 \
  X(CreateIoBinding, 134, Status, (Object, Object*))                                                       \
  X(ReleaseIoBinding, 135, void, (Object))                                                                 \
  X(BindInput, 136, Status, (Object, const char*, Object))                                                 \
  X(BindOutput, 137, Status, (Object, const char*, Object))                                                \
  X(CreateAndRegisterAllocator, 144, Status, (Object, Object, Object))                                     \
  X(ReleaseArenaCfg, 157, void, (Object))                                                                  \
  X(CreateArenaCfgV2, 164, Status, (const char* const*, const size_t*, size_t, Object*))                   \
  X(AddRunConfigEntry, 165, Status, (Object, const char*, const char*))

constexpr uint32_t kApiVersion = 20;  // the oldest release that is tested: 1.20
enum AllocatorType { kDeviceAllocator = 0, kArenaAllocator = 1 };
constexpr int kDefaultMemory = 0, kFatal = 4;

struct Failed : EngineError {  // what onnxruntime said
  using EngineError::EngineError;
};

struct Api {
#define EDGEFL_ORT_MEMBER(name, place, result, arguments) result(*name) arguments;
  EDGEFL_ORT_FUNCTIONS(EDGEFL_ORT_MEMBER)
#undef EDGEFL_ORT_MEMBER
  std::string version;

  void check(Status status) const;  // Failed with its message, unless it is null
};

// Loaded when it is first asked for; EngineError if there is no onnxruntime that can be.
const Api& api();
// Of this process; made with the first engine. Its memory stays, so it belongs to the idle agent and not to a round.
Object env();

// An object that is released with its owner.
class Owned {
 public:
  explicit Owned(void (*release)(Object)) : release_(release) {}
  ~Owned() {
    if (object_ != nullptr) release_(object_);
  }
  Owned(Owned&& other) noexcept : object_(other.object_), release_(other.release_) { other.object_ = nullptr; }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&&) = delete;
  Object get() const { return object_; }
  Object* out() { return &object_; }

 private:
  Object object_ = nullptr;
  void (*release_)(Object);
};

int type_number(DType dtype);                // as onnxruntime numbers element types
bool is_type(int number, DType dtype);

}  // namespace edgefl::ort
