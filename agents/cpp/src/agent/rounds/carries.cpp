#include "agent/rounds/carries.h"

#include <algorithm>
#include <set>

#include "wire/bytes/safetensors.h"
#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

struct Void {
  StoredCarry carry;
  std::string why;
};

struct CarryChoice {
  std::optional<StoredCarry> carry;
  std::vector<Void> useless;
  std::vector<StoredCarry> superseded;
};

std::string of_round(const StoredCarry& carry) {
  return "of round " + std::to_string(carry.round) + " of run " + carry.name.substr(0, carry.name.find('/'));
}

bool of_run(const StoredCarry& carry, const std::string& run) { return carry.name.rfind(run + "/", 0) == 0; }

// Whether a carry of a completed round is good no more, as it is good for `exchanges` completed rounds (0: for all).
bool is_too_old(const StoredCarry& carry, int64_t base, int64_t exchanges) { return exchanges > 0 && base - carry.round >= exchanges; }

// Judges carries, oldest first: the newest of a completed round is taken; those before it are superseded as far as no
// rejection can bring them back.
CarryChoice choose(const std::vector<StoredCarry>& carries, const Job& job, const std::string& name, int64_t exchanges) {
  CarryChoice choice;
  std::vector<StoredCarry> valid;
  for (const StoredCarry& each : carries)
    if (!of_run(each, job.run)) choice.useless.push_back({each, "it belongs to another run, " + job.run + " goes on now"});
  for (const StoredCarry& each : carries) {
    if (each.name != name) continue;
    if (each.round > job.base) {
      choice.useless.push_back({each, "round " + std::to_string(each.round) + " was abandoned"});
    } else {
      valid.push_back(each);
    }
  }
  if (valid.empty()) return choice;
  if (is_too_old(valid.back(), job.base, exchanges)) {
    choice.useless.push_back({valid.back(), "it was good for " + std::to_string(exchanges) + " completed round" + (exchanges > 1 ? "s" : "") +
                                                " after it, and round " + std::to_string(job.base) + " is completed"});
    valid.pop_back();
    choice.superseded = valid;
    return choice;
  }
  choice.carry = valid.back();
  for (size_t place = valid.size(); place-- > 0;) {
    if (valid[place].waits) continue;
    choice.superseded.assign(valid.begin(), valid.begin() + static_cast<long>(place));
    break;
  }
  return choice;
}

Ports carry_ports(const Manifest& manifest) {
  std::vector<std::string> names = {manifest.start};
  for (const Phase& phase : manifest.phases) names.push_back(phase.graph);
  names.push_back(manifest.finish);
  Ports ports;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (!seen.insert(name).second) continue;
    const Ports each = manifest.graph(name).inputs_of("carry");
    ports.insert(ports.end(), each.begin(), each.end());
  }
  return ports;
}

// Why the tensors of a carry do not fit the ports; "" if they do.
std::string misfit(const Tensors& arrays, const Ports& ports) {
  std::string missing;
  for (const Port& port : ports)
    if (arrays.count(port.label()) == 0) missing += (missing.empty() ? "" : ", ") + in_quotes(port.label());
  if (!missing.empty()) return "the program now reads " + missing + ", which it does not hold";
  for (const Port& port : ports) {
    const Tensor& found = arrays.at(port.label());
    if (found.shape != port.shape || found.dtype != port.dtype)
      return port.name + " should be " + std::string(dtype_name(port.dtype)) + " " + shown(port.shape) + ", found " +
             std::string(dtype_name(found.dtype)) + " " + shown(found.shape) + ": the data or the weights do not belong to this bundle";
  }
  return "";
}

// The carry that the store has no more: nothing. One that does not fit the ports: no arrays, and `why`.
std::optional<RestoredCarry> read_carry(const Store& store, const StoredCarry& carry, const Ports& ports, std::string& why) {
  const auto data = store.carry(carry);
  if (!data) return std::nullopt;
  RestoredCarry taken;
  try {
    taken.arrays = load_tensors(*data);
    why = misfit(taken.arrays, ports);
  } catch (const ProtocolError& error) {
    why = error.what();
  }
  if (!why.empty()) return RestoredCarry{};
  taken.origin = of_round(carry) + " (task " + carry.nonce + ")";
  return taken;
}

