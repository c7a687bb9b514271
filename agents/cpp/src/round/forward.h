// Multi-step forward pass: the frozen prefix, chunk by chunk, into a record on disk, once per round.
#pragma once

#include <memory>
#include <vector>

#include "round/graphs.h"
#include "round/record.h"
#include "round/runner.h"

namespace edgefl {

// The boundary activations, one row per sample. Chunks whose record is sealed already are not run again.
std::unique_ptr<Record> run_forward(RoundGraphs& graphs, const RoundRequest& request, const FittedData& data,
                                    const RoundHost& host, std::vector<double>& took);

}  // namespace edgefl
