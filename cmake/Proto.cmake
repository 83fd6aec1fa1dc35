# proto/shardpull/v1/*.proto, generated at build time into shardpull_proto. Only src/control/grpc links it.
pkg_check_modules(shardpull_grpc_pc REQUIRED IMPORTED_TARGET grpc++ protobuf)
add_library(shardpull_grpc INTERFACE)
target_link_libraries(shardpull_grpc INTERFACE PkgConfig::shardpull_grpc_pc)

file(GLOB shardpull_protos CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/proto/shardpull/v1/*.proto")
if(shardpull_protos)
  find_program(SHARDPULL_PROTOC protoc REQUIRED)
  find_program(SHARDPULL_GRPC_PLUGIN grpc_cpp_plugin REQUIRED)
  mark_as_advanced(SHARDPULL_PROTOC SHARDPULL_GRPC_PLUGIN)
  set(out "${PROJECT_BINARY_DIR}/proto")
  file(MAKE_DIRECTORY "${out}")
  set(generated "")
  foreach(proto IN LISTS shardpull_protos)
    get_filename_component(stem "${proto}" NAME_WE)
    set(base "${out}/shardpull/v1/${stem}")
    file(STRINGS "${proto}" services REGEX "^ *service ")
    set(outputs "${base}.pb.cc" "${base}.pb.h")
    set(grpc_arguments "")
    if(services)
      list(APPEND outputs "${base}.grpc.pb.cc" "${base}.grpc.pb.h")
      set(grpc_arguments "--grpc_out=${out}" "--plugin=protoc-gen-grpc=${SHARDPULL_GRPC_PLUGIN}")
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${proto}")
    add_custom_command(
      OUTPUT ${outputs}
      COMMAND "${SHARDPULL_PROTOC}" "--proto_path=${PROJECT_SOURCE_DIR}/proto" "--cpp_out=${out}" ${grpc_arguments}
              "${proto}"
      DEPENDS ${shardpull_protos}
      COMMENT "protoc ${stem}.proto"
      VERBATIM)
    list(APPEND generated ${outputs})
  endforeach()
  add_library(shardpull_proto STATIC ${generated})
  add_custom_target(shardpull_proto_sources DEPENDS ${generated})
  target_compile_features(shardpull_proto PUBLIC cxx_std_20)
  target_include_directories(shardpull_proto SYSTEM PUBLIC "${out}")
  target_link_libraries(shardpull_proto PUBLIC shardpull_grpc)
  shardpull_hide_symbols(shardpull_proto)
else()
  add_library(shardpull_proto_none INTERFACE)
  add_library(shardpull_proto ALIAS shardpull_proto_none)
endif()
