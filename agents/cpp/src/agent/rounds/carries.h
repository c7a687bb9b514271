// What a round goes on from of earlier ones, and what of it is void (docs/protocol.md, What is carried).
#pragma once

#include <functional>
#include <string>

#include "agent/rounds/job.h"
#include "store/store.h"
#include "wire/manifest.h"

namespace edgefl {

// (text for people, the carry that it is about)
using TellCarry = std::function<void(const std::string&, const StoredCarry&)>;

struct RestoredCarry {
  Tensors arrays;      // empty: zeros
  std::string origin;  // names the round that left it
};

std::string carry_name(const Job& job, const Manifest& manifest);

// What the round of `job` goes on from. What is of no use any more is told, then dropped. RoundDeclined if nothing is there
// and the program cannot begin without it.
RestoredCarry take_up(Store& store, const Job& job, const Manifest& manifest, const TellCarry& tell);

// Drops what was kept of rounds between the last completed one and the one that is announced: later announcements do not
// tell any more that these were abandoned.
void drop_abandoned(Store& store, const Round& announced, const TellCarry& tell);

}  // namespace edgefl
