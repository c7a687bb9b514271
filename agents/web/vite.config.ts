/** Builds `dist/`: `worker.js` (the agent), `ort/` (onnxruntime's WebAssembly), and the page where there is one. */
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { gzipSync } from "node:zlib";
import { defaultClientConditions, defineConfig } from "vite";

const here = import.meta.dirname ?? new URL(".", import.meta.url).pathname;
const runtime = resolve(here, "node_modules/onnxruntime-web/dist");
const pages = ["index.html", "bench.html"].filter((name) => existsSync(resolve(here, name)));

/** What onnxruntime loads by itself at run time; WebGPU's 27 MB by `vite build --mode webgpu` alone. */
const RUNTIME_FILES = ["ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"];
const WEBGPU_FILES = RUNTIME_FILES.map((file) => file.replace(".", ".asyncify."));

/** Above so many bytes a file is kept as a browser gets it, NAME.gz: every browser takes gzip, over http too. */
const LARGE_BYTES = 1 << 20;

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
        for (const file of files) {
          const content = readFileSync(resolve(runtime, file));
          if (content.length > LARGE_BYTES) writeFileSync(resolve(ort, `${file}.gz`), gzipSync(content, { level: 9 }));
          else writeFileSync(resolve(ort, file), content);
        }
      },
    },
  ],
  test: { include: ["tests/**/*.test.ts"], isolate: false },
} as Parameters<typeof defineConfig>[0]);
