# Rooms: the folders of src/. Each is one static library, shardpull_<room> with slashes as underscores, made of
# its *.cc files; the *_test.cc (and *_testing.cc, shared by tests) beside them make one test program,
# <room>_test. Files are found by glob, so adding one needs no change here.

set(shardpull_rooms "" CACHE INTERNAL "")

function(shardpull_target_name room out)
  string(REPLACE "/" "_" name "${room}")
  set(${out} "shardpull_${name}" PARENT_SCOPE)
endfunction()

# Only what SHARDPULL_API marks (include/shardpull/api.h) can be seen from outside a program or library.
function(shardpull_hide_symbols target)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# shardpull_room(NAME [ROOMS room...] [LINK target...] [PRIVATE_LINK target...] [EXCLUDE file...] [RECURSE])
function(shardpull_room room)
  cmake_parse_arguments(arg "RECURSE" "" "ROOMS;LINK;PRIVATE_LINK;EXCLUDE" ${ARGN})
  shardpull_target_name("${room}" target)
  set(glob GLOB)
  if(arg_RECURSE)
    set(glob GLOB_RECURSE)
  endif()
  file(${glob} sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${room}/*.cc")
  set(test_sources ${sources})
  list(FILTER sources EXCLUDE REGEX "_(test|testing)\\.cc$")
  list(FILTER test_sources INCLUDE REGEX "_(test|testing)\\.cc$")
  if(SHARDPULL_WITH_GRPC)
    list(FILTER test_sources EXCLUDE REGEX "_without_grpc_testing\\.cc$")
  endif()
  foreach(file IN LISTS arg_EXCLUDE)
    list(REMOVE_ITEM sources "${PROJECT_SOURCE_DIR}/src/${room}/${file}")
  endforeach()

  set(links ${arg_LINK})
  foreach(other IN LISTS arg_ROOMS)
    shardpull_target_name("${other}" other_target)
    if(TARGET ${other_target})
      list(APPEND links ${other_target})
    endif()
  endforeach()

  if(sources)
    add_library(${target} STATIC ${sources})
    target_include_directories(${target} PUBLIC "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
    target_link_libraries(${target} PUBLIC ${links} PRIVATE ${arg_PRIVATE_LINK} shardpull_settings)
    shardpull_hide_symbols(${target})
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
    target_link_libraries(${target} INTERFACE ${links})
  endif()
  set_property(GLOBAL PROPERTY ${target}_test_sources "${test_sources}")
  set_property(GLOBAL PROPERTY ${target}_test_links "${target};${arg_PRIVATE_LINK}")
  list(APPEND shardpull_rooms ${target})
  set(shardpull_rooms "${shardpull_rooms}" CACHE INTERNAL "")
endfunction()

# shardpull_join_rooms(NAME [STATIC|SHARED]): one library of the objects of all rooms declared so far. Without a type
# BUILD_SHARED_LIBS decides.
function(shardpull_join_rooms name)
  set(objects "")
  foreach(room IN LISTS shardpull_rooms)
    get_target_property(type ${room} TYPE)
    if(type STREQUAL "STATIC_LIBRARY")
      list(APPEND objects $<TARGET_OBJECTS:${room}>)
    endif()
  endforeach()
  set(links fmt::fmt spdlog::spdlog Threads::Threads shardpull_xxhash)
  if(shardpull_protos)
    list(APPEND objects $<TARGET_OBJECTS:shardpull_proto>)
    list(APPEND links shardpull_grpc)
  endif()
  add_library(${name} ${ARGN} ${objects})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_include_directories(${name} PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                                            "$<INSTALL_INTERFACE:include>")
  target_link_libraries(${name} PRIVATE ${links})
  get_target_property(type ${name} TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    # Templates of other libraries that our objects instantiate have no hidden visibility to inherit.
    set(script "${PROJECT_SOURCE_DIR}/cmake/exports.map")
    target_link_options(${name} PRIVATE "LINKER:--version-script=${script}" LINKER:--no-undefined)
    set_target_properties(${name} PROPERTIES LINK_DEPENDS "${script}" VERSION ${PROJECT_VERSION}
                          SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  endif()
endfunction()

# libshardpull, target shardpull::shardpull.
function(shardpull_library)
  shardpull_join_rooms(shardpull)
  add_library(shardpull::shardpull ALIAS shardpull)
endfunction()

# Everything that the tests which cross rooms link.
function(shardpull_all_rooms out)
  set(rooms ${shardpull_rooms})
  set(${out} "${rooms}" PARENT_SCOPE)
endfunction()

# A GoogleTest program with gmock's main, RapidCheck and the precompiled header.
function(shardpull_gtest_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(${name} PRIVATE ${arg_LINK} GTest::gmock_main rapidcheck shardpull_settings)
  target_compile_definitions(${name} PRIVATE SHARDPULL_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  # GoogleTest's macros and gmock's matchers want a missing-field or sign warning here and there.
  target_compile_options(${name} PRIVATE -Wno-missing-field-initializers)
  if(SHARDPULL_PCH)
    if(NOT TARGET shardpull_test_pch)
      file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/test_pch.cc" CONTENT "int shardpull_test_pch_anchor();\n")
      add_library(shardpull_test_pch OBJECT "${CMAKE_BINARY_DIR}/test_pch.cc")
      target_link_libraries(shardpull_test_pch PRIVATE GTest::gmock rapidcheck shardpull_settings)
      target_compile_options(shardpull_test_pch PRIVATE -Wno-missing-field-initializers)
      # Made with the code model of the programs which reuse it, or the compiler ignores it.
      set_target_properties(shardpull_test_pch PROPERTIES POSITION_INDEPENDENT_CODE OFF)
      target_compile_options(shardpull_test_pch PRIVATE -fPIE)
      target_precompile_headers(shardpull_test_pch PRIVATE
        <gtest/gtest.h> <gmock/gmock.h> <rapidcheck.h> <rapidcheck/gtest.h>)
    endif()
    target_precompile_headers(${name} REUSE_FROM shardpull_test_pch)
  endif()
endfunction()

# Registers COMMAND as the ctest test NAME. Every test gets what it may ask for in its environment, a time limit,
# and sanitizer settings which turn a finding into a failure; ENVIRONMENT adds to these or takes their place.
set(shardpull_asan_options abort_on_error=0:detect_stack_use_after_return=1:strict_string_checks=1)
function(shardpull_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT;PROCESSORS" "COMMAND;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(SHARDPULL_SANITIZE)
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 3")
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  set(supp "${PROJECT_SOURCE_DIR}/tests/support")
  set(environment
    "SHARDPULL_SOURCE_DIR=${PROJECT_SOURCE_DIR}"
    "SHARDPULL_BUILD_DIR=${PROJECT_BINARY_DIR}"
    "SHARDPULL_TEST_BIN_DIR=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}"
    "SHARDPULL_BIN=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/shardpull"
    "SHARDPULL_CMAKE=${CMAKE_COMMAND}"
    "SHARDPULL_CXX=${CMAKE_CXX_COMPILER}"
    "SHARDPULL_SANITIZE=${SHARDPULL_SANITIZE}"
    "SHARDPULL_TEST_RESULT=${PROJECT_BINARY_DIR}/test-results/${name}"
    "GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/test-results/${name}.xml"
    "PYTHONDONTWRITEBYTECODE=1"
    "ASAN_OPTIONS=${shardpull_asan_options}"
    "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1"
    "LSAN_OPTIONS=print_suppressions=0:suppressions='${supp}/lsan.supp'"
    "TSAN_OPTIONS=halt_on_error=1:suppressions='${supp}/tsan.supp'"
    ${arg_ENVIRONMENT})
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} PROCESSORS ${arg_PROCESSORS} SKIP_RETURN_CODE 77
    ENVIRONMENT "${environment}")
endfunction()

# What runs under ThreadSanitizer: the rooms with threads, and the machines that they drive, without gRPC, whose own
# libraries are not instrumented. Target thread_tests builds them, label threads runs them.
set(shardpull_thread_rooms base transport transport_shm transport_cma transport_sim control_sim protocol runtime)

function(shardpull_unit_tests)
  add_custom_target(thread_tests)
  foreach(room IN LISTS shardpull_rooms)
    get_property(sources GLOBAL PROPERTY ${room}_test_sources)
    if(NOT sources)
      continue()
    endif()
    string(REGEX REPLACE "^shardpull_" "" short "${room}")
    get_property(links GLOBAL PROPERTY ${room}_test_links)  # a room's own tests may use what only the room may
    shardpull_gtest_program(${short}_test SOURCES ${sources} LINK ${links})
    set(labels unit)
    if(short IN_LIST shardpull_thread_rooms)
      list(APPEND labels threads)
      add_dependencies(thread_tests ${short}_test)
    endif()
    shardpull_add_test(${short}_test COMMAND ${short}_test --gtest_brief=1 LABELS ${labels})
  endforeach()
endfunction()
