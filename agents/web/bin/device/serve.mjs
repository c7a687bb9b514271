/** What the browser loads: the built agent, a page that holds its worker, the data, and the broker over a WebSocket. */
import { randomBytes } from "node:crypto";
import { createReadStream, existsSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { WebSocketServer } from "ws";
import { bridge } from "./bridge.mjs";
import { isFile } from "./options.mjs";

const DIST = process.env.EDGEFL_WEB_DIST ?? fileURLToPath(new URL("../../dist", import.meta.url));
const PACKED = ".gz";
const LOST_MS = 2000;
const HOST = "edgefl.localhost";
const TYPES = { ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".html": "text/html" };
const HEADERS = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp", "Cache-Control": "no-cache" };

/** The page hands over what comes from the launcher to the worker, and back. It reloads nothing and shows nothing. */
const PAGE = `<!doctype html><meta charset="utf-8"><title>edgefl</title><script type="module">
const line = new WebSocket(location.href.replace(/^http/, "ws").replace(/\\/page/, "/control"));
const worker = new Worker("/worker.js", { type: "module" });
const tell = (message) => line.readyState === 1 && line.send(JSON.stringify(message));
worker.onmessage = (event) => tell(event.data);
worker.onerror = (event) => tell({ type: "ended", error: "the agent cannot be loaded: " + event.message, code: 1 });
line.onmessage = (event) => {
  const message = JSON.parse(event.data);
  if (message.type === "reload") location.reload();
  else worker.postMessage(message);
};
line.onclose = () => worker.postMessage({ type: "stop" });
</script>`;

export async function serve(options) {
  if (!existsSync(join(DIST, "worker.js"))) {
    throw new Error(`the agent is not built (${DIST}): npm ci && npm run build in agents/web`);
  }
  const secret = randomBytes(16).toString("hex");
  let [told, lost, control, waiting] = [() => undefined, () => undefined, null, []];
  const server = createServer((request, response) => answer(request, response, secret, options));
  const sockets = new WebSocketServer({ noServer: true, handleProtocols: (offered) => (offered.has("mqtt") ? "mqtt" : false) });
  server.on("upgrade", (request, socket, head) => {
    const asked = parsed(request.url);
    if (asked?.searchParams.get("secret") !== secret) return socket.destroy();
    sockets.handleUpgrade(request, socket, head, (line) => {
      if (asked.pathname === "/mqtt") return bridge(line, options.broker);
      control = line;
      line.on("message", (text) => told(JSON.parse(String(text))));
      line.on("close", () => {
        if (control === line) control = null;
        setTimeout(() => control ?? lost(), LOST_MS).unref();
      });
      line.send(JSON.stringify({ type: "start", config: configOf(options, secret) }));
      for (const message of waiting.splice(0)) line.send(JSON.stringify(message));
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    port: server.address().port,
    path: `http://${HOST}/page?secret=${secret}`,
    onMessage: (listener) => (told = listener),
    /** The page is gone, and does not come back: its process has ended. */
    onLost: (listener) => (lost = listener),
    send: (message) => (control ? control.send(JSON.stringify(message)) : waiting.push(message)),
  };
}

function configOf(options, secret) {
  const { id, federation, engine, serverKeys, token, tier, memory, threads, limits, untilDone, broker } = options;
  return {
    id, federation, engine, serverKeys, token, tier, memory, threads, limits, untilDone, pauseHidden: false,
    broker: broker.url ?? `ws://${HOST}/mqtt?secret=${secret}`,
    ...(broker.username === undefined ? {} : { username: broker.username, password: broker.password }),
    data: { kind: "url", url: `/data.npz?secret=${secret}` },
  };
}

function answer(request, response, secret, options) {
  const asked = parsed(request.url);
  if (asked === null) return response.writeHead(404).end();
  const known = asked.searchParams.get("secret") === secret;
  if (asked.pathname === "/page" && known) {
    response.writeHead(200, { ...HEADERS, "Content-Type": "text/html" });
    return response.end(PAGE);
  }
  const own = asked.pathname === "/data.npz" && known ? options.data : join(DIST, normalize(asked.pathname));
  if (!own.startsWith(DIST + sep) && own !== options.data) return response.writeHead(404).end();
  const file = [own, `${own}${PACKED}`].find(isFile); // large ones are kept as browsers get them
  if (!file) return response.writeHead(404).end();
  const packed = file === own ? {} : { "Content-Encoding": "gzip" };
  const stream = createReadStream(file);
  stream.on("error", () => response.destroy());
  stream.on("open", () => {
    response.writeHead(200, { ...HEADERS, ...packed, "Content-Type": TYPES[extname(own)] ?? "application/octet-stream" });
    stream.pipe(response);
  });
}

/** What a request asks for; null for what is no address, which anybody on this machine may send. */
function parsed(url) {
  return URL.canParse(url, "http://localhost") ? new URL(url, "http://localhost") : null;
}
