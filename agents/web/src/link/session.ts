/**
 * One broker session: stable client id, persistent, own reconnect with jitter, a last will for each connection. MQTT.js
 * speaks; each connection has a client of its own, as what was under way in one is said again by whoever needs it.
 */
import mqtt, { type IClientOptions, type MqttClient } from "mqtt";
import { said } from "../wire/errors";
import type { Limits } from "../wire/limits";
import { publishBytes } from "../wire/topics";
import { pause } from "./mailbox";
import { Subscriptions } from "./subscriptions";
import { mostBytes, PacketWatch } from "./watch";

export type Event =
  | { kind: "up" }
  | { kind: "down"; reason: string; retryS: number; rival: boolean }
  | { kind: "message"; topic: string; payload: Uint8Array }
  | { kind: "refused"; action: "publish" | "subscribe"; topic: string; reason: string };

export interface Address {
  url: string;
  username?: string;
  password?: string;
}

export interface Will {
  topic: string;
  payload: Uint8Array;
}

const SESSION_S = 7 * 86_400;
const MOMENT_MS = 5000;
const ANSWER_MS = 10_000;
/** Connections in a row that last a moment only: a link that breaks does not do that by itself so regularly. */
const RIVAL_AFTER = 3;
const PROPERTIES_BYTES = 16;
const UNSUPPORTED = [1, 0x84];
const FAILURE = 0x80;

export class Session {
  private client: MqttClient | null = null;
  private stopping = false;
  private version: 4 | 5 = 5;
  private older = 0;
  private upSince = 0;
  private mostBytes = Infinity;
  private readonly subscriptions: Subscriptions;
  private wakeUp: () => void = () => undefined;
  /** Whoever waits for a PUBACK of this connection. */
  private readonly flying = new Set<(taken: boolean) => void>();
  /** QoS 1 messages that the broker takes at once. */
  window = 64;
  receivedBytes = 0;
  sentBytes = 0;

  constructor(
    private readonly address: Address,
    private readonly clientId: string,
    private readonly limits: Limits,
    private readonly will: () => Will,
    private readonly deliver: (event: Event) => void,
  ) {
    this.subscriptions = new Subscriptions((topic, reason) =>
      deliver({ kind: "refused", action: "subscribe", topic, reason }));
  }

  get connected(): boolean {
    return this.client?.connected ?? false;
  }

  /** Connects, and again, until `stop`. */
  async run(): Promise<void> {
    let attempt = -1;
    let moments = 0;
    while (!this.stopping) {
      const { reason, wasUp } = await this.connection();
      if (this.stopping) return;
      moments = wasUp && performance.now() - this.upSince < MOMENT_MS ? moments + 1 : 0;
      const rival = moments >= RIVAL_AFTER;
      attempt = wasUp && !rival ? 0 : attempt + 1;
      const ceiling = Math.min(this.limits.reconnect_max_s, this.limits.reconnect_min_s * 2 ** Math.min(attempt, 16));
      const retryS = ceiling * (0.5 + 0.5 * Math.random());
      this.deliver({ kind: "down", reason, retryS, rival });
      await Promise.race([pause(1000 * retryS), new Promise<void>((resolve) => (this.wakeUp = resolve))]);
    }
  }

  /** Says goodbye, so that the will stays unsaid. */
  async stop(): Promise<void> {
    this.stopping = true;
    this.wakeUp();
    await Promise.race([this.client?.endAsync().catch(() => undefined), pause(2000)]);
  }

  subscribe(topics: readonly string[], qos: 0 | 1, standing: boolean): void {
    this.subscriptions.add(topics, qos, standing);
  }

  unsubscribe(topics: readonly string[]): void {
    this.subscriptions.remove(topics);
  }

  /** Whether the broker has it; false where the connection ended before, or it will never take it. */
  async publish(topic: string, payload: Uint8Array, options: { qos?: 0 | 1; retain?: boolean } = {}): Promise<boolean> {
    const client = this.client;
    if (!client?.connected) return false;
    const size = publishBytes(topic, payload.length, 1) + PROPERTIES_BYTES;
    if (size > this.mostBytes) {
      const reason = `a packet of ${size} bytes, and the broker takes ${this.mostBytes} at most`;
      this.deliver({ kind: "refused", action: "publish", topic, reason });
      return false;
    }
    this.sentBytes += payload.length;
    return new Promise((resolve) => {
      this.flying.add(resolve);
      client.publish(topic, payload as never, { qos: options.qos ?? 1, retain: options.retain ?? false }, (error, packet) => {
        const code = (packet as { reasonCode?: number } | undefined)?.reasonCode ?? 0;
        if (code >= FAILURE) this.deliver({ kind: "refused", action: "publish", topic, reason: `reason ${code}` });
        this.flying.delete(resolve);
        resolve(!error && code < FAILURE);
      });
    });
  }

