// PNG and JPEG files as samples, by the rules that every device has (docs/protocol.md, Readers): turned upright, in grey or
// RGB, stretched bilinearly as Pillow stretches.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/check.h"
#include "wire/tensor.h"

namespace edgefl {

struct Pixels {  // rows of pixels, `channels` bytes each (1: grey, 3: RGB)
  int64_t width = 0, height = 0, channels = 0;
  std::vector<uint8_t> data;
};

// Whether this agent was built with what decodes images.
bool reads_images();
// The file's bytes as uint8 (channels, height, width) of `shape`, its values times `white` / 255. BadRow for what is none.
Tensor image_sample(std::string_view file, const Shape& shape, int64_t white);

// Each step of it. `width`, `height`: those that are wanted; a large JPEG is decoded at a smaller size right away.
Pixels decoded(std::string_view file, int64_t channels, int64_t width, int64_t height);
Pixels in_channels(Pixels pixels, int64_t channels);
Pixels upright(Pixels pixels, int orientation);  // as EXIF numbers it, 1 to 8
Pixels stretched(Pixels pixels, int64_t width, int64_t height);
int exif_orientation(std::string_view tiff);     // of the bytes behind "Exif\0\0"; 1 if they say nothing

}  // namespace edgefl
