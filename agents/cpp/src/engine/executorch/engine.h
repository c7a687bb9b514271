// Programs of ExecuTorch (.pte), run by its C++ runtime.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace edgefl {

std::unique_ptr<Engine> executorch_engine(const EngineOptions& options);

}  // namespace edgefl
