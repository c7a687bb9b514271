/* The C interface from plain C: what it refuses, what it tells, and that it ends in time. Argument: a folder of its own. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "edgefl_agent.h"

static int released = 0, offline = 0, json_is_an_object = 1;

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      printf("line %d: %s; last error: %s\n", __LINE__, #condition, edgefl_last_error()); \
      exit(1);                                                               \
    }                                                                        \
  } while (0)

static int read_row(void *context, size_t array, uint64_t row, void *into, size_t bytes) {
  (void)context;
  memset(into, (int)(array + row), bytes);
  return 0;
}

static void release(void *context) {
  (void)context;
  ++released;
}

static void on_event(void *context, const edgefl_event *event) {
  edgefl_agent **agent = context;
  if (strcmp(event->event, "offline") == 0) ++offline;
  if (event->json[0] != '{' || strstr(event->json, event->event) == NULL) json_is_an_object = 0;
  if (*agent == NULL) return;
  CHECK(edgefl_agent_pause(*agent, 0) == EDGEFL_OK); /* allowed within an event, as what waits is not */
  CHECK(edgefl_agent_stop(*agent, 0) == EDGEFL_ERR_STATE && strstr(edgefl_last_error(), "within an event") != NULL);
  CHECK(edgefl_agent_step(*agent, 0, NULL) == EDGEFL_ERR_STATE);
  edgefl_agent_destroy(*agent);
}

static void on_signal(int number) { (void)number; }

static void *long_step(void *agent) {
  edgefl_status status = edgefl_agent_step(agent, 3600 * 1000, NULL);
  return status == EDGEFL_OK ? agent : NULL;
}

static double now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static edgefl_data_source source_of(const edgefl_array *arrays) {
  edgefl_data_source source = {"squares", 8, arrays, 2, read_row, release, NULL};
  return source;
}

static void refuses(edgefl_options good) {
  edgefl_agent *agent = (edgefl_agent *)&good;
  edgefl_options bad = good;
  CHECK(edgefl_agent_create(NULL, &agent) == EDGEFL_ERR_ARGUMENT && agent == NULL);
  CHECK(edgefl_agent_create(&good, NULL) == EDGEFL_ERR_ARGUMENT);
  bad.size = 3;
  CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_ARGUMENT && strstr(edgefl_last_error(), "size 3") != NULL);
  bad = good;
  bad.device = NULL;
  CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_ARGUMENT && strstr(edgefl_last_error(), "options.device") != NULL);
  bad.device = "a/b";
  CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_CONFIG && strstr(edgefl_last_error(), "'a/b'") != NULL);
  bad = good;
  bad.broker = "localhost:99999";
  CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_BROKER);
  bad.broker = "user@broker.example";
  bad.password = "secret";
  CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_BROKER && strstr(edgefl_last_error(), "in clear") != NULL);
  bad = good;
  bad.folder = "/proc/nowhere";
  CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_STORE && strstr(edgefl_last_error(), "/proc/nowhere") != NULL);
  bad = good;
  bad.server_keys = "abc";
  CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_CONFIG);
  {
    const char *limits[] = {"fetch_window=0"};
    bad = good;
    bad.limits = limits;
    bad.limit_count = 1;
    CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_CONFIG && strstr(edgefl_last_error(), "fetch_window") != NULL);
    bad = good;
    bad.limit_count = 1;
    CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_ARGUMENT && strstr(edgefl_last_error(), "options.limits") != NULL);
    bad = good;
    bad.mirrors = limits;
    bad.mirror_count = 1;
    CHECK(edgefl_agent_create(&bad, &agent) == EDGEFL_ERR_CONFIG && strstr(edgefl_last_error(), "mirror") != NULL);
  }
}

