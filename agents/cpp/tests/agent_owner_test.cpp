// What an owner says between two steps.
#include <doctest/doctest.h>
#include <thread>

#include "agent/owner.h"
#include "link/session.h"
#include "wire/errors.h"

using namespace edgefl;

namespace {

std::string declined(RoundControl& guard) {
  try {
    guard.between();
  } catch (const RoundDeclined& error) {
    return error.reason;
  }
  return "";
}

}  // namespace

TEST_CASE("nothing is in the way of a step unless the owner puts it there") {
  const Limits limits;
  Owner owner;
  RoundControl guard(limits, owner, [] { return false; });
  guard.worked(5);
  CHECK(declined(guard) == "");
  owner.forbid("it is not charging");
  CHECK(declined(guard) == "policy");
  CHECK(owner.conditions().available == false);
  owner.forbid("");
  CHECK(declined(guard) == "");
  CHECK_FALSE(owner.conditions().available.has_value());
}

TEST_CASE("a step, and a round, that take too long are declined") {
  Limits limits;
  limits.max_step_s = 1.0;
  Owner owner;
  RoundControl guard(limits, owner, [] { return false; });
  guard.worked(1500);
  CHECK(declined(guard) == "too-much-work");
  CHECK(declined(guard) == "");
  limits.max_round_s = 1e-9;
  RoundControl brief(limits, owner, [] { return false; });
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(declined(brief) == "too-much-work");
}

TEST_CASE("a paused device stands still until it may go on, and its pause is no part of the round") {
  Limits limits;
  limits.max_round_s = 0.2;
  Owner owner;
  owner.pause(true);
  std::atomic<bool> went_on{false};
  RoundControl guard(limits, owner, [] { return false; });
  std::thread working([&] {
    guard.between();
    went_on = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK_FALSE(went_on);
  owner.pause(false);
  working.join();
  CHECK(went_on);
  CHECK(declined(guard) == "");
}

TEST_CASE("a pause, and a rest, end with the round") {
  const Limits limits;
  Owner owner;
  owner.pause(true);
  std::atomic<bool> over{false};
  RoundControl guard(limits, owner, [&] { return over.load(); });
  std::thread ending([&] { over = true; });
  CHECK_THROWS_AS(guard.between(), RoundAborted);
  ending.join();
  owner.pause(false);
  owner.set_duty(0.001);
  RoundControl resting(limits, owner, [calls = 0]() mutable { return ++calls > 2; });
  resting.worked(1e6);
  CHECK_THROWS_AS(resting.between(), RoundDeclined);  // that step alone was too long
  resting.worked(500);
  CHECK_THROWS_AS(resting.between(), RoundAborted);
}
