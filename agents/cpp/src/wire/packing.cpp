#include "wire/packing.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <msgpack.hpp>

#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr size_t kHeadBytes = 64;  // around a large value: the head of the map, and small fields behind it
constexpr size_t kMostDepth = 64;
constexpr size_t kMostItems = 1 << 24;
using msgpack::type::object_type;

const char* type_name(const Packable& value) {
  switch (value.type) {
    case object_type::NIL: return "nil";
    case object_type::BOOLEAN: return "bool";
    case object_type::POSITIVE_INTEGER:
    case object_type::NEGATIVE_INTEGER: return "int";
    case object_type::FLOAT32:
    case object_type::FLOAT64: return "float";
    case object_type::STR: return "str";
    case object_type::BIN: return "bytes";
    case object_type::ARRAY: return "list";
    case object_type::MAP: return "map";
    default: return "ext";
  }
}

[[noreturn]] void wrong(const std::string& what, const char* expected, const Packable& found) {
  throw ProtocolError(what + " should be " + expected + ", found " + type_name(found));
}

template <typename Write>
Bytes packed(Write write) {
  msgpack::sbuffer buffer(64);
  msgpack::packer<msgpack::sbuffer> packer(buffer);
  write(packer);
  return Bytes(buffer.data(), buffer.size());
}

// `take` gets one value after the other of a key that may be missing.
template <typename T>
std::vector<T> list_of(const Fields& fields, std::string_view key, bool needed, T (*read)(const Packable&, const std::string&)) {
  std::vector<T> found;
  fields.each(key, [&](const Packable& value) { found.push_back(read(value, fields.name(key))); }, needed);
  return found;
}

}  // namespace

struct Packed::Handle {
  msgpack::object_handle object;
};

Packed::Packed(std::string_view data) : handle_(std::make_unique<Handle>()) {
  // Text and bytes stay where they are: `data` has to live as long.
  const size_t most = std::min(kMostItems, data.size());  // each item is a byte at least: no room is made for what is only claimed
  msgpack::unpack_limit limit(most, most, std::numeric_limits<uint32_t>::max(),
                              std::numeric_limits<uint32_t>::max(), std::numeric_limits<uint32_t>::max(), kMostDepth);
  size_t offset = 0;
  try {
    handle_->object = msgpack::unpack(
        data.data(), data.size(), offset, [](msgpack::type::object_type, size_t, void*) { return true; }, nullptr, limit);
  } catch (const msgpack::unpack_error& error) {
    throw ProtocolError(std::string("it is no MessagePack (") + error.what() + ")");
  } catch (const std::bad_alloc&) {
    throw ProtocolError("it is no MessagePack (it claims more than there is)");
  }
  if (offset != data.size()) throw ProtocolError("something follows the message");
}

Packed::~Packed() = default;

const Packable& Packed::root() const { return handle_->object.get(); }

int64_t to_integer(const Packable& value, const std::string& what) {
  if (value.type == object_type::NEGATIVE_INTEGER) return value.via.i64;
  if (value.type != object_type::POSITIVE_INTEGER || value.via.u64 > uint64_t{INT64_MAX}) wrong(what, "int", value);
  return static_cast<int64_t>(value.via.u64);
}

double to_number(const Packable& value, const std::string& what) {
  if (value.type == object_type::FLOAT32 || value.type == object_type::FLOAT64) return value.via.f64;
  if (value.type == object_type::NEGATIVE_INTEGER) return static_cast<double>(value.via.i64);
  if (value.type != object_type::POSITIVE_INTEGER) wrong(what, "float", value);
  return static_cast<double>(value.via.u64);
}

std::string to_text(const Packable& value, const std::string& what) {
  if (value.type != object_type::STR) wrong(what, "str", value);
  std::string text(value.via.str.ptr, value.via.str.size);
  if (!is_utf8(text)) throw ProtocolError(what + " is no UTF-8");
  return text;
}

Bytes to_bytes(const Packable& value, const std::string& what) {
  if (value.type != object_type::BIN) wrong(what, "bytes", value);
  return Bytes(value.via.bin.ptr, value.via.bin.size);
}

