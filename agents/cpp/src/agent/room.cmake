set(ROOM_LIBRARIES edgefl_link edgefl_round edgefl_engine edgefl_data edgefl_store edgefl_wire)
set(ROOM_DEFINITIONS EDGEFL_VERSION="${EDGEFL_VERSION}")
