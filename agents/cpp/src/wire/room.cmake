set(ROOM_LIBRARIES OpenSSL::Crypto nlohmann_json::nlohmann_json PkgConfig::ZSTD)
