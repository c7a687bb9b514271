/** Chromium, without a window, with its data below the device's store. */
import { spawn } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const PLACES = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome", "/usr/bin/google-chrome-stable"];
const END_MS = 3000;

/** EDGEFL_CHROMIUM_FLAGS has more, such as a graphics card that is made up: --use-webgpu-adapter=swiftshader. */
function flagsOf(folder, port, engine) {
  return [
    "--headless=new", "--no-sandbox", engine === "webgpu" ? "--enable-unsafe-webgpu" : "--disable-gpu",
    ...(process.env.EDGEFL_CHROMIUM_FLAGS ?? "").split(" ").filter(Boolean), "--disable-quic", "--no-first-run", "--no-default-browser-check",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-default-apps", "--disable-dev-shm-usage", "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding", "--metrics-recording-only", "--mute-audio", "--no-proxy-server",
    // The store belongs to a page's origin, so that has to be the same at every start, whatever the port is.
    `--host-resolver-rules=MAP edgefl.localhost 127.0.0.1:${port}`, `--user-data-dir=${folder}`,
  ];
}

export async function start(options, port, url) {
  const command = process.env.EDGEFL_CHROMIUM ?? PLACES.find((place) => existsSync(place));
  if (!command) throw new Error("no Chromium is installed (Debian: apt-get install chromium), or name it in EDGEFL_CHROMIUM");
  const folder = join(options.store, "browser");
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  await endEarlier(options.store, folder);
  const child = spawn(command, [...flagsOf(folder, port, options.engine), url], { stdio: ["ignore", "ignore", process.env.EDGEFL_CHROMIUM_LOG ? "inherit" : "ignore"] });
  if (child.pid) writeFileSync(pidFile(options.store), String(child.pid));
  return {
    stopping: false,
    onExit: (listener) => child.on("exit", (code, signal) => listener(code ?? signal)).on("error", (error) => listener(error.message)),
    async stop() {
      this.stopping = true;
      child.kill("SIGTERM");
      await until(() => child.exitCode !== null || child.signalCode !== null, END_MS);
      child.kill("SIGKILL");
      rmSync(pidFile(options.store), { force: true });
    },
  };
}

const pidFile = (store) => join(store, "browser.pid");

/** One whose launcher was killed still has the folder: it would be told to open another window, and this one would end. */
async function endEarlier(store, folder) {
  const pid = Number(read(pidFile(store)));
  if (pid && read(`/proc/${pid}/cmdline`).includes(folder)) {
    try {
      process.kill(pid, "SIGKILL");
    } catch {
      // it is gone by now
    }
    await until(() => !read(`/proc/${pid}/cmdline`).includes(folder), END_MS);
  }
  for (const name of ["SingletonLock", "SingletonSocket", "SingletonCookie"]) rmSync(join(folder, name), { force: true });
}

function read(path) {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return "";
  }
}

async function until(holds, ms) {
  const end = Date.now() + ms;
  while (!holds() && Date.now() < end) await new Promise((resolve) => setTimeout(resolve, 20));
}
