// The page: the race, the state of the server, and the buttons.

import { Palette, Pane } from "./pane.js";
import { PassView } from "./passview.js";
import { frame, verdict } from "./score.js";
import { describe, digest, fillMethods, methods, order, readLink, seed, showExamples, sides as racers, writeLink } from "./settings.js";
import { ask, chat, keep } from "./stream.js";

const RETRY = 3000;
const FRAME = 70;
const THEME = "outstride-theme";

const $ = (id) => document.getElementById(id);
const view = new PassView($("pass"));
let running = null;
let panes = [];
let seedUsed = null;
let again = null;

// --- the race -----------------------------------------------------------------------------------

async function run(pane, body, signal) {
  pane.begin();
  try {
    for await (const chunk of chat(body, signal)) pane.add(chunk);
    pane.set("done");
  } catch (error) {
    pane.set(signal.aborted ? "stopped" : "failed");
    if (signal.aborted) return;
    if (!("status" in error)) throw error; // a fault of this page: show it in the console
    pane.say(error.message);
    pane.problem = error;
  } finally {
    pane.dirty = true;
  }
}

async function race() {
  if (running) return;
  clear();
  running = new AbortController();
  const { signal } = running;
  seedUsed = seed();
  writeLink(seedUsed);
  const palette = new Palette();
  const sides = racers(seedUsed);
  panes = sides.map(({ label }) => new Pane($("pane"), palette, { label, onPass, onHover }));
  $("panes").replaceChildren(...panes.map((pane) => pane.element));
  $("result").hidden = false;
  const [left, right] = sides.map((side) => side.label);
  say(order() === "turns" ? `Racing: ${left} first, then ${right}.` : `Racing: ${left} against ${right}.`);
  busy(true);
  const ticking = tick(palette);
  try {
    if (order() === "turns") {
      for (const [index, pane] of panes.entries()) {
        if (signal.aborted || panes[0].problem) pane.set("stopped");
        else await run(pane, sides[index].body, signal);
      }
    } else {
      await Promise.all(panes.map((pane, index) => run(pane, sides[index].body, signal)));
    }
  } finally {
    running = null;
    await ticking;
    busy(false);
  }
  const problem = panes.find((pane) => pane.problem)?.problem;
  if (!problem) return say(...verdict(panes, seedUsed));
  alarm(problem);
  verdict(panes, seedUsed);
  return say("The race could not be finished.");
}

/** Draws every FRAME milliseconds, independent of the rate of chunks, and once more at the end. */
async function tick(palette) {
  for (let last = false; ; last = !running) {
    frame(panes, palette, !last);
    if (last) return;
    await new Promise((done) => setTimeout(done, FRAME));
  }
}

function onPass(pane, index) {
  view.open(pane, index);
}

function onHover(pane, number) {
  if (pane.lit === number) return;
  pane.lit = number;
  pane.light(number);
}

// --- messages and states ------------------------------------------------------------------------

function busy(now) {
  const held = document.activeElement;
  $("race").disabled = now;
  $("stop").hidden = !now;
  if (now) {
    if (held === $("race")) $("stop").focus({ preventScroll: true });
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    $("bar").scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
  } else if (held === $("stop")) $("race").focus({ preventScroll: true });
}

/** Shows a message; `more` is for screen readers, which do not see the figures. */
function say(text, more = "") {
  const unseen = document.createElement("span");
  unseen.className = "unseen";
  unseen.textContent = ` ${more}`;
  $("status").replaceChildren(text, more ? unseen : "");
}

function warn(text) {
  $("alert").textContent = text;
  $("alert").hidden = !text;
}

function clear() {
  warn("");
  $("key-form").hidden = true;
}

/** Shows a problem; where a key is missing, asks for it. */
function alarm(problem, retry = race) {
  warn(problem.message);
  $("alert").scrollIntoView({ block: "nearest" });
  if (problem.status === 401) {
    again = retry;
    $("key-form").hidden = false;
    $("key").focus();
  }
  if (problem.status === 0) {
    server("off", "not reachable");
    setTimeout(connect, RETRY);
  }
}

function server(state, text, title = "") {
  $("server").dataset.state = state;
  $("server-text").textContent = text;
  $("server").title = title;
}

/** Asks for the methods and the model; again until the model is loaded. */
async function connect() {
  try {
    const [list, models] = await Promise.all([ask("/v1/methods"), ask("/v1/models")]);
    const back = $("server").dataset.state === "off";
    if (!methods.size) {
      fillMethods(list.data, warn);
      readLink();
    }
    const model = models.data[0];
    if (!model.operations) {
      server("wait", `${model.id} is being loaded …`);
      setTimeout(connect, RETRY);
      return;
    }
    server("on", `${model.id} · ${model.operations}`, `system_fingerprint ${model.system_fingerprint}`);
    if (back) clear();
  } catch (error) {
    server("off", error.status === 401 ? "needs a key" : "not reachable");
    if (error.status === 401) alarm(error, connect);
    else if (!methods.size) warn(error.message);
    if (error.status !== 401) setTimeout(connect, RETRY);
  }
}

function theme(value) {
  document.documentElement.dataset.theme = value;
  $("theme").value = value;
}

async function share() {
  writeLink(seedUsed);
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is in the clipboard. It holds the prompt and all settings, and no key.");
  } catch {
    say("The address of this page is the link now. It holds the prompt and all settings, and no key.");
  }
}

function listen() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    race();
  });
  $("form").addEventListener("input", digest);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });
  $("method").addEventListener("change", () => describe());
  $("stop").addEventListener("click", () => running?.abort());
  $("share").addEventListener("click", share);
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keep($("key").value);
    $("key").value = "";
    clear();
    if (again !== connect) connect();
    again();
  });
  $("theme").addEventListener("change", () => {
    localStorage.setItem(THEME, $("theme").value);
    theme($("theme").value);
  });
  addEventListener("hashchange", readLink);
  addEventListener("resize", () => {
    for (const pane of panes) pane.dirty = true;
    if (panes.length) frame(panes, panes[0].palette, running);
  });
}

theme(localStorage.getItem(THEME) ?? "auto");
showExamples();
listen();
readLink();
connect();
