/** Builds `dist/`: `worker.js` (the agent), `ort/` (onnxruntime's WebAssembly), and the page where there is one. */
import { cpSync, existsSync, mkdirSync } from "node:fs";
import { resolve } from "node:path";
import { defaultClientConditions, defineConfig } from "vite";

const here = import.meta.dirname ?? new URL(".", import.meta.url).pathname;
const runtime = resolve(here, "node_modules/onnxruntime-web/dist");
const pages = ["index.html", "bench.html"].filter((name) => existsSync(resolve(here, name)));

/** What onnxruntime loads by itself at run time; WebGPU's 27 MB by `vite build --mode webgpu` alone. */
const RUNTIME_FILES = ["ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"];
const WEBGPU_FILES = RUNTIME_FILES.map((file) => file.replace(".", ".asyncify."));

let ort = "";
let files: string[] = [];

export default defineConfig({
  base: "./",
  // Else its WebAssembly would be packed in beside that in ort/.
  resolve: { conditions: ["onnxruntime-web-use-extern-wasm", ...defaultClientConditions] },
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
        files = config.mode === "webgpu" ? [...RUNTIME_FILES, ...WEBGPU_FILES] : RUNTIME_FILES;
      },
      closeBundle() {
        mkdirSync(ort, { recursive: true });
        for (const file of files) cpSync(resolve(runtime, file), resolve(ort, file));
      },
    },
  ],
  test: { include: ["tests/**/*.test.ts"] },
} as Parameters<typeof defineConfig>[0]);
