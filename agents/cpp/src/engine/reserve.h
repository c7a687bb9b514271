// Room on the disk for a file that is about to be written: a disk that is full later would end the round.
#pragma once

#include <cstdint>

namespace edgefl {

// Gives an open file its bytes now, where its file system can; 0, or an errno.
int reserve_room(int file, int64_t nbytes);

}  // namespace edgefl
