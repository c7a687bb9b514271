/** Prints the licences of all packages that the built page holds: `node licenses.mjs`. */
import { execFileSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const listed = execFileSync("npm", ["ls", "--omit=dev", "--all", "--parseable"], { cwd: import.meta.dirname, encoding: "utf8" });
const folders = [...new Set(listed.trim().split("\n").slice(1))].filter((folder) => existsSync(join(folder, "package.json")));

for (const folder of folders.sort()) {
  const { name, version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((each) => /^licen[sc]e/i.test(each));
  const text = file ? readFileSync(join(folder, file), "utf8").trim() : "(the package has no licence file)";
  process.stdout.write(`${name} ${version}: ${license}\n\n${text}\n\n${"-".repeat(80)}\n`);
}
