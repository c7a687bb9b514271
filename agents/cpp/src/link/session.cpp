#include "link/session.h"

#include <algorithm>
#include <chrono>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <mosquitto.h>
#include <mqtt_protocol.h>
#include <random>

#include "link/signals.h"
#include "link/watch.h"
#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr double kMomentS = 5.0, kAnswerS = 10.0, kLeaveS = 0.25;
constexpr int kRivalAfter = 3, kSessionS = 7 * 24 * 3600, kMostUnread = 50'000;
constexpr const char* kUnanswered = "unanswered";
constexpr const char* kUntrusted = "certificate verify failed";  // as OpenSSL says it

constexpr const char* kQos2 = "received PUBLISH (d0, q2";  // as the library logs it; d1 where it comes again
constexpr const char* kQos2Again = "received PUBLISH (d1, q2";
constexpr int64_t kAround = 1 << 20;  // TLS, headers and acknowledgements

Session& of(void* session) { return *static_cast<Session*>(session); }

int no_password(char*, int, int, void*) { return 0; }  // a key that wants one would ask the terminal

int most_bytes_of(const mosquitto_property* properties) {
  uint32_t most = 0;
  mosquitto_property_read_int32(properties, MQTT_PROP_MAXIMUM_PACKET_SIZE, &most, false);
  return static_cast<int>(std::min<uint32_t>(most, INT32_MAX));
}

// No exception goes through the library: what there is no memory for is lost, as on the way.
template <typename RoundExecutor>
void quietly(void* session, RoundExecutor work) noexcept {
  try {
    work(of(session));
  } catch (const std::exception&) {
  }
}

void set_callbacks(mosquitto* client) {
  using Properties = const mosquitto_property*;
  mosquitto_connect_v5_callback_set(client, [](mosquitto*, void* session, int code, int, Properties properties) {
    quietly(session, [&](Session& each) { each.on_connect(code, most_bytes_of(properties)); });
  });
  mosquitto_disconnect_v5_callback_set(client, [](mosquitto*, void* session, int code, Properties) {
    quietly(session, [&](Session& each) { each.on_disconnect(code); });
  });
  mosquitto_message_v5_callback_set(client, [](mosquitto*, void* session, const mosquitto_message* message, Properties) {
    quietly(session, [&](Session& each) { each.on_message(*message); });
  });
  mosquitto_publish_v5_callback_set(client, [](mosquitto*, void* session, int mid, int code, Properties) {
    quietly(session, [&](Session& each) { each.on_publish(mid, code); });
  });
  mosquitto_subscribe_v5_callback_set(client, [](mosquitto*, void* session, int, int count, const int* granted, Properties) {
    quietly(session, [&](Session& each) { each.on_subscribe(count, granted); });
  });
  mosquitto_log_callback_set(client, [](mosquitto*, void* session, int level, const char* text) {
    if (level == MOSQ_LOG_ERR) quietly(session, [&](Session& each) { each.on_log(text); });
    if (level == MOSQ_LOG_DEBUG && (std::strstr(text, kQos2) != nullptr || std::strstr(text, kQos2Again) != nullptr)) of(session).on_qos_2();
  });
}

}  // namespace

double monotonic_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Session::Session(const Address& address, const std::string& client_id, const Limits& limits, std::function<Will()> will, bool clean)
    : address_(address), client_id_(client_id), limits_(limits), will_(std::move(will)), clean_(clean),
      inbox_(limits.inbox_messages, limits.inbox_bytes, std::min(2.0, static_cast<double>(limits.keepalive_s) / 8)),
      first_(address.mqtt == "3.1.1" ? "3.1.1" : "5"), version_(first_) {
  address_.check();
  static const int ready = mosquitto_lib_init();
  (void)ready;
  {
    const PipeHandlerKept kept;
    client_ = mosquitto_new(client_id.c_str(), clean, this);
  }
  if (client_ == nullptr) throw BrokerError("there is no memory for a connection to the broker");
  try {
    prepare();
  } catch (...) {
    mosquitto_destroy(client_);
    throw;
  }
}

// Frees all that the library holds, messages of QoS 2 above all, which it keeps over reconnects. What is under way is sent again.
void Session::forget() {
  const std::scoped_lock guard(lock_, sending_);
  mosquitto_reinitialise(client_, client_id_.c_str(), clean_, this);
  prepare();
  flying_.clear();
  sent_.notify_all();
}

