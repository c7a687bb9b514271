#include "engine/onnx/rows.h"

#include <algorithm>

namespace edgefl {
namespace {

constexpr size_t kDigits = 12;

std::optional<int64_t> number(const std::string& text) {
  const bool digits = std::all_of(text.begin(), text.end(), [](char each) { return each >= '0' && each <= '9'; });
  if (text.empty() || text.size() > kDigits || !digits) return std::nullopt;
  return std::stoll(text);
}

}  // namespace

std::optional<RowsOf> rows_in(const std::string& name) {
  const size_t open = name.rfind('['), colon = name.rfind(':');
  if (name.empty() || name.back() != ']' || open == std::string::npos || open == 0 || colon == std::string::npos || colon < open) {
    return std::nullopt;
  }
  const auto start = number(name.substr(open + 1, colon - open - 1));
  const auto stop = number(name.substr(colon + 1, name.size() - colon - 2));
  if (!start || !stop) return std::nullopt;
  return RowsOf{name.substr(0, open), *start, *stop};
}

}  // namespace edgefl
