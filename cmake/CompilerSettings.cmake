# Flags of our own targets, on the interface target shardpull_settings: nothing leaks into an embedding project.

set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
endif()

add_library(shardpull_settings INTERFACE)
target_compile_features(shardpull_settings INTERFACE cxx_std_20)
target_compile_options(shardpull_settings INTERFACE -Wall -Wextra -Wpedantic)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # -Wrestrict and its kin report std::string and std::variant code that is right (GCC 12, bug 105651 and others).
  target_compile_options(shardpull_settings INTERFACE -Wno-restrict)
  set(shardpull_soft_warnings maybe-uninitialized array-bounds stringop-overflow stringop-overread dangling-pointer
                              free-nonheap-object)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(shardpull_settings INTERFACE -Wthread-safety -Werror=thread-safety)
  # libstdc++ 12's own std::stable_sort uses what C++17 deprecated.
  target_compile_options(shardpull_settings INTERFACE -Wno-deprecated-declarations)
  # A designated initializer names what differs from the defaults; GCC agrees, and clang 19 has a warning of its own.
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 19)
    target_compile_options(shardpull_settings INTERFACE -Wno-missing-designated-field-initializers)
  endif()
endif()

if(SHARDPULL_WERROR)
  target_compile_options(shardpull_settings INTERFACE -Werror)
  foreach(warning IN LISTS shardpull_soft_warnings)
    target_compile_options(shardpull_settings INTERFACE -Wno-error=${warning})
  endforeach()
endif()

if(SHARDPULL_SANITIZE)
  # For the whole tree, so that every object and link agrees.
  add_compile_options(-fsanitize=${SHARDPULL_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SHARDPULL_SANITIZE})
endif()

add_link_options(LINKER:--as-needed)

find_program(SHARDPULL_CCACHE ccache)
mark_as_advanced(SHARDPULL_CCACHE)
if(SHARDPULL_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Sloppiness as ccache's manual asks for with precompiled headers; base directory so that several build
  # folders of one checkout share their objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      /usr/bin/env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_NOHASHDIR=1 "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" "${SHARDPULL_CCACHE}")
endif()
