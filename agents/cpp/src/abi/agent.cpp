// The C interface: an Agent behind an opaque handle, and no exception beyond it.
#include "edgefl_agent.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "abi/options.h"
#include "agent/agent.h"
#include "agent/events.h"
#include "wire/errors.h"

namespace {

using edgefl::Misuse;
using edgefl::given;
using edgefl::sized;
using edgefl::text_of;

thread_local std::string last_error;
thread_local const edgefl_agent* telling = nullptr;  // the agent whose callback for events this thread is in

struct Telling {
  explicit Telling(const edgefl_agent* agent) { telling = agent; }
  ~Telling() { telling = nullptr; }
};

edgefl_status failed(edgefl_status status, const std::string& text) noexcept {
  try {
    last_error = text;
  } catch (...) {  // no memory for words
    last_error.clear();
  }
  return status;
}

// Runs what a function does; its exceptions become codes.
template <typename Body>
edgefl_status guarded(Body body) noexcept {
  try {
    body();
    return EDGEFL_OK;
  } catch (const Misuse& misuse) {
    return failed(misuse.status, misuse.text);
  } catch (const edgefl::DataError& error) {
    return failed(EDGEFL_ERR_DATA, error.what());
  } catch (const edgefl::StoreError& error) {
    return failed(EDGEFL_ERR_STORE, error.what());
  } catch (const edgefl::BrokerError& error) {
    return failed(EDGEFL_ERR_BROKER, error.what());
  } catch (const edgefl::ConfigError& error) {
    return failed(EDGEFL_ERR_CONFIG, error.what());
  } catch (const edgefl::EngineError& error) {
    return failed(EDGEFL_ERR_CONFIG, error.what());
  } catch (const std::exception& error) {
    return failed(EDGEFL_ERR_INTERNAL, error.what());
  } catch (...) {
    return failed(EDGEFL_ERR_INTERNAL, "something that is no error was thrown; this is a fault of edgefl");
  }
}

// What waits for an agent's threads would wait for ever in an event, for which they wait.
edgefl_agent& outside_of_events(edgefl_agent* agent) {
  if (agent == nullptr) throw Misuse{EDGEFL_ERR_ARGUMENT, "agent is NULL"};
  if (agent == telling) throw Misuse{EDGEFL_ERR_STATE, "only edgefl_agent_pause and edgefl_agent_set_constraints may be called within an event"};
  return *agent;
}

}  // namespace

struct edgefl_agent {
  edgefl::AgentConfig config;
  edgefl_event_callback callback = nullptr;
  void* context = nullptr;
  std::mutex lock;  // of the constraints, and of where there is an agent
  edgefl_constraints constraints{};
  std::string words[4];
  bool paused = false;
  std::atomic<bool> stopped{false};
  std::unique_ptr<edgefl::Agent> agent;
  std::mutex serving;  // held by a step, which `stop` ends and waits for
  std::thread loop;

  void make() {
    if (stopped) throw Misuse{EDGEFL_ERR_STATE, "this agent was stopped: create another one"};
    if (agent) return;
    auto made = std::make_unique<edgefl::Agent>(config, [this](const std::string& event, const std::string& text, const edgefl::Details& details) {
      if (callback == nullptr) return;
      const std::string json = edgefl::event_json(event, text, details);
      const edgefl_event told{event.c_str(), text.c_str(), json.c_str()};
      const Telling here(this);
      callback(context, &told);
    });
    const std::lock_guard<std::mutex> guard(lock);
    agent = std::move(made);
    apply();
  }

  void apply() {  // with the lock held
    if (!agent) return;
    edgefl::Owner& owner = agent->owner();
    owner.pause(paused);
    if (constraints.size == 0) return;
    owner.set_duty(constraints.duty);
    owner.forbid(constraints.allowed != 0 ? "" : words[0].empty() ? "its owner does not allow it now" : words[0]);
    edgefl::Conditions conditions;
    conditions.power = words[1];
    conditions.link = words[2];
    conditions.thermal = words[3];
    owner.tell(conditions);
    agent->wake();
  }

  void check_unstarted() const {
    if (agent) throw Misuse{EDGEFL_ERR_STATE, "the agent has started: this is set before"};
  }

  bool stop(double within_s) {
    stopped = true;
    {
      const std::lock_guard<std::mutex> guard(lock);
      if (agent) agent->stop();
    }
    const std::lock_guard<std::mutex> guard(serving);
    if (loop.joinable()) loop.join();
    return !agent || agent->end(within_s);
  }
};

