/** What the page knows of its agent: a pure function of what the worker said. */
import type { FromWorker, ProgressEvent } from "../worker/messages";

export type Phase = "starting" | "waiting" | "training" | "paused" | "done" | "ended";

export interface Line {
  at: number;
  text: string;
}

export interface PageState {
  phase: Phase;
  link: "" | "up" | "down";
  doing: string;
  tier: string;
  round: number;
  accepted: number;
  progress: ProgressEvent | null;
  /** Bytes fetched in the rounds before this one: a round's progress counts its own. What was sent is counted from the start. */
  downBefore: number;
  /** Bytes sent since the start. */
  sent: number;
  /** Mean loss of each report, oldest first: one point a progress event. */
  losses: number[];
  lines: Line[];
  error: string;
}

export const START: PageState = {
  phase: "starting",
  link: "",
  doing: "Starting",
  tier: "",
  round: 0,
  accepted: 0,
  progress: null,
  downBefore: 0,
  sent: 0,
  losses: [],
  lines: [],
  error: "",
};

const MOST_LINES = 60;
const MOST_POINTS = 400;

export function after(state: PageState, message: FromWorker, now: number): PageState {
  if (message.type === "progress") return progressed(state, message);
  if (message.type === "ended") return ended(state, message.error, now);
  const told = { ...state, lines: [{ at: now, text: message.text || message.event }, ...state.lines].slice(0, MOST_LINES) };
  switch (message.event) {
    case "online":
      return { ...told, link: "up", phase: state.phase === "starting" ? "waiting" : state.phase, doing: waiting(state) };
    case "offline":
      return { ...told, link: "down" };
    case "tier":
      return { ...told, tier: String(message.details["tier"] ?? state.tier) };
    case "round":
      return begun(told, Number(message.details["round"] ?? state.round));
    case "accepted":
      return accepted(told);
    case "rejected":
    case "declined":
    case "failed":
    case "aborted":
      return { ...told, phase: state.phase === "training" ? "waiting" : state.phase, doing: message.text };
    case "paused":
      return { ...told, phase: "paused", doing: `Paused: ${message.text}` };
    case "resumed":
      return { ...told, phase: state.progress ? "training" : "waiting", doing: "Going on" };
    case "done":
      return { ...told, phase: "done", doing: "The training is done. Thank you." };
    case "busy":
      return { ...told, doing: message.text };
    default:
      return told;
  }
}

/** The word on the last round's update may come after that the training is over. */
function accepted(state: PageState): PageState {
  const counted = { ...state, accepted: state.accepted + 1 };
  return state.phase === "done" ? counted : { ...counted, phase: "waiting", doing: "Update accepted; waiting for the next round" };
}

function waiting(state: PageState): string {
  return state.phase === "starting" ? "Joined; waiting for a round" : state.doing;
}

function begun(state: PageState, round: number): PageState {
  const fetched = round === state.round ? 0 : (state.progress?.downBytes ?? 0);
  return {
    ...state,
    phase: "training",
    round,
    progress: round === state.round ? state.progress : null,
    downBefore: state.downBefore + fetched,
    sent: Math.max(state.sent, state.progress?.upBytes ?? 0),
    doing: `Round ${round}: fetching`,
  };
}

function progressed(state: PageState, message: ProgressEvent): PageState {
  const moved = message.round === state.round ? state : begun(state, message.round);
  const losses = Number.isFinite(message.loss) ? [...state.losses, message.loss].slice(-MOST_POINTS) : state.losses;
  const phase = state.phase === "paused" ? "paused" : "training";
  const doing = phase === "paused" ? state.doing : `Round ${message.round}: ${stage(message)}`;
  return { ...moved, phase, doing, progress: message, tier: message.tier || state.tier, losses };
}

function stage(message: ProgressEvent): string {
  if (message.stage.startsWith("forward")) return "running the frozen part over the data";
  if (message.stage !== "train") return message.stage;
  return `step ${message.step} of ${message.steps}`;
}

function ended(state: PageState, error: string, now: number): PageState {
  const lines = error ? [{ at: now, text: error }, ...state.lines] : state.lines;
  if (!error && state.phase === "done") return state;
  return { ...state, phase: "ended", link: "", doing: error ? "It ended" : "You left", error, lines };
}
