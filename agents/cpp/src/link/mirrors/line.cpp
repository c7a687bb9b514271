#include "link/mirrors/line.h"

#ifdef EDGEFL_HAS_CURL
#include <algorithm>
#include <arpa/inet.h>
#include <cstring>
#include <exception>
#include <netinet/in.h>
#include <sys/socket.h>
#include <utility>

#include "link/mirrors/curl.h"
#include "link/session.h"
#include "wire/printable.h"
#endif

namespace edgefl {

#ifndef EDGEFL_HAS_CURL

bool reads_mirrors() { return false; }
std::string mirror_address(const std::string&) { return ""; }
struct MirrorLine::Curl {};
MirrorLine::MirrorLine(std::string address, Rules rules, std::function<bool()> aborted)
    : address_(std::move(address)), rules_(std::move(rules)), aborted_(std::move(aborted)) {}
MirrorLine::~MirrorLine() = default;
MirrorLine::End MirrorLine::pieces(const std::string&, int64_t, int64_t, int64_t, int64_t, const std::function<bool(std::string_view)>&) {
  why_ = "this agent was built without libcurl";
  return End::wrong;
}

#else

namespace {

constexpr size_t kMostLetters = 500;
constexpr long kWhole = 200, kPart = 206;
constexpr int64_t kMostWords = 1 << 16;  // of an answer that is no blob

std::string part_of(CURLU* url, CURLUPart part, unsigned flags = 0) {
  char* text = nullptr;
  std::string found = curl().url_get(url, part, &text, flags) == CURLUE_OK ? text : "";
  curl().free(text);
  return found;
}

bool is_private(uint32_t address) {
  return address >> 24 == 10 || address >> 24 == 127 || address >> 20 == 0xAC1 || address >> 16 == 0xC0A8;
}

// Whether it belongs to this machine or to a private network.
bool is_near(const sockaddr* address) {
  if (address->sa_family == AF_INET) return is_private(ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr));
  if (address->sa_family != AF_INET6) return false;
  const in6_addr& wide = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  uint32_t last = 0;
  std::memcpy(&last, wide.s6_addr + 12, sizeof last);
  return IN6_IS_ADDR_LOOPBACK(&wide) || (wide.s6_addr[0] & 0xFE) == 0xFC || (IN6_IS_ADDR_V4MAPPED(&wide) && is_private(ntohl(last)));
}

}  // namespace

bool reads_mirrors() { return curl().loaded; }

std::string mirror_address(const std::string& text) {
  if (!curl().loaded) return "";
  const std::unique_ptr<CURLU, void (*)(CURLU*)> url(curl().url(), curl().url_cleanup);
  if (text.size() > kMostLetters || !is_printable(text) || curl().url_set(url.get(), CURLUPART_URL, text.c_str(), CURLU_DISALLOW_USER) != CURLUE_OK) return "";
  const std::string scheme = part_of(url.get(), CURLUPART_SCHEME), host = part_of(url.get(), CURLUPART_HOST);
  const bool more = !part_of(url.get(), CURLUPART_QUERY).empty() || !part_of(url.get(), CURLUPART_FRAGMENT).empty();
  if ((scheme != "https" && scheme != "http") || host.empty() || more || text.find_first_of("?#@\\") != std::string::npos) return "";
  std::string path = part_of(url.get(), CURLUPART_PATH);
  path.erase(path.find_last_not_of('/') + 1);
  return scheme + "://" + host + ":" + part_of(url.get(), CURLUPART_PORT, CURLU_DEFAULT_PORT) + path;
}

// One transfer's state, as its callbacks see it.
struct MirrorLine::Curl {
  CURL* easy = nullptr;
  const Rules& rules;
  const std::function<bool()>& aborted;
  const std::function<bool(std::string_view)>* take = nullptr;
  std::string piece;
  int64_t skip = 0, left = 0, step = 0, words = 0;
  double late_at = 0;
  std::exception_ptr failed;
  bool begun = false, part = false, wrong = false, far = false;

  Curl(const Rules& each, const std::function<bool()>& ends) : easy(curl().easy_init()), rules(each), aborted(ends) {}
  ~Curl() { curl().easy_cleanup(easy); }

  void patience() { late_at = monotonic_s() + rules.patience_s; }

