// What people are told, and how often.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace edgefl {

using Detail = std::variant<std::string, int64_t, double>;
using Details = std::vector<std::pair<std::string, Detail>>;
// Tells an event, in words, and with values that a program can read.
using Say = std::function<void(const std::string& event, const std::string& text, const Details& details)>;

// Each thing is due once in so many seconds; how often one was not is counted. For one thread.
class NoticeLimiter {
 public:
  explicit NoticeLimiter(double every_s) : every_s_(every_s) {}

  bool due(const std::string& what, double now) {
    const auto found = again_at_.find(what);
    if (found != again_at_.end() && now < found->second) {
      ++hushed_;
      return false;
    }
    if (again_at_.size() >= kMost) again_at_.clear();
    again_at_[what] = now + every_s_;
    return true;
  }
  int64_t hushed() const { return hushed_; }

 private:
  static constexpr size_t kMost = 256;
  const double every_s_;
  std::map<std::string, double> again_at_;
  int64_t hushed_ = 0;
};

}  // namespace edgefl
