#include "engine/engine.h"

#ifdef EDGEFL_HAS_EXECUTORCH
#include "engine/executorch/engine.h"
#endif
#ifdef EDGEFL_HAS_ONNXRUNTIME
#include "engine/onnx/engine.h"
#endif

namespace edgefl {
namespace {

constexpr int kMostThreads = 1024;  // more is a slip of the hand

}  // namespace

std::vector<std::string> built_engines() {
  std::vector<std::string> formats;
#ifdef EDGEFL_HAS_EXECUTORCH
  formats.emplace_back("executorch");
#endif
#ifdef EDGEFL_HAS_ONNXRUNTIME
  formats.emplace_back("onnx");
#endif
  return formats;
}

std::unique_ptr<Engine> make_engine(const std::string& format, const EngineOptions& options) {
  if (options.threads < 1 || options.threads > kMostThreads) {
    throw EngineError("an engine cannot work with " + std::to_string(options.threads) + " threads: choose 1 to " +
                      std::to_string(kMostThreads) + " by `threads`");
  }
#ifdef EDGEFL_HAS_EXECUTORCH
  if (format == "executorch") return executorch_engine(options);
#endif
#ifdef EDGEFL_HAS_ONNXRUNTIME
  if (format == "onnx") return onnx_engine(options);
#endif
  std::string there;
  for (const std::string& each : built_engines()) there += (there.empty() ? "" : ", ") + each;
  throw EngineError("there is no engine for '" + format + "' in this agent: it was built with " +
                    (there.empty() ? "none" : there) + "; build it with another, or offer the tier in these formats");
}

}  // namespace edgefl
