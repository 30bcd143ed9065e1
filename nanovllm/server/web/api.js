/** Talking to the server: the key, errors in words, streams line by line. */

import { byId, setText } from "./dom.js";

const KEY = "nanovllm.key";
let question = null; // the promise of the open key dialog: requests that are refused meanwhile wait for the same answer

/** What the server, or the way to it, has to say. `status` is 0 if it could not be reached. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask the server; a body is sent as JSON. The answer is a response with a good status.
 *
 * Without the right key the user is asked for it, as often as needed.
 * Throws ServerError with the server's own words, and AbortError when `signal` says so. */
export async function ask(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY) ?? "";
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const options = { headers, signal, cache: "no-store" };
    if (body) {
      headers["Content-Type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(path, options).catch((error) => {
      throw explained(error);
    });
    if (response.ok) return response;
    if (response.status !== 401) throw new ServerError(response.status, await reason(response));
    await newKey(key);
  }
}

/** The whole lines of a response as they come, in batches. Throws as `ask` does. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      if (parts.length) yield parts;
    }
    if (rest) yield [rest];
  } catch (error) {
    throw explained(error);
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already, which has been told
  }
}

/** The chunks of an OpenAI stream. Throws as `ask` does, and what the server reports half-way. */
export async function* chunks(response) {
  let ended = false;
  for await (const batch of lines(response)) {
    for (const line of batch) {
      if (line === "data: [DONE]") ended = true;
      else if (line.startsWith("data: ")) {
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new ServerError(500, sentence(chunk.error.message));
        yield chunk;
      }
    }
  }
  if (!ended) throw new ServerError(0, "The connection was lost before the answer was complete.");
}

function explained(error) {
  if (error.name === "AbortError" || error instanceof ServerError) return error;
  return new ServerError(0, "The server cannot be reached. Is nanovllm still running?");
}

async function reason(response) {
  const text = await response.text();
  try {
    return sentence(JSON.parse(text).error.message);
  } catch {
    return `The server answered ${response.status} ${response.statusText}`; // a proxy's own page, for example
  }
}

/** As a sentence; the name of a field keeps its small letters. */
function sentence(text) {
  const first = /^\w*_/.test(text) ? text.charAt(0) : text.charAt(0).toUpperCase();
  return first + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** Ask for another key than the one that was used, unless the user has given it meanwhile. */
async function newKey(used) {
  if ((sessionStorage.getItem(KEY) ?? "") !== used) return;
  question ??= keyDialog(used !== "").finally(() => (question = null));
  sessionStorage.setItem(KEY, await question);
}

function keyDialog(refused) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  const say = (text) => {
    setText(byId("key-error"), text);
    field.setAttribute("aria-invalid", String(text !== ""));
  };
  say(refused ? "The server does not accept this key." : "");
  field.value = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) return say("A key has only ASCII letters, digits and signs, and no spaces.");
      dialog.close("given");
      resolve(key);
    };
    byId("key-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => {
      if (dialog.returnValue !== "given") reject(new ServerError(401, "This server needs an API key."));
      dialog.returnValue = "";
    };
  });
}
