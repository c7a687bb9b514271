// MessagePack as the protocol has it: maps with string keys, strict types, bounded nesting, shortest integers.
//
//   Packed data(payload);                       // ProtocolError if it cannot be read
//   Fields fields(data.root(), "Task");
//   task.round = fields.integer("round");
//   return MapOut().text("run", run).integer("round", 3).done();
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#ifndef MSGPACK_NO_BOOST
#define MSGPACK_NO_BOOST
#endif
#include <msgpack/object_fwd.hpp>

#include "wire/blob_ref.h"
#include "wire/errors.h"

namespace edgefl {

using Packable = msgpack::object;

// What was read; its values live as long as it does.
class Packed {
 public:
  explicit Packed(std::string_view data);
  ~Packed();
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
  const Packable& root() const;

 private:
  struct Handle;
  std::unique_ptr<Handle> handle_;
};

// Single values; ProtocolError, which names `what`, for another type.
int64_t to_integer(const Packable& value, const std::string& what);
double to_number(const Packable& value, const std::string& what);
std::string to_text(const Packable& value, const std::string& what);
Bytes to_bytes(const Packable& value, const std::string& what);
bool to_flag(const Packable& value, const std::string& what);
std::vector<const Packable*> to_list(const Packable& value, const std::string& what);

// Calls `take` with each key and value of a map with string keys.
void each_entry(const Packable& value, const std::string& what, const std::function<void(const std::string&, const Packable&)>& take);

// A map of numbers by keys that are bytes.
Bytes packed_numbers(const std::map<Bytes, int64_t>& values);
std::map<Bytes, int64_t> read_numbers(const Packable& value);

// One map. A key that is missing, where no default is given, is an error that names it.
class Fields {
 public:
  Fields(const Packable& value, std::string what);
  const Packable* find(std::string_view key) const;  // the last one of that name
  const Packable& at(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  bool is_nil(std::string_view key) const;

  int64_t integer(std::string_view key) const;
  int64_t integer(std::string_view key, int64_t otherwise) const;
  double number(std::string_view key) const;
  double number(std::string_view key, double otherwise) const;
  std::string text(std::string_view key) const;
  std::string text(std::string_view key, const std::string& otherwise) const;
  Bytes bytes(std::string_view key) const;
  Bytes bytes(std::string_view key, const Bytes& otherwise) const;
  bool flag(std::string_view key) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::vector<std::string> texts(std::string_view key, bool needed = true) const;
  std::vector<int64_t> integers(std::string_view key, bool needed = true) const;
  std::vector<double> numbers(std::string_view key, bool needed = true) const;
  std::map<std::string, double> scalars(std::string_view key) const;
  // Calls `take` with each element of a list, or with each key and value of a map with string keys.
  void each(std::string_view key, const std::function<void(const Packable&)>& take, bool needed = true) const;
  void entries(std::string_view key, const std::function<void(const std::string&, const Packable&)>& take,
               bool needed = true) const;
  // Of a map with integer keys.
  void numbered(std::string_view key, const std::function<void(int64_t, const Packable&)>& take, bool needed) const;
  std::string name(std::string_view key) const;  // "Task.round", for messages

 private:
  const Packable& map_;
  std::string what_;
};

// Encoded values.
Bytes packed_text(std::string_view value);
Bytes packed_bytes(std::string_view value);
Bytes packed_integer(int64_t value);
Bytes packed_number(double value);
Bytes packed_flag(bool value);
Bytes packed_list(const std::vector<Bytes>& values);
Bytes packed_scalars(const std::map<std::string, double>& values);
Bytes packed_texts(const std::map<std::string, std::string>& values);

// A map that is written in the order of its fields.
class MapOut {
 public:
  MapOut& raw(std::string_view key, std::string_view encoded);
  MapOut& text(std::string_view key, std::string_view value) { return raw(key, packed_text(value)); }
  MapOut& bytes(std::string_view key, std::string_view value);  // copied once: an update may be large
  MapOut& integer(std::string_view key, int64_t value) { return raw(key, packed_integer(value)); }
  MapOut& number(std::string_view key, double value) { return raw(key, packed_number(value)); }
  MapOut& flag(std::string_view key, bool value) { return raw(key, packed_flag(value)); }
  Bytes done();  // once, at the end

 private:
  Bytes body_;
  uint32_t count_ = 0;
};

BlobRef read_ref(const Packable& value, const std::string& what);
Bytes packed_ref(const BlobRef& ref);

}  // namespace edgefl
