// Stock ONNX Runtime, by its C API.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace edgefl {

std::unique_ptr<Engine> onnx_engine(const EngineOptions& options);

}  // namespace edgefl
