# bench/*.cc: one Google Benchmark program each, and a smoke run of each, and of bench/*_bench.py, as a ctest test.
find_package(benchmark CONFIG REQUIRED)
file(GLOB shardpull_bench_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/*.cc")
shardpull_all_rooms(shardpull_bench_rooms)
foreach(source IN LISTS shardpull_bench_sources)
  get_filename_component(stem "${source}" NAME_WE)
  if(NOT stem MATCHES "_bench$")
    string(APPEND stem "_bench")
  endif()
  add_executable(${stem} "${source}")
  target_link_libraries(${stem} PRIVATE ${shardpull_bench_rooms} benchmark::benchmark benchmark::benchmark_main
                                        shardpull_settings)
  shardpull_add_test(${stem} COMMAND ${stem} --benchmark_min_time=0.01 LABELS bench)
endforeach()

if(TARGET shardpull_command)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  shardpull_add_test(
    sync_bench COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/bench/sync_bench.py $<TARGET_FILE:shardpull_command>
                       --quick LABELS bench)
  if(shardpull_with_ucx)
    shardpull_add_test(
      wire_bench COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/bench/wire_bench.py
                         $<TARGET_FILE:shardpull_command> $<TARGET_FILE:wire_pump_bench> --quick LABELS bench)
  endif()
endif()
