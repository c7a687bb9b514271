/** MQTT over a WebSocket is the same bytes as over TCP: they are handed over, both ways. */
import { connect } from "node:net";
import { connect as connectTls } from "node:tls";
import { createWebSocketStream } from "ws";

export function bridge(line, broker) {
  const [near, far] = [createWebSocketStream(line), (broker.tls ? connectTls : connect)({ host: broker.host, port: broker.port })];
  const end = () => {
    near.destroy();
    far.destroy();
  };
  for (const side of [near, far]) {
    side.on("error", end);
    side.on("close", end);
  }
  near.pipe(far);
  far.pipe(near);
}
