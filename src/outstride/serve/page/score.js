// The result of the race: while it runs, and at its end.

import { entry } from "./passview.js";
import { methods, order, sampled } from "./settings.js";
import { count } from "./messages.js";

const KINDS = {
  plain: "no draft: one token, one pass",
  bonus: "bonus token: the model's own, after the draft",
  given: "given",
};

const $ = (id) => document.getElementById(id);

/** Draws both panes, the legend, and the figures so far. */
export function frame(panes, palette, running) {
  const passes = Math.max(...panes.map((pane) => pane.passes.length));
  const tokens = Math.max(...panes.flatMap((pane) => pane.passes.map((pass) => pass.tokens.length)), 1);
  for (const pane of panes) pane.show({ passes, tokens });
  legend(panes, palette);
  if (running) soFar(panes);
}

function legend(panes, palette) {
  const all = panes.flatMap((pane) => pane.tokens);
  const items = [...palette.sources].map(([source, index]) => [
    `swatch d${index}`,
    `drafted by ${source.replaceAll("+", " and ")}, accepted`,
  ]);
  for (const [kind, meaning] of Object.entries(KINDS)) {
    if (all.some((token) => token.kind === kind)) items.push([`swatch ${kind}`, meaning]);
  }
  if (panes.some((pane) => pane.masked)) items.push(["swatch steps", "unmasked, from the first step to the last"]);
  const key = JSON.stringify(items);
  if ($("legend").dataset.key === key) return;
  $("legend").dataset.key = key;
  $("legend").replaceChildren(...items.map(([css, text]) => entry(css, text)));
}

/** Shows a figure; one with the result "loss" is printed small. */
function figure(name, value, text, result = "win") {
  $(name).textContent = value;
  $(`${name}-text`).textContent = text;
  $(`${name}-figure`).dataset.result = result;
}

function soFar([left, right]) {
  const mean = (pane) => pane.emitted / pane.counted;
  const ratio = mean(right) / mean(left);
  figure("ratio", Number.isFinite(ratio) ? `${ratio.toFixed(2)}×` : "…", `tokens per pass with ${right.label} against ${left.label}, so far`, ratio < 1 ? "loss" : "win");
  figure("speed", `${Math.max(left.seconds, right.seconds, 0).toFixed(1)} s`, "since the start");
  const both = Math.min(left.tokens.length, right.tokens.length);
  const same = firstDifference(left.tokens, right.tokens);
  delete $("same").dataset.equal;
  $("same").textContent = both && same === both ? `Equal so far: ${count(both, "token")}.` : "Comparing the texts …";
}

function firstDifference(a, b) {
  const length = Math.min(a.length, b.length);
  for (let i = 0; i < length; i++) if (a[i].token !== b[i].token) return i;
  return length;
}

/** Shows the result; returns it as a short message and as sentences for screen readers. */
export function verdict(panes, seed) {
  const [left, right] = panes;
  const same = firstDifference(left.tokens, right.tokens);
  if (panes.some((pane) => pane.state !== "done")) {
    const both = Math.min(left.tokens.length, right.tokens.length);
    const equal = both && same === both;
    $("same").textContent = equal ? `The texts are equal as far as both came: ${count(both, "token")}.` : "";
    return ["Stopped.", $("same").textContent];
  }
  const passes = compared(left.counted / right.counted, ["fewer", "as many", "more"]);
  figure("ratio", passes.factor, `${passes.word} passes with ${right.label}: ${right.counted} instead of ${left.counted}`, passes.result);
  const speed = compared(left.seconds / right.seconds, ["faster", "as fast", "slower"]);
  const shared = order() === "together" ? ", in one batch" : "";
  const times = `${right.seconds.toFixed(1)} s against ${left.seconds.toFixed(1)} s${shared}`;
  figure("speed", speed.factor, `${speed.word}: ${times}`, speed.result);
  equality(panes, same, seed);
  return ["Finished.", `${passes.factor} ${$("ratio-text").textContent}. ${$("same").textContent}`];
}

/** A ratio as a factor of at least 1, with a word for its direction; above 1 is a win. */
function compared(ratio, [better, equal, worse]) {
  const factor = `${(ratio >= 1 ? ratio : 1 / ratio).toFixed(2)}×`;
  if (factor === "1.00×") return { factor, word: equal, result: "even" };
  return ratio > 1 ? { factor, word: better, result: "win" } : { factor, word: worse, result: "loss" };
}

function equality(panes, same, seed) {
  const [left, right] = panes;
  const equal = left.content === right.content && left.tokens.length === right.tokens.length && same === left.tokens.length;
  const seeded = sampled() ? `, seed ${seed}` : "";
  $("same").dataset.equal = String(equal);
  if (equal) {
    $("same").textContent = `Both texts are equal, token for token: ${count(left.tokens.length, "token")}${seeded}.`;
    return;
  }
  for (const pane of panes) pane.differ(same);
  const exact = panes.every((pane) => methods.get(pane.label.split(":")[0])?.exactness === "exact");
  let reason = `${right.label} is not exact to ${left.label}.`;
  if (panes.some((pane) => pane.masked)) reason = "A masked model unmasks tokens in another order: its text is not that of plain decoding.";
  else if (exact) reason = "Both methods are exact, so this is a fault: please report it, with the link of this page.";
  $("same").textContent = `The texts diverge at token ${same + 1}${seeded}. ${reason}`;
}
