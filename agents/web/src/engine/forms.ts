/**
 * Ops in the form that onnxruntime's WebAssembly runs fastest, with the same bits. It writes Relu over its input, and
 * compilers make no vectors of a loop whose memory may overlap: a tenth of the speed that Max(x, 0) has, which never does that.
 */
import { joined, utf8 } from "../wire/digests";
import { field, type Field, fieldsOf, whole } from "./protobuf";

/** Fields of ONNX's messages. */
const GRAPH = 7;
const NODE = 1;
const INITIALIZER = 5;
const [INPUT, OPERATOR, DOMAIN] = [1, 4, 7];
const [DATA_TYPE, NAME, RAW] = [2, 8, 9];

const FLOAT = 1;
const ZERO = "edgefl.zero";
const RELU = "Relu";
const MAX = utf8("Max");

/** The model with each Relu as Max(x, 0) of float32; null where it has none. */
export function faster(model: Uint8Array): Uint8Array | null {
  let changed = false;
  const parts = fieldsOf(model).map((each) => {
    if (each.number !== GRAPH || each.content === null) return each.whole;
    const nodes = fieldsOf(each.content);
    const told = nodes.map((part) => (part.number === NODE ? maxOf(part) : null));
    if (told.every((part) => part === null)) return each.whole;
    changed = true;
    return field(GRAPH, joined([...nodes.map((part, place) => told[place] ?? part.whole), field(INITIALIZER, zero())]));
  });
  return changed ? joined(parts) : null;
}

/** The node as Max; null for any other than Relu of ONNX's own domain. */
function maxOf(node: Field): Uint8Array | null {
  const fields = fieldsOf(node.content!);
  const text = (number: number) => new TextDecoder().decode(fields.find((each) => each.number === number)?.content ?? new Uint8Array());
  if (text(OPERATOR) !== RELU || text(DOMAIN)) return null;
  const renamed = fields.map((each) => (each.number === OPERATOR ? field(OPERATOR, MAX) : each.whole));
  return field(NODE, joined([...renamed, field(INPUT, utf8(ZERO))]));
}

function zero(): Uint8Array {
  return joined([whole(DATA_TYPE, FLOAT), field(NAME, utf8(ZERO)), field(RAW, new Uint8Array(4))]);
}
