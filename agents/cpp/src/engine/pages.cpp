#include "engine/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <cstdlib>
#include <utility>

#include "engine/reserve.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr int64_t kSmall = 1 << 16, kMost = int64_t{1} << 46;  // bytes; a manifest may say anything

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

// Bytes before the value: some where it would end so close before the end of its last page that what an engine reads beyond
// it lies outside.
int64_t lead(const Port& port) {
  const int64_t left = (page_bytes() - port.nbytes() % page_bytes()) % page_bytes();
  return left < static_cast<int64_t>(kSlack) ? static_cast<int64_t>(kSlack) : 0;
}

int64_t mapped_bytes(const Port& port) {
  const int64_t whole = lead(port) + port.nbytes() + static_cast<int64_t>(kSlack);
  return (whole + page_bytes() - 1) / page_bytes() * page_bytes();
}

[[noreturn]] void no_room(int64_t nbytes, int error) {
  throw StoreError("no room for " + std::to_string(nbytes) + " bytes that a training step keeps on the disk (" +
                   std::strerror(error) + "): free some space, or put the store elsewhere");
}

}  // namespace

Pages::Mapped::Mapped(Mapped&& other) noexcept : data(other.data), start(std::exchange(other.start, nullptr)), size(other.size) {}

Pages::Mapped::~Mapped() {
  if (start != nullptr) munmap(start, size);
}

Pages::Pages(const Ports& ports, const std::string& folder) {
  int64_t total = 0;
  for (const Port& port : ports) {
    if (port.nbytes() < kSmall) {
      small_[port.name] = std::make_shared<HeldTensor>(port.dtype, port.shape);
    } else {
      if (port.nbytes() > kMost || total > kMost) no_room(port.nbytes(), EFBIG);
      places_[port.name] = total;
      total += mapped_bytes(port);
    }
  }
  if (total == 0) return;
  const char* temporary = std::getenv("TMPDIR");
  std::string path = !folder.empty() ? folder : temporary != nullptr && *temporary != '\0' ? temporary : "/tmp";
  path += "/edgefl-pages-XXXXXX";
  file_ = mkostemp(path.data(), O_CLOEXEC);
  if (file_ < 0) no_room(total, errno);
  unlink(path.c_str());
  if (const int failed = reserve_room(file_, total); failed != 0) {
    close(file_);
    no_room(total, failed);
  }
}

Pages::~Pages() {
  if (file_ >= 0) close(file_);
}

Pages::Mapped Pages::mapped(const Port& port) const {
  Mapped made;
  const auto small = small_.find(port.name);
  if (small != small_.end()) {
    made.data = small->second->data;
    return made;
  }
  const auto size = static_cast<size_t>(mapped_bytes(port));
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, places_.at(port.name));
  if (start == MAP_FAILED) throw EngineError(std::string("a page of a training step cannot be mapped: ") + std::strerror(errno));
  made.start = start;
  made.size = size;
  made.data = static_cast<std::byte*>(start) + lead(port);
  return made;
}

}  // namespace edgefl