extern "C" {

void edgefl_options_init(edgefl_options* options) {
  if (options == nullptr) return;
  *options = edgefl_options{};
  options->size = sizeof *options;
}

void edgefl_constraints_init(edgefl_constraints* constraints) {
  if (constraints == nullptr) return;
  *constraints = edgefl_constraints{};
  constraints->size = sizeof *constraints;
  constraints->duty = 1.0;
  constraints->allowed = 1;
}

edgefl_status edgefl_agent_create(const edgefl_options* options, edgefl_agent** agent) {
  return guarded([&] {
    given(agent, "agent");
    *agent = nullptr;
    auto made = std::make_unique<edgefl_agent>();
    made->config = edgefl::config_of(sized(options, "options"));
    // Opened once to say now what is wrong with it; the agent opens it for good when it starts.
    edgefl::Store(made->config.folder, made->config.limits.store_bytes, made->config.limits.history_rounds, made->config.federation, made->config.device);
    *agent = made.release();
  });
}

edgefl_status edgefl_agent_set_data(edgefl_agent* agent, const edgefl_data_source* source) {
  return guarded([&] {
    auto data = edgefl::callback_source(given(source, "source"));
    outside_of_events(agent).check_unstarted();
    agent->config.data = std::move(data);
  });
}

edgefl_status edgefl_agent_set_data_path(edgefl_agent* agent, const char* path, int skip_bad_rows) {
  return guarded([&] {
    outside_of_events(agent).check_unstarted();
    agent->config.data = edgefl::open_source(&given(path, "path"), skip_bad_rows != 0 ? edgefl::BadRows::skip : edgefl::BadRows::refuse);
  });
}

edgefl_status edgefl_agent_set_events(edgefl_agent* agent, edgefl_event_callback callback, void* context) {
  return guarded([&] {
    outside_of_events(agent).check_unstarted();
    agent->callback = callback;
    agent->context = context;
  });
}

edgefl_status edgefl_agent_set_constraints(edgefl_agent* agent, const edgefl_constraints* constraints) {
  return guarded([&] {
    const edgefl_constraints& asked = sized(constraints, "constraints");
    if (!(asked.duty > 0.0 && asked.duty <= 1.0)) throw Misuse{EDGEFL_ERR_ARGUMENT, "constraints.duty is a share above 0 and up to 1"};
    given(agent, "agent");
    const std::lock_guard<std::mutex> guard(agent->lock);
    agent->constraints = asked;
    const char* words[] = {asked.reason, asked.power, asked.link, asked.thermal};
    for (size_t i = 0; i < 4; ++i) agent->words[i] = text_of(words[i]);
    agent->apply();
  });
}

edgefl_status edgefl_agent_start(edgefl_agent* agent) {
  return guarded([&] {
    outside_of_events(agent);
    const std::lock_guard<std::mutex> guard(agent->serving);
    if (agent->loop.joinable()) throw Misuse{EDGEFL_ERR_STATE, "the agent runs already"};
    agent->make();
    agent->agent->start();
    agent->loop = std::thread([each = agent->agent.get()] {
      while (!each->stopping()) each->turn(0.25);
    });
  });
}

edgefl_status edgefl_agent_step(edgefl_agent* agent, uint32_t wait_ms, edgefl_state* state) {
  return guarded([&] {
    outside_of_events(agent);
    const std::lock_guard<std::mutex> guard(agent->serving);
    if (agent->loop.joinable()) throw Misuse{EDGEFL_ERR_STATE, "the agent runs on a thread of its own: it needs no steps"};
    agent->make();
    agent->agent->start();
    const double until = edgefl::monotonic_s() + wait_ms / 1e3;
    do agent->agent->turn(std::clamp(until - edgefl::monotonic_s(), 0.0, 0.25));
    while (edgefl::monotonic_s() < until && !agent->agent->stopping());
    if (state != nullptr && edgefl_agent_state(agent, state) != EDGEFL_OK) throw Misuse{EDGEFL_ERR_ARGUMENT, last_error};
  });
}

edgefl_status edgefl_agent_state(edgefl_agent* agent, edgefl_state* state) {
  return guarded([&] {
    given(agent, "agent");
    sized(state, "state");
    *state = edgefl_state{sizeof *state, 0, 0, 0, 0};
    const std::lock_guard<std::mutex> guard(agent->lock);
    state->paused = agent->paused;
    if (!agent->agent) return;
    state->connected = agent->agent->connected();
    state->working = agent->agent->working();
    state->done = agent->agent->done();
  });
}

edgefl_status edgefl_agent_pause(edgefl_agent* agent, int on) {
  return guarded([&] {
    given(agent, "agent");
    const std::lock_guard<std::mutex> guard(agent->lock);
    agent->paused = on != 0;
    agent->apply();
    if (agent->agent) agent->agent->wake();
  });
}

edgefl_status edgefl_agent_stop(edgefl_agent* agent, uint32_t within_ms) {
  return guarded([&] {
    outside_of_events(agent);
    if (!agent->stop(within_ms / 1e3)) throw Misuse{EDGEFL_ERR_BUSY, "a step is still being made: call edgefl_agent_stop again"};
  });
}

void edgefl_agent_destroy(edgefl_agent* agent) {
  if (agent == nullptr) return;
  if (guarded([&] { outside_of_events(agent); }) != EDGEFL_OK) return;
  (void)guarded([&] { agent->stop(0.0); });
  (void)guarded([&] { delete agent; });
}

const char* edgefl_last_error(void) { return last_error.c_str(); }

const char* edgefl_version(void) { return EDGEFL_VERSION; }

}  // extern "C"
