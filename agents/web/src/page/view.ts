/** Shows a {@link PageState}. Texts of others are set as text, never as markup. */
import { bytes, milliseconds, number } from "./format";
import type { PageState } from "./state";

export function element<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no element ${id}`);
  return found as T;
}

export function show(state: PageState): void {
  const { dataset } = document.body;
  dataset["state"] = state.phase;
  dataset["link"] = state.link;
  element("link").textContent = { "": "not connected", up: "connected", down: "no connection; trying again" }[state.link];
  element("doing").textContent = state.doing;
  document.title = `${state.doing} · edgefl`;
  problem(state.error);
  steps(state);
  tiles(state);
  chart(state.losses);
  log(state);
  const pause = element<HTMLButtonElement>("pause");
  pause.textContent = state.phase === "paused" ? "Go on" : "Pause";
  pause.disabled = state.phase === "done" || state.phase === "ended";
  element("leave").textContent = state.phase === "ended" ? "Join again" : "Leave";
}

export function problem(text: string): void {
  const shown = element("problem");
  shown.hidden = text === "";
  shown.textContent = text;
}

function steps({ progress, phase }: PageState): void {
  const bar = element<HTMLProgressElement>("steps");
  bar.max = Math.max(1, progress?.steps ?? 1);
  bar.value = phase === "done" ? bar.max : (progress?.step ?? 0);
}

function tiles(state: PageState): void {
  const now = state.progress;
  const shown: [string, string, string][] = [
    ["tier", "Tier", state.tier || "–"],
    ["round", "Round", state.round ? String(state.round) : "–"],
    ["loss", "Loss", now ? number(now.loss) : "–"],
    ["step", "A step", now && now.stepMs > 0 ? milliseconds(now.stepMs) : "–"],
    ["memory", "Memory", now && now.peakBytes > 0 ? bytes(now.peakBytes) : "–"],
    ["down", "Fetched", bytes(state.downBefore + (now?.downBytes ?? 0))],
    ["up", "Sent", bytes(Math.max(state.sent, now?.upBytes ?? 0))],
    ["accepted", "Updates accepted", String(state.accepted)],
  ];
  const list = element("tiles");
  for (const [name, title, value] of shown) tile(list, name, title).textContent = value;
}

/** The value of a tile; it is made once, so that a screen reader keeps its place. */
function tile(list: HTMLElement, name: string, title: string): HTMLElement {
  const known = list.querySelector<HTMLElement>(`[data-tile="${name}"] dd`);
  if (known !== null) return known;
  const box = document.createElement("div");
  const [term, value] = [document.createElement("dt"), document.createElement("dd")];
  box.dataset["tile"] = name;
  term.textContent = title;
  box.append(term, value);
  list.append(box);
  return value;
}

const [WIDTH, HEIGHT, MARGIN] = [320, 96, 6];

function chart(losses: number[]): void {
  const figure = element("chart");
  figure.hidden = losses.length < 2;
  if (figure.hidden) return;
  const [least, most] = [Math.min(...losses), Math.max(...losses)];
  const range = most - least || 1;
  const points = losses.map((loss, at) => {
    const x = (WIDTH * at) / (losses.length - 1);
    return `${x.toFixed(1)},${(HEIGHT - MARGIN - ((HEIGHT - 2 * MARGIN) * (loss - least)) / range).toFixed(1)}`;
  });
  const svg = figure.querySelector("svg");
  const line = svg?.querySelector("polyline") ?? svg?.appendChild(document.createElementNS(svg.namespaceURI, "polyline"));
  (line as SVGPolylineElement).setAttribute("points", points.join(" "));
  const caption = figure.querySelector("figcaption");
  if (caption) caption.textContent = `Loss, from ${number(losses[0] ?? NaN)} to ${number(losses.at(-1) ?? NaN)}`;
}

function log({ lines }: PageState): void {
  const rows = lines.map(({ at, text }) => {
    const row = document.createElement("li");
    const when = document.createElement("time");
    when.textContent = new Date(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
    row.append(when, text);
    return row;
  });
  element("log").replaceChildren(...rows);
}
