// Watches what a connection holds, because the library holds a packet of any size until it is whole.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace edgefl {

// Ends the connection of `socket` once `most` more bytes were read than `delivered` says. Its thread wakes only while bytes are
// unread: the reader has to call check() after each read, because it may have left none.
// Linux and Android count the bytes of a connection; elsewhere this does nothing.
class Watch {
 public:
  Watch(int socket, int64_t most, std::atomic<int64_t>& delivered);
  ~Watch();
  bool check();  // true once it has ended the connection

 private:
  void run();
  int socket_ = -1, wake_ = -1;
  const int64_t most_;
  std::atomic<int64_t>& delivered_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace edgefl
