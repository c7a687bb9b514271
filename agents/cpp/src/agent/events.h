// Events as people and programs read them.
#pragma once

#include <string>

#include "link/say.h"

namespace edgefl {

// {"event":"round","text":"...","details":{"round":3}}, on one line; NaN is null.
std::string event_json(const std::string& event, const std::string& text, const Details& details);
// "12:34:56  round     ..."
std::string event_line(const std::string& event, const std::string& text);

}  // namespace edgefl
