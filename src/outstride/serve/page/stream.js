// Requests to the server, and answers that come as a stream of events.

import { BROKEN, Problem, UNREACHABLE, refusal } from "./messages.js";

const KEY = "outstride-key";

export function keep(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(UNREACHABLE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The JSON of a GET. */
export async function ask(path) {
  const response = await send(path, { headers: headers(), cache: "no-store" });
  return response.json();
}

/** The chunks of a chat completion. */
export async function* chat(body, signal) {
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem(`The server ended this answer: ${chunk.error.message}`, { status: 500 });
    yield chunk;
  }
  throw new Problem(BROKEN);
}

/** The data of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem(BROKEN);
    }
    if (part.done) return;
    rest += part.value;
    const whole = rest.split("\n\n");
    rest = whole.pop();
    for (const event of whole) if (event.startsWith("data: ")) yield event.slice(6);
  }
}
