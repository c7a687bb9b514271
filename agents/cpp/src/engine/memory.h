// Resident memory of this process: measuring it, and keeping it low. Where a system does not tell, nothing happens.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgefl {

int64_t resident_bytes();  // now
int64_t anonymous_bytes(); // that no file backs
int64_t peak_bytes();      // highest since reset_peak()
void reset_peak();

// glibc hands every freed block of 64 KiB back to the system at once: what a step frees does not stay in a torn heap. For a
// process of the agent's own, as it is a setting of the whole process.
void return_memory_early();
// Gives freed memory back to the system, so that what was dropped is really gone.
void trim_memory();
// Takes the unchanged pages of programs and libraries out of this process: code that starting or loading a graph has used
// and what follows will not. They stay in the system's cache, and what is needed is mapped again.
void release_code();
// Both.
void give_memory_back();

}  // namespace edgefl
