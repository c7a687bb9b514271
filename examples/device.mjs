// A device in one file, in JavaScript on Node, without edgefl: five npm packages, and docs/protocol.md.
// npm install mqtt @msgpack/msgpack fzstd seedrandom onnxruntime-web
// node device.mjs --id node-0 --data data.json --broker localhost:1883 --federation demo
//
// The data are {"x": samples of whole numbers, "y": labels}. onnxruntime-node has the same API, and is faster.
import { createHash, randomBytes } from "node:crypto";
import { EventEmitter, once } from "node:events";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { decode, encode } from "@msgpack/msgpack";
import { decompress } from "fzstd";
import mqtt from "mqtt";
import * as ort from "onnxruntime-web";
import random from "seedrandom";

const CHUNK_BYTES = 128 * 1024, WINDOW = 8, PATIENCE_MS = 10_000;
const TYPES = { F32: "float32", I64: "int64", U16: "uint16", U8: "uint8", I8: "int8" };
const ARRAYS = { float32: Float32Array, int64: BigInt64Array, uint16: Uint16Array, uint8: Uint8Array, int8: Int8Array };
const pack = (fields) => Buffer.from(encode({ v: 1, ...fields }));
const unpack = (bytes) => decode(bytes, { useBigInt64: true }); // a seed has 63 bits, a number of JavaScript 53
// Those of a message; nothing if the bytes are no message, or one of another version.
const fields = (bytes) => {
  try {
    let content = unpack(bytes);
    if (content?.v === 2) content = unpack(content.body); // a server signs; this device believes whoever speaks
    return content?.v === 1 ? content : undefined;
  } catch {
    return undefined;
  }
};
const sha256 = (bytes) => createHash("sha256").update(bytes).digest();
const range = (count) => Array.from({ length: count }, (_, index) => index);
const labelled = (outputs, role) =>
  Object.entries(outputs).flatMap(([name, value]) => (name.startsWith(role) ? [[name.slice(role.length), value]] : []));

// The broker: what was announced last, and an event for each chunk, answer and piece of news.
class Link extends EventEmitter {
  constructor(broker, federation, device, hello, clientId) {
    super();
    [this.prefix, this.me] = [`edgefl/v1/${federation}/`, `devices/${device}/`];
    const standing = ["rounds/current", `${this.me}tasks`, `${this.me}acks`].map((topic) => this.prefix + topic);
    this.client = mqtt.connect(`mqtt://${broker}`, {
      protocolVersion: 4, clientId, clean: false, keepalive: 20, resubscribe: false,
      will: { topic: `${this.prefix}${this.me}status`, payload: pack({ online: false }), qos: 1, retain: true },
    });
    this.client.on("error", (error) => console.error(String(error)));
    this.client.on("message", (topic, payload) => this.arrived(topic.slice(this.prefix.length), payload));
    this.client.on("connect", () => {
      this.client.subscribe(standing, { qos: 1 });
      this.send("status", { online: true }, true);
      this.send("hello", hello, true);
    });
  }

  arrived(topic, payload) {
    if (topic.startsWith("blobs/")) return this.emit(topic, payload);
    const message = fields(payload);
    if (!message) return;
    if (topic.endsWith("/acks")) return this.emit("ack", message);
    if (topic.endsWith("/tasks")) this.task = message;
    else this.round = message;
    this.emit("news");
  }

  send(topic, fields, retain = false) {
    return this.client.publishAsync(this.prefix + this.me + topic, pack(fields), { qos: 1, retain });
  }

  // The next event of that name; undefined if none comes in time.
  next(name, patience) {
    return once(this, name, { signal: AbortSignal.timeout(patience) }).then(([value]) => value, () => undefined);
  }
}

// The bytes of a BlobRef: subscribe to its chunks, a few at a time, and check each digest.
async function fetched(link, ref) {
  const digests = ref.digests?.length ? Buffer.from(ref.digests) : Buffer.from(ref.sha256, "hex");
  const chunks = [], waiting = range(Math.ceil(ref.size / ref.chunk));
  const worker = async () => {
    for (let index; (index = waiting.shift()) !== undefined; ) {
      const topic = `blobs/${ref.sha256}/${index}`, digest = digests.subarray(32 * index, 32 * index + 32);
      while (!chunks[index]) {
        const arrival = link.next(topic, PATIENCE_MS);
        await link.client.subscribeAsync(link.prefix + topic, { qos: 0 });
        const data = await arrival;
        await link.client.unsubscribeAsync(link.prefix + topic);
        if (data && sha256(data).equals(digest)) chunks[index] = data;
      }
    }
  };
  await Promise.all(range(WINDOW).map(worker));
  const blob = Buffer.concat(chunks);
  return ref.codec === "zstd" ? Buffer.from(decompress(blob, new Uint8Array(ref.raw))) : blob;
}

