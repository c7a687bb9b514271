find_package(ZLIB REQUIRED)
set(ROOM_LIBRARIES edgefl_wire ZLIB::ZLIB)
