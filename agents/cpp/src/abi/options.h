// What callers of the C interface hand in: checked, and as the agent takes it.
#pragma once

#include <string>

#include "agent/agent.h"
#include "edgefl_agent.h"

namespace edgefl {

struct Misuse {  // of the interface itself
  edgefl_status status;
  std::string text;
};

template <typename T>
const T& given(const T* pointer, const char* what) {
  if (pointer == nullptr) throw Misuse{EDGEFL_ERR_ARGUMENT, std::string(what) + " is NULL"};
  return *pointer;
}

template <typename T>
const T& sized(const T* pointer, const char* what) {
  if (given(pointer, what).size != sizeof(T))
    throw Misuse{EDGEFL_ERR_ARGUMENT, std::string(what) + " has size " + std::to_string(pointer->size) + ", this library's has " + std::to_string(sizeof(T)) +
                                          ": fill it by its init function, of the header that belongs to the library"};
  return *pointer;
}

inline std::string text_of(const char* text) { return text == nullptr ? "" : text; }

// Misuse, or an Error of the kind of what cannot be used.
AgentConfig config_of(const edgefl_options& options);

}  // namespace edgefl
