// What went wrong, in words that say what to do.

export class Problem extends Error {
  constructor(message, { status = 0 } = {}) {
    super(message);
    this.status = status; // 0: nobody answered, or not to the end
  }
}

export const UNREACHABLE =
  "The server does not answer. Check that “outstride serve” is still running and that this page has its address, then try again.";
export const BROKEN =
  "The connection broke off in the middle of the answer. What has arrived stays; if the server has stopped, start it and race again.";

/** What a response that is no success means. */
export async function refusal(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch {
    // Whoever answered, it was not the API: its status has to do.
  }
  return explain(response.status, said, response.headers.get("retry-after"));
}

function explain(status, said, wait) {
  const options = { status };
  if (status === 401) return new Problem("This server wants an API key. Enter it below.", options);
  if (status === 429) {
    const when = wait ? `in ${count(Number(wait), "second")}` : "in a moment";
    return new Problem(`The server is busy: its queue is full. Try again ${when}.`, options);
  }
  if (status === 408) return new Problem(`The server gave up: ${said || "the deadline passed"}.`, options);
  if (status === 503) return new Problem(`The model is not ready. ${sentence(said)}`, options);
  if (status >= 400 && status < 500) return new Problem(`The server refused this: ${sentence(said)}`, options);
  return new Problem(`The server failed with status ${status}. ${sentence(said)}`, options);
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