bool to_flag(const Packable& value, const std::string& what) {
  if (value.type != object_type::BOOLEAN) wrong(what, "bool", value);
  return value.via.boolean;
}

std::vector<const Packable*> to_list(const Packable& value, const std::string& what) {
  if (value.type != object_type::ARRAY) wrong(what, "list", value);
  std::vector<const Packable*> found;
  for (uint32_t i = 0; i < value.via.array.size; ++i) found.push_back(value.via.array.ptr + i);
  return found;
}

void each_entry(const Packable& value, const std::string& what, const std::function<void(const std::string&, const Packable&)>& take) {
  if (value.type != object_type::MAP) wrong(what, "a map", value);
  for (uint32_t i = 0; i < value.via.map.size; ++i) take(to_text(value.via.map.ptr[i].key, what), value.via.map.ptr[i].val);
}

Bytes packed_numbers(const std::map<Bytes, int64_t>& values) {
  Bytes found = packed([&](auto& out) { out.pack_map(static_cast<uint32_t>(values.size())); });
  for (const auto& [key, value] : values) found += packed_bytes(key) + packed_integer(value);
  return found;
}

std::map<Bytes, int64_t> read_numbers(const Packable& value) {
  if (value.type != object_type::MAP) wrong("numbers", "a map", value);
  std::map<Bytes, int64_t> found;
  for (uint32_t i = 0; i < value.via.map.size; ++i)
    found[to_bytes(value.via.map.ptr[i].key, "numbers")] = to_integer(value.via.map.ptr[i].val, "numbers");
  return found;
}

Fields::Fields(const Packable& value, std::string what) : map_(value), what_(std::move(what)) {
  if (value.type != object_type::MAP) wrong(what_, "a map", value);
}

std::string Fields::name(std::string_view key) const { return what_ + "." + std::string(key); }

const Packable* Fields::find(std::string_view key) const {
  for (uint32_t i = map_.via.map.size; i-- > 0;) {
    const auto& entry = map_.via.map.ptr[i];
    if (entry.key.type == object_type::STR && std::string_view(entry.key.via.str.ptr, entry.key.via.str.size) == key)
      return &entry.val;
  }
  return nullptr;
}

const Packable& Fields::at(std::string_view key) const {
  const Packable* found = find(key);
  if (found == nullptr) throw ProtocolError(name(key) + " is missing");
  return *found;
}

bool Fields::is_nil(std::string_view key) const {
  const Packable* found = find(key);
  return found == nullptr || found->type == object_type::NIL;
}

