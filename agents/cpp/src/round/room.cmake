set(ROOM_LIBRARIES edgefl_wire edgefl_data edgefl_engine)
