// The settings of a race: the form, and the link that holds them.

const EXACTNESS = {
  exact: ["Same text as plain", "Exact: the same text, token for token."],
  schedule: ["Masked models: same text as steps", "Exact: the same text as steps, the fixed schedule of a masked model."],
  distribution: ["Same distribution as plain", "Another text than plain, sampled from the same distribution."],
  lossy: ["May change the text", "Lossy: may change the text."],
};
const TYPES = { int: "an integer", float: "a number", bool: "true or false", str: "text" };
const FIELDS = ["prompt", "method", "against", "temperature", "top_p", "seed", "max_tokens"];
const DEFAULTS = { temperature: "0", top_p: "1", seed: "", max_tokens: "160", against: "plain", order: "together" };
const EXAMPLES = {
  Code: "Write a Python class Stack with the methods push, pop, peek, is_empty and size, each with a docstring.",
  "A form": "Write an HTML page with a form that has fields for name, email, phone, street, city and country.",
  "A table": "Write a table in Markdown with the columns Month, Days and Season, and a row for each of the twelve months.",
  Proofreading:
    "Correct the spelling in this text and write it out again: The wether was realy nice yesterday, so we went to the beech. The water was cold, but we went swiming anyway. Afterwards we ate icecream and went home by trane.",
  "A story": "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
};

/** How exact a method is; methods of masked models are exact to `steps`. */
function exactnessOf(method) {
  return method.exactness === "exact" && method.family === "diffusion" ? "schedule" : method.exactness;
}

const $ = (id) => document.getElementById(id);

/** Methods by name, as the server lists them. */
export const methods = new Map();

/** Fills the menus of methods; warns if the server lacks the one that a link names. */
export function fillMethods(list, warn) {
  for (const method of list) methods.set(method.id, method);
  for (const [select, usual] of [[$("method"), "auto"], [$("against"), "plain"]]) {
    const wanted = select.dataset.wanted ?? usual;
    select.replaceChildren(
      ...Object.entries(EXACTNESS).map(([kind, [title]]) => {
        const group = document.createElement("optgroup");
        group.label = title;
        const those = list.filter((method) => exactnessOf(method) === kind);
        group.append(...those.map((method) => new Option(method.id, method.id)));
        return group;
      }),
    );
    select.value = methods.has(wanted) ? wanted : usual;
    if (!methods.has(wanted)) warn(`This server has no method “${wanted}”; ${usual} was chosen instead.`);
  }
}

/** Describes the chosen method and shows its options. */
export function describe(given = {}) {
  const method = methods.get($("method").value);
  if (method) {
    const needs = method.needs.length ? ` Needs ${method.needs.join(" and ")}.` : "";
    $("about").textContent = `${method.summary} ${EXACTNESS[exactnessOf(method)][1]}${needs}`;
    $("about").dataset.exactness = method.exactness;
    $("option-fields").replaceChildren(...method.options.map((option) => optionField(option, given[option.name])));
    $("options").hidden = !method.options.length;
    if (method.options.some((option) => option.required)) $("settings").open = true;
  }
  digest();
}

function optionField(option, value = "") {
  const box = document.createElement("div");
  const name = document.createElement("label");
  const input = document.createElement("input");
  const hint = document.createElement("small");
  box.className = "field";
  input.id = name.htmlFor = `option-${option.name}`;
  input.dataset.option = option.name;
  input.dataset.type = option.type;
  input.required = option.required;
  input.value = value;
  input.placeholder = option.default === null || option.default === "" ? "none" : String(option.default);
  name.textContent = option.name;
  hint.textContent = TYPES[option.type] ?? option.type;
  box.append(name, input, hint);
  return box;
}

function options() {
  const found = {};
  for (const input of document.querySelectorAll("[data-option]")) {
    const { option, type } = input.dataset;
    const text = input.value.trim();
    if (!text) continue;
    if (type === "bool") found[option] = text === "true";
    else found[option] = type === "str" || Number.isNaN(Number(text)) ? text : Number(text);
  }
  return found;
}

/** “together” or “turns”. */
export function order() {
  return document.querySelector("[name=order]:checked").value;
}

/** Whether tokens are sampled, so that the seed matters. */
export function sampled() {
  return Number($("temperature").value) > 0;
}

/** The seed of the next race: both sides get the same. */
export function seed() {
  return $("seed").value ? Number($("seed").value) : crypto.getRandomValues(new Uint32Array(1))[0];
}

/** Left and right: names, and bodies of their requests. */
export function sides(number) {
  const common = {
    messages: [{ role: "user", content: $("prompt").value }],
    temperature: Number($("temperature").value || 0),
    top_p: Number($("top_p").value || 1),
    max_tokens: Number($("max_tokens").value),
    seed: number,
  };
  const pair = [[$("against").value || "plain", {}], [$("method").value || "auto", options()]];
  return pair.map(([method, extra]) => ({
    label: Object.entries(extra).reduce((label, [key, value], i) => `${label}${i ? "," : ":"}${key}=${value}`, method),
    body: {
      ...common,
      // No request profits from the cached prefix or the drafter memory of another one.
      cache_salt: crypto.getRandomValues(new Uint32Array(4)).join("-"),
      outstride: { ...extra, method, trace: true, graphs: true },
    },
  }));
}

/** A summary of the settings. */
export function digest() {
  const parts = [sampled() ? `temperature ${$("temperature").value}` : "greedy", `${$("max_tokens").value} tokens`];
  if ($("seed").value) parts.push(`seed ${$("seed").value}`);
  if ($("against").value && $("against").value !== "plain") parts.push(`against ${$("against").value}`);
  for (const [key, value] of Object.entries(options())) parts.push(`${key}=${value}`);
  parts.push(order() === "turns" ? "one after the other" : "at once");
  $("digest").textContent = parts.join(" · ");
}

/** Puts the settings and the seed into the address. */
export function writeLink(seedUsed = null) {
  const values = { ...Object.fromEntries(FIELDS.map((id) => [id, $(id).value])), order: order() };
  if (seedUsed !== null && sampled()) values.seed = String(seedUsed);
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) if (value !== (DEFAULTS[key] ?? "")) found.set(key, value);
  for (const [key, value] of Object.entries(options())) found.set(`o.${key}`, value);
  history.replaceState(null, "", `${location.pathname}#${found}`);
}

/** Reads the settings from the address. */
export function readLink() {
  const given = {};
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (key.startsWith("o.")) given[key.slice(2)] = value;
    else if (key === "method" || key === "against") {
      $(key).dataset.wanted = value;
      if (methods.has(value)) $(key).value = value;
    } else if (FIELDS.includes(key)) $(key).value = value;
    else if (key === "order") document.querySelector(`[name=order][value=${value === "turns" ? value : "together"}]`).checked = true;
  }
  if (!$("prompt").value) $("prompt").value = EXAMPLES.Code;
  describe(given);
}

/** Buttons with example prompts. */
export function showExamples() {
  for (const [name, prompt] of Object.entries(EXAMPLES)) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "chip";
    button.textContent = name;
    button.addEventListener("click", () => {
      $("prompt").value = prompt;
      $("prompt").focus();
    });
    $("examples").append(button);
  }
}
