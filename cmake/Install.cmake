# find_package(shardpull) from an install: the archive, the public headers, and a config file which finds again what
# the archive was built with.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/shardpull")
set(exported shardpull shardpull_xxhash)
set(shardpull_with_protos OFF)
if(shardpull_protos)
  set(shardpull_with_protos ON)
  list(APPEND exported shardpull_grpc)
endif()
install(TARGETS ${exported} EXPORT shardpull_targets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/shardpull" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.h")
install(EXPORT shardpull_targets NAMESPACE shardpull:: DESTINATION "${config_dir}")
configure_file("${CMAKE_CURRENT_LIST_DIR}/shardpullConfig.cmake.in" "${PROJECT_BINARY_DIR}/shardpullConfig.cmake" @ONLY)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/shardpullConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/shardpullConfig.cmake" "${PROJECT_BINARY_DIR}/shardpullConfigVersion.cmake"
        DESTINATION "${config_dir}")
install(FILES LICENSE NOTICE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
if(TARGET shardpull_command)
  install(TARGETS shardpull_command RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
