// What libpng and libjpeg are asked for. Both leave by longjmp where a file is damaged, so nothing that has a destructor is
// made between setjmp and their calls.
#include "data/files/images.h"

#ifdef EDGEFL_HAS_IMAGES
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>

#include <png.h>

#include <jpeglib.h>
#endif

namespace edgefl {

#ifndef EDGEFL_HAS_IMAGES

bool reads_images() { return false; }
Pixels decoded(std::string_view, int64_t, int64_t, int64_t) {
  throw BadRow("is an image, and this agent was built without libpng and libjpeg");
}

#else

namespace {

constexpr int64_t kMostPixels = 1 << 26;  // as it is decoded, so that none takes the memory of the training
constexpr int64_t kLarger = 2;            // a JPEG is decoded at no less than so many times the size that is wanted
constexpr std::string_view kExif("Exif\0\0", 6);

void check_size(int64_t width, int64_t height) {
  if (width * height > kMostPixels) {
    throw BadRow("it has " + std::to_string(width) + " x " + std::to_string(height) + " pixels, more than " +
                 std::to_string(kMostPixels) + ": make it smaller");
  }
}

struct PngSource {
  std::string_view left;
  char error[200] = "";
};

void png_read(png_structp png, png_bytep into, size_t count) {
  auto* source = static_cast<PngSource*>(png_get_io_ptr(png));
  if (count > source->left.size()) png_error(png, "it is cut short");
  std::memcpy(into, source->left.data(), count);
  source->left.remove_prefix(count);
}

void png_failed(png_structp png, png_const_charp text) {
  std::snprintf(static_cast<PngSource*>(png_get_error_ptr(png))->error, sizeof(PngSource::error), "%s", text);
  png_longjmp(png, 1);
}

void png_warned(png_structp, png_const_charp) {}

struct Png {
  PngSource source;
  png_structp png = nullptr;
  png_infop info = nullptr;
  Pixels pixels;
  std::vector<png_bytep> rows;
  int orientation = 1;
  bool wide = false;  // grey of 16 bits

  explicit Png(std::string_view file) : source{file} {
    png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &source, png_failed, png_warned);
    info = png == nullptr ? nullptr : png_create_info_struct(png);
    if (info == nullptr) throw BadRow("libpng cannot start");
  }
  ~Png() { png_destroy_read_struct(&png, &info, nullptr); }
  Png(const Png&) = delete;
  Png& operator=(const Png&) = delete;

  bool head() {
    if (setjmp(png_jmpbuf(png)) != 0) return false;
    png_set_read_fn(png, &source, png_read);
    png_read_info(png, info);
    pixels.width = png_get_image_width(png, info);
    pixels.height = png_get_image_height(png, info);
    const int kind = png_get_color_type(png, info), bits = png_get_bit_depth(png, info);
    wide = kind == PNG_COLOR_TYPE_GRAY && bits == 16;
    if (kind == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png);
    if (kind == PNG_COLOR_TYPE_GRAY && bits < 8) png_set_expand_gray_1_2_4_to_8(png);
    if (bits == 16) png_set_strip_16(png);
    png_set_strip_alpha(png);
    png_set_interlace_handling(png);
    png_read_update_info(png, info);
    pixels.channels = png_get_channels(png, info);
    return true;
  }

  bool body() {
    if (setjmp(png_jmpbuf(png)) != 0) return false;
    png_read_image(png, rows.data());
    png_read_end(png, info);
    return true;
  }

  Pixels all() {
    if (!head()) throw BadRow(std::string("is no image that can be read: ") + source.error);
    if (wide) throw BadRow("it has pixels of more than 8 bits");
    check_size(pixels.width, pixels.height);
    const auto row = static_cast<size_t>(pixels.width * pixels.channels);
    pixels.data.resize(row * static_cast<size_t>(pixels.height));
    for (int64_t y = 0; y < pixels.height; ++y) rows.push_back(pixels.data.data() + row * static_cast<size_t>(y));
    if (!body()) throw BadRow(std::string("is no image that can be read: ") + source.error);
    png_bytep exif = nullptr;
    png_uint_32 count = 0;
    if (png_get_eXIf_1(png, info, &count, &exif) != 0) {
      orientation = exif_orientation({reinterpret_cast<const char*>(exif), count});
    }
    return upright(std::move(pixels), orientation);
  }
};

// Adobe's programs, and Pillow, write each ink as 255 minus what is printed: the light that is left, times that of black.
Pixels from_inverted_cmyk(const Pixels& inks) {
  Pixels made{inks.width, inks.height, 3, {}};
  made.data.reserve(inks.data.size() / 4 * 3);
  for (size_t at = 0; at < inks.data.size(); at += 4) {
    const int black = inks.data[at + 3];
    for (size_t ink = 0; ink < 3; ++ink) {
      const int product = (255 - inks.data[at + ink]) * black + 128;
      made.data.push_back(static_cast<uint8_t>(black - (((product >> 8) + product) >> 8)));
    }
  }
  return made;
}

struct JpegErrors {
  jpeg_error_mgr base;
  std::jmp_buf place;
  char text[JMSG_LENGTH_MAX];
};

void jpeg_failed(j_common_ptr jpeg) {
  auto* errors = reinterpret_cast<JpegErrors*>(jpeg->err);
  jpeg->err->format_message(jpeg, errors->text);
  std::longjmp(errors->place, 1);
}

void jpeg_warned(j_common_ptr jpeg, int level) {
  if (level < 0) jpeg_failed(jpeg);  // damaged data: what would be made up is no sample
}

struct Jpeg {
  jpeg_decompress_struct jpeg{};
  JpegErrors errors{};
  std::string_view file;
  Pixels pixels;
  int orientation = 1;

