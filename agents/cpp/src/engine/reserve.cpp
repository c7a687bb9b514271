#include "engine/reserve.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace edgefl {

int reserve_room(int file, int64_t nbytes) {
  if (nbytes == 0) return 0;
#ifndef __APPLE__
  const int failed = posix_fallocate(file, 0, nbytes);
  if (failed != EINVAL && failed != EOPNOTSUPP) return failed;
#endif
  return ftruncate(file, nbytes) == 0 ? 0 : errno;
}

}  // namespace edgefl
