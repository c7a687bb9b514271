/** Where the ops of a graph ran, by onnxruntime's profile. */

/** Ops by the provider that ran them. */
export type Placement = Map<string, Map<string, number>>;

/** Of the lines of a profile, each an event of JSON with a comma behind it. */
export function placementIn(lines: readonly string[]): Placement {
  const found: Placement = new Map();
  for (const line of lines.flatMap((each) => each.split("\n"))) {
    const event = eventIn(line);
    const { provider, op_name: op } = event?.args ?? {};
    if (event?.cat !== "Node" || !event.name?.endsWith("_kernel_time") || !provider || !op) continue;
    const ops = found.get(provider) ?? new Map<string, number>();
    ops.set(op, (ops.get(op) ?? 0) + 1);
    found.set(provider, ops);
  }
  return found;
}

interface ProfileEvent {
  cat?: string;
  name?: string;
  args?: { provider?: string; op_name?: string };
}

function eventIn(line: string): ProfileEvent | null {
  const text = line.trim().replace(/,$/, "");
  if (!text.startsWith("{")) return null;
  try {
    return JSON.parse(text) as ProfileEvent;
  } catch {
    return null;
  }
}

/** In one line, such as: graph 'step': 120 ops on WebGpu, 3 on CPU (Gather, 2 Where). */
export function placementText(graph: string, placement: Placement): string {
  if (!placement.size) return `graph '${graph}': onnxruntime does not say where its ops run`;
  const parts = [...placement].map(([provider, ops]) => {
    const count = [...ops.values()].reduce((sum, each) => sum + each, 0);
    const listed = [...ops].map(([op, times]) => (times > 1 ? `${times} ${op}` : op)).join(", ");
    const name = provider.replace(/ExecutionProvider$/, "");
    return `${count} op${count > 1 ? "s" : ""} on ${name}${/cpu/i.test(name) ? ` (${listed})` : ""}`;
  });
  return `graph '${graph}': ${parts.join(", ")}`;
}
