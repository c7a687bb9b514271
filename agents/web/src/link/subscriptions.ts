/** What is subscribed to: eight filters at a time, the next when the broker has answered; standing ones after each CONNACK. */
import type { MqttClient } from "mqtt";

const BATCH = 8;
const FAILURE = 0x80;
const AGAIN_MS = 30_000;

type Filter = [topic: string, qos: 0 | 1];

export class Subscriptions {
  private readonly standing = new Map<string, 0 | 1>();
  private waiting: Filter[] = [];
  private client: MqttClient | null = null;
  private asking = false;
  private again: ReturnType<typeof setTimeout> | null = null;

  constructor(private readonly refused: (topic: string, reason: string) => void) {}

  /** A connection stands: even in a resumed session the process may be new and know nothing of what is retained. */
  begin(client: MqttClient): void {
    this.client = client;
    this.asking = false;
    this.waiting = [...this.standing];
    this.pump();
  }

  end(): void {
    this.client = null;
    this.waiting = [];
    if (this.again) clearTimeout(this.again);
  }

  add(topics: readonly string[], qos: 0 | 1, standing: boolean): void {
    if (standing) for (const topic of topics) this.standing.set(topic, qos);
    if (!this.client) return;
    this.waiting.push(...topics.map((topic): Filter => [topic, qos]));
    this.pump();
  }

  remove(topics: readonly string[]): void {
    const gone = new Set(topics);
    for (const topic of topics) this.standing.delete(topic);
    this.waiting = this.waiting.filter(([topic]) => !gone.has(topic));
    for (let start = 0; start < topics.length; start += BATCH) {
      if (this.client?.connected) this.client.unsubscribe(topics.slice(start, start + BATCH), () => undefined);
    }
  }

  private pump(): void {
    const client = this.client;
    if (this.asking || !client?.connected || !this.waiting.length) return;
    const asked = this.waiting.splice(0, BATCH);
    this.asking = true;
    client.subscribe(Object.fromEntries(asked.map(([topic, qos]) => [topic, { qos }])), (error, granted) => {
      if (client !== this.client) return;
      this.asking = false;
      const denied = (granted ?? []).filter((each) => (each.qos as number) >= FAILURE).map((each) => each.topic);
      if (error && !denied.length && /unspecified|denied|authorized|subscribe error/i.test(error.message)) {
        denied.push(...asked.map(([topic]) => topic));
      }
      for (const topic of denied) this.refused(topic, error?.message ?? "the broker refuses it");
      this.askAgain(denied);
      this.pump();
    });
  }

  /** Access lists are mended. */
  private askAgain(denied: readonly string[]): void {
    const wanted = denied.filter((topic) => this.standing.has(topic));
    if (!wanted.length) return;
    this.again = setTimeout(() => this.add(wanted, 1, true), AGAIN_MS);
  }
}