void Session::prepare() {
  mosquitto_threaded_set(client_, true);  // whoever publishes leaves the writing to the network thread
  mosquitto_max_inflight_messages_set(client_, static_cast<unsigned>(limits_.max_inflight));
  mosquitto_int_option(client_, MOSQ_OPT_SEND_MAXIMUM, static_cast<int>(limits_.max_inflight));
  mosquitto_int_option(client_, MOSQ_OPT_TCP_NODELAY, 1);
  set_callbacks(client_);
  if (!address_.username.empty()) mosquitto_username_pw_set(client_, address_.username.c_str(), address_.password.empty() ? nullptr : address_.password.c_str());
  if (!address_.secure()) return;
  const auto named = [](const std::string& file) { return file.empty() ? nullptr : file.c_str(); };
  if (address_.ca_file.empty()) mosquitto_int_option(client_, MOSQ_OPT_TLS_USE_OS_CERTS, 1);
  const char* system = address_.ca_file.empty() ? "/etc/ssl/certs" : nullptr;
  const int code = mosquitto_tls_set(client_, named(address_.ca_file), system, named(address_.cert_file), named(address_.key_file), no_password);
  if (code != MOSQ_ERR_SUCCESS)
    throw BrokerError("the certificate files " + address_.ca_file + " " + address_.cert_file + " " + address_.key_file + " cannot be used (" +
                      mosquitto_strerror(code) + "): give PEM files that belong together, the key without a password");
  if (!address_.alpn.empty()) mosquitto_string_option(client_, MOSQ_OPT_TLS_ALPN, address_.alpn.c_str());
}

Session::~Session() {
  stop(0.0);
  if (thread_.joinable()) thread_.join();
  const NoPipeSignal held;  // TLS says goodbye
  mosquitto_destroy(client_);
}

void Session::start() {
  thread_ = std::thread([this] {
    const NoPipeSignal held;  // this thread alone writes to the connection
    run();
    const std::lock_guard<std::mutex> guard(sleeping_);
    left_ = true;
    woken_.notify_all();
  });
}

bool Session::stop(double within_s) {
  const double until = monotonic_s() + within_s;
  const auto writes = [this] {
    const std::lock_guard<std::mutex> guard(sending_);
    return mosquitto_want_write(client_);
  };
  while (connected_ && writes() && monotonic_s() < until) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    const std::lock_guard<std::mutex> guard(sleeping_);
    stopping_ = true;
  }
  woken_.notify_all();
  {
    const std::lock_guard<std::mutex> guard(sending_);
    mosquitto_disconnect(client_);
  }
  if (!thread_.joinable()) return true;
  std::unique_lock<std::mutex> guard(sleeping_);
  if (!woken_.wait_for(guard, std::chrono::duration<double>(std::max(kLeaveS, until - monotonic_s())), [&] { return left_; })) return false;
  guard.unlock();
  thread_.join();
  return true;
}

void Session::run() {
  int attempt = -1, moments = 0;
  while (!stopping_) {
    std::string reason;
    try {
      reason = connect_and_loop();
    } catch (const std::exception& error) {  // no memory, for example
      reason = error.what();
    }
    const bool was_up = connected_.exchange(false);
    if (stopping_) return;
    moments = was_up && monotonic_s() - up_since_ < kMomentS ? moments + 1 : 0;
    const bool rival = moments >= kRivalAfter;
    attempt = was_up && !rival ? 0 : attempt + 1;  // whoever fights for a name at full speed leaves no time to work
    Event down;
    down.kind = Event::Kind::down;
    down.text = reason;
    down.retry_s = pause(attempt);
    down.rival = rival;
    const auto length = std::chrono::duration<double>(down.retry_s);
    inbox_.put(std::move(down));
    std::unique_lock<std::mutex> guard(sleeping_);
    woken_.wait_for(guard, length, [&] { return stopping_.load(); });
  }
}

double Session::pause(int attempt) const {
  static thread_local std::mt19937 random(std::random_device{}());
  const double ceiling = std::min(limits_.reconnect_max_s, limits_.reconnect_min_s * std::pow(2.0, std::min(attempt, 16)));
  return ceiling * (0.5 + 0.5 * std::uniform_real_distribution<double>()(random));
}

std::string Session::connect_and_loop() {
  version_ = first_;
  std::string reason = attempt();
  if (stopping_ || connected_ || address_.mqtt != "auto") return reason;
  const bool unsupported = unsupported_;
  if (unsupported || (refusal_.empty() && ended_ == kUnanswered)) {
    // A broker of 3.1.1 says so, or hangs up on what it cannot read; so does one that is just being stopped.
    version_ = first_ == "5" ? "3.1.1" : "5";
    reason = attempt();
    older_ += connected_;
    if (connected_ && (unsupported || older_ > 1)) first_ = version_;
  }
  return reason;
}

