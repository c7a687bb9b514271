#include "engine/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace edgefl {
namespace {

constexpr int kReturned = 1 << 16;

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

// A field of /proc/self/status in kB, as bytes; the peak of the process where there is none.
int64_t status_bytes(const char* field) {
  const File file(std::fopen("/proc/self/status", "re"));
  char line[256];
  const size_t length = std::strlen(field);
  while (file && std::fgets(line, sizeof(line), file.get()) != nullptr) {
    int64_t kib = 0;
    if (std::strncmp(line, field, length) == 0 && std::sscanf(line + length, ": %" SCNd64, &kib) == 1) return kib * 1024;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
  return usage.ru_maxrss;
#else
  return usage.ru_maxrss * 1024;
#endif
}

struct Mapping {
  uintptr_t start = 0, end = 0;
  std::string path;
  int64_t resident = 0, changed = 0;
  bool of_file = false, writable = false;
};

// Read-only mappings of files with code of which no page was ever written: a page that was (addresses filled in when the
// library was loaded) would come back from the file without that.
std::vector<Mapping> unchanged() {
  const File file(std::fopen("/proc/self/smaps", "re"));
  std::vector<Mapping> found;
  std::set<std::string> with_code;
  Mapping current;
  const auto done = [&] {
    if (current.of_file && !current.writable && current.resident > 0 && current.changed == 0) found.push_back(current);
  };
  char line[4352];
  while (file && std::fgets(line, sizeof(line), file.get()) != nullptr) {
    uintptr_t start = 0, end = 0;
    char rights[5] = "", path[4097] = "";
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %*s %4096[^\n]", &start, &end, rights, path) >= 3) {
      done();
      current = {start, end, path, 0, 0, path[0] == '/' && rights[0] == 'r', rights[1] == 'w'};
      if (rights[2] == 'x') with_code.insert(path);
      continue;
    }
    char field[64] = "";
    int64_t kib = 0;
    if (std::sscanf(line, "%63[^:]: %" SCNd64, field, &kib) != 2) continue;
    if (std::strcmp(field, "Rss") == 0) current.resident = kib;
    for (const char* each : {"Private_Dirty", "Shared_Dirty", "Anonymous", "Swap"}) {
      if (std::strcmp(field, each) == 0) current.changed += kib;
    }
  }
  done();
  std::vector<Mapping> code;
  for (const Mapping& each : found) {
    if (with_code.count(each.path) != 0) code.push_back(each);
  }
  return code;
}

}  // namespace

int64_t resident_bytes() { return status_bytes("VmRSS"); }
int64_t anonymous_bytes() { return status_bytes("RssAnon"); }
int64_t peak_bytes() { return status_bytes("VmHWM"); }

void reset_peak() {
  const File file(std::fopen("/proc/self/clear_refs", "we"));
  if (file) std::fputs("5", file.get());
}

void return_memory_early() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, kReturned);
  mallopt(M_TRIM_THRESHOLD, kReturned);
#endif
}

void trim_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void release_code() {
  for (const Mapping& each : unchanged()) {
    (void)madvise(reinterpret_cast<void*>(each.start), each.end - each.start, MADV_DONTNEED);
  }
}

void give_memory_back() {
  trim_memory();
  release_code();
}

}  // namespace edgefl
