#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "wire/errors.h"
#include "wire/files.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

struct Words {
  std::string id, data, broker = "localhost:1883", federation = "demo", store, bad_rows = "refuse", tier, memory, engine = "onnx", server_key, token, token_file;
  std::string ca_file, cert_file, key_file, password_file, sandbox = "auto", policy, surroundings;
  std::vector<std::string> limits, mirrors;
  int threads = 0;
  double duty = 1.0;
  bool until_done = false, as_json = false, insecure_password = false, tune = false;
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void declare(CLI::App& app, Words& w) {
  app.set_config("--config", "", "TOML file of options, by their long names without dashes; the command line has precedence");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.add_option("--id", w.id, "name of this device; stable over restarts")->required();
  app.add_option("--data", w.data, "local data: .npz, .npy or idx files, or a folder of images by class")->required();
  app.add_option("--broker", w.broker, "host:port of the MQTT broker, or a URL: mqtts://user@host:8883")->envname("EDGEFL_BROKER")->capture_default_str();
  app.add_option("--federation", w.federation, "name of the federation to join")->capture_default_str();
  app.add_option("--store", w.store, "folder for the device's store; default: ~/.edgefl/FEDERATION/ID");
  app.add_option("--bad-rows", w.bad_rows, "rows that cannot be read or do not fit: refuse the data, or leave them out")->check(CLI::IsMember({"refuse", "skip"}))->capture_default_str();
  app.add_option("--tier", w.tier, "tier to ask for; the server decides");
  app.add_option("--memory", w.memory, "memory this device offers, like 64MiB; default: what it has");
  app.add_option("--engine", w.engine, "runtime that runs the graphs")->check(CLI::IsMember({"onnx", "executorch"}))->capture_default_str();
  app.add_option("--threads", w.threads, "threads of the engine; 0: one")->check(CLI::Range(0, 1024));
  app.add_option("--duty", w.duty, "share of the time in which steps are made")->check(CLI::Range(0.001, 1.0))->capture_default_str();
  app.add_flag("--until-done,!--no-until-done", w.until_done, "stop when the training is done");
  app.add_option("--limit", w.limits, "a limit as key=value, e.g. fetch_window=4");
  app.add_option("--server-key", w.server_key, "listen to this key of the server only (hex; several with commas); default: the first seen");
  app.add_option("--token", w.token, "@FILE that holds a one-time token of `edgefl enroll token`");
  app.add_option("--token-file", w.token_file, "file with such a token, removed once the server has given this device a task; without it, --token or EDGEFL_TOKEN");
  app.add_option("--ca-file", w.ca_file, "certificate of the broker's authority (PEM); switches TLS on");
  app.add_option("--cert-file", w.cert_file, "client certificate (PEM), for mutual TLS");
  app.add_option("--key-file", w.key_file, "its key (PEM, without a password)");
  app.add_option("--password-file", w.password_file, "file whose first line is the password; or EDGEFL_BROKER_PASSWORD");
  app.add_flag("--insecure-password", w.insecure_password, "let the password travel without TLS");
  app.add_option("--mirror", w.mirrors, "URL below which blobs lie too, asked before the broker and those that the server names");
  app.add_flag("--json", w.as_json, "events as JSON lines");
  // Of `edgefl device`, so that one line starts either agent: taken where they ask for nothing, refused where they do.
  app.add_flag("--tune,!--no-tune", w.tune, "taken for the sake of `edgefl device`: this agent tries no forms of a step");
  app.add_option("--sandbox", w.sandbox, "auto or never: this agent runs graphs in its own process")->check(CLI::IsMember({"auto", "always", "never"}));
  app.add_option("--policy", w.policy, "not of this agent: rules are set by its C interface")->group("");
  app.add_option("--surroundings-command", w.surroundings, "not of this agent")->group("");
}

void refuse_others(const Words& w) {
  if (!w.policy.empty()) throw ConfigError("--policy is an option of `edgefl device`: this agent has --duty, and its C interface for all else");
  if (!w.surroundings.empty()) throw ConfigError("--surroundings-command is an option of `edgefl device`: this agent is told by its C interface");
  if (w.sandbox == "always") throw ConfigError("--sandbox always: this agent runs graphs in its own process; use `edgefl device`, or leave it out");
}

Address address_of(const Words& w, bool by_command_line) {
  Address address = Address::parse(w.broker);
  if (by_command_line && !address.password.empty())
    throw ConfigError("--broker holds a password, and everybody on this machine can read the arguments of a process: put the address into EDGEFL_BROKER, the "
                      "password into EDGEFL_BROKER_PASSWORD, or name a file by --password-file");
  if (!w.password_file.empty()) address.password = read_secret(w.password_file);
  if (!address.username.empty() && address.password.empty()) address.password = environment("EDGEFL_BROKER_PASSWORD");
  if (!w.ca_file.empty()) address.ca_file = w.ca_file;
  if (!w.cert_file.empty()) address.cert_file = w.cert_file;
  if (!w.key_file.empty()) address.key_file = w.key_file;
  address.insecure_password = address.insecure_password || w.insecure_password;
  address.check();
  return address;
}

std::optional<Token> token_of(const std::string& given) {
  const std::string text = given.empty() ? environment("EDGEFL_TOKEN") : given;
  if (text.empty()) return std::nullopt;
  if (!given.empty() && given[0] != '@')
    throw ConfigError("--token is a secret, and everybody on this machine can read the arguments of a process: put it into a file and name that as @FILE, or into EDGEFL_TOKEN");
  return Token::parse(text[0] == '@' ? read_file(text.substr(1), 4096) : text);
}

std::string store_of(const Words& w) {
  if (!w.store.empty()) return w.store;
  const std::string home = environment("HOME");
  if (home.empty()) throw ConfigError("there is no folder for what a device keeps: this user has no home. Set HOME, or name a folder by --store");
  return home + "/.edgefl/" + w.federation + "/" + w.id;
}

}  // namespace

