"""A device in one file, without edgefl: paho-mqtt, onnxruntime, numpy, msgspec, and docs/protocol.md.

python small_device.py --id small-0 --data my-data.npz --broker localhost:1883 --federation demo
"""

import argparse
import hashlib
import json
import os
import queue
import secrets
import time

import msgspec
import numpy as np
import paho.mqtt.client as mqtt

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # without it onnxruntime sends telemetry
import onnxruntime

CHUNK_BYTES, WINDOW, PATIENCE_S = 128 * 1024, 8, 10.0
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def kept_id(path):
    """Return a secret client id, the same at every start: a client with our id can end our connections."""
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write("d" + secrets.token_hex(11))
    with open(path) as file:
        return file.read()


class Link:
    """The broker: what was announced last, and chunks and answers in the order in which they come."""

    def __init__(self, broker, federation, device, hello, client_id):
        self.prefix, self.me, self.hello = f"edgefl/v1/{federation}/", f"devices/{device}/", hello
        self.round, self.task = None, None
        self.chunks, self.acks, self.news = queue.Queue(), queue.Queue(), queue.Queue()
        version = mqtt.CallbackAPIVersion.VERSION2
        self.client = mqtt.Client(version, client_id=client_id, clean_session=False)
        self.client.will_set(
            self.prefix + self.me + "status", pack({"v": 1, "online": False}), 1, retain=True
        )
        self.client.on_connect, self.client.on_message = self.connected, self.arrived
        host, _, port = broker.partition(":")
        self.client.connect_async(host, int(port or 1883), keepalive=20)
        self.client.loop_start()  # which connects, and connects again, for as long as it takes

    def connected(self, client, *_):
        """After every CONNACK, whether or not the broker remembers the session."""
        topics = ("rounds/current", self.me + "tasks", self.me + "acks")
        client.subscribe([(self.prefix + topic, 1) for topic in topics])
        self.send("status", {"online": True}, retain=True)
        self.send("hello", self.hello, retain=True)

    def arrived(self, _client, _userdata, message):
        topic = message.topic.removeprefix(self.prefix)
        if topic.startswith("blobs/"):
            self.chunks.put((topic, message.payload))
        elif content := fields(message.payload):
            if topic.endswith("/acks"):
                if not content.get("nonce"):  # not of an update: of a message that it cannot read
                    print("the server says:", content.get("text", ""), flush=True)
                self.acks.put(content)
            elif topic.endswith("/tasks"):
                self.task = content
            else:
                self.round = content
            self.news.put(topic)

    def send(self, topic, content, retain=False):
        return self.client.publish(self.prefix + self.me + topic, pack({"v": 1, **content}), 1, retain)


def fields(payload):
    """Those of a message; none if the bytes are no message, or one of another version.

    A server signs: the message is the envelope's body. This device believes whoever speaks, and does not look at who signed.
    """
    try:
        content = unpack(payload, type=dict)
        if content.get("v") == 2:
            content = unpack(content["body"], type=dict)
    except (msgspec.MsgspecError, KeyError, TypeError):
        return {}
    return content if content.get("v") == 1 else {}


