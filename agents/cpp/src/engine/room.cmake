# The runtimes come from the wheels of their Python packages, which an interpreter finds; or a folder has them (of another
# architecture: `make agents-cpp ARCH=arm64` unpacks them), or each is named.
set(ROOM_LIBRARIES edgefl_wire ${CMAKE_DL_LIBS})
set(EDGEFL_PYTHON "" CACHE FILEPATH "An interpreter that has the packages executorch and onnxruntime")
set(EDGEFL_RUNTIMES "" CACHE PATH "A folder with the packages executorch and onnxruntime, in place of an interpreter's")
set(EDGEFL_EXECUTORCH_ROOT "" CACHE PATH "The package executorch: a folder with lib and include")
set(EDGEFL_ONNXRUNTIME_LIBRARY "" CACHE FILEPATH "libonnxruntime, if it is not to be looked for when the agent runs")
set(EDGEFL_ONNXRUNTIME_INCLUDE "" CACHE PATH "Where onnxruntime_c_api.h is, to compare its table with what the agent calls")
if(NOT EDGEFL_PYTHON)
  find_program(EDGEFL_FOUND_PYTHON NAMES python3 python)
  set(EDGEFL_PYTHON ${EDGEFL_FOUND_PYTHON})
endif()

function(edgefl_package_root NAME OUT)
  set(FOUND "")
  if(EDGEFL_RUNTIMES)
    file(GLOB FOUND ${EDGEFL_RUNTIMES}/${NAME})
  elseif(EDGEFL_PYTHON)
    execute_process(
      COMMAND ${EDGEFL_PYTHON} -c
              "import importlib.util as u, sys; s = u.find_spec('${NAME}'); print(list(s.submodule_search_locations)[0] if s else '')"
      OUTPUT_VARIABLE FOUND OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${OUT} "${FOUND}" PARENT_SCOPE)
endfunction()

if(EDGEFL_EXECUTORCH)
  if(NOT EDGEFL_EXECUTORCH_ROOT)
    edgefl_package_root(executorch EDGEFL_EXECUTORCH_ROOT)
  endif()
  if(NOT EXISTS "${EDGEFL_EXECUTORCH_ROOT}/include")
    message(FATAL_ERROR "There is no package executorch: install it (pip install 'edgefl-tiers[executorch]') and name its "
                        "interpreter by -DEDGEFL_PYTHON, or its folder by -DEDGEFL_EXECUTORCH_ROOT, or build without it by "
                        "-DEDGEFL_EXECUTORCH=OFF")
  endif()
  file(GLOB ET_FACTS "${EDGEFL_EXECUTORCH_ROOT}/../executorch-*.dist-info")
  string(REGEX REPLACE ".*/executorch-(.*)[.]dist-info.*" "\\1" ET_VERSION "${ET_FACTS}")
  if(NOT ET_FACTS)
    set(ET_VERSION "unknown")
  endif()
  foreach(NAME executorch executorch_threadpool)
    list(APPEND ROOM_LIBRARIES "${EDGEFL_EXECUTORCH_ROOT}/lib/lib${NAME}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  endforeach()
  # As system headers: their warnings are not ours. Their logs name the file that calls them.
  set_source_files_properties(src/engine/executorch/program.cpp PROPERTIES
    COMPILE_OPTIONS "-isystem;${EDGEFL_EXECUTORCH_ROOT}/include;-isystem;${EDGEFL_EXECUTORCH_ROOT}/include/executorch/runtime/core/portable_type/c10;-ffile-prefix-map=${PROJECT_SOURCE_DIR}/="
    COMPILE_DEFINITIONS "C10_USING_CUSTOM_GENERATED_MACROS;ET_EVENT_TRACER_ENABLED")
  list(APPEND ROOM_DEFINITIONS EDGEFL_HAS_EXECUTORCH "EDGEFL_EXECUTORCH_VERSION=\"${ET_VERSION}\"")
else()
  list(FILTER ROOM_SOURCES EXCLUDE REGEX "/engine/executorch/")
endif()

if(EDGEFL_ONNXRUNTIME)
  if(NOT EDGEFL_ONNXRUNTIME_LIBRARY)
    edgefl_package_root(onnxruntime ORT_ROOT)
    file(GLOB ORT_FOUND "${ORT_ROOT}/capi/libonnxruntime${CMAKE_SHARED_LIBRARY_SUFFIX}.*"
         "${ORT_ROOT}/capi/libonnxruntime.*${CMAKE_SHARED_LIBRARY_SUFFIX}")
    if(ORT_ROOT AND ORT_FOUND)
      list(GET ORT_FOUND 0 EDGEFL_ONNXRUNTIME_LIBRARY)
    endif()
  endif()
  set(EDGEFL_ONNXRUNTIME_WHEEL "${EDGEFL_ONNXRUNTIME_LIBRARY}")
  if(EDGEFL_DEB)  # the package brings the library, and a path of this machine may be anybody's on another
    set(EDGEFL_ONNXRUNTIME_LIBRARY "")
  endif()
  list(APPEND ROOM_DEFINITIONS EDGEFL_HAS_ONNXRUNTIME "EDGEFL_ONNXRUNTIME_LIBRARY=\"${EDGEFL_ONNXRUNTIME_LIBRARY}\"")
  if(EDGEFL_ONNXRUNTIME_INCLUDE)
    list(APPEND ROOM_INCLUDES ${EDGEFL_ONNXRUNTIME_INCLUDE})
    list(APPEND ROOM_DEFINITIONS EDGEFL_HAS_ORT_HEADER)
  endif()
else()
  list(FILTER ROOM_SOURCES EXCLUDE REGEX "/engine/onnx/(api|engine|graph)")
endif()
