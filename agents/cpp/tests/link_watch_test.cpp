#ifdef __linux__
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "link/watch.h"

namespace {

// Both ends of a connection over TCP.
std::array<int, 2> connection() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  const int listener = socket(AF_INET, SOCK_STREAM, 0), ours = socket(AF_INET, SOCK_STREAM, 0);
  REQUIRE(bind(listener, at, size) == 0);
  REQUIRE(listen(listener, 1) == 0);
  REQUIRE(getsockname(listener, at, &size) == 0);
  REQUIRE(connect(ours, at, size) == 0);
  const int theirs = accept(listener, nullptr, nullptr);
  close(listener);
  return {ours, theirs};
}

}  // namespace

// A fast reader leaves no unread bytes, which would wake the watch's thread.
TEST_CASE("bytes that were read before the watch woke are counted") {
  const auto [ours, theirs] = connection();
  std::array<char, 1001> bytes{};
  REQUIRE(write(theirs, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  REQUIRE(recv(ours, bytes.data(), bytes.size(), MSG_WAITALL) == static_cast<ssize_t>(bytes.size()));
  std::atomic<int64_t> none{0}, one{1};
  CHECK(edgefl::Watch(ours, 1000, one).check() == false);
  REQUIRE(edgefl::Watch(ours, 1000, none).check() == true);
  CHECK(recv(ours, bytes.data(), bytes.size(), 0) == 0);
  close(ours);
  close(theirs);
}
#endif