int64_t Fields::integer(std::string_view key) const { return to_integer(at(key), name(key)); }
int64_t Fields::integer(std::string_view key, int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
double Fields::number(std::string_view key) const { return to_number(at(key), name(key)); }
double Fields::number(std::string_view key, double otherwise) const { return has(key) ? number(key) : otherwise; }
std::string Fields::text(std::string_view key) const { return to_text(at(key), name(key)); }
std::string Fields::text(std::string_view key, const std::string& otherwise) const {
  return has(key) ? text(key) : otherwise;
}
Bytes Fields::bytes(std::string_view key) const { return to_bytes(at(key), name(key)); }
Bytes Fields::bytes(std::string_view key, const Bytes& otherwise) const { return has(key) ? bytes(key) : otherwise; }
bool Fields::flag(std::string_view key) const { return to_flag(at(key), name(key)); }
bool Fields::flag(std::string_view key, bool otherwise) const { return has(key) ? flag(key) : otherwise; }

std::vector<std::string> Fields::texts(std::string_view key, bool needed) const {
  return list_of<std::string>(*this, key, needed, to_text);
}
std::vector<int64_t> Fields::integers(std::string_view key, bool needed) const {
  return list_of<int64_t>(*this, key, needed, to_integer);
}
std::vector<double> Fields::numbers(std::string_view key, bool needed) const {
  return list_of<double>(*this, key, needed, to_number);
}

std::map<std::string, double> Fields::scalars(std::string_view key) const {
  std::map<std::string, double> found;
  entries(key, [&](const std::string& each, const Packable& value) { found[each] = to_number(value, name(key)); });
  return found;
}

void Fields::each(std::string_view key, const std::function<void(const Packable&)>& take, bool needed) const {
  if (!needed && !has(key)) return;
  for (const Packable* value : to_list(at(key), name(key))) take(*value);
}

void Fields::entries(std::string_view key, const std::function<void(const std::string&, const Packable&)>& take,
                     bool needed) const {
  if (!needed && !has(key)) return;
  each_entry(at(key), name(key), take);
}

void Fields::numbered(std::string_view key, const std::function<void(int64_t, const Packable&)>& take, bool needed) const {
  if (!needed && !has(key)) return;
  const Packable& value = at(key);
  if (value.type != object_type::MAP) wrong(name(key), "a map", value);
  for (uint32_t i = 0; i < value.via.map.size; ++i)
    take(to_integer(value.via.map.ptr[i].key, name(key)), value.via.map.ptr[i].val);
}

Bytes packed_text(std::string_view value) {
  return packed([&](auto& out) { out.pack_str(static_cast<uint32_t>(value.size())).pack_str_body(value.data(), static_cast<uint32_t>(value.size())); });
}
Bytes packed_bytes(std::string_view value) {
  return packed([&](auto& out) { out.pack_bin(static_cast<uint32_t>(value.size())).pack_bin_body(value.data(), static_cast<uint32_t>(value.size())); });
}
Bytes packed_integer(int64_t value) {
  return packed([&](auto& out) { out.pack_int64(value); });
}
Bytes packed_number(double value) {
  uint64_t bits;  // the library would write 40.0 as the integer
  std::memcpy(&bits, &value, sizeof bits);
  Bytes found(1, '\xcb');
  for (int shift = 56; shift >= 0; shift -= 8) found += static_cast<char>(bits >> shift & 255);
  return found;
}
Bytes packed_flag(bool value) {
  return packed([&](auto& out) { value ? out.pack_true() : out.pack_false(); });
}

Bytes packed_list(const std::vector<Bytes>& values) {
  Bytes found = packed([&](auto& out) { out.pack_array(static_cast<uint32_t>(values.size())); });
  for (const Bytes& value : values) found += value;
  return found;
}

Bytes packed_scalars(const std::map<std::string, double>& values) {
  MapOut out;
  for (const auto& [key, value] : values) out.number(key, value);
  return out.done();
}

Bytes packed_texts(const std::map<std::string, std::string>& values) {
  MapOut out;
  for (const auto& [key, value] : values) out.text(key, value);
  return out.done();
}

MapOut& MapOut::raw(std::string_view key, std::string_view encoded) {
  body_ += packed_text(key);
  body_ += encoded;
  ++count_;
  return *this;
}

MapOut& MapOut::bytes(std::string_view key, std::string_view value) {
  raw(key, packed([&](auto& out) { out.pack_bin(static_cast<uint32_t>(value.size())); }));
  body_.reserve(body_.size() + value.size() + kHeadBytes);
  body_ += value;
  return *this;
}

Bytes MapOut::done() {
  body_.insert(0, packed([&](auto& out) { out.pack_map(count_); }));
  return std::move(body_);
}

BlobRef read_ref(const Packable& value, const std::string& what) {
  Fields fields(value, what);
  BlobRef ref;
  ref.sha256 = fields.text("sha256");
  ref.size = fields.integer("size");
  ref.chunk = fields.integer("chunk");
  ref.digests = fields.bytes("digests", "");
  ref.codec = fields.text("codec", "");
  ref.raw = fields.integer("raw", 0);
  if (!ref.codec.empty() && ref.codec != "zstd") throw ProtocolError(what + ".codec is " + in_quotes(ref.codec) + ", not zstd");
  return ref;
}

Bytes packed_ref(const BlobRef& ref) {
  MapOut out;
  out.text("sha256", ref.sha256).integer("size", ref.size).integer("chunk", ref.chunk);
  if (!ref.digests.empty()) out.bytes("digests", ref.digests);
  if (!ref.codec.empty()) out.text("codec", ref.codec);
  if (ref.raw != 0) out.integer("raw", ref.raw);
  return out.done();
}

}  // namespace edgefl
