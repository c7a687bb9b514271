#include "link/signals.h"

#include <pthread.h>

namespace edgefl {
namespace {

sigset_t only_pipe() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

bool is_pending() {
  sigset_t waiting;
  return sigpending(&waiting) == 0 && sigismember(&waiting, SIGPIPE) == 1;
}

}  // namespace

NoPipeSignal::NoPipeSignal() : pending_(is_pending()) {
  const sigset_t pipe = only_pipe();
  pthread_sigmask(SIG_BLOCK, &pipe, &before_);
}

NoPipeSignal::~NoPipeSignal() {
  const sigset_t pipe = only_pipe();
  if (!pending_ && is_pending()) {
#ifdef __APPLE__
    int taken = 0;
    sigwait(&pipe, &taken);
#else
    const timespec now{};
    sigtimedwait(&pipe, nullptr, &now);
#endif
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace edgefl
