#define ZSTD_STATIC_LINKING_ONLY
#include "wire/bytes/zstd.h"

#include <algorithm>
#include <memory>
#include <zstd.h>

#include "wire/errors.h"

namespace edgefl {
namespace {

[[noreturn]] void refuse(const BlobRef& ref, const std::string& why) {
  throw BundleError("blob " + ref.sha256.substr(0, 12) + " is no zstd frame of " + std::to_string(ref.raw) + " bytes (" + why +
                    "); the server must publish it again");
}

int window_log(int64_t raw) {
  int log = 10;
  while (log < 27 && int64_t{1} << log < raw) ++log;
  return log;
}

}  // namespace

Bytes unpacked(const BlobRef& ref, Bytes data, int64_t limit) {
  if (ref.codec.empty()) return data;
  ref.check(limit);
  const unsigned long long claimed = ZSTD_getFrameContentSize(data.data(), data.size());
  if (claimed == ZSTD_CONTENTSIZE_ERROR) refuse(ref, "it is no frame");
  if (claimed == ZSTD_CONTENTSIZE_UNKNOWN || claimed != static_cast<unsigned long long>(ref.raw)) refuse(ref, "its frame claims another size");
  const std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context(ZSTD_createDCtx(), ZSTD_freeDCtx);
  ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, window_log(ref.raw));
  Bytes content(static_cast<size_t>(ref.raw), '\0');
  ZSTD_inBuffer in{data.data(), data.size(), 0};
  ZSTD_outBuffer out{content.data(), content.size(), 0};
  size_t left = 1;
  while (left != 0) {
    const size_t before = in.pos + out.pos;
    left = ZSTD_decompressStream(context.get(), &out, &in);
    if (ZSTD_isError(left)) refuse(ref, ZSTD_getErrorName(left));
    if (left != 0 && in.pos + out.pos == before) refuse(ref, "it is cut off");
  }
  if (in.pos != in.size) refuse(ref, "something follows it");
  if (out.pos != content.size()) refuse(ref, "it unfolds to " + std::to_string(out.pos) + " bytes");
  return content;
}

}  // namespace edgefl
