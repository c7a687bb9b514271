// edgefl-agent: a device agent as a process, in place of `edgefl device`.
#include <csignal>
#include <cstdio>
#include <pthread.h>
#include <thread>
#include <unistd.h>

#include "agent/events.h"
#include "cli/options.h"
#include "cli/service_manager.h"
#include "engine/memory.h"
#include "wire/errors.h"
#include "wire/mqtt/address.h"

namespace {

constexpr double kLookS = 0.25;      // deadlines and silence wake nobody
constexpr double kWorkerEndS = 30.0;
constexpr double kGraceS = 60.0;     // beyond the longest step: to load graphs and data

// As `edgefl` has them.
int code_of(const std::exception& error) {
  using namespace edgefl;
  if (dynamic_cast<const ConfigError*>(&error) != nullptr || dynamic_cast<const EngineError*>(&error) != nullptr) return 2;
  if (dynamic_cast<const DataError*>(&error) != nullptr) return 3;
  if (dynamic_cast<const BundleError*>(&error) != nullptr) return 6;
  if (dynamic_cast<const BrokerError*>(&error) != nullptr) return 7;
  if (dynamic_cast<const ProtocolError*>(&error) != nullptr) return 8;
  if (dynamic_cast<const StoreError*>(&error) != nullptr) return 11;
  return 1;
}

// SIGTERM and SIGINT arrive in a thread that may take locks.
sigset_t ends() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

// Ends an agent at the first of these signals, for as long as this lives.
class EndsBySignal {
 public:
  explicit EndsBySignal(edgefl::Agent& agent) : waiting_([&agent, set = ends()] {
    int number = 0;
    if (sigwait(&set, &number) == 0) agent.stop();
  }) {}
  ~EndsBySignal() {
    pthread_kill(waiting_.native_handle(), SIGTERM);  // it waits no more
    waiting_.join();
  }

 private:
  std::thread waiting_;
};

void serve(const edgefl::CommandLine& line) {
  const bool as_json = line.as_json;
  edgefl::ServiceManager manager;
  edgefl::Agent agent(line.config, [as_json, &manager](const std::string& event, const std::string& text, const edgefl::Details& details) {
    const std::string told = as_json ? edgefl::event_json(event, text, details) : edgefl::event_line(event, text);
    std::fprintf(stdout, "%s\n", told.c_str());
    std::fflush(stdout);
    manager.send("STATUS=" + event + ": " + text.substr(0, text.find('\n')));
  });
  agent.owner().set_duty(line.duty);
  agent.owner().ask_system();
  const EndsBySignal ends_by_signal(agent);
  agent.start();
  manager.send("READY=1");
  while (!agent.finished()) {
    agent.turn(kLookS);
    // A round's thread that hangs must not look alive because this one does.
    if (agent.silent_s() < line.config.limits.max_step_s + kGraceS) manager.keep_alive();
  }
  manager.send("STOPPING=1");
  agent.stop();
  agent.end(kWorkerEndS);
  std::fflush(stdout);
  if (!agent.end(0)) _exit(0);  // a step that does not end: what it did is kept up to the last checkpoint
}

}  // namespace

int main(int count, char** words) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on files is an error of the store, with words
  const sigset_t set = ends();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  edgefl::return_memory_early();
  try {
    serve(edgefl::read_command_line(count, words));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return code_of(error);
  }
}
