/** What this agent calls itself to the server. */
import { version } from "../../package.json";

export const AGENT = `edgefl-web/${version}`;
