/* Local data by callbacks: part of edgefl_agent.h, which includes it. */
#ifndef EDGEFL_DATA_H
#define EDGEFL_DATA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One array of the local data: "x" (samples), "y" (labels), or the name of an input beside x. */
typedef struct edgefl_array {
  const char *name;
  const char *dtype;    /* numpy's name: "uint8", "float32", "int64", ... */
  const int64_t *shape; /* of one row; not read if `dims` is 0 */
  size_t dims;
} edgefl_array;

/*
 * Where samples come from. Copied when it is given; `arrays` and what it points at need not outlive the call.
 * `read` is called in the agent's worker thread, one row at a time and never twice at once, also many times for one row: it
 * writes row `row` of array number `array` (its place in `arrays`) into `into`, `bytes` long, in C order and the
 * machine's byte order, and returns 0, or anything else if it cannot. Equal rows must give equal bytes within a round.
 * `release`, which may be NULL, is called once when the agent needs it no more.
 */
typedef struct edgefl_data_source {
  const char *name; /* for people: "photos" */
  uint64_t rows;
  const edgefl_array *arrays;
  size_t array_count;
  int (*read)(void *context, size_t array, uint64_t row, void *into, size_t bytes);
  void (*release)(void *context);
  void *context;
} edgefl_data_source;

#ifdef __cplusplus
}
#endif
#endif
