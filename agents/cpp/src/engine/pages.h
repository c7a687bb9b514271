// Values of a training step that wait on the disk between two segments: written and read as memory, and in no process's
// memory between. They lie in a file that has no name, so that whatever ends the process, nothing stays.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "engine/held.h"

namespace edgefl {

class Pages {
 public:
  // Somebody's view of a page; its bytes are the system's once this is let go of.
  struct Mapped {
    std::byte* data = nullptr;
    void* start = nullptr;  // of the mapping, null for a value that stays in memory
    size_t size = 0;
    Mapped() = default;
    Mapped(Mapped&& other) noexcept;
    Mapped& operator=(Mapped&&) = delete;
    ~Mapped();
  };

  // In `folder`, or where the system has temporary files; StoreError if the disk has no room for them.
  Pages(const Ports& ports, const std::string& folder);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  Mapped mapped(const Port& port) const;

 private:
  std::map<std::string, Held> small_;  // there are many, and together they are little
  std::map<std::string, int64_t> places_;
  int file_ = -1;
};

}  // namespace edgefl
