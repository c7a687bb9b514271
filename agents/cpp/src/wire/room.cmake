find_path(MSGPACK_INCLUDES msgpack.hpp REQUIRED)  # headers alone; what CMake packages call it differs by release
set(ROOM_LIBRARIES OpenSSL::Crypto nlohmann_json::nlohmann_json PkgConfig::ZSTD)
set(ROOM_INCLUDES ${MSGPACK_INCLUDES})
