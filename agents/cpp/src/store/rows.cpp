#include "store/rows.h"

#include <array>

#include "wire/errors.h"
#include "wire/packing.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr std::array<const char*, 12> kCodes = {"|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"};

}  // namespace

Bytes packed_outgoing(const Outgoing& outgoing) {
  return MapOut()
      .text("run", outgoing.run)
      .integer("round", outgoing.round)
      .text("nonce", outgoing.nonce)
      .bytes("data", outgoing.data)
      .flag("ask", outgoing.ask)
      .integer("shard", outgoing.shard)
      .done();
}

Outgoing read_outgoing(std::string_view data) {
  const Packed packed(data);
  const Fields fields(packed.root(), "Outgoing");
  return {fields.text("run"), fields.integer("round"), fields.text("nonce"), fields.bytes("data"), fields.flag("ask", false), fields.integer("shard", kNoShard)};
}

Bytes packed_past(const PastRound& past) {
  return MapOut()
      .text("run", past.run)
      .integer("round", past.round)
      .text("tier", past.tier)
      .text("nonce", past.nonce)
      .text("outcome", past.outcome)
      .text("reason", past.reason)
      .number("loss", past.loss)
      .number("step_ms", past.step_ms)
      .integer("peak_bytes", past.peak_bytes)
      .integer("down_bytes", past.down_bytes)
      .integer("up_bytes", past.up_bytes)
      .text("text", past.text)
      .done();
}

PastRound read_past(std::string_view data) {
  const Packed packed(data);
  const Fields f(packed.root(), "PastRound");
  return {f.text("run"),           f.integer("round"),         f.text("tier"),          f.text("nonce"),
          f.text("outcome"),       f.text("reason", ""),       f.number("loss", 0),     f.number("step_ms", 0),
          f.integer("peak_bytes", 0), f.integer("down_bytes", 0), f.integer("up_bytes", 0), f.text("text", "")};
}

Bytes packed_shape(const Shape& shape) {
  std::vector<Bytes> sizes;
  for (const int64_t size : shape) sizes.push_back(packed_integer(size));
  return packed_list(sizes);
}

Shape read_shape(std::string_view data) {
  const Packed packed(data);
  Shape shape;
  for (const Packable* each : to_list(packed.root(), "shape")) shape.push_back(to_integer(*each, "shape"));
  return shape;
}

Scalars read_scalars(std::string_view data) {
  const Packed packed(data);
  Scalars found;
  each_entry(packed.root(), "sums", [&](const std::string& name, const Packable& value) { found[name] = to_number(value, "sums"); });
  return found;
}

std::string numpy_code(DType dtype) { return kCodes[static_cast<size_t>(dtype)]; }

DType dtype_of_code(const std::string& code) {
  for (size_t i = 0; i < kCodes.size(); ++i)
    if (code == kCodes[i]) return static_cast<DType>(i);
  throw ProtocolError("a stored tensor has the type " + in_quotes(code));
}

}  // namespace edgefl
