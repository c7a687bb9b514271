// What engines hold between calls.
#include <cstring>
#include <doctest/doctest.h>

#include "engine/engine.h"
#include "engine/held.h"
#include "engine/memory.h"
#include "engine/onnx/rows.h"
#include "engine/pages.h"

using namespace edgefl;

namespace {

Port state_port(const std::string& name, Shape shape) { return {name, "state", DType::f32, std::move(shape), 0, std::nullopt}; }

}  // namespace

TEST_CASE("state in place is written where it is read, other state by turns") {
  const std::vector<std::string> in_place = {"state.w"};
  const Port w = state_port("state.w", {2}), v = state_port("state.v", {3});
  Turns turns(in_place);
  State state = {{"state.w", std::make_shared<HeldTensor>(DType::f32, Shape{2})}, {"state.v", std::make_shared<HeldTensor>(DType::f32, Shape{3})}};
  const State first = state;
  std::vector<EngineValue*> places;
  for (int step = 0; step < 4; ++step) {
    const State read = state;
    state = {{"state.w", turns.target(w, read)}, {"state.v", turns.target(v, read)}};
    turns.ran(read, state);
    CHECK(state["state.w"].get() == first.at("state.w").get());
    CHECK(state["state.v"].get() != read.at("state.v").get());
    places.push_back(state["state.v"].get());
  }
  // Two sets, and what somebody else made is left alone.
  CHECK(places[0] == places[2]);
  CHECK(places[1] == places[3]);
  CHECK(places[0] != first.at("state.v").get());
  CHECK(places[1] != first.at("state.v").get());
}

TEST_CASE("what does not belong to a graph is named") {
  const Port port = state_port("state.w", {2});
  CHECK_THROWS_WITH_AS(held_for(port, {}, "train"), doctest::Contains("graph 'train' reads 'state.w', which nobody feeds"), BundleError);
  const State other = {{"state.w", std::make_shared<HeldTensor>(DType::f32, Shape{3})}};
  CHECK_THROWS_WITH_AS(held_for(port, other, "train"), doctest::Contains("takes float32 (2,) at 'state.w', and was given float32 (3,)"), BundleError);
}

TEST_CASE("an engine that is not built in is named, with those that are") {
  CHECK_THROWS_WITH_AS(make_engine("tflite", {}), doctest::Contains("there is no engine for 'tflite'"), EngineError);
  CHECK_THROWS_WITH_AS(make_engine("onnx", {0, ""}), doctest::Contains("cannot work with 0 threads"), EngineError);
  for (const std::string& format : built_engines()) CHECK(make_engine(format, {})->format() == format);
}

TEST_CASE("memory is measured, and given back") {
  reset_peak();
  {
    std::vector<char> block(32 << 20, 1);
    CHECK(resident_bytes() >= (32 << 20));
  }
  give_memory_back();
  CHECK(peak_bytes() >= (32 << 20));
  CHECK(resident_bytes() < peak_bytes());
}

TEST_CASE("rows of a port are read from its name") {
  const auto rows = rows_in("state.w[2:14]");
  REQUIRE(rows);
  CHECK(rows->whole == "state.w");
  CHECK(rows->start == 2);
  CHECK(rows->stop == 14);
  for (const char* name : {"state.w", "state.w[2]", "[1:2]", "state.w[a:2]", "state.w[1:]", "state.w[1:2]x"}) CHECK_FALSE(rows_in(name));
}

TEST_CASE("a page keeps its value on the disk") {
  const Port large{"page.a", "page", DType::u8, {100000}, 0, std::nullopt}, small{"page.b", "page", DType::u8, {3}, 0, std::nullopt};
  const Pages pages({large, small}, "");
  for (const Port& port : {large, small}) std::memset(pages.mapped(port).data, 7, static_cast<size_t>(port.nbytes()));
  for (const Port& port : {large, small}) CHECK(static_cast<int>(pages.mapped(port).data[port.nbytes() - 1]) == 7);
  CHECK_THROWS_AS(Pages({large}, "/nowhere"), StoreError);
  Ports huge(4, Port{"page.a", "page", DType::u8, {int64_t{1} << 62}, 0, std::nullopt});  // whose sum would wrap
  for (size_t at = 0; at < huge.size(); ++at) huge[at].name += std::to_string(at);
  CHECK_THROWS_WITH_AS(Pages(huge, ""), doctest::Contains("no room for 4611686018427387904 bytes"), StoreError);
}
