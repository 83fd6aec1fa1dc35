# Everything comes from the system; `./dev` installs it on Debian.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(fmt CONFIG REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)

pkg_check_modules(shardpull_xxhash_pc REQUIRED IMPORTED_TARGET libxxhash)
add_library(shardpull_xxhash INTERFACE)
target_link_libraries(shardpull_xxhash INTERFACE PkgConfig::shardpull_xxhash_pc)
# A library built with it takes the widest instructions of the CPU that runs, which doubles the speed of sums.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES PkgConfig::shardpull_xxhash_pc)
check_cxx_source_compiles(
  "#include <xxhash.h>\n#include <xxh_x86dispatch.h>\nint main() { return XXH3_64bits(nullptr, 0) == 0; }"
  SHARDPULL_XXHASH_DISPATCH)
unset(CMAKE_REQUIRED_LIBRARIES)
if(SHARDPULL_XXHASH_DISPATCH)
  set_source_files_properties("${PROJECT_SOURCE_DIR}/src/tensor/checksum.cc" PROPERTIES COMPILE_DEFINITIONS
    SHARDPULL_XXHASH_DISPATCH)
endif()

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
