/**
 * What a page and the agent's worker say to each other. The page posts {@link ToWorker}, the worker {@link FromWorker}.
 *
 * Everything is plain data (structured clone). Buffers of {@link Data} may be transferred. The page needs nothing else of
 * the agent, and the agent nothing of the page: no DOM, no globals.
 */

/** Shape, dtype as numpy names it ("float32", "uint8", "int64"), and the values in C order, little-endian. */
export interface RawArray {
  dtype: string;
  shape: number[];
  data: ArrayBuffer;
}

/** Where the local rows come from. */
export type Data =
  /** The bytes of an .npz with x, y and the inputs beside x: what `edgefl device --data` takes. */
  | { kind: "npz"; bytes: ArrayBuffer }
  /** The same from the page's own server, such as the bundled sample. The worker fetches it. */
  | { kind: "url"; url: string }
  | { kind: "arrays"; x: RawArray; y: RawArray; others?: Record<string, RawArray> }
  /** Photos, each with the name of its class (the folder it lay in). Decoded and sized as the bundle's reader says. */
  | { kind: "photos"; photos: { name: string; label: string; file: Blob }[] };

/**
 * wasm: onnxruntime's WebAssembly kernels. webgpu: those of the graphics card; ops that it has none for run in WebAssembly,
 * and an event `engine` says which. An error where the browser has no WebGPU, or the page was built without.
 */
export type EngineName = "wasm" | "webgpu";

/** Limits of docs/protocol.md#limits that may be set; what is left out has its default. */
export type Limits = Partial<{
  chunk_bytes: number;
  fetch_window: number;
  fetch_timeout_s: number;
  fetch_retries: number;
  mirror_bytes_s: number;
  mirror_pause_s: number;
  max_blob_bytes: number;
  max_manifest_bytes: number;
  upload_window: number;
  ack_timeout_s: number;
  conditions_s: number;
  retry_pause_s: number;
  notice_s: number;
  max_steps: number;
  max_step_s: number;
  max_round_s: number;
  attempts: number;
  checkpoint_steps: number;
  history_rounds: number;
  store_bytes: number;
  max_message_bytes: number;
}>;

/** Who this device is and what it has. */
export interface AgentConfig {
  /** Name of the device, `[A-Za-z0-9][A-Za-z0-9._-]{0,62}`, the same at every start. */
  id: string;
  /** `ws://host:port/` or `wss://...`: the broker's WebSocket listener. */
  broker: string;
  username?: string;
  password?: string;
  federation: string;
  data: Data;
  /** The tier to ask for; the server decides. Default: it chooses by memory. */
  tier?: string;
  /** Bytes this device offers to training. Default: a quarter of `navigator.deviceMemory`, at most 2 GiB. */
  memory?: number;
  engine?: EngineName;
  /** Of wasm. More than one needs a cross-origin isolated page; default 1, so that updates are bit-equal. */
  threads?: number;
  /** Where the page serves onnxruntime's .wasm and .mjs files; default: beside the worker. */
  assets?: string;
  /** Keys of the server (hex) that are listened to; default: the first seen. */
  serverKeys?: string[];
  /** A one-time token, `efl1.<name>.<secret>.<server key>`. */
  token?: string;
  /** Stop when the training is done. */
  untilDone?: boolean;
  limits?: Limits;
  /** Battery level, 0 to 1, below which an unplugged device pauses; default 0.2. */
  leastBattery?: number;
  /** Pause while the page is hidden; default true. */
  pauseHidden?: boolean;
}

/** What only a page sees; it posts this whenever something of it changes. Left out: not known. */
export interface DeviceConditions {
  hidden?: boolean;
  /** 0 to 1. */
  battery?: number;
  charging?: boolean;
  metered?: boolean;
}

export type ToWorker =
  | { type: "start"; config: AgentConfig; surroundings?: DeviceConditions }
  | { type: "surroundings"; surroundings: DeviceConditions }
  /** Between two steps: training and fetching stand still; the connection stays. */
  | { type: "pause" }
  | { type: "resume" }
  /** Says goodbye to the broker and answers `ended`. What was begun goes on at the next start. */
  | { type: "stop" };

/**
 * The events that `edgefl device --json` prints, and three of a browser's own: `paused`, `resumed` (with `reason`:
 * asked, hidden or battery) and `busy` (another tab has this device, and this one waits for it).
 */
export type EventName =
  | "online"
  | "offline"
  | "rival"
  | "alone"
  | "left-out"
  | "denied"
  | "refused"
  | "tier"
  | "server-key"
  | "round"
  | "accepted"
  | "rejected"
  | "declined"
  | "data"
  | "failed"
  | "aborted"
  | "stopped"
  | "carry"
  | "store"
  | "limited"
  | "mirror"
  | "done"
  | "engine"
  | "paused"
  | "resumed"
  | "busy";

export interface AgentEvent {
  type: "event";
  event: EventName;
  text: string;
  /** For programs: `round`, `loss`, `run`, `samples`, `reason`, ... as `edgefl device --json` has them. */
  details: Record<string, string | number>;
}

/** After each step, a few times a second at most: the numbers of the protocol's Progress and more. */
export interface ProgressEvent {
  type: "progress";
  round: number;
  tier: string;
  /** `forward <k>`, `train`, `failed: ...`. */
  stage: string;
  step: number;
  steps: number;
  /** Mean so far; NaN if there is none. */
  loss: number;
  /** Of the last step. */
  stepMs: number;
  /** Bytes of wasm memory and of the arrays that the agent holds: the highest in this round. */
  peakBytes: number;
  downBytes: number;
  upBytes: number;
}

/**
 * The last message of a worker. `error` is empty if the agent ended as it was asked to; else what to tell the person, with
 * the exit code that `edgefl device` has for it.
 */
export interface EndedEvent {
  type: "ended";
  error: string;
  code: number;
}

export type FromWorker = AgentEvent | ProgressEvent | EndedEvent;
