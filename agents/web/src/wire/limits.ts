/** Limits of the protocol (docs/protocol.md#limits) and of this device, with the reference's defaults. */
export const DEFAULT_LIMITS = {
  chunk_bytes: 128 * 1024,
  fetch_window: 8,
  fetch_timeout_s: 10,
  fetch_retries: 5,
  max_blob_bytes: 2 ** 30,
  max_manifest_bytes: 16 * 2 ** 20,
  upload_window: 16,
  ack_timeout_s: 20,
  conditions_s: 60,
  retry_pause_s: 1,
  notice_s: 5,
  max_steps: 1_000_000,
  max_step_s: 600,
  max_round_s: 86_400,
  attempts: 10,
  checkpoint_steps: 5,
  history_rounds: 1000,
  store_bytes: 2 * 2 ** 30,
  reconnect_min_s: 0.2,
  reconnect_max_s: 10,
  keepalive_s: 20,
  max_inflight: 64,
  inbox_messages: 20_000,
  inbox_bytes: 128 * 2 ** 20,
};

export type Limits = typeof DEFAULT_LIMITS;