std::string Session::attempt() {
  refusal_.clear();
  ended_.clear();
  logged_.clear();
  unsupported_ = qos_2_ = false;
  delivered_ = unread_ = 0;
  const bool fifth = version_ == "5";
  mosquitto_int_option(client_, MOSQ_OPT_PROTOCOL_VERSION, fifth ? MQTT_PROTOCOL_V5 : MQTT_PROTOCOL_V311);
  if (will_) {
    const Will will = will_();
    mosquitto_will_clear(client_);
    mosquitto_will_set(client_, will.topic.c_str(), static_cast<int>(will.payload.size()), will.payload.data(), 1, true);
  }
  mosquitto_property* properties = nullptr;
  if (fifth && !clean_) mosquitto_property_add_int32(&properties, MQTT_PROP_SESSION_EXPIRY_INTERVAL, kSessionS);
  const int64_t most = limits_.readable_bytes() + kAround;
  if (fifth) mosquitto_property_add_int32(&properties, MQTT_PROP_MAXIMUM_PACKET_SIZE, static_cast<uint32_t>(std::min<int64_t>(most, INT32_MAX)));
  int code = mosquitto_connect_bind_v5(client_, address_.host.c_str(), address_.port, static_cast<int>(limits_.keepalive_s), nullptr, properties);
  const int number = errno;
  mosquitto_property_free_all(&properties);
  if (code != MOSQ_ERR_SUCCESS) return unreachable(code, number);
  const double answer_by = monotonic_s() + kAnswerS;
  Watch watch(mosquitto_socket(client_), most, delivered_);
  bool hung_up = false;
  while (code == MOSQ_ERR_SUCCESS && !stopping_) {
    if (!mosquitto_want_write(client_)) unread_ = 0;
    code = mosquitto_loop(client_, 500, 1);
    if (code == MOSQ_ERR_ERRNO && errno == 0) code = MOSQ_ERR_CONN_LOST;  // the library's code for an end inside a packet
    if ((hung_up = qos_2_ || watch.check() || unread_ > kMostUnread)) {
      ended_ = qos_2_                   ? "the broker sent a message of QoS 2, which nobody asked for"
               : unread_ > kMostUnread ? "the broker reads none of " + std::to_string(kMostUnread) + " acknowledgements"
                                       : "the broker sent a packet of more than " + std::to_string(most) + " bytes, which is the most that is read";
      forget();
      break;
    }
    ask_again();
    if (!connected_ && monotonic_s() > answer_by) break;
  }
  for (int i = 0; stopping_ && code == MOSQ_ERR_SUCCESS && i < 20; ++i) {
    mosquitto_disconnect(client_);
    code = mosquitto_loop(client_, 50, 1);
  }
  if (!refusal_.empty()) return "the broker at " + address_.text() + " refused us: " + refusal_;
  if (!connected_ && (code == MOSQ_ERR_TLS || logged_.find(kUntrusted) != std::string::npos)) return unreachable(MOSQ_ERR_TLS, 0);
  if (!connected_ && !hung_up) {
    ended_ = kUnanswered;
    const char* hint = !address_.secure()             ? "does it want TLS (mqtts://, or --ca-file)?"
                       : address_.cert_file.empty() ? "is this port one for TLS, and does it want a client certificate (--cert-file)?"
                                                    : "is this port one for TLS, and does its authority know the client certificate?";
    return "the broker at " + address_.text() + " ended the connection before it answered; " + hint;
  }
  return "connection to the broker at " + address_.text() + " lost: " + (ended_.empty() ? mosquitto_strerror(code) : ended_);
}

std::string Session::unreachable(int code, int number) const {
  std::string why = code == MOSQ_ERR_ERRNO ? std::strerror(number) : mosquitto_strerror(code);
  if (!why.empty() && why.back() == '.') why.pop_back();
  if (code == MOSQ_ERR_TLS || code == MOSQ_ERR_EAI) why += logged_.empty() ? "" : " (" + printable(logged_, 200) + ")";
  std::string remedy;
  if (code == MOSQ_ERR_TLS && logged_.find(kUntrusted) != std::string::npos) {
    remedy = "; the broker's certificate is " + (address_.ca_file.empty() ? std::string("of no authority known here") : "not of the authority in " + address_.ca_file) +
             ", or for another name: name the PEM file of the right one (--ca-file), and the name that is in it";
  } else if (code == MOSQ_ERR_TLS) {
    remedy = "; is this port one for TLS?";
  } else if (code == MOSQ_ERR_EAI) {
    remedy = "; is the name right, and does this machine have a network?";
  } else if (code == MOSQ_ERR_ERRNO && number == ECONNREFUSED) {
    remedy = "; does a broker run there, and listen on this port?";
  } else if (code == MOSQ_ERR_ERRNO && number == ENETUNREACH) {
    remedy = "; does this machine have a network?";
  } else if (code == MOSQ_ERR_ERRNO && (number == ETIMEDOUT || number == EHOSTUNREACH)) {
    remedy = "; is that machine on, and does a firewall let this port through?";
  }
  return "cannot reach the broker at " + address_.text() + ": " + why + remedy;
}

}  // namespace edgefl
