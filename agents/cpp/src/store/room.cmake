set(ROOM_LIBRARIES edgefl_wire PkgConfig::SQLITE3)
