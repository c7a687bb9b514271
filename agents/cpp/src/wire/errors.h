// What can go wrong, by what becomes of it. Each text names the thing, the value and the remedy.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace edgefl {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What somebody else wrote cannot be read.
struct ProtocolError : Error {
  using Error::Error;
};

// A message is not signed by whom it should be. `reason` is a code of the protocol.
struct IdentityError : ProtocolError {
  std::string reason;
  IdentityError(std::string code, const std::string& text) : ProtocolError(text), reason(std::move(code)) {}
};

// Message and code of a BundleError for blobs that neither the broker nor a mirror has.
inline constexpr std::string_view kLostChunk = "no good chunk";

// Manifest, graphs, blobs and ports do not fit together.
struct BundleError : ProtocolError {
  using ProtocolError::ProtocolError;
};

// The local data do not fit the model: the round is declined (`wrong-data`).
struct DataError : Error {
  using Error::Error;
};

// The store cannot be used, read or written.
struct StoreError : Error {
  using Error::Error;
};

// An engine failed, or is not built in.
struct EngineError : Error {
  using Error::Error;
};

// The user asked for something that cannot be.
struct ConfigError : Error {
  using Error::Error;
};

// The round is over, or this device is being stopped.
struct RoundAborted : Error {
  using Error::Error;
};

// This device does not take the round; `reason` is a code of the protocol (Decline).
struct RoundDeclined : Error {
  std::string reason;
  RoundDeclined(std::string code, const std::string& text) : Error(text), reason(std::move(code)) {}
};

}  // namespace edgefl
