/*
 * edgefl_agent.h: a device of a federation, embedded in a program.
 *
 *   edgefl_options options;
 *   edgefl_options_init(&options);
 *   options.federation = "demo";
 *   options.device = "phone-7";
 *   options.broker = "mqtts://broker.example:8883";
 *   options.folder = "/data/app/edgefl";
 *   edgefl_agent *agent = NULL;
 *   if (edgefl_agent_create(&options, &agent) != EDGEFL_OK) puts(edgefl_last_error());
 *   edgefl_agent_set_data(agent, &source);
 *   edgefl_agent_start(agent);             or edgefl_agent_step(agent, 1000, &state) again and again
 *   ...
 *   edgefl_agent_stop(agent, 2000);
 *   edgefl_agent_destroy(agent);
 *
 * No exception leaves these functions. Each returns EDGEFL_OK or what went wrong, which edgefl_last_error() says in words.
 * Strings are UTF-8 and are copied. One agent's functions may be called from any thread, one at a time; edgefl_agent_stop also
 * while edgefl_agent_step is being called, and edgefl_agent_pause and edgefl_agent_set_constraints at any time. These two alone may
 * be called within an event. How signals are handled is the program's affair: nothing here changes it.
 *
 * Whatever ends the process, nothing is lost: what was computed waits in `folder`, and a round that was begun goes on there
 * with the bits that it would have had. One process at a time may have a folder.
 */
#ifndef EDGEFL_AGENT_H
#define EDGEFL_AGENT_H

#include <stddef.h>
#include <stdint.h>

#include "edgefl_data.h"

#if defined(_WIN32)
#define EDGEFL_API __declspec(dllexport)
#else
#define EDGEFL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum edgefl_status {
  EDGEFL_OK = 0,
  EDGEFL_ERR_ARGUMENT = 1, /* a null pointer, or a struct of another size */
  EDGEFL_ERR_CONFIG = 2,   /* an option cannot be used, or the engine is not built in */
  EDGEFL_ERR_DATA = 3,     /* the local data cannot be read */
  EDGEFL_ERR_STATE = 4,    /* the call does not fit what the agent is doing */
  EDGEFL_ERR_BUSY = 5,     /* a step is still being made: call edgefl_agent_stop again */
  EDGEFL_ERR_BROKER = 7,   /* the broker cannot be used as it is named */
  EDGEFL_ERR_STORE = 11,   /* the folder cannot be used */
  EDGEFL_ERR_INTERNAL = 99
} edgefl_status;

typedef struct edgefl_agent edgefl_agent;

/* What an agent is. Fill it by edgefl_options_init first; a NULL or 0 that is left there has the meaning in the comment. */
typedef struct edgefl_options {
  size_t size;             /* of this struct, set by edgefl_options_init */
  const char *federation;  /* required, as are the next three */
  const char *device;      /* stable over restarts */
  const char *broker;      /* "host:port", or "mqtts://user@host:port" */
  const char *folder;      /* what the device keeps */
  const char *engine;      /* "onnx" or "executorch"; NULL: the first that is built in */
  const char *tier;        /* to ask for; NULL: the server decides */
  const char *server_keys; /* 64 hexadecimal digits, several with commas; NULL: the first that is seen is trusted */
  const char *token;       /* a one-time token of `edgefl enroll token` */
  const char *password;    /* of the broker's user */
  const char *ca_file;     /* PEM; switches TLS on */
  const char *cert_file;   /* PEM, with key_file: a client certificate */
  const char *key_file;
  int insecure_password;   /* not 0: the password may travel without TLS */
  uint64_t memory_bytes;   /* that this device offers to training; 0: what it has */
  int threads;             /* of the engine; 0: one */
  const char *const *limits; /* "fetch_window=4", ...: those of `edgefl device --limit` */
  size_t limit_count;
  const char *const *mirrors; /* URLs below which blobs lie too, asked before those that the server names, and the broker */
  size_t mirror_count;
  int own_mirrors_only;    /* not 0: no mirror that the server names is asked */
} edgefl_options;

EDGEFL_API void edgefl_options_init(edgefl_options *options);

