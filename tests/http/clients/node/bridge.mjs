// One call of OpenAI's client for each line of standard input, one line of standard output for its outcome:
// {"url", "key", "call": "chat.completions.create", "arguments": [...], "take": number of chunks before the stream is left, or null}
// becomes {"value"} (or {"chunks"} of a stream), or {"error"} with the name of the client's own class, and the chunks before it.
import { createInterface } from "node:readline";
import OpenAI from "openai";

const clients = new Map();

function clientFor(url, key) {
  const name = JSON.stringify([url, key]);
  if (!clients.has(name)) clients.set(name, new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 60_000 }));
  return clients.get(name);
}

function described(error) {
  const { status, code, param, type, message } = error;
  return { name: error.constructor.name, status, code, param, type, message, request_id: error.requestID };
}

async function outcome({ url, key, call, arguments: args, take }) {
  const path = call.split(".");
  const method = path.pop();
  const owner = path.reduce((value, name) => value[name], clientFor(url, key));
  const chunks = [];
  try {
    const value = await owner[method](...args);
    if (method === "stream") {
      const events = [];
      for await (const event of value) events.push(event.type ?? event.object);
      const final = value.finalChatCompletion ? await value.finalChatCompletion() : await value.finalResponse();
      return { value: final, chunks: events };
    }
    if (typeof value[Symbol.asyncIterator] !== "function") return { value, request_id: value._request_id };
    for await (const chunk of value) {
      chunks.push(chunk);
      if (chunks.length === take) break;
    }
    return { chunks };
  } catch (error) {
    return { error: described(error), chunks };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(JSON.stringify(await outcome(JSON.parse(line))) + "\n");
}