CommandLine read_command_line(int count, char** words) {
  Words w;
  CLI::App app("Run a device agent: take tasks, train on local data, send updates.", "edgefl-agent");
  app.set_version_flag("--version", std::string("edgefl-agent ") + EDGEFL_VERSION);
  declare(app, w);
  try {
    app.parse(count, words);
  } catch (const CLI::FileError& error) {
    throw ConfigError(std::string("--config: ") + error.what() + "; name a file that there is");
  } catch (const CLI::ConfigError& error) {
    const std::string text = error.what(), before = "INI was not able to parse ";
    throw ConfigError(app.get_config_ptr()->as<std::string>() + ": expected lines `option = value`, with the options of `edgefl-agent --help`; found " +
                      (text.rfind(before, 0) == 0 ? text.substr(before.size()) : text));
  } catch (const CLI::ParseError& error) {
    std::exit(error.get_exit_code() == 0 ? app.exit(error) : (app.exit(error), 2));
  }
  bool named = false;
  for (int i = 1; i < count; ++i) named = named || std::string(words[i]).rfind("--broker", 0) == 0;
  refuse_others(w);
  CommandLine line;
  AgentConfig& config = line.config;
  config.federation = checked_name("federation", w.federation);
  config.device = checked_name("device", w.id);
  config.broker = address_of(w, named);
  config.folder = store_of(w);
  config.tier = w.tier;
  config.memory_bytes = w.memory.empty() ? 0 : parse_size(w.memory, "--memory");
  config.engine = w.engine;
  config.threads = w.threads > 0 ? w.threads : 1;
  config.until_done = w.until_done;
  config.server_keys = parse_keys(w.server_key);
  // A packaged configuration names a file that need not exist. Only a token that was read from it makes the agent remove it.
  if (!w.token_file.empty() && file_exists(w.token_file)) config.token_file = w.token_file;
  config.token = config.token_file.empty() ? token_of(w.token) : Token::parse(read_file(config.token_file, 4096));
  config.mirrors = w.mirrors;
  for (const std::string& each : w.limits) config.limits.set(each);
  config.data = open_source(w.data, w.bad_rows == "skip" ? BadRows::skip : BadRows::refuse);
  line.duty = w.duty;
  line.as_json = w.as_json;
  return line;
}

}  // namespace edgefl