static void lives(edgefl_options options, const edgefl_array *arrays) {
  edgefl_agent *agent = NULL;
  edgefl_state state = {sizeof state, 0, 0, 0, 0};
  edgefl_constraints constraints;
  edgefl_data_source source = source_of(arrays);
  double began;
  CHECK(edgefl_agent_create(&options, &agent) == EDGEFL_OK && agent != NULL);
  CHECK(edgefl_agent_start(agent) == EDGEFL_ERR_CONFIG && strstr(edgefl_last_error(), "no data") != NULL);
  CHECK(edgefl_agent_set_data_path(agent, "/nowhere.npz", 0) == EDGEFL_ERR_DATA);
  CHECK(edgefl_agent_set_data(agent, &source) == EDGEFL_OK);
  CHECK(edgefl_agent_set_events(agent, on_event, &agent) == EDGEFL_OK);
  edgefl_constraints_init(&constraints);
  constraints.duty = 2.0;
  CHECK(edgefl_agent_set_constraints(agent, &constraints) == EDGEFL_ERR_ARGUMENT);
  constraints.duty = 0.5;
  constraints.power = "charging";
  CHECK(edgefl_agent_set_constraints(agent, &constraints) == EDGEFL_OK);
  CHECK(edgefl_agent_step(agent, 500, &state) == EDGEFL_OK && !state.connected && !state.done && !state.working);
  CHECK(edgefl_agent_set_data(agent, &source) == EDGEFL_ERR_STATE);
  CHECK(edgefl_agent_start(agent) == EDGEFL_OK);
  CHECK(edgefl_agent_start(agent) == EDGEFL_ERR_STATE);
  CHECK(edgefl_agent_step(agent, 10, NULL) == EDGEFL_ERR_STATE);
  CHECK(edgefl_agent_pause(agent, 1) == EDGEFL_OK);
  began = now_s();
  CHECK(edgefl_agent_stop(agent, 2000) == EDGEFL_OK);
  CHECK(now_s() - began < 10.0); /* "stop within 2 s", and what a loaded machine adds */
  CHECK(edgefl_agent_start(agent) == EDGEFL_ERR_STATE);
  edgefl_agent_destroy(agent);
  agent = NULL;
  CHECK(offline > 0 && json_is_an_object);
  CHECK(released == 2); /* of the source that was used, and of the one that was refused */
  edgefl_agent_destroy(NULL);
}

/* Another thread ends a step, and the program's own handling of SIGPIPE is left alone. */
static void ends_a_step(edgefl_options options, const edgefl_array *arrays) {
  edgefl_agent *agent = NULL;
  edgefl_data_source source = source_of(arrays);
  edgefl_state state = {sizeof state, 0, 0, 0, 0};
  struct sigaction mine, now;
  pthread_t thread;
  void *stepped = NULL;
  memset(&mine, 0, sizeof mine);
  mine.sa_handler = on_signal;
  CHECK(sigaction(SIGPIPE, &mine, NULL) == 0);
  CHECK(edgefl_agent_create(&options, &agent) == EDGEFL_OK);
  CHECK(edgefl_agent_set_data(agent, &source) == EDGEFL_OK);
  CHECK(edgefl_agent_step(agent, 0, &state) == EDGEFL_OK);
  CHECK(pthread_create(&thread, NULL, long_step, agent) == 0);
  CHECK(edgefl_agent_stop(agent, 2000) == EDGEFL_OK);
  CHECK(pthread_join(thread, &stepped) == 0);
  CHECK(stepped == agent || stepped == NULL); /* it may not have begun */
  edgefl_agent_destroy(agent);
  CHECK(sigaction(SIGPIPE, NULL, &now) == 0 && now.sa_handler == on_signal);
}

int main(int count, char **words) {
  const int64_t shape[] = {1, 4, 4};
  const edgefl_array arrays[] = {{"x", "uint8", shape, 3}, {"y", "int64", NULL, 0}};
  edgefl_options options;
  if (count != 2) return 2;
  edgefl_options_init(&options);
  options.federation = "demo";
  options.device = "phone-7";
  options.broker = "127.0.0.1:9"; /* nobody listens there */
  options.folder = words[1];
  CHECK(strlen(edgefl_version()) > 0);
  refuses(options);
  lives(options, arrays);
  ends_a_step(options, arrays);
  puts("good");
  return 0;
}