// The newest carry, stored after the one of number `after`, that the same run and program left in another tier and that fits.
std::optional<RestoredCarry> of_other_tiers(const Store& store, const std::vector<StoredCarry>& carries, const Job& job, const Manifest& manifest,
                                            const Ports& ports, int64_t after) {
  const std::string own = carry_name(job, manifest);
  const auto program = [](const std::string& name) { return name.substr(0, name.rfind('/')); };
  for (auto each = carries.rbegin(); each != carries.rend() && each->id > after; ++each) {
    if (each->name == own || program(each->name) != program(own)) continue;
    if (each->round > job.base || is_too_old(*each, job.base, manifest.carry_exchanges)) continue;
    std::string why;  // it stays for a return to its tier
    if (auto taken = read_carry(store, *each, ports, why); taken && !taken->arrays.empty()) return taken;
  }
  return std::nullopt;
}

// Tells of what is void, then drops it: a process that is killed in between tells it twice.
void drop(Store& store, const std::vector<Void>& useless, std::vector<StoredCarry> others, const TellCarry& tell, const std::string& now) {
  std::set<std::string> told;
  for (const Void& each : useless) {
    if (told.insert(each.carry.name + each.why).second) tell("what this device kept " + of_round(each.carry) + " is dropped: " + each.why + "; " + now, each.carry);
    others.push_back(each.carry);
  }
  if (!others.empty()) store.drop_carries(others);
}

}  // namespace

std::string carry_name(const Job& job, const Manifest& manifest) { return job.run + "/" + manifest.program + "/" + job.tier; }

RestoredCarry take_up(Store& store, const Job& job, const Manifest& manifest, const TellCarry& tell) {
  const Ports ports = carry_ports(manifest);
  const std::vector<StoredCarry> carries = store.carries();
  const std::string name = carry_name(job, manifest);
  CarryChoice choice = choose(carries, job, name, manifest.carry_exchanges);
  if (ports.empty()) {  // this round asks for nothing; a later one may ask for those of this run
    choice.carry.reset();
    choice.superseded.clear();
    choice.useless.erase(std::remove_if(choice.useless.begin(), choice.useless.end(), [&](const Void& each) { return of_run(each.carry, job.run); }), choice.useless.end());
  }
  RestoredCarry taken;
  if (choice.carry) {
    std::string why;
    auto own = read_carry(store, *choice.carry, ports, why);
    if (!own) return take_up(store, job, manifest, tell);  // refused by the server a moment ago
    taken = std::move(*own);
    if (!why.empty()) {
      choice.useless.push_back({*choice.carry, why});
      for (const StoredCarry& each : carries)  // those before it fit no better
        if (each.name == name) choice.superseded.push_back(each);
    }
  }
  if (manifest.carry_any_tier && !ports.empty()) {
    const int64_t after = taken.arrays.empty() ? 0 : choice.carry->id;
    if (auto other = of_other_tiers(store, carries, job, manifest, ports, after)) taken = std::move(*other);
  }
  const bool declines = manifest.carry_needed && !ports.empty() && taken.arrays.empty();
  const std::string number = std::to_string(job.round);
  const std::string now = declines               ? "this device declines round " + number
                          : ports.empty()        ? "round " + number + " asks for nothing of earlier ones"
                          : taken.arrays.empty() ? "round " + number + " begins from zeros"
                                                 : "round " + number + " goes on from what was kept " + taken.origin;
  drop(store, choice.useless, choice.superseded, tell, now);
  if (declines)
    throw RoundDeclined("no-carry", "program " + in_quotes(manifest.program) + " goes on from what a device kept of an earlier round, and this one has "
                                    "nothing that round " + number + " can go on from" + (choice.useless.empty() ? "" : ": " + choice.useless.back().why));
  return taken;
}

void drop_abandoned(Store& store, const Round& announced, const TellCarry& tell) {
  if (!announced.is_open()) return;
  std::vector<Void> lost;
  for (const StoredCarry& each : store.carries())
    if (of_run(each, announced.run) && each.round > announced.base && each.round < announced.round)
      lost.push_back({each, "round " + std::to_string(each.round) + " was abandoned"});
  drop(store, lost, {}, tell, "later rounds go on from what was kept before it");
}

}  // namespace edgefl