// safetensors: the length of a JSON header, the header, the data.
function fromSafetensors(blob) {
  const end = 8 + Number(blob.readBigUInt64LE()), { __metadata__, ...header } = JSON.parse(blob.subarray(8, end));
  return Object.entries(header).map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
    if (!TYPES[dtype]) throw new Error(`weights of type ${dtype}`);
    const bytes = new Uint8Array(blob.subarray(end + from, end + to)); // a copy, which begins at a multiple of 8
    return [name, new ort.Tensor(TYPES[dtype], new ARRAYS[TYPES[dtype]](bytes.buffer), shape)];
  });
}

function toSafetensors(tensors) {
  const header = {}, data = [], types = Object.keys(TYPES), width = ([, tensor]) => tensor.data.BYTES_PER_ELEMENT;
  let end = 0;
  for (const [name, tensor] of tensors.toSorted((a, b) => width(b) - width(a) || (a[0] < b[0] ? -1 : 1))) {
    const bytes = Buffer.from(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength);
    const dtype = types.find((each) => TYPES[each] === tensor.type);
    header[name] = { dtype, shape: tensor.dims, data_offsets: [end, (end += bytes.length)] };
    data.push(bytes);
  }
  const text = JSON.stringify(header), padded = text.padEnd(8 * Math.ceil(text.length / 8));
  return Buffer.concat([new Uint8Array(BigUint64Array.of(BigInt(padded.length)).buffer), Buffer.from(padded), ...data]);
}

// One task. The steps of a round, whatever the method: the method is in the graphs.
class Round {
  async open(link, task, { x, y }) {
    Object.assign(this, { link, task, announced: link.round });
    this.manifest = unpack(await fetched(this.link, this.announced.offers.onnx.bundles[this.task.tier]));
    this.graphs = Object.fromEntries(this.manifest.graphs.map((graph) => [graph.name, graph]));
    this.hyper = { ...this.manifest.hyper, ...this.announced.hyper };
    const { scale = 1, shift = 0 } = this.manifest.data;
    this.samples = Math.min(this.task.samples || Infinity, y.length);
    this.y = BigInt64Array.from(y.slice(0, this.samples), BigInt);
    this.x = Float32Array.from(x.slice(0, this.samples).flat(Infinity));
    this.x = this.x.map((value) => Math.fround(value * Math.fround(scale)) + Math.fround(shift));
  }

  async weights(units) {
    const refs = units.map((unit) => this.announced.units[unit]);
    if (refs.some(([, ...patches]) => patches.length)) throw new Error("patches of weights are left out here");
    const blobs = await Promise.all(refs.map(([ref]) => fetched(this.link, ref)));
    return Object.fromEntries(blobs.flatMap(fromSafetensors).map(([name, array]) => [`weights.${name}`, array]));
  }

  async load(name) {
    const graph = this.graphs[name], model = await fetched(this.link, graph.blob);
    return { graph, session: await ort.InferenceSession.create(model) };
  }

  // Inputs go by name, outputs by position. Scalars and noise are the same for every role that reads them.
  async run({ graph, session }, given, step = 0) {
    const { run, round, state } = this.link.round, feeds = {};
    if (run !== this.task.run || round !== this.task.round || state !== "open") throw new Error("the round is over");
    let noise = 0;
    for (const { name, role, dtype, shape } of graph.inputs) {
      const label = name.slice(role.length + 1), values = new ARRAYS[dtype](shape.reduce((size, length) => size * length, 1));
      if (role === "noise") {
        const draw = random(`${this.task.seed} noise ${step} ${noise++}`);
        values.forEach((_, at) => (values[at] = Math.floor(draw() * 2 ** 24) / 2 ** 24)); // of float32, below 1
      } else if (role === "hyper") values.fill(this.hyper[label]);
      else if (role === "batch" && !given[name]) values.set(this.batch(label, step, shape[0]));
      else if (!given[name]) throw new Error(`graph ${graph.name} asks for ${name}`);
      feeds[name] = given[name] ?? new ort.Tensor(dtype, values, shape);
    }
    const results = await session.run(feeds);
    return Object.fromEntries(graph.outputs.map(({ name }, at) => [name, results[session.outputNames[at]]]));
  }

  // `walk`: shuffled once a round and stream, walked through, wrapped around; `draw`: each step on its own.
  batch(label, step, size) {
    const [stream, part] = label.split("."), own = random(`${this.task.seed} ${stream} ${step}`);
    const shuffled = (draw) =>
      range(this.samples).map((row) => [draw(), row]).sort(([a], [b]) => a - b).map(([, row]) => row);
    if (this.samples < size) return this.rows(range(size).map(() => Math.floor(own() * this.samples)), part);
    if (this.manifest.draws === "draw") return this.rows(shuffled(own).slice(0, size), part);
    const order = shuffled(random(`${this.task.seed} ${stream}`));
    return this.rows(range(size).map((at) => order[(step * size + at) % this.samples]), part);
  }

  rows(order, part) {
    const values = this[part], width = values.length / this.samples, rows = new values.constructor(order.length * width);
    order.forEach((row, at) => rows.set(values.subarray(row * width, (row + 1) * width), at * width));
    return rows;
  }

