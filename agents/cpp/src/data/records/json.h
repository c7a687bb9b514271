// One JSON object, with the rules and the words of Python's json module: NaN is a number, half a surrogate pair is text.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "data/records/values.h"

namespace edgefl {

// Values of a line that is a JSON object, by name; the last one of each name. BadRow says what is wrong with the line.
std::map<std::string, Value> json_object(std::string_view line);

}  // namespace edgefl
