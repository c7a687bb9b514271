#ifdef EDGEFL_HAS_CURL
#include "link/mirrors/curl.h"

#include <dlfcn.h>

namespace edgefl {
namespace {

#ifdef __APPLE__
constexpr const char* kLibrary = "libcurl.4.dylib";
#else
constexpr const char* kLibrary = "libcurl.so.4";
#endif

template <typename Function>
bool take(void* library, const char* name, Function& into) {
  into = reinterpret_cast<Function>(dlsym(library, name));
  return into != nullptr;
}

CurlApi loaded() {
  CurlApi api;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return api;
  api.loaded = take(library, "curl_global_init", api.global_init) && take(library, "curl_easy_init", api.easy_init) &&
               take(library, "curl_easy_cleanup", api.easy_cleanup) && take(library, "curl_easy_setopt", api.easy_setopt) &&
               take(library, "curl_easy_getinfo", api.easy_getinfo) && take(library, "curl_easy_perform", api.easy_perform) &&
               take(library, "curl_easy_strerror", api.easy_strerror) && take(library, "curl_url", api.url) &&
               take(library, "curl_url_cleanup", api.url_cleanup) && take(library, "curl_url_set", api.url_set) &&
               take(library, "curl_url_get", api.url_get) && take(library, "curl_free", api.free) &&
               api.global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
  return api;
}

}  // namespace

const CurlApi& curl() {
  static const CurlApi api = loaded();
  return api;
}

}  // namespace edgefl
#endif