def fetch(link, ref):
    """The bytes of a BlobRef: subscribe to its chunks, a few at a time, and check each digest."""
    count = -(-ref["size"] // ref["chunk"])
    listed = ref.get("digests") or bytes.fromhex(ref["sha256"])
    digests = {f"blobs/{ref['sha256']}/{n}": listed[32 * n : 32 * n + 32] for n in range(count)}
    parts = {}
    while missing := [topic for topic in digests if topic not in parts][:WINDOW]:
        link.client.subscribe([(link.prefix + topic, 0) for topic in missing])
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and not parts.keys() >= set(missing):
            try:
                topic, data = link.chunks.get(timeout=0.1)
            except queue.Empty:
                continue
            if hashlib.sha256(data).digest() == digests.get(topic):
                parts[topic] = data
        link.client.unsubscribe([link.prefix + topic for topic in missing])
    return b"".join(parts[topic] for topic in digests)


TYPES = {"F32": "float32", "F16": "float16", "I64": "int64", "U16": "uint16", "U8": "uint8", "I8": "int8"}


def from_safetensors(blob):
    """The length of a JSON header, the header, the data."""
    end = 8 + int.from_bytes(blob[:8], "little")
    header = {name: entry for name, entry in json.loads(blob[8:end]).items() if name != "__metadata__"}
    places = {name: slice(*(end + at for at in entry["data_offsets"])) for name, entry in header.items()}
    return {
        name: np.frombuffer(blob[places[name]], TYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def to_safetensors(arrays):
    names, header, data = {numpy: name for name, numpy in TYPES.items()}, {}, b""
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])):
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": ends}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def random(*key):
    """Random numbers are a function of a key, so a round can be repeated."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class Round:
    """One task. The steps of a round, whatever the method: the method is in the graphs."""

    def __init__(self, link, announced, task, x, y):
        self.link, self.units, self.seed = link, announced["units"], task["seed"]
        self.manifest = unpack(fetch(link, announced["offers"]["onnx"]["bundles"][task["tier"]]))
        self.graphs = {graph["name"]: graph for graph in self.manifest["graphs"]}
        self.hyper = self.manifest["hyper"] | announced["hyper"]
        data = self.manifest["data"]
        self.y = y[: task["samples"] or None].astype(np.int64)
        self.x = x[: len(self.y)].reshape(-1, *data["shape"])
        if self.x.dtype.kind in "iu":
            self.x = self.x.astype("float32") * np.float32(data.get("scale", 1)) + np.float32(
                data.get("shift", 0)
            )

    def weights(self, units):
        """Each unit is one blob here; patches come with `[downlink] encoding = "int8"` only."""
        if any(len(self.units[unit]) > 1 for unit in units):
            raise NotImplementedError("patches of weights are left out here")
        blobs = [fetch(self.link, self.units[unit][0]) for unit in units]
        return {f"weights.{name}": array for blob in blobs for name, array in from_safetensors(blob).items()}

    def load(self, name):
        model = fetch(self.link, self.graphs[name]["blob"])
        return self.graphs[name], onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    def run(self, loaded, given, step=0):
        """Inputs go by name, outputs by position. Scalars and noise are the same for every role that reads them."""
        graph, session = loaded
        feeds, noise = {}, 0
        for port in graph["inputs"]:
            role, _, label = port["name"].partition(".")
            if role == "hyper":
                value = np.full(port["shape"], self.hyper[label], port["dtype"])
            elif role == "noise":
                value = random(self.seed, 1 << 20, step, noise).random(port["shape"], np.float32)
                noise += 1
            elif role == "batch" and port["name"] not in given:
                value = self.batch(label, step, port["shape"][0])
            else:
                value = given[port["name"]]
            feeds[port["name"]] = np.asarray(value, port["dtype"])
        names = [port["name"] for port in graph["outputs"]]
        return dict(zip(names, session.run(None, feeds), strict=True))

    def batch(self, label, step, size):
        """`walk`: shuffled once a round and stream, walked through, wrapped around; `draw`: each step on its own."""
        stream, part = int(label.partition(".")[0]), self.x if label.endswith(".x") else self.y
        if len(part) < size:
            return part[random(self.seed, stream, step).integers(0, len(part), size)]
        if self.manifest["draws"] == "draw":
            return part[random(self.seed, stream, step).choice(len(part), size, replace=False)]
        order = random(self.seed, stream).permutation(len(part))
        return part[np.take(order, np.arange(step * size, (step + 1) * size), mode="wrap")]

    def frozen(self):
        """The units in front of the trained ones, chunk by chunk, once over all rows; then their weights can go."""
        for chunk in self.manifest["prefix"]:
            loaded, weights, record = self.load(chunk["graph"]), self.weights(chunk["units"]), []
            size = next(port["shape"][0] for port in loaded[0]["inputs"] if port["name"] == "batch.0.x")
            for first in range(0, len(self.x), size):
                rows = np.arange(first, first + size) % len(self.x)
                record += self.run(loaded, weights | {"batch.0.x": self.x[rows]}).values()
            self.x = np.concatenate(record)[: len(self.x)]

    def train(self):
        """The `update` and `metric` outputs, by name."""
        if any(phase.get("over_data") for phase in self.manifest["phases"]):
            raise NotImplementedError("phases over the data are left out here")
        self.frozen()
        steps = [phase["graph"] for phase in self.manifest["phases"] for _ in range(phase["steps"])]
        weights, sums = self.weights(self.manifest["suffix"]), {}
        state = self.run(self.load(self.manifest["start"]), weights, len(steps))
        for step, graph in enumerate(steps):
            if step == 0 or graph != steps[step - 1]:
                loaded = self.load(graph)
            outputs = self.run(loaded, state, step)
            for name, value in labelled(outputs, "metric.").items():
                sums.setdefault(f"metric.{name}", []).append(float(value))
            state |= outputs
        outputs = self.run(self.load(self.manifest["finish"]), weights | state, len(steps) + 1)
        return {name: np.mean(values) for name, values in sums.items()} | outputs


def labelled(outputs, role):
    return {name.removeprefix(role): value for name, value in outputs.items() if name.startswith(role)}


def deliver(link, task, update):
    """In chunks, until the server has the last word."""
    encoded, size = pack({"v": 1, **update}), CHUNK_BYTES - 512
    count = -(-len(encoded) // size)
    whole = {"sha256": hashlib.sha256(encoded).hexdigest(), "count": count, "size": len(encoded)}
    missing = range(count)
    while True:
        for index in missing:
            chunk = {"nonce": task["nonce"], **whole, "index": index, "data": encoded[index * size :][:size]}
            link.send(f"updates/{task['round']}/{index}", chunk).wait_for_publish(PATIENCE_S)
        try:
            ack = link.acks.get(timeout=2 * PATIENCE_S)
        except queue.Empty:
            ack = {"nonce": task["nonce"], "status": "missing", "missing": range(count)}
        if ack["nonce"] == task["nonce"] and ack["status"] != "missing":
            return ack
        missing = [
            index for index in ack.get("missing", ()) if ack["nonce"] == task["nonce"] and index < count
        ]


def answer(link, device, announced, task, x, y):
    current = Round(link, announced, task, x, y)
    outputs = current.train()
    unknown = (
        "step_ms",
        "forward_ms",
        "load_ms",
        "idle_bytes",
        "peak_bytes",
        "down_bytes",
        "down_wire_bytes",
    )
    update = {name: task[name] for name in ("run", "round", "nonce", "tier")}
    update |= {"device": device, "model_version": announced["model_version"], "samples": len(current.y)}
    update |= {name: current.manifest[name] for name in ("codec", "codec_version")}
    update["metrics"] = {name: float(value) for name, value in labelled(outputs, "metric.").items()}
    update |= {"profile": dict.fromkeys(unknown, 0), "tensors": to_safetensors(labelled(outputs, "update."))}
    ack = deliver(link, task, update)
    print(f"round {task['round']} as {task['tier']}: {ack['status']}, {update['metrics']}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    for option, default in (
        ("id", "small-0"),
        ("data", "data.npz"),
        ("broker", "localhost"),
        ("federation", "demo"),
    ):
        parser.add_argument(f"--{option}", default=default)
    options = parser.parse_args()
    with np.load(options.data) as file:
        x, y = file["x"], file["y"]
    engines = {"onnxruntime": onnxruntime.__version__}
    hello = {"agent": "small/1", "memory_bytes": 0, "cores": 1, "samples": len(y), "engines": engines}
    client_id = kept_id(f"{options.data}.id")
    link, answered = Link(options.broker, options.federation, options.id, hello, client_id), set()
    while (announced := link.round) is None or announced["state"] != "done":
        task = link.task
        mine = announced and task and (announced["run"], announced["round"]) == (task["run"], task["round"])
        if mine and announced["state"] == "open" and task["nonce"] not in answered:
            answered.add(task["nonce"])
            try:
                answer(link, options.id, announced, task, x, y)
            except NotImplementedError as error:  # the round need not wait for this device
                decline = {"round": task["round"], "nonce": task["nonce"], "reason": "failed"}
                link.send("declines", decline | {"text": str(error)})
                print(f"round {task['round']}: declined, {error}", flush=True)
        else:
            link.news.get()
    link.send("status", {"online": False}, retain=True).wait_for_publish(PATIENCE_S)
    link.client.disconnect()


if __name__ == "__main__":
    main()
