// Multi-step forward pass: the frozen prefix, chunk by chunk, into a record on disk, once per round.
#pragma once

#include <memory>
#include <vector>

#include "round/graph_loader.h"
#include "round/record.h"
#include "round/trainer.h"

namespace edgefl {

// The boundary activations, one row per sample. Chunks whose record is sealed already are not run again.
std::unique_ptr<ActivationRecord> run_forward(GraphLoader& graphs, const RoundRequest& request, const FittedData& data,
                                    const RoundHost& host, std::vector<double>& took);

}  // namespace edgefl
