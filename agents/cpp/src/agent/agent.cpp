#include "agent/agent.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <unistd.h>

#include "agent/system.h"
#include "engine/memory.h"
#include "wire/errors.h"
#include "wire/files.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr double kRestS = 5.0;      // how long an engine waits for another round
constexpr double kWorkerEndS = 30.0;
constexpr double kGoodbyeS = 0.5, kLongGoodbyeS = 2.0;  // of the time to end in: to tell the server, and leave the broker
constexpr size_t kMostText = 2000;

// Bytes of memory that the machine has, or its control group; those of this process where the system does not tell.
int64_t physical_memory() {
  const long page = sysconf(_SC_PAGESIZE), pages = sysconf(_SC_PHYS_PAGES);
  return std::min(page > 0 && pages > 0 ? static_cast<int64_t>(page) * pages : resident_bytes(), group_memory_limit());
}

int64_t clock_us() { return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

Agent::Agent(const AgentConfig& config, Say report)
    : config_(config), report_(std::move(report)), topics_(config.federation, config.device),
      memory_bytes_(config.memory_bytes > 0 ? config.memory_bytes : physical_memory()), refusals_(config.limits.notice_s) {
  const Limits& limits = config_.limits;
  const Say tell = [this](const std::string& event, const std::string& text, const Details& details) { say(event, text, details); };
  if (!config_.data) throw ConfigError("this device has no data: name some by --data, or set a data source");
  config_.broker.check();
  EngineOptions options;
  options.threads = config_.threads;
  options.pages = config_.folder;
  engine_ = make_engine(config_.engine, options);
  store_ = std::make_unique<Store>(config_.folder, limits.store_bytes, limits.history_rounds, config_.federation, config_.device);
  const auto kept = store_->fact("numbers");
  const auto save = [this](int64_t number) {
    try {
      store_->keep_fact("numbers", std::to_string(number));
    } catch (const StoreError&) {  // a full disk: the clock keeps the next process ahead of this one
    }
  };
  speaker_ = std::make_unique<MessageSigner>(config_.folder + "/device.key", kept ? std::atoll(kept->c_str()) : 0, save, clock_us());
  std::vector<Bytes> keys = config_.server_keys;
  if (config_.token && keys.empty()) keys.push_back(config_.token->server);
  trust_ = std::make_unique<ServerTrust>(*store_, keys, tell);
  const std::string id = client_id(speaker_->client_secret(), "device", config_.federation, config_.device, config_.broker.readable_ids);
  session_ = std::make_unique<Session>(config_.broker, id, limits, [this] { return last_will(); });
  mirrors_ = std::make_unique<Mirrors>(limits, own_mirrors(config_.mirrors), config_.other_mirrors, config_.broker.ca_file, [tell](const std::string& text) { tell("mirror", text, {}); });
  fetcher_ = std::make_unique<Fetcher>(*session_, topics_, *store_, limits, [this] { return scheduler_->is_over(); }, *mirrors_);
  progress_ = std::make_unique<ProgressMessages>(*session_, topics_, *fetcher_, *speaker_);
  outbox_ = std::make_unique<Outbox>(*session_, topics_, *store_, limits, *speaker_, tell, [this](const PastRound& past, const Ack& ack) { settled(past, ack); });
  scheduler_ = std::make_unique<RoundScheduler>(*store_, *outbox_, engine_->format(), limits.retry_pause_s, stopping_, scheduler_host());
  work_.reset(new RoundExecutor{config_.device, limits, memory_bytes_, *engine_, *config_.data, *fetcher_, *store_, *trust_, owner_,
                       [this](const Job& job, int64_t rows, int64_t steps, const std::string& skipped) {
                         const std::string text = "round " + std::to_string(job.round) + " as " + job.tier + ": " + std::to_string(rows) + " samples, " + std::to_string(steps) + " steps";
                         say("round", skipped.empty() ? text : text + "; " + skipped, {{"round", job.round}});
                       },
                       [this](const Job& job, const StepReport& step) { progress_->watch(job, step); }, [this] { return scheduler_->is_over(); },
                       scheduler_host().dropped, [this](const std::string& text) { say("memory", text, {}); }});
  listening_ = std::make_unique<Listening>(*session_, topics_.current_round(), [this] { return scheduler_->is_idle(); });
  hello_sender_ = std::make_unique<HelloSender>(hello(), limits, [this] { return owner_.conditions(); }, [this](const Hello& hello) { publish(topics_.hello(), hello, true); });
  federation_status_ = std::make_unique<StatusReporter>(config_.federation, config_.device, config_.broker, limits, tell);
}

Agent::~Agent() {
  stop();
  while (!end(kWorkerEndS)) {  // a step that does not end
  }
  // Its thread still waits for a host that does not answer, and touches nothing but the session.
  if (abandoned_) (void)session_.release();
}

Hello Agent::hello() const {
  Hello hello;
  hello.agent = std::string("edgefl-agent/") + EDGEFL_VERSION;
  hello.memory_bytes = memory_bytes_;
  hello.cores = std::max(1u, std::thread::hardware_concurrency());
  hello.samples = config_.data->size();
  hello.engines = {{engine_->name(), engine_->version()}};
  hello.tier = config_.tier;
  if (config_.token) {
    hello.token = config_.token->name;
    hello.proof = config_.token->proof(topics_.hello(), speaker_->public_key());
  }
  return hello;
}

SchedulerHost Agent::scheduler_host() {
  SchedulerHost host;
  host.work = [this](const Job& job) { work_->run(job); };
  host.read = [this](const Round& announced) { return read_page(announced); };
  host.send = [this](const Decline& decline) { publish(topics_.declines(), decline); };
  host.failed = [this](int64_t round, const std::string& tier, const std::exception& error) { progress_->failed(round, tier, error); };
  host.held = [this] { return owner_.paused(); };
  host.wake = [this] { session_->wake(); };
  host.say = [this](const std::string& event, const std::string& text, const Details& details) { say(event, text, details); };
  host.dropped = [this](const std::string& text, const StoredCarry& carry) { say("carry", text, {{"run", carry.name.substr(0, carry.name.find('/'))}, {"round", carry.round}}); };
  return host;
}

void Agent::start() {
  if (started_) return;
  started_ = true;
  give_memory_back();
  session_->subscribe({topics_.current_round(), topics_.tasks(), topics_.acks()}, 1, true);
  session_->start();
  outbox_->start();
  // RLIMIT_DATA counts the addresses of stacks. glibc keeps these two for later threads: a connection's watch, a round's worker.
  std::thread watch([] {}), worker([] {});
  watch.join();
  worker.join();
}

void Agent::turn(double wait_s) {
  // The pause after trouble is spread over turns, as the caller feeds a watchdog between them.
  if (const double left_s = resume_at_ - monotonic_s(); left_s > 0 && !stopping_) return pause(std::min(left_s, wait_s));
  try {
    if (const auto event = session_->inbox().get(wait_s)) handle(*event);
    if (scheduler_->collect()) {
      give_memory_back();
      rest_at_ = monotonic_s() + kRestS;
    }
    scheduler_->begin();
    const bool connected = session_->connected();
    federation_status_->step(connected && !scheduler_->heard());
    federation_status_->left_out(connected ? scheduler_->round_without_us() : 0, [this] { return scheduler_->took_part(); });
    hello_sender_->step(connected);
    if (!scheduler_->busy() && rest_at_ > 0 && monotonic_s() > rest_at_) {
      engine_->rest();
      give_memory_back();
      rest_at_ = 0;
    }
    tell_dropped();
    done_ = scheduler_->is_done();
    trouble_.clear();
  } catch (const StoreError& error) {  // a full disk: what it was for comes again
    trouble("store", error.what());
  } catch (const std::exception& error) {  // no memory, for example
    trouble("failed", error.what());
  }
  working_ = scheduler_->busy();
}

double Agent::silent_s() const { return scheduler_->silent_s(); }

void Agent::stop() {
  stopping_ = true;
  session_->wake();
}

bool Agent::end(double within_s) {
  if (ended_) return true;
  stopping_ = true;
  const double until = monotonic_s() + within_s;
  federation_status_->leave();
  outbox_->leave();
  fetcher_->poke();
  if (!scheduler_->join(std::max(within_s - kGoodbyeS, within_s / 2))) return false;
  scheduler_->collect();
  ended_ = true;
  outbox_->stop();
  engine_->rest();
  const double goodbye_s = std::clamp(until - monotonic_s(), kGoodbyeS, kLongGoodbyeS) / 2;
  if (started_ && session_->connected()) session_->wait(publish(topics_.status(), Status{false}, true), goodbye_s);
  abandoned_ = !session_->stop(goodbye_s);
  return true;
}

void Agent::handle(const Event& event) {
  switch (event.kind) {
    case Event::Kind::up: return greet();
    case Event::Kind::down: return federation_status_->offline(event);
    case Event::Kind::refused: return federation_status_->denied(event);
    case Event::Kind::message: return route(event);
    case Event::Kind::woken: return;
  }
}

// Of the connection that is made now. Its number is after the one of what this device says first, and before all else that it
// says: a will of an earlier connection is old news.
Will Agent::last_will() {
  online_at_ = speaker_->numbers().next(2);
  return {topics_.status(), speaker_->seal(topics_.status(), Status{false}, online_at_ + 1)};
}

void Agent::greet() {
  listening_->begin();
  session_->publish(topics_.status(), speaker_->seal(topics_.status(), Status{true}, online_at_), 1, true);
  hello_sender_->greet();
  fetcher_->poke();
  outbox_->send_again();
  say("online", "connected to " + config_.broker.text() + " as " + config_.device, {{"samples", config_.data->size()}});
  scheduler_->declare();
}

void Agent::route(const Event& event) {
  std::string reason = "malformed";
  try {
    return take(event.topic, event);
  } catch (const DuplicateMessageError&) {
    return;
  } catch (const IdentityError& error) {
    if (!refusals_.due(event.topic + error.reason, monotonic_s())) return;
    say("refused", "ignored a message on " + event.topic + ": " + error.what(), {});
  } catch (const ProtocolError& error) {
    if (!refusals_.due(event.topic + reason, monotonic_s())) return;
    say("refused", "ignored a message on " + event.topic + ": " + error.what(), {});
  }
}

void Agent::take(const std::string& topic, const Event& event) {
  if (topic.rfind(topics_.blobs(), 0) == 0) return fetcher_->deliver(topic, event.payload);
  if (event.payload.empty()) return;
  if (topic == topics_.current_round()) {
    const Round announced = trust_->open<Round>(topic, event.payload);
    mirrors_->announced(announced);
    federation_status_->announced(announced);
    scheduler_->announce(announced);
    listening_->heard(announced);
  } else if (topic == topics_.tasks()) {
    scheduler_->assign(trust_->open<Task>(topic, event.payload));
    listening_->begin();
    drop_token();
  } else if (topic == topics_.acks()) {
    Ack ack = trust_->open<Ack>(topic, event.payload);
    if (!ack.nonce.empty()) return outbox_->deliver(std::move(ack));
    federation_status_->answered(ack);
    hello_sender_->answered(ack);
  }
}

// A task is the server's word that the token was accepted: there is no acknowledgement of a hello. The key that the token
// brought has to be stored by then, else the next start would trust the first key that it sees.
void Agent::drop_token() {
  if (config_.token_file.empty() || !config_.token || token_dropped_ || !trust_->is_stored()) return;
  token_dropped_ = true;
  const int error = remove_secret(config_.token_file);
  const std::string end = error == 0 ? " and removed" : ", but cannot be removed (" + std::string(std::strerror(error)) + "): delete the file";
  say("enrolled", "the server gave this device a task: the token in " + config_.token_file + " is used up" + end, {});
}

Round Agent::read_page(const Round& announced) {
  const BlobRef& page = *announced.pages;
  if (std::max(page.size, page.raw) > config_.limits.max_manifest_bytes)
    throw BundleError("the page of the announcement of round " + std::to_string(announced.round) + " has " + size_text(static_cast<double>(std::max(page.size, page.raw))) +
                      ", more than this device reads: raise limits.max_manifest_bytes, or have the server use larger chunks");
  return announced.whole(fetcher_->get(page));
}

void Agent::settled(const PastRound& past, const Ack& ack) {
  std::string text = "round " + std::to_string(past.round) + ": " + ack.status;
  if (!ack.text.empty()) text += " " + ack.text;
  say(ack.status, text, {{"round", past.round}, {"loss", past.loss}});
  session_->wake();
}

void Agent::trouble(const std::string& event, const std::string& text) {  // said once for as long as it stays so
  if (text != trouble_) say(event, text, {});
  trouble_ = text;
  resume_at_ = monotonic_s() + config_.limits.retry_pause_s;
}

void Agent::pause(double seconds) const {
  for (const double until = monotonic_s() + seconds; monotonic_s() < until && !stopping_;) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

void Agent::tell_dropped() {  // now and then: how many messages were dropped unread, or refused without a word
  const std::pair<int64_t, int64_t> now{session_->inbox().dropped() + fetcher_->dropped(), refusals_.hushed()};
  if (now == limited_told_ || monotonic_s() < tell_dropped_at_) return;
  limited_told_ = now;
  tell_dropped_at_ = monotonic_s() + config_.limits.notice_s;
  std::string text;
  if (now.first > 0) text = std::to_string(now.first) + " messages so far were dropped unread: more came than this device reads";
  if (now.second > 0) text += (text.empty() ? "" : "; ") + std::to_string(now.second) + " messages so far were refused like others that were told";
  say("limited", text, {{"dropped", now.first}, {"refused", now.second}});
}

void Agent::say(const std::string& event, const std::string& text, const Details& details) {
  const std::lock_guard<std::mutex> guard(reporting_);
  try {
    report_(event, printable(text, kMostText), details);
  } catch (...) {  // nobody has to listen
  }
}

}  // namespace edgefl
