// What the race shows: while it runs, and at its end.

import { entry } from "./passview.js";
import { methods, order, warm } from "./settings.js";
import { count } from "./words.js";

const KINDS = {
  plain: "nothing guessed: one token, one pass",
  bonus: "the model's own choice behind a guess",
  given: "stood there already",
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
    `guessed by ${source.replaceAll("+", " and ")}, and it held`,
  ]);
  for (const [kind, meaning] of Object.entries(KINDS)) {
    if (all.some((token) => token.kind === kind)) items.push([`swatch ${kind}`, meaning]);
  }
  if (panes.some((pane) => pane.masked)) items.push(["swatch steps", "filled in, from the first step to the last"]);
  const key = JSON.stringify(items);
  if ($("legend").dataset.key === key) return;
  $("legend").dataset.key = key;
  $("legend").replaceChildren(...items.map(([css, text]) => entry(css, text)));
}

function figure(name, value, words) {
  $(name).textContent = value;
  $(`${name}-text`).textContent = words;
}

function soFar([left, right]) {
  const mean = (pane) => pane.emitted / pane.counted;
  const ratio = mean(right) / mean(left);
  figure("ratio", Number.isFinite(ratio) ? `${ratio.toFixed(2)}×` : "…", `the tokens per pass with ${right.label}, so far`);
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

/** What the race has shown: in a word, and in sentences; the figures say it larger. */
export function verdict(panes, seed) {
  const [left, right] = panes;
  const same = firstDifference(left.tokens, right.tokens);
  if (panes.some((pane) => pane.state !== "done")) {
    const both = Math.min(left.tokens.length, right.tokens.length);
    const equal = both && same === both;
    $("same").textContent = equal ? `The texts are equal as far as both came: ${count(both, "token")}.` : "";
    return ["Stopped.", $("same").textContent];
  }
  const [more, passes] = above(left.counted / right.counted);
  const compared = left.counted === right.counted ? "as many" : more ? "fewer" : "more";
  figure("ratio", passes, `${compared} passes with ${right.label}: ${right.counted} instead of ${left.counted}`);
  const [sooner, seconds] = above(left.seconds / right.seconds);
  const shared = order() === "together" ? ", sharing the machine" : "";
  const times = `${right.seconds.toFixed(1)} s against ${left.seconds.toFixed(1)} s${shared}`;
  figure("speed", seconds, `${sooner ? "sooner" : "later"} done: ${times}`);
  equality(panes, same, seed);
  return ["Finished.", `${passes} ${$("ratio-text").textContent}. ${$("same").textContent}`];
}

function above(ratio) {
  return [ratio >= 1, `${(ratio >= 1 ? ratio : 1 / ratio).toFixed(2)}×`];
}

function equality(panes, same, seed) {
  const [left, right] = panes;
  const equal = left.content === right.content && left.tokens.length === right.tokens.length && same === left.tokens.length;
  const seeded = warm() ? `, seed ${seed}` : "";
  $("same").dataset.equal = String(equal);
  if (equal) {
    $("same").textContent = `Both texts are equal, token for token: ${count(left.tokens.length, "token")}${seeded}.`;
    return;
  }
  for (const pane of panes) pane.differ(same);
  const exact = panes.every((pane) => methods.get(pane.label.split(":")[0])?.exactness === "exact");
  let reason = `${right.label} does not promise the text of ${left.label}.`;
  if (panes.some((pane) => pane.masked)) reason = "Masks were filled in: that is a text of its own.";
  else if (exact) reason = "Both promise the same text, so this is a fault: please report it, with the link of this page.";
  $("same").textContent = `The texts differ from token ${same + 1} on${seeded}. ${reason}`;
}