  // The units in front of the trained ones, chunk by chunk, once over all rows; then their weights can go.
  async frozen() {
    for (const { graph, units } of this.manifest.prefix) {
      const loaded = await this.load(graph), weights = await this.weights(units);
      const { dtype, shape } = loaded.graph.inputs.find(({ name }) => name === "batch.0.x"), records = [];
      for (let first = 0; first < this.samples; first += shape[0]) {
        const x = this.rows(range(shape[0]).map((at) => (first + at) % this.samples), "x");
        const outputs = await this.run(loaded, { ...weights, "batch.0.x": new ort.Tensor(dtype, x, shape) });
        records.push(...Object.values(outputs).map((record) => record.data));
      }
      const width = records[0].length / shape[0], all = new Float32Array(records.length * records[0].length);
      records.forEach((record, at) => all.set(record, at * record.length));
      this.x = all.subarray(0, this.samples * width);
    }
  }

  // The outputs of `finish`, and the metrics of all steps.
  async train(link, task, data) {
    await this.open(link, task, data);
    const { start, finish, suffix, phases } = this.manifest, metrics = {};
    if (phases.some((phase) => phase.over_data)) throw new Error("phases over the data are left out here");
    await this.frozen();
    const steps = phases.flatMap(({ graph, steps }) => Array(steps).fill(graph));
    const weights = await this.weights(suffix), state = await this.run(await this.load(start), weights, steps.length);
    for (let step = 0, loaded; step < steps.length; step++) {
      if (steps[step] !== loaded?.graph.name) loaded = await this.load(steps[step]);
      const outputs = await this.run(loaded, state, step);
      for (const [name, { data }] of labelled(outputs, "metric.")) (metrics[name] ??= []).push(Number(data[0]));
      Object.assign(state, outputs);
    }
    const outputs = await this.run(await this.load(finish), { ...weights, ...state }, steps.length + 1);
    for (const [name, { data }] of labelled(outputs, "metric.")) metrics[name] = [Number(data[0])];
    const mean = ([name, values]) => [name, values.reduce((sum, value) => sum + value) / values.length];
    return [outputs, Object.fromEntries(Object.entries(metrics).map(mean))];
  }
}

// In chunks, until the server has the last word.
async function deliver(link, task, update) {
  const encoded = pack(update), size = CHUNK_BYTES - 512, count = Math.ceil(encoded.length / size);
  const whole = { nonce: task.nonce, sha256: sha256(encoded).toString("hex"), count, size: encoded.length };
  for (let missing = range(count); ; ) {
    const answer = link.next("ack", 2 * PATIENCE_MS);
    for (const index of missing) {
      const chunk = { ...whole, index, data: encoded.subarray(index * size, (index + 1) * size) };
      await link.send(`updates/${task.round}/${index}`, chunk);
    }
    const ack = (await answer) ?? { ...whole, status: "missing", missing: range(count) }, mine = ack.nonce === task.nonce;
    if (mine && ack.status !== "missing") return ack;
    missing = mine ? ack.missing.filter((index) => index < count) : [];
  }
}

async function answer(link, device, task, data) {
  const round = new Round(), [outputs, metrics] = await round.train(link, task, data);
  const ack = await deliver(link, task, {
    run: task.run, round: task.round, nonce: task.nonce, tier: task.tier, device, metrics,
    model_version: round.announced.model_version, samples: round.samples, codec: round.manifest.codec,
    codec_version: round.manifest.codec_version, tensors: toSafetensors(labelled(outputs, "update.")),
    profile: { step_ms: 0, forward_ms: 0, load_ms: 0, idle_bytes: 0, peak_bytes: 0, down_bytes: 0, down_wire_bytes: 0 },
  });
  console.log(`round ${task.round} as ${task.tier}: ${ack.status} ${ack.text}`, JSON.stringify(metrics));
}

const defaults = { id: "node-0", data: "data.json", broker: "localhost:1883", federation: "demo" };
const named = Object.entries(defaults).map(([name, value]) => [name, { type: "string", default: value }]);
const options = parseArgs({ options: Object.fromEntries(named) }).values;
const data = JSON.parse(readFileSync(options.data)), engines = { onnxruntime: ort.env.versions.web };
const hello = { agent: "node/1", memory_bytes: 0, cores: 1, samples: data.y.length, engines };
// A secret client id, the same at every start: a client with our id can end our connections.
const idFile = `${options.data}.id`;
if (!existsSync(idFile)) writeFileSync(idFile, `d${randomBytes(11).toString("hex")}`);
const clientId = readFileSync(idFile, "utf8");
const link = new Link(options.broker, options.federation, options.id, hello, clientId), answered = new Set();
link.on("ack", ({ nonce, text }) => nonce || console.error(`the server says: ${text}`)); // of a message it cannot read
while (link.round?.state !== "done") {
  const { round, task } = link;
  if (round?.state === "open" && round.run === task?.run && round.round === task.round && !answered.has(task.nonce)) {
    answered.add(task.nonce);
    await answer(link, options.id, task, data).catch(({ message: text }) => {
      console.error(`round ${task.round}: declined, ${text}`); // so that the round need not wait for this device
      return link.send("declines", { round: task.round, nonce: task.nonce, reason: "failed", text });
    });
  } else await once(link, "news");
}
await link.send("status", { online: false }, true);
await link.client.endAsync();