/* Something that people or the program may want to know: "online", "round", "accepted", "declined", "failed", "store", ...
 * `json` is {"event":..., "text":..., "details":{...}}. All three live as long as the call. */
typedef struct edgefl_event {
  const char *event;
  const char *text;
  const char *json;
} edgefl_event;

/* Called on threads of the agent, one call at a time. It must return soon. */
typedef void (*edgefl_event_callback)(void *context, const edgefl_event *event);

/* What the owner of the device allows now. Fill it by edgefl_constraints_init first. */
typedef struct edgefl_constraints {
  size_t size;
  double duty;         /* share of the time in which steps are made, above 0 to 1; rests are between steps */
  int allowed;         /* 0: this device does not train; a round in hand is declined with `reason` */
  const char *reason;  /* for people */
  const char *power;   /* "charging", "battery"; NULL: unknown. These three are told to the server, which selects by them */
  const char *link;    /* "unmetered", "metered" */
  const char *thermal; /* "cool", "warm", "hot" */
} edgefl_constraints;

EDGEFL_API void edgefl_constraints_init(edgefl_constraints *constraints);

typedef struct edgefl_state {
  size_t size;    /* set before the call: sizeof(edgefl_state) */
  int connected;  /* to the broker */
  int working;    /* on a round */
  int paused;
  int done;       /* the training is over, and nothing waits to be sent */
} edgefl_state;

/* Opens the folder and checks the options; connects to nothing yet. `*agent` is NULL if it fails. */
EDGEFL_API edgefl_status edgefl_agent_create(const edgefl_options *options, edgefl_agent **agent);

/* Before the start. `source->release` is called once, also if this fails. */
EDGEFL_API edgefl_status edgefl_agent_set_data(edgefl_agent *agent, const edgefl_data_source *source);
/* npz, npy, idx, or a folder of images by class; `skip_bad_rows` not 0: rows that cannot be read are left out. */
EDGEFL_API edgefl_status edgefl_agent_set_data_path(edgefl_agent *agent, const char *path, int skip_bad_rows);
/* Before the start. */
EDGEFL_API edgefl_status edgefl_agent_set_events(edgefl_agent *agent, edgefl_event_callback callback, void *context);
/* At any time. */
EDGEFL_API edgefl_status edgefl_agent_set_constraints(edgefl_agent *agent, const edgefl_constraints *constraints);

/* Connects and takes part, on a thread of its own; returns at once. */
EDGEFL_API edgefl_status edgefl_agent_start(edgefl_agent *agent);
/* The same on the caller's thread: connects at the first call, and serves for about `wait_ms`. `state` may be NULL. For a
 * program that is given its time in pieces, such as a job of a phone's scheduler. A round in hand goes on between two calls, on a
 * thread of its own, until edgefl_agent_stop. */
EDGEFL_API edgefl_status edgefl_agent_step(edgefl_agent *agent, uint32_t wait_ms, edgefl_state *state);
EDGEFL_API edgefl_status edgefl_agent_state(edgefl_agent *agent, edgefl_state *state);

/* `on` not 0: no step is begun until it is called with 0; the connection stays. */
EDGEFL_API edgefl_status edgefl_agent_pause(edgefl_agent *agent, int on);

/* Leaves in good order, within about `within_ms`: a round in hand stops before its next step, which is kept, and so does an
 * edgefl_agent_step of another thread. EDGEFL_ERR_BUSY if the step of training that is being made takes longer: call it again, or end the process, which loses the steps since the last checkpoint and
 * nothing else. A stopped agent does not start again: create another. */
EDGEFL_API edgefl_status edgefl_agent_stop(edgefl_agent *agent, uint32_t within_ms);

/* Stops it, waits for the step that is being made, and frees it. NULL is nothing; within an event it does nothing. */
EDGEFL_API void edgefl_agent_destroy(edgefl_agent *agent);

/* What the last call on this thread that failed has to say; "" if none did. Good until the next call. */
EDGEFL_API const char *edgefl_last_error(void);

EDGEFL_API const char *edgefl_version(void);

#ifdef __cplusplus
}
#endif
#endif
