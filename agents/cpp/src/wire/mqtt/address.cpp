#include "wire/mqtt/address.h"

#include <cstdlib>
#include <map>

#include "wire/digest.h"
#include "wire/files.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

const std::map<std::string, int> kPorts = {{"mqtt", 1883}, {"mqtts", 8883}};

std::string unquoted(const std::string& text) {
  std::string found;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && is_hex(text.substr(i + 1, 2), 2, true)) {
      found += from_hex(text.substr(i + 1, 2));
      i += 2;
    } else {
      found += text[i] == '+' ? ' ' : text[i];
    }
  }
  return found;
}

Address placed(const std::string& text, int default_port) {
  Address address;
  const size_t at = text.rfind('@');
  const std::string place = at == std::string::npos ? text : text.substr(at + 1);
  if (at != std::string::npos) {
    const size_t colon = text.substr(0, at).find(':');
    address.username = text.substr(0, std::min(colon, at));
    if (colon != std::string::npos) address.password = text.substr(colon + 1, at - colon - 1);
  }
  const size_t bracket = place.rfind("[", 0) == 0 ? place.find(']') : std::string::npos;
  const bool v6 = bracket != std::string::npos;
  size_t colon = v6 ? bracket + 1 : place.find(':');
  if (colon >= place.size()) colon = std::string::npos;
  address.host = v6 ? place.substr(1, bracket - 1) : place.substr(0, colon);
  const std::string port = colon == std::string::npos ? "" : place.substr(colon + 1);
  const bool after = colon == std::string::npos || place[colon] == ':';
  const bool digits = after && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
  address.port = !digits ? 0 : port.empty() ? default_port : std::atoi(port.c_str());
  if (address.host.empty() || address.port < 1 || address.port > 65535)
    throw BrokerError("broker address " + in_quotes(place) +
                      " should read host:port with a port up to 65535, for example localhost:1883, [::1]:1883 or mqtts://broker.lan:8883");
  return address;
}

void set_option(Address& address, const std::string& key, const std::string& value) {
  const std::map<std::string, std::string*> texts = {{"ca-file", &address.ca_file}, {"cert-file", &address.cert_file}, {"key-file", &address.key_file}, {"alpn", &address.alpn}};
  std::string name = key;
  for (char& c : name)
    if (c == '_') c = '-';
  const auto text = texts.find(name);
  if (text != texts.end()) {
    *text->second = value;
  } else if (name == "mqtt" && (value == "auto" || value == "5" || value == "3.1.1")) {
    address.mqtt = value;
  } else if (name == "client-ids" && (value == "full" || value == "short")) {
    address.readable_ids = value == "full";
  } else if (name == "insecure-password" && (value == "true" || value == "1" || value.empty() || value == "false" || value == "0")) {
    address.insecure_password = value == "true" || value == "1" || value.empty();
  } else {
    throw BrokerError(printable(key + "=" + value, 200) +
                      " in the broker's address should be an option: ca-file, cert-file, key-file, alpn, mqtt, client-ids, insecure-password");
  }
}

}  // namespace

Address Address::parse(const std::string& text) {
  const size_t mark = text.find("://");
  if (mark == std::string::npos) return placed(text, 1883);
  const std::string scheme = text.substr(0, mark);
  if (scheme == "ws" || scheme == "wss")
    throw BrokerError("this agent reaches brokers by TCP and TLS, not by WebSocket: write mqtt:// or mqtts:// and that port");
  const auto port = kPorts.find(scheme);
  if (port == kPorts.end()) throw BrokerError(in_quotes(scheme) + " is no way to reach a broker: write mqtt, mqtts before ://");
  std::string rest = text.substr(mark + 3), query;
  if (const size_t asks = rest.find('?'); asks != std::string::npos) {
    query = rest.substr(asks + 1);
    rest.resize(asks);
  }
  if (const size_t slash = rest.find('/', rest.rfind('@') == std::string::npos ? 0 : rest.rfind('@')); slash != std::string::npos) {
    if (slash + 1 < rest.size()) throw BrokerError("a broker at " + scheme + ":// has no path, found " + rest.substr(slash) + ": leave it out");
    rest.resize(slash);
  }
  Address address = placed(rest, port->second);
  address.username = unquoted(address.username);
  address.password = unquoted(address.password);
  address.tls = scheme == "mqtts";
  while (!query.empty()) {
    const size_t end = query.find('&');
    const std::string pair = query.substr(0, end);
    const size_t equals = pair.find('=');
    set_option(address, unquoted(pair.substr(0, equals)), equals == std::string::npos ? "" : unquoted(pair.substr(equals + 1)));
    query = end == std::string::npos ? "" : query.substr(end + 1);
  }
  return address;
}

bool Address::is_loopback() const { return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0; }

std::string Address::text() const { return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port); }

void Address::check() const {
  if (cert_file.empty() != key_file.empty())
    throw BrokerError("a client certificate is two files, and only " + cert_file + key_file + " is given: give both, --cert-file and --key-file");
  if (!password.empty() && !secure() && !is_loopback() && !insecure_password)
    throw BrokerError("the password of user " + in_quotes(username) + " would travel to " + text() +
                      " in clear, for everybody on the way to read: use TLS (mqtts://, or --ca-file), or say that it may (--insecure-password)");
  for (const std::string& file : {ca_file, cert_file, key_file})
    if (!file.empty() && !file_exists(file)) throw BrokerError("there is no file " + file + ": name a PEM file that is there");
}

std::string read_secret(const std::string& path) {
  std::string text;
  try {
    text = read_file(path, 1 << 16);
  } catch (const ConfigError& error) {
    throw BrokerError(std::string("the password file ") + error.what() + ": give a text file whose first line is the password");
  }
  text = text.substr(0, text.find('\n'));
  if (!text.empty() && text.back() == '\r') text.pop_back();
  if (text.empty()) throw BrokerError("the first line of the password file " + path + " is empty: write the password there");
  return text;
}

}  // namespace edgefl
