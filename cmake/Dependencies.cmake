# Everything comes from the system; `./dev` installs it on Debian.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(fmt CONFIG REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)

pkg_check_modules(shardpull_xxhash_pc REQUIRED IMPORTED_TARGET libxxhash)
add_library(shardpull_xxhash INTERFACE)
target_link_libraries(shardpull_xxhash INTERFACE PkgConfig::shardpull_xxhash_pc)

# Only UCX's headers are needed.
set(shardpull_with_ucx OFF)
if(SHARDPULL_WITH_UCX)
  pkg_check_modules(shardpull_ucx QUIET "ucx>=1.13")
  if(shardpull_ucx_FOUND)
    set(shardpull_with_ucx ON)
  else()
    message(STATUS "UCX 1.13 or newer was not found (pkg-config ucx): built without the transport between hosts")
  endif()
endif()

if(SHARDPULL_CLI)
  find_path(SHARDPULL_CLI11_INCLUDE CLI/CLI.hpp REQUIRED)
  mark_as_advanced(SHARDPULL_CLI11_INCLUDE)
  add_library(shardpull_cli11 INTERFACE)
  target_include_directories(shardpull_cli11 SYSTEM INTERFACE "${SHARDPULL_CLI11_INCLUDE}")
endif()

if(SHARDPULL_TESTS)
  find_package(GTest CONFIG REQUIRED)
  find_package(rapidcheck CONFIG REQUIRED)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
endif()
