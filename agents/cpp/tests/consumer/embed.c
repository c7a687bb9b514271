/*
 * A device in a program of its own: its data come by callbacks, events go to standard output, and it ends when the training
 * does. embed BROKER FEDERATION DEVICE FOLDER ENGINE X Y: X holds rows of 64 bytes (1, 8, 8), Y their labels, int64.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edgefl_agent.h"

typedef struct rows {
  FILE *files[2];
} rows;

static int read_row(void *context, size_t array, uint64_t row, void *into, size_t bytes) {
  FILE *file = ((rows *)context)->files[array];
  if (fseek(file, (long)(row * bytes), SEEK_SET) != 0) return 1;
  return fread(into, 1, bytes, file) == bytes ? 0 : 1;
}

static void tell(void *context, const edgefl_event *event) {
  (void)context;
  puts(event->json);
  fflush(stdout);
}

static int failed(void) {
  fprintf(stderr, "error: %s\n", edgefl_last_error());
  return 1;
}

int main(int count, char **words) {
  static const int64_t shape[] = {1, 8, 8};
  static const edgefl_array arrays[] = {{"x", "uint8", shape, 3}, {"y", "int64", NULL, 0}};
  rows data;
  edgefl_data_source source = {"digits", 0, arrays, 2, read_row, NULL, &data};
  edgefl_options options;
  edgefl_agent *agent = NULL;
  edgefl_state state = {sizeof state, 0, 0, 0, 0};
  if (count == 2 && strcmp(words[1], "version") == 0) {
    puts(edgefl_version());
    return 0;
  }
  if (count != 8) return 2;
  data.files[0] = fopen(words[6], "rb");
  data.files[1] = fopen(words[7], "rb");
  if (data.files[0] == NULL || data.files[1] == NULL) return 2;
  fseek(data.files[1], 0, SEEK_END);
  source.rows = (uint64_t)ftell(data.files[1]) / 8;
  edgefl_options_init(&options);
  options.broker = words[1];
  options.federation = words[2];
  options.device = words[3];
  options.folder = words[4];
  options.engine = words[5];
  if (edgefl_agent_create(&options, &agent) != EDGEFL_OK) return failed();
  if (edgefl_agent_set_data(agent, &source) != EDGEFL_OK) return failed();
  if (edgefl_agent_set_events(agent, tell, NULL) != EDGEFL_OK) return failed();
  while (!state.done)
    if (edgefl_agent_step(agent, 500, &state) != EDGEFL_OK) return failed();
  if (edgefl_agent_stop(agent, 2000) != EDGEFL_OK) return failed();
  edgefl_agent_destroy(agent);
  return 0;
}
