// What a round may ask of a device, checked before anything of it is fetched, unfolded or loaded. RoundDeclined says what is
// too much, and the remedy.
#pragma once

#include <cstdint>

#include "agent/rounds/job.h"
#include "engine/engine.h"
#include "wire/mqtt/limits.h"
#include "wire/manifest.h"

namespace edgefl {

void check_manifest_size(const BlobRef& ref, const Limits& limits);
// Throws if a graph of the bundle needs a newer release of the engine's runtime than this device has.
void check_runtime(const Manifest& manifest, const Engine& engine);
void check_graphs(const Manifest& manifest, int64_t memory_bytes);           // of the round
void check_weights(const Job& job, const Manifest& manifest);
void check_steps(const Manifest& manifest, int64_t rows, const Limits& limits);

}  // namespace edgefl
