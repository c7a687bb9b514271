// As much of libcurl as mirrors take, loaded when one is first asked: most devices have none, and Debian's library brings many others.
#pragma once

#define CURL_DISABLE_TYPECHECK
#include <curl/curl.h>

namespace edgefl {

struct CurlApi {
  decltype(&::curl_global_init) global_init = nullptr;
  decltype(&::curl_easy_init) easy_init = nullptr;
  decltype(&::curl_easy_cleanup) easy_cleanup = nullptr;
  decltype(&::curl_easy_setopt) easy_setopt = nullptr;
  decltype(&::curl_easy_getinfo) easy_getinfo = nullptr;
  decltype(&::curl_easy_perform) easy_perform = nullptr;
  decltype(&::curl_easy_strerror) easy_strerror = nullptr;
  decltype(&::curl_url) url = nullptr;
  decltype(&::curl_url_cleanup) url_cleanup = nullptr;
  decltype(&::curl_url_set) url_set = nullptr;
  decltype(&::curl_url_get) url_get = nullptr;
  decltype(&::curl_free) free = nullptr;
  bool loaded = false;
};

const CurlApi& curl();  // `loaded` is false where this system has no libcurl

}  // namespace edgefl
