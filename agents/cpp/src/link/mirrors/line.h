// One blob from a mirror, as far as the mirror goes along: bounded in time and bytes, and nothing that it says is believed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace edgefl {

// Whether this agent was built with what speaks HTTP.
bool reads_mirrors();

// A mirror's address as it is asked, `https://host:port/path` without a slash behind it; "" for what is no mirror: another scheme,
// a user's name, a query, a fragment, or too long.
std::string mirror_address(const std::string& text);

// A connection to one mirror, kept for the next blob; for one thread.
class MirrorLine {
 public:
  struct Rules {
    bool near = true;          // without TLS only machines of a private network are asked
    double patience_s = 10.0;  // for an answer, and for each piece
    std::string ca_file;       // an authority beside the system's
  };
  enum class End { whole, lacks, wrong };

  MirrorLine(std::string address, Rules rules, std::function<bool()> aborted);
  ~MirrorLine();
  MirrorLine(const MirrorLine&) = delete;
  MirrorLine& operator=(const MirrorLine&) = delete;

  // Bytes `first` to `last` of the blob of `size` bytes, `step` at a time, to `take`, which says whether they are right.
  End pieces(const std::string& sha256, int64_t size, int64_t first, int64_t last, int64_t step, const std::function<bool(std::string_view)>& take);
  const std::string& why() const { return why_; }  // it was wrong, in words

 private:
  struct Curl;
  const std::string address_;
  const Rules rules_;
  const std::function<bool()> aborted_;
  std::unique_ptr<Curl> curl_;
  std::string why_;
};

}  // namespace edgefl
