// Which mirrors are asked.
#include <doctest/doctest.h>

#include "link/mirrors/mirrors.h"
#include "wire/errors.h"

using namespace edgefl;

TEST_CASE("a mirror is a place that is named without a user, a query or a fragment") {
  if (!reads_mirrors()) return;
  CHECK(mirror_address("https://weights.example.org/demo/") == "https://weights.example.org:443/demo");
  CHECK(mirror_address("http://gateway.lan:8480") == "http://gateway.lan:8480");
  for (const char* text : {"", "weights.example.org", "ftp://weights.example.org", "file:///etc/passwd", "https://user@weights.example.org", "https://weights.example.org/?a=b",
                           "https://weights.example.org/#a", "https://weights.example.org/\n"})
    CHECK_MESSAGE(mirror_address(text) == "", text);
  CHECK(mirror_address("https://weights.example.org/" + std::string(500, 'a')) == "");
}

TEST_CASE("what a user names, and is no mirror, is refused in words") {
  CHECK(own_mirrors({}).empty());
  CHECK_THROWS_AS(own_mirrors({"ftp://weights.example.org"}), ConfigError);
}

TEST_CASE("where blobs are at mirrors only and none can be asked, the round is declined") {
  for (const bool others : {true, false}) {
    Mirrors mirrors(Limits(), {}, others, "", [](const std::string&) {});
    CHECK_NOTHROW(mirrors.check_broker());
    Round round;
    round.mirrors_only = true;
    if (!others) round.mirrors = {"https://weights.example.org"};
    mirrors.announced(round);
    CHECK_THROWS_WITH_AS(mirrors.check_broker(), doctest::Contains("at mirrors only"), RoundDeclined);
  }
}
