// Every vector that is MessagePack decodes to what values.json says.
#include <cmath>
#include <doctest/doctest.h>
#include <msgpack.hpp>
#include <nlohmann/json.hpp>

#include "golden.h"
#include "wire/digest.h"
#include "wire/packing.h"

using nlohmann::json;

namespace {

// As values.json writes it.
json told(const edgefl::Packable& value) {
  using msgpack::type::object_type;
  switch (value.type) {
    case object_type::NIL: return nullptr;
    case object_type::BOOLEAN: return value.via.boolean;
    case object_type::POSITIVE_INTEGER:
      if (value.via.u64 > uint64_t{1} << 53) return {{"int", std::to_string(value.via.u64)}};
      return value.via.u64;
    case object_type::NEGATIVE_INTEGER: return value.via.i64;
    case object_type::FLOAT32:
    case object_type::FLOAT64: return value.via.f64;
    case object_type::STR: return edgefl::to_text(value, "text");
    case object_type::BIN: return {{"hex", edgefl::hex(edgefl::to_bytes(value, "bytes"))}};
    case object_type::ARRAY: {
      json list = json::array();
      for (const auto* each : edgefl::to_list(value, "list")) list.push_back(told(*each));
      return list;
    }
    default: {
      json map = json::object();
      for (uint32_t i = 0; i < value.via.map.size; ++i) {
        const auto& entry = value.via.map.ptr[i];
        const json key = told(entry.key);
        map[key.is_string() ? key.get<std::string>() : key.dump()] = told(entry.val);
      }
      return map;
    }
  }
}

}  // namespace

TEST_CASE("every vector decodes to its values") {
  const json values = json::parse(golden("values.json"));
  CHECK(values.size() > 40);
  for (const auto& [name, expected] : values.items()) {
    const std::string data = golden(name);
    const edgefl::Packed packed(data);
    CHECK_MESSAGE(told(packed.root()) == expected, name);
  }
}

TEST_CASE("what is no message is refused, however deep it claims to be") {
  CHECK_THROWS_AS(edgefl::Packed(""), edgefl::ProtocolError);
  CHECK_THROWS_AS(edgefl::Packed(std::string(100000, '\x91')), edgefl::ProtocolError);
  CHECK_THROWS_AS(edgefl::Packed("\xdd\xff\xff\xff\xff"), edgefl::ProtocolError);
  CHECK_THROWS_AS(edgefl::Packed(golden("task.bin") + "x"), edgefl::ProtocolError);
}
