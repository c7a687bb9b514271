#include "cli/service_manager.h"

#include <cstdlib>
#include <cstring>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "link/session.h"

namespace edgefl {
namespace {

constexpr double kFeedsPerInterval = 4;

std::string take_variable(const char* name) {
  const char* value = std::getenv(name);
  const std::string text = value == nullptr ? "" : value;
  unsetenv(name);
  return text;
}

}  // namespace

ServiceManager::ServiceManager() {
  const std::string path = take_variable("NOTIFY_SOCKET"), interval_us = take_variable("WATCHDOG_USEC"), process = take_variable("WATCHDOG_PID");
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof address.sun_path) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (path[0] == '@') address.sun_path[0] = '\0';  // in Linux's abstract namespace, which has no files
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket_ >= 0 && connect(socket_, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    close(socket_);
    socket_ = -1;
  }
  if (process.empty() || process == std::to_string(getpid())) interval_s_ = std::atof(interval_us.c_str()) / 1e6;
}

ServiceManager::~ServiceManager() {
  if (socket_ >= 0) close(socket_);
}

void ServiceManager::send(const std::string& text) const {
  if (socket_ >= 0) (void)::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
}

void ServiceManager::keep_alive() {
  const double now = monotonic_s();
  if (interval_s_ <= 0 || now < fed_at_ + interval_s_ / kFeedsPerInterval) return;
  fed_at_ = now;
  send("WATCHDOG=1");
}

}  // namespace edgefl
