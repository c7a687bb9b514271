set(ROOM_LIBRARIES edgefl_store edgefl_wire PkgConfig::MOSQUITTO Threads::Threads)
