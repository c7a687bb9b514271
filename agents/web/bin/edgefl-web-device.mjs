#!/usr/bin/env node
/** A device in a browser of this machine, in place of `edgefl device`: events as JSON lines, the same options. */
import { start } from "./device/browser.mjs";
import { readOptions, UsageError } from "./device/options.mjs";
import { serve } from "./device/serve.mjs";

const GRACE_MS = 4500;
const WATCH_MS = 1000;

function say(asJson, event) {
  const { event: name, text, details } = event;
  const line = asJson ? JSON.stringify({ event: name, text, details }) : `${name.padEnd(9)} ${text}`;
  process.stdout.write(`${line}\n`);
}

async function main() {
  const options = readOptions(process.argv.slice(2), process.env);
  const server = await serve(options);
  let browser = await start(options, server.port, server.path);
  let leaving = false;
  let end = () => undefined;
  const ended = new Promise((resolve) => (end = resolve));
  server.onMessage((message) => {
    if (message.type === "event") say(options.json, message);
    else if (message.type === "ended") end(message);
  });
  const watch = () =>
    browser.onExit((code) => browser.stopping || end({ error: leaving ? "" : `the browser ended (${code}): is there memory for it?`, code: leaving ? 0 : 1 }));
  watch();
  const again = async () => {
    await browser.stop();
    browser = await start(options, server.port, server.path);
    watch();
  };
  server.onLost(() => leaving || again().catch((error) => end({ error: error.message, code: 1 })));
  const leave = () => {
    if (leaving) return;
    leaving = true;
    server.send({ type: "stop" });
    setTimeout(() => end({ error: "", code: 0 }), GRACE_MS).unref();
  };
  for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, leave);
  process.on("SIGUSR2", () => server.send({ type: "reload" })); // as a person may, at any time
  const parent = Number(process.env.EDGEFL_PARENT ?? 0);
  if (parent) setInterval(() => isAlive(parent) || leave(), WATCH_MS).unref();
  const last = await ended;
  if (last.error) process.stderr.write(`error: ${last.error}\n`);
  await browser.stop();
  process.exit(last.code ?? (last.error ? 1 : 0));
}

function isAlive(pid) {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return error.code === "EPERM";
  }
}

main().catch((error) => {
  process.stderr.write(`error: ${error.message}\n`);
  process.exit(error instanceof UsageError ? 2 : 1);
});
