#include "abi/options.h"

#include <algorithm>

#include "wire/errors.h"

namespace edgefl {
namespace {

std::string needed(const char* text, const char* what) {
  if (text == nullptr || *text == '\0') throw Misuse{EDGEFL_ERR_ARGUMENT, std::string("options.") + what + " is required"};
  return text;
}

std::vector<std::string> texts_of(const char* const* texts, size_t count, const char* what) {
  if (texts == nullptr && count > 0) throw Misuse{EDGEFL_ERR_ARGUMENT, std::string("options.") + what + " is NULL"};
  std::vector<std::string> found;
  for (size_t i = 0; i < count; ++i) found.push_back(text_of(texts[i]));
  return found;
}

}  // namespace

AgentConfig config_of(const edgefl_options& options) {
  AgentConfig config;
  config.federation = checked_name("federation", needed(options.federation, "federation"));
  config.device = checked_name("device", needed(options.device, "device"));
  config.broker = Address::parse(needed(options.broker, "broker"));
  config.folder = needed(options.folder, "folder");
  const auto built = built_engines();
  config.engine = text_of(options.engine).empty() ? (built.empty() ? "onnx" : built.front()) : options.engine;
  config.tier = text_of(options.tier);
  config.server_keys = parse_keys(text_of(options.server_keys));
  if (options.token != nullptr) config.token = Token::parse(options.token);
  Address& broker = config.broker;
  if (options.password != nullptr) broker.password = options.password;
  if (options.ca_file != nullptr) broker.ca_file = options.ca_file;
  if (options.cert_file != nullptr) broker.cert_file = options.cert_file;
  if (options.key_file != nullptr) broker.key_file = options.key_file;
  broker.insecure_password = broker.insecure_password || options.insecure_password != 0;
  broker.check();
  config.memory_bytes = static_cast<int64_t>(std::min<uint64_t>(options.memory_bytes, INT64_MAX));
  config.threads = std::max(1, options.threads);
  for (const std::string& limit : texts_of(options.limits, options.limit_count, "limits")) config.limits.set(limit);
  config.mirrors = texts_of(options.mirrors, options.mirror_count, "mirrors");
  (void)own_mirrors(config.mirrors);  // says now what is wrong with them
  config.other_mirrors = options.own_mirrors_only == 0;
  return config;
}

}  // namespace edgefl