  /** One connection from start to end. */
  private async connection(): Promise<{ reason: string; wasUp: boolean }> {
    const first = await this.attempt();
    if (first.wasUp || this.stopping || !first.unread) return first;
    // A broker of 3.1.1 says so, or hangs up on what it cannot read.
    const before = this.version;
    this.version = before === 5 ? 4 : 5;
    const second = await this.attempt();
    this.older += second.wasUp ? 1 : 0;
    if (!second.wasUp || (this.older < 2 && !first.unsupported)) this.version = before;
    return second;
  }

  private attempt(): Promise<{ reason: string; wasUp: boolean; unread: boolean; unsupported: boolean }> {
    let client: MqttClient;
    try {
      client = mqtt.connect(this.address.url, this.options());
    } catch (error) {
      return Promise.resolve({ reason: `the broker at ${this.address.url} cannot be asked: ${said(error)}`, wasUp: false, unread: false, unsupported: false });
    }
    this.client = client;
    let [wasUp, refusal, trouble, opened] = [false, 0, "", false];
    const stream = client.stream;
    stream?.once?.("connect", () => (opened = true));
    const watch = new PacketWatch(mostBytes(this.limits));
    stream?.on?.("data", (chunk: Uint8Array) => {
      const objection = trouble === "" ? watch.objection(chunk) : "";
      if (objection === "") return;
      trouble = objection;
      client.end(true);
    });
    client.on("connect", (packet) => {
      wasUp = true;
      this.begin(client, packet.properties as { receiveMaximum?: number; maximumPacketSize?: number } | undefined);
    });
    client.on("message", (topic, payload) => {
      this.receivedBytes += payload.length;
      this.deliver({ kind: "message", topic, payload: new Uint8Array(payload) });
    });
    client.on("error", (error) => {
      refusal = (error as { code?: number }).code ?? 0;
      trouble = error.message || "";
    });
    client.on("disconnect", (packet) => (trouble = `the broker ended it (reason ${packet.reasonCode ?? 0})`));
    return new Promise((resolve) => {
      const late = setTimeout(() => !wasUp && client.end(true), ANSWER_MS);
      client.on("close", () => {
        clearTimeout(late);
        this.subscriptions.end();
        for (const resolve of this.flying) resolve(false);
        this.flying.clear();
        client.end(true);
        const what = wasUp ? "connection to the broker at" : "no connection to the broker at";
        const reason = `${what} ${this.address.url}${wasUp ? " lost" : ""}${trouble ? `: ${trouble}` : ""}`;
        const unsupported = UNSUPPORTED.includes(refusal);
        resolve({ reason, wasUp, unread: !wasUp && (unsupported || (!refusal && opened)), unsupported });
      });
    });
  }

  private begin(client: MqttClient, told: { receiveMaximum?: number; maximumPacketSize?: number } | undefined): void {
    this.window = Math.min(this.limits.max_inflight, told?.receiveMaximum ?? 65_535);
    this.mostBytes = told?.maximumPacketSize ?? Infinity;
    this.upSince = performance.now();
    this.subscriptions.begin(client);
    this.deliver({ kind: "up" });
  }

  private options(): IClientOptions {
    const will = this.will();
    return {
      clientId: this.clientId,
      clean: false,
      keepalive: this.limits.keepalive_s,
      reconnectPeriod: 0,
      connectTimeout: ANSWER_MS,
      resubscribe: false,
      queueQoSZero: false,
      protocolVersion: this.version,
      ...(this.address.username === undefined ? {} : { username: this.address.username, password: this.address.password ?? "" }),
      ...(this.version === 5 ? { properties: { sessionExpiryInterval: SESSION_S, receiveMaximum: this.limits.max_inflight, maximumPacketSize: mostBytes(this.limits) } } : {}),
      will: { topic: will.topic, payload: will.payload as never, qos: 1, retain: true },
    };
  }
}
