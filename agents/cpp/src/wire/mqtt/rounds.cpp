#include <algorithm>

#include "wire/errors.h"
#include "wire/mqtt/messages.h"
#include "wire/packing.h"
#include "wire/printable.h"
#include "wire/mqtt/versions.h"

namespace edgefl {
namespace {

constexpr int64_t kElsewhere = 3;

std::vector<BlobRef> read_refs(const Packable& value, const std::string& what) {
  std::vector<BlobRef> refs;
  for (const Packable* each : to_list(value, what)) refs.push_back(read_ref(*each, what));
  return refs;
}

Units read_units(const Fields& fields, std::string_view key) {
  Units units;
  fields.entries(key, [&](const std::string& name, const Packable& value) { units[name] = read_refs(value, fields.name(key)); });
  return units;
}

std::map<std::string, Offer> read_offers(const Fields& fields) {
  std::map<std::string, Offer> offers;
  fields.entries("offers", [&](const std::string& format, const Packable& value) {
    Fields each(value, "Offer");
    Offer offer;
    each.entries("bundles", [&](const std::string& tier, const Packable& ref) { offer.bundles[tier] = read_ref(ref, "Offer.bundles"); });
    each.entries("signatures", [&](const std::string& tier, const Packable& text) { offer.signatures[tier] = to_bytes(text, "Offer.signatures"); }, false);
    offers[format] = std::move(offer);
  });
  return offers;
}

std::map<int64_t, LiveRound> read_live(const Fields& fields) {
  std::map<int64_t, LiveRound> live;
  fields.numbered("live", [&](int64_t number, const Packable& value) {
    Fields each(value, "Live");
    live[number] = {each.text("model_version"), read_units(each, "units"), each.scalars("hyper")};
  }, false);
  return live;
}

void check(const Round& round) {
  const bool elsewhere = round.pages || round.mirrors_only;
  if (elsewhere && round.v != kElsewhere)
    throw ProtocolError("a Round of version " + std::to_string(round.v) + " has no pages and no mirrors_only, found them: it is refused");
  if (round.pages && (!round.offers.empty() || !round.units.empty()))
    throw ProtocolError("a Round with pages has its offers and units there, found some beside them: it is refused");
}

}  // namespace

std::vector<int64_t> Round::takes() const {
  std::vector<int64_t> numbers;
  if (!is_open()) return numbers;
  for (const auto& [number, each] : live) numbers.push_back(number);
  numbers.push_back(round);
  return numbers;
}

bool Round::takes(int64_t number) const { return is_open() && (number == round || live.count(number) != 0); }

std::vector<std::string> Round::formats_of(const std::string& tier) const {
  std::vector<std::string> formats;
  for (const auto& [format, offer] : offers)
    if (offer.bundles.count(tier) != 0) formats.push_back(format);
  return formats;
}

Round Round::whole(std::string_view page) const {
  try {
    Packed packed(page);
    Fields fields(packed.root(), "page");
    Round found = *this;
    found.offers = read_offers(fields);
    found.units = read_units(fields, "units");
    std::map<int64_t, Units> units;
    fields.numbered("live", [&](int64_t number, const Packable& value) {
      each_entry(value, "page.live", [&](const std::string& name, const Packable& refs) { units[number][name] = read_refs(refs, "page.live"); });
    }, false);
    for (auto& [number, each] : found.live) each.units = units[number];
    found.pages.reset();
    return found;
  } catch (const ProtocolError& error) {
    throw ProtocolError("the page of the announcement of round " + std::to_string(round) + " is malformed: " + error.what());
  }
}

template <>
Round decode<Round>(std::string_view payload) {
  return read_message<Round>(payload, {1, kElsewhere}, [](const Fields& fields) {
    Round round;
    round.v = fields.integer("v", 1);
    round.run = fields.text("run");
    round.round = fields.integer("round");
    round.state = fields.text("state");
    if (round.state != "open" && round.state != "closed" && round.state != "done")
      throw ProtocolError("Round.state is " + in_quotes(round.state) + ", not open, closed or done");
    round.model_version = fields.text("model_version");
    round.offers = read_offers(fields);
    round.units = read_units(fields, "units");
    round.hyper = fields.scalars("hyper");
    round.base = fields.integer("base");
    round.deadline = fields.number("deadline");
    round.mirrors = fields.texts("mirrors", false);
    round.mirrors_only = fields.flag("mirrors_only", false);
    if (!fields.is_nil("pages")) round.pages = read_ref(fields.at("pages"), "Round.pages");
    round.live = read_live(fields);
    check(round);
    return round;
  });
}

}  // namespace edgefl
