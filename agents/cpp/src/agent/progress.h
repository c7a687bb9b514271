// What a device tells of a round while it works on it: for people who watch, and nothing depends on it.
#pragma once

#include <exception>
#include <mutex>
#include <string>

#include "agent/rounds/job.h"
#include "link/fetch.h"
#include "link/session.h"
#include "round/trainer.h"
#include "wire/mqtt/envelope.h"

namespace edgefl {

// At most five messages a second, or as the task says. Any thread.
class ProgressMessages {
 public:
  ProgressMessages(Session& session, const Topics& topics, const Fetcher& fetcher, MessageSigner& speaker) : session_(session), topic_(topics.progress()), fetcher_(fetcher), speaker_(speaker) {}
  void watch(const Job& job, const StepReport& step);
  void failed(int64_t round, const std::string& tier, const std::exception& error);  // an attempt ended; there will be another

 private:
  void publish(int64_t round, const std::string& tier, const StepReport& step);
  Session& session_;
  const std::string topic_;
  const Fetcher& fetcher_;
  MessageSigner& speaker_;
  std::mutex lock_;
  double last_ = -1e9;
};

}  // namespace edgefl
