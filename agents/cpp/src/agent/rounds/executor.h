// The work on one round: fetch its bundle, train, and put the update into the outbox.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "agent/rounds/carries.h"
#include "agent/rounds/job.h"
#include "agent/owner.h"
#include "data/source.h"
#include "engine/engine.h"
#include "link/fetch.h"
#include "link/trust.h"
#include "round/trainer.h"
#include "store/store.h"

namespace edgefl {

struct RoundExecutor {
  std::string device;
  Limits limits;
  int64_t memory_bytes = 0;  // that this device offers
  Engine& engine;
  const DataSource& data;
  Fetcher& fetcher;
  Store& store;
  ServerTrust& trust;
  const Owner& owner;
  // Told before the first step: rows, steps, and which rows were left out.
  std::function<void(const Job&, int64_t rows, int64_t steps, const std::string& skipped)> begins;
  std::function<void(const Job&, const StepReport&)> watch;
  std::function<bool()> aborted;
  TellCarry dropped;
  std::function<void(const std::string& text)> exceeded;  // a round took more memory than planned
  int64_t most_bytes = 0;  // anonymous memory at the peak of the round so far

  // One round, from the first blob to the outbox. RoundAborted when it is over, RoundDeclined if this device cannot take part,
  // DataError if the local data do not fit the model, and other errors after which it may be tried again.
  void run(const Job& job);

 private:
  Manifest manifest_of(const Job& job);
  Tensors weights_of(const Job& job, const std::vector<std::string>& units);
  DataParts parts_of(const Manifest& manifest);
  RoundHost host_of(const Job& job, RoundControl& guard);
  void compare(const Job& job, const Manifest& manifest, int64_t used) const;
  void hand_over(const Job& job, const Manifest& manifest, RoundResult result, int64_t idle_bytes);
};

}  // namespace edgefl
