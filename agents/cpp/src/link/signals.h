// What this library must not change in the process that it is part of: how signals are handled.
#pragma once

#include <csignal>

namespace edgefl {

// SIGPIPE of this thread, which writing to a connection that is gone would end the process with, is held back.
class NoPipeSignal {
 public:
  NoPipeSignal();
  ~NoPipeSignal();  // takes one that came meanwhile
  NoPipeSignal(const NoPipeSignal&) = delete;
  NoPipeSignal& operator=(const NoPipeSignal&) = delete;

 private:
  sigset_t before_;
  bool pending_;
};

// The process's own handling of SIGPIPE, which libmosquitto sets aside where it makes a client, comes back with the block.
class PipeHandlerKept {
 public:
  PipeHandlerKept() { sigaction(SIGPIPE, nullptr, &before_); }
  ~PipeHandlerKept() { sigaction(SIGPIPE, &before_, nullptr); }
  PipeHandlerKept(const PipeHandlerKept&) = delete;
  PipeHandlerKept& operator=(const PipeHandlerKept&) = delete;

 private:
  struct sigaction before_;
};

}  // namespace edgefl
