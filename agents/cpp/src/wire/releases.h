// Releases of runtimes, as manifests name them and agents compare them: 1.9.2 is older than 1.15.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace edgefl {

struct Release {
  std::array<int64_t, 4> numbers{};  // missing ones are 0
  size_t length = 0;                 // of the text that was read; 0 if it begins with no number

  explicit Release(std::string_view text) {
    constexpr size_t kDigits = 9;
    for (size_t place = 0; place < numbers.size(); ++place) {
      size_t at = length;
      if (place > 0 && (at >= text.size() || text[at++] != '.')) return;
      const size_t begin = at;
      int64_t number = 0;
      for (; at < text.size() && text[at] >= '0' && text[at] <= '9' && at - begin < kDigits; ++at) number = 10 * number + (text[at] - '0');
      if (at == begin) return;
      numbers[place] = number;
      length = at;
    }
  }
};

// Returns true for up to four numbers with dots between them.
inline bool is_release(std::string_view text) { return !text.empty() && Release(text).length == text.size(); }

// Returns true if `version` comes before the release `least`. What follows the numbers, such as "rc1" or "+cpu", does not
// count. A version that begins with no number counts as new.
inline bool is_older(std::string_view version, std::string_view least) {
  const Release found(version);
  return found.length > 0 && found.numbers < Release(least).numbers;
}

}  // namespace edgefl
