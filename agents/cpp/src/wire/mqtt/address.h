// How a broker is reached: "localhost:1883", "user:password@host", "mqtts://host:8883?ca-file=ca.crt".
#pragma once

#include <string>

#include "wire/errors.h"

namespace edgefl {

// The broker cannot be used as it is named.
struct BrokerError : Error {
  using Error::Error;
};

struct Address {
  std::string host;
  int port = 1883;
  std::string username, password, ca_file, cert_file, key_file, alpn;
  bool tls = false;
  std::string mqtt = "auto";  // "5", "3.1.1"
  bool readable_ids = false;  // for a broker that binds client ids to users
  bool insecure_password = false;

  static Address parse(const std::string& text);
  bool secure() const { return tls || !ca_file.empty() || !cert_file.empty() || !alpn.empty(); }
  bool is_loopback() const;
  void check() const;         // BrokerError for what must not be used
  std::string text() const;   // "host:port"
};

// The first line of a file; BrokerError if there is none.
std::string read_secret(const std::string& path);

}  // namespace edgefl
