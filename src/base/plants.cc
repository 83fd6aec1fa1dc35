#include "base/plants.h"

#ifdef SHARDPULL_PLANTS

#include <string>

namespace shardpull {
namespace {

std::string& planted() {
  static std::string name;
  return name;
}

}  // namespace

void plant(std::string_view name) {
  planted() = name;
}

bool is_planted(std::string_view name) {
  return planted() == name;
}

}  // namespace shardpull

#endif
