// WAV files in a folder for each class.
#pragma once

#include <string_view>
#include <vector>

#include "data/readers/reading.h"

namespace edgefl {

// A sample for each file: the wave itself, or the features that the bundle's graph computes.
Samples read_sounds(const Reading& reading, const SoundSpec& reader, const Manifest& manifest, const std::vector<FoundFile>& files);

// The sound in a WAV as float32 (length,) in [-1, 1], its channels averaged, cut or with zeros behind it. BadRow for what is
// no WAV of integers or floats, damaged, empty, or of another rate.
Tensor wave_of(std::string_view file, const SoundSpec& reader);

}  // namespace edgefl
