#include "link/watch.h"

#ifdef __linux__
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#endif

namespace edgefl {

#ifdef __linux__
namespace {

// Bytes that were read from a connection; -1 if the system does not count them.
int64_t bytes_read(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  int unread = 0;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || ioctl(socket, FIONREAD, &unread) != 0) return -1;
  return static_cast<int64_t>(info.tcpi_bytes_received) - unread;
}

}  // namespace

Watch::Watch(int socket, int64_t most, std::atomic<int64_t>& delivered)
    : socket_(dup(socket)), wake_(eventfd(0, EFD_CLOEXEC)), most_(most), delivered_(delivered) {  // the library may close its own
  if (socket_ >= 0 && wake_ >= 0) thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  const uint64_t one = 1;
  if (thread_.joinable() && write(wake_, &one, sizeof one) == sizeof one) thread_.join();
  if (socket_ >= 0) close(socket_);
  if (wake_ >= 0) close(wake_);
}

bool Watch::check() {
  if (ended_) return true;
  int64_t delivered = delivered_;  // before `read`: a message between both makes the exchange below fail
  const int64_t read = bytes_read(socket_);
  if (read < 0) return false;
  if (read - delivered_ > most_) {
    ended_ = true;
    shutdown(socket_, SHUT_RDWR);
    return true;
  }
  // Headers are counted generously. The surplus is taken back, or it would add up.
  if (delivered > read) delivered_.compare_exchange_strong(delivered, read);
  return false;
}

void Watch::run() {
  pollfd both[] = {{socket_, POLLIN, 0}, {wake_, POLLIN, 0}};
  while (poll(both, 2, -1) >= 0 && both[1].revents == 0)
    if (check() || poll(both + 1, 1, 10) != 0) return;
}
#else
Watch::Watch(int, int64_t most, std::atomic<int64_t>& delivered) : most_(most), delivered_(delivered) {}
Watch::~Watch() = default;
bool Watch::check() { return false; }
#endif

}  // namespace edgefl
