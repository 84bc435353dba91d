// Error messages that say what to do, and plurals.

export class Problem extends Error {
  constructor(message, { status = 0 } = {}) {
    super(message);
    this.status = status; // 0: no answer, or not a whole one
  }
}

export const UNREACHABLE =
  "The server does not answer. Check that “outstride serve” is still running and that this page has its address, then try again.";
export const BROKEN =
  "The connection broke off in the middle of the answer. What has arrived stays; if the server has stopped, start it and race again.";

/** The problem that an error response stands for. */
export async function refusal(response) {
  let message = "";
  try {
    message = (await response.json()).error?.message ?? "";
  } catch {
    // Not the API's answer: the status has to do.
  }
  return explain(response.status, message, response.headers.get("retry-after"));
}

function explain(status, message, wait) {
  const options = { status };
  if (status === 401) return new Problem("This server needs an API key. Enter it below.", options);
  if (status === 429) {
    const when = wait ? `in ${count(Number(wait), "second")}` : "in a moment";
    return new Problem(`The server is busy: its queue is full. Try again ${when}.`, options);
  }
  if (status === 408) return new Problem(`The server gave up: ${message || "the deadline passed"}.`, options);
  if (status === 503) return new Problem(`The model is not ready. ${sentence(message)}`, options);
  if (status >= 400 && status < 500) return new Problem(`The server refused this: ${sentence(message)}`, options);
  return new Problem(`The server failed with status ${status}. ${sentence(message)}`, options);
}

function sentence(text) {
  if (!text) return "It gave no reason.";
  return /[.!?…]$/.test(text) ? text : `${text}.`;
}

/** “1 token”, “2 tokens”. */
export function count(number, noun) {
  const plural = noun.endsWith("s") ? `${noun}es` : `${noun}s`;
  return `${number} ${number === 1 ? noun : plural}`;
}
