# EDGEFL_VERSION, the release that the sources become, as pyproject.toml has it, and EDGEFL_NUMBERS, the part of it that CMake compares.
set(FILE_OF_VERSION ${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml)
file(STRINGS ${FILE_OF_VERSION} EDGEFL_VERSION REGEX "^default-version = " LIMIT_COUNT 1)
string(REGEX REPLACE "^default-version = \"(.*)\".*$" "\\1" EDGEFL_VERSION "${EDGEFL_VERSION}")
string(REGEX MATCH "^[0-9]+[.][0-9]+([.][0-9]+)?" EDGEFL_NUMBERS "${EDGEFL_VERSION}")
if(NOT EDGEFL_NUMBERS)
  message(FATAL_ERROR "${FILE_OF_VERSION} has no version: build from a whole checkout")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${FILE_OF_VERSION})
