/** Builds `dist/`: `worker.js` (the agent), `ort/` (onnxruntime's WebAssembly), and the page where there is one. */
import { cpSync, existsSync, mkdirSync } from "node:fs";
import { resolve } from "node:path";
import { defineConfig } from "vite";

const here = import.meta.dirname ?? new URL(".", import.meta.url).pathname;
const runtime = resolve(here, "node_modules/onnxruntime-web/dist");
const pages = ["index.html", "bench.html"].filter((name) => existsSync(resolve(here, name)));

let ort = "";
/** What onnxruntime loads by itself at run time. */
const RUNTIME_FILES = ["ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"];

export default defineConfig({
  base: "./",
  build: {
    target: "es2022",
    modulePreload: false,
    rollupOptions: {
      input: [resolve(here, "src/worker/worker.ts"), ...pages.map((name) => resolve(here, name))],
      output: { entryFileNames: "[name].js", chunkFileNames: "chunks/[name]-[hash].js" },
    },
  },
  plugins: [
    {
      name: "onnxruntime",
      apply: "build",
      configResolved(config) {
        ort = resolve(here, config.build.outDir, "ort");
      },
      closeBundle() {
        mkdirSync(ort, { recursive: true });
        for (const file of RUNTIME_FILES) cpSync(resolve(runtime, file), resolve(ort, file));
      },
    },
  ],
  test: { include: ["tests/**/*.test.ts"] },
} as Parameters<typeof defineConfig>[0]);
