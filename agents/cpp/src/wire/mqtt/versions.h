// Reading a message of the versions that this side speaks.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "wire/errors.h"
#include "wire/packing.h"

namespace edgefl {

struct VersionError : ProtocolError {
  using ProtocolError::ProtocolError;
};

template <typename Message, typename Read>
Message read_message(std::string_view payload, const std::vector<int64_t>& known, Read read) {
  try {
    const Packed packed(payload);
    const Fields fields(packed.root(), Message::kName);
    const int64_t version = fields.integer("v", 1);
    if (std::find(known.begin(), known.end(), version) == known.end()) {
      std::string speaks;
      for (const int64_t each : known) speaks += (speaks.empty() ? "" : " and ") + std::to_string(each);
      throw VersionError(std::string(Message::kName) + " has protocol version " + std::to_string(version) + ", this side speaks " +
                                         speaks + ": install the edgefl release that the other side runs");
    }
    return read(fields);
  } catch (const VersionError&) {
    throw;
  } catch (const ProtocolError& error) {
    throw ProtocolError(std::string(Message::kName) + " message is malformed: " + error.what());
  }
}

}  // namespace edgefl
