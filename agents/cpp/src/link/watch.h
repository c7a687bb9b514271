// Watches what a connection holds, because the library holds a packet of any size until it is whole.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace edgefl {

// Ends the connection of `socket` once more than `most` bytes were read of it than `delivered` says. Its thread wakes only while
// bytes wait: whoever reads them asks ended() too, between two reads, because by then none may wait.
// Linux and Android count the bytes of a connection; elsewhere this does nothing.
class Watch {
 public:
  Watch(int socket, int64_t most, std::atomic<int64_t>& delivered);
  ~Watch();
  bool ended();

 private:
  void run();
  int socket_ = -1, wake_ = -1;
  const int64_t most_;
  std::atomic<int64_t>& delivered_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace edgefl
