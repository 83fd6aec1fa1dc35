#include "control/messages.h"

#include <set>
#include <string>
#include <utility>

#include <gtest/gtest.h>

namespace shardpull {
namespace {

template <std::size_t... Indices>
std::set<std::string> all_names(std::index_sequence<Indices...>) {
  return {std::string(name_of(ControlBody(std::in_place_index<Indices>)))...};
}

// Goal: every body has a name of its own.
TEST(ControlBody, NamesAreDistinct) {
  constexpr std::size_t kCount = std::variant_size_v<ControlBody>;
  const std::set<std::string> names = all_names(std::make_index_sequence<kCount>());
  EXPECT_EQ(names.size(), kCount);
  EXPECT_FALSE(names.contains(""));
  EXPECT_EQ(name_of(Reserve{}), "Reserve");
}

}  // namespace
}  // namespace shardpull