  long status() const {
    long code = 0;
    curl().easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &code);
    return code;
  }

  // Whether more is wanted of what came. A mirror may give the whole for a part.
  bool came(std::string_view data) {
    if (status() != kWhole && status() != kPart) return (words += static_cast<int64_t>(data.size())) <= kMostWords;
    if (!begun && status() == kPart) skip = 0;
    begun = true;
    const size_t before = std::min(data.size(), static_cast<size_t>(skip));
    skip -= static_cast<int64_t>(before);
    for (data.remove_prefix(before); !data.empty() && left > 0;) {
      const int64_t wanted = std::min(step, left) - static_cast<int64_t>(piece.size());
      const size_t taken = std::min(data.size(), static_cast<size_t>(wanted));
      piece += data.substr(0, taken);
      data.remove_prefix(taken);
      if (static_cast<int64_t>(taken) < wanted) return true;
      left -= static_cast<int64_t>(piece.size());
      wrong = !(*take)(piece);
      piece.clear();
      patience();
      if (wrong) return false;
    }
    return data.empty() && (left > 0 || !(part && status() == kWhole));  // of the whole no more is read than the part
  }

  static size_t write(char* data, size_t, size_t count, void* self) noexcept {
    try {
      return static_cast<Curl*>(self)->came({data, count}) ? count : 0;
    } catch (...) {  // a full disk, which is no fault of the mirror
      static_cast<Curl*>(self)->failed = std::current_exception();
      return 0;
    }
  }

  static int look(void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    const auto* now = static_cast<Curl*>(self);
    return now->aborted() || monotonic_s() > now->late_at ? 1 : 0;
  }

  static curl_socket_t open(void* self, curlsocktype, curl_sockaddr* address) {
    auto* now = static_cast<Curl*>(self);
    now->far = now->rules.near && !is_near(&address->addr);
    return now->far ? CURL_SOCKET_BAD : socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
  }
};

MirrorLine::MirrorLine(std::string address, Rules rules, std::function<bool()> aborted)
    : address_(std::move(address)), rules_(std::move(rules)), aborted_(std::move(aborted)) {
  curl_ = std::make_unique<Curl>(rules_, aborted_);
  CURL* easy = curl_->easy;
  if (easy == nullptr) return;
  curl().easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
  curl().easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
  curl().easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
  curl().easy_setopt(easy, CURLOPT_PROXY, "");
  curl().easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
  curl().easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
  curl().easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, Curl::look);
  curl().easy_setopt(easy, CURLOPT_XFERINFODATA, curl_.get());
  curl().easy_setopt(easy, CURLOPT_WRITEFUNCTION, Curl::write);
  curl().easy_setopt(easy, CURLOPT_WRITEDATA, curl_.get());
  if (!rules_.ca_file.empty()) curl().easy_setopt(easy, CURLOPT_CAINFO, rules_.ca_file.c_str());
  if (address_.rfind("http://", 0) == 0) {
    curl().easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, Curl::open);
    curl().easy_setopt(easy, CURLOPT_OPENSOCKETDATA, curl_.get());
  }
}

MirrorLine::~MirrorLine() = default;

MirrorLine::End MirrorLine::pieces(const std::string& sha256, int64_t size, int64_t first, int64_t last, int64_t step,
                                   const std::function<bool(std::string_view)>& take) {
  Curl& now = *curl_;
  why_ = "there is no memory for a connection";
  if (now.easy == nullptr) return End::wrong;
  now.take = &take;
  now.piece.clear();
  now.part = first > 0 || last < size;
  now.skip = first;
  now.left = last - first;
  now.step = step;
  now.words = 0;
  now.begun = now.wrong = now.far = false;
  now.patience();
  const std::string range = std::to_string(first) + "-" + std::to_string(last - 1);
  curl().easy_setopt(now.easy, CURLOPT_URL, (address_ + "/" + sha256).c_str());
  curl().easy_setopt(now.easy, CURLOPT_RANGE, now.part ? range.c_str() : nullptr);
  const CURLcode code = curl().easy_perform(now.easy);
  if (const auto failed = std::exchange(now.failed, nullptr)) std::rethrow_exception(failed);
  const long status = now.status();
  if (now.left == 0 && !now.wrong && (code == CURLE_OK || now.part)) return End::whole;
  if (status == 404 || status == 410) {
    why_ = "it has not this blob";
    return End::lacks;
  }
  why_ = now.far                                  ? "without TLS only a machine of a private network is asked"
         : now.wrong                              ? "a chunk has a wrong digest"
         : status != 0 && status != kWhole && status != kPart ? "it answers with status " + std::to_string(status)
         : code == CURLE_ABORTED_BY_CALLBACK       ? "it gave nothing of use in " + std::to_string(static_cast<int>(rules_.patience_s)) + " s"
         : code != CURLE_OK && now.left > 0       ? printable(curl().easy_strerror(code), 200)
         : now.left > 0                           ? "it gave too few bytes"
                                                   : "it gave too many bytes";
  return End::wrong;
}

#endif

}  // namespace edgefl
