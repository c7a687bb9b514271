/** Runs aedes on a port of this machine: `node aedes.mjs PORT [exact]`. With `exact`, subscriptions with wildcards get no
 * retained messages, as RabbitMQ does it. */
import { createServer } from "node:net";
import { Aedes } from "aedes";

const [port, retained] = process.argv.slice(2);
const broker = await Aedes.createBroker();
if (retained === "exact") {
  const { persistence } = broker;
  const combined = persistence.createRetainedStreamCombi.bind(persistence);
  persistence.createRetainedStreamCombi = (filters) => combined(filters.filter((each) => !/[+#]/.test(each)));
}
createServer(broker.handle).listen(Number(port), "127.0.0.1");
