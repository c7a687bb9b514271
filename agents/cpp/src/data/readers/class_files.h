// Arrays and images in a folder for each class.
#pragma once

#include <vector>

#include "data/readers/reading.h"

namespace edgefl {

Samples read_arrays(const Reading& reading, const std::vector<FoundFile>& files);
Samples read_images(const Reading& reading, const ImageSpec& reader, const std::vector<FoundFile>& files);

}  // namespace edgefl
