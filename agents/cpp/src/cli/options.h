// The command line of edgefl-agent: that of `edgefl device`.
#pragma once

#include "agent/agent.h"

namespace edgefl {

struct CommandLine {
  AgentConfig config;
  double duty = 1.0;
  bool as_json = false;
};

// ConfigError, DataError, BrokerError for what cannot be used. Ends the process for --help, --version and wrong options.
CommandLine read_command_line(int count, char** words);

}  // namespace edgefl