  explicit Jpeg(std::string_view bytes) : file(bytes) {
    jpeg.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = jpeg_failed;
    errors.base.emit_message = jpeg_warned;
  }
  ~Jpeg() { jpeg_destroy_decompress(&jpeg); }
  Jpeg(const Jpeg&) = delete;
  Jpeg& operator=(const Jpeg&) = delete;

  bool head() {
    if (setjmp(errors.place) != 0) return false;
    jpeg_create_decompress(&jpeg);
    jpeg_save_markers(&jpeg, JPEG_APP0 + 1, 0xFFFF);
    jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(file.data()), static_cast<unsigned long>(file.size()));
    jpeg_read_header(&jpeg, TRUE);
    return true;
  }

  bool body() {
    if (setjmp(errors.place) != 0) return false;
    while (jpeg.output_scanline < jpeg.output_height) {
      JSAMPROW row = pixels.data.data() + static_cast<size_t>(jpeg.output_scanline * pixels.width * pixels.channels);
      jpeg_read_scanlines(&jpeg, &row, 1);
    }
    jpeg_finish_decompress(&jpeg);
    return true;
  }

  // Begins with so many channels, at a half, a quarter or an eighth where that is still larger than what is wanted.
  bool begin(int64_t channels, int64_t wanted) {
    if (setjmp(errors.place) != 0) return false;
    jpeg.scale_num = 1;
    jpeg.scale_denom = 1;
    const int64_t most = std::min<int64_t>(jpeg.image_width / wanted, jpeg.image_height / wanted);
    for (unsigned int each = 8; each > 1 && jpeg.scale_denom == 1; each /= 2) {
      if (most >= each) jpeg.scale_denom = each;
    }
    const bool grey = jpeg.num_components == 1 || (channels == 1 && jpeg.jpeg_color_space == JCS_YCbCr);
    jpeg.out_color_space = jpeg.num_components == 4 ? JCS_CMYK : grey ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_start_decompress(&jpeg);
    return true;
  }

  Pixels all(int64_t channels, int64_t wanted) {
    if (!head()) throw BadRow(std::string("is no image that can be read: ") + errors.text);
    for (jpeg_saved_marker_ptr each = jpeg.marker_list; each != nullptr; each = each->next) {
      const std::string_view data(reinterpret_cast<const char*>(each->data), each->data_length);
      if (data.substr(0, kExif.size()) == kExif) orientation = exif_orientation(data.substr(kExif.size()));
    }
    if (!begin(channels, wanted)) throw BadRow(std::string("is no image that can be read: ") + errors.text);
    check_size(jpeg.output_width, jpeg.output_height);
    pixels.width = jpeg.output_width;
    pixels.height = jpeg.output_height;
    pixels.channels = jpeg.output_components;
    pixels.data.resize(static_cast<size_t>(pixels.width * pixels.height * pixels.channels));
    if (!body()) throw BadRow(std::string("is no image that can be read: ") + errors.text);
    if (pixels.channels == 4) pixels = from_inverted_cmyk(pixels);
    return upright(std::move(pixels), orientation);
  }
};

}  // namespace

bool reads_images() { return true; }

Pixels decoded(std::string_view file, int64_t channels, int64_t width, int64_t height) {
  if (file.substr(0, 4) == "\x89PNG") return in_channels(Png(file).all(), channels);
  if (file.substr(0, 2) == "\xFF\xD8") return in_channels(Jpeg(file).all(channels, kLarger * std::max(width, height)), channels);
  throw BadRow("is no image that can be read: it is neither PNG nor JPEG");
}

#endif

}  // namespace edgefl
