// One side of the race: its text, its figures, its chart.

import { chart } from "./chart.js";
import { count } from "./messages.js";

const SHADES = 6; // of denoising steps, from early to late
const DRAFTERS = 6; // with a colour of their own
const END = "‹end›";
const FENCE = "```";

/** Colours of drafters, in the order of their first token; both panes share one palette. */
export class Palette {
  constructor() {
    this.sources = new Map();
  }

  kind(row) {
    if (row.kind !== "drafted") return row.kind;
    if (!this.sources.has(row.source)) this.sources.set(row.source, this.sources.size % DRAFTERS);
    return `d${this.sources.get(row.source)}`;
  }
}

/** Joins the bytes of characters that are spread over several tokens. */
class Detokenizer {
  constructor() {
    this.bytes = [];
  }

  text(shown) {
    if (!shown.startsWith("bytes:")) {
      this.bytes = [];
      return shown;
    }
    for (const [, byte] of shown.matchAll(/\\x([0-9a-f]{2})/g)) this.bytes.push(parseInt(byte, 16));
    try {
      const found = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(this.bytes));
      this.bytes = [];
      return found;
    } catch {
      if (this.bytes.length < 4) return "";
      this.bytes = [];
      return "\ufffd";
    }
  }
}

export class Pane {
  constructor(template, palette, { label, onPass, onHover }) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.palette = palette;
    this.label = label;
    this.tokens = [];
    this.passes = [];
    this.byNumber = new Map();
    this.places = new Map();
    this.masked = false;
    this.width = 0;
    this.content = "";
    this.finish = null;
    this.usage = null;
    this.state = "waits";
    this.started = this.ended = 0;
    this.chosen = -1;
    this.fresh = []; // tokens that are not on the screen yet
    this.fences = 0; // of code, so far
    this.tail = ""; // the end of the text, which may begin a fence
    this.bin = 1; // passes per bar
    this.detokenizer = new Detokenizer();
    const find = (selector) => this.element.querySelector(selector);
    find("h2").textContent = label;
    this.badge = find(".state");
    this.text = find(".text");
    this.box = find(".chart");
    this.note = find(".note");
    this.figures = Object.fromEntries([...this.element.querySelectorAll("[data-of]")].map((e) => [e.dataset.of, e]));
    this.text.setAttribute("aria-label", `Text of ${label}`);
    this.box.setAttribute("aria-label", `Passes of ${label}: arrow keys choose one, Enter opens it`);
    this.set("waits");
    this.listen(onPass, onHover);
  }

  listen(onPass, onHover) {
    const numberOf = (event) => event.target.closest("[data-pass]")?.dataset.pass;
    for (const place of [this.text, this.box]) {
      place.addEventListener("click", (event) => {
        const number = numberOf(event);
        if (number) onPass(this, this.indexOf(Number(number)));
      });
      place.addEventListener("pointerover", (event) => onHover(this, numberOf(event)));
      place.addEventListener("pointerleave", () => onHover(this, null));
    }
    this.box.addEventListener("keydown", (event) => {
      const last = this.passes.length - 1;
      if (last < 0) return;
      const moves = { ArrowLeft: this.chosen - 1, ArrowRight: this.chosen + 1, Home: 0, End: last };
      if (event.key in moves) {
        this.choose(Math.min(Math.max(moves[event.key], 0), last));
      } else if (event.key === "Enter" || event.key === " ") {
        onPass(this, Math.max(this.chosen, 0));
      } else {
        return;
      }
      event.preventDefault();
    });
  }

  indexOf(number) {
    return this.byNumber.get(number)?.index ?? -1;
  }

  choose(index) {
    this.chosen = index;
    const bars = this.box.querySelectorAll(".bar");
    bars.forEach((bar, at) => bar.classList.toggle("chosen", at === Math.floor(index / this.bin)));
    const pass = this.passes[index];
    this.box.setAttribute("aria-valuenow", String(index + 1));
    this.box.setAttribute("aria-valuetext", `pass ${index + 1}: ${count(pass.tokens.length, "token")}`);
    this.light(String(pass.number));
  }

  /** Highlights one pass in the text and in the chart. */
  light(number) {
    for (const old of this.element.querySelectorAll(".hot")) old.classList.remove("hot");
    if (!number) return;
    for (const part of this.element.querySelectorAll(`[data-pass="${number}"]`)) part.classList.add("hot");
  }

  set(state) {
    this.state = state;
    this.badge.textContent = state;
    this.element.dataset.state = state;
  }

  begin() {
    this.started = this.ended = performance.now();
    this.set("runs");
  }

  /** Adds a chunk of the stream. */
  add(chunk) {
    this.ended = performance.now();
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.content += choice.delta?.content ?? "";
    const own = choice.outstride ?? {};
    if (own.pass) this.pass(own.pass.pass).graph = own.pass;
    if (own.pass?.masks.length) this.settle(own.pass);
    for (const row of own.trace ?? []) this.fresh.push(this.token(row));
    if (choice.finish_reason) this.close(choice.finish_reason);
    this.dirty = true;
  }

  pass(number) {
    let found = this.byNumber.get(number);
    if (!found) {
      found = { number, index: this.passes.length, tokens: [], parts: [], graph: null };
      this.byNumber.set(number, found);
      this.passes.push(found);
      this.box.setAttribute("aria-valuemax", String(this.passes.length));
    }
    return found;
  }

  token(row) {
    const token = { ...row, shown: this.detokenizer.text(row.text), css: this.palette.kind(row), index: this.tokens.length };
    token.code = this.inCode(token.shown);
    this.tokens.push(token);
    if (row.kind === "unmasked" || row.kind === "given") return token; // counted when it was settled
    const pass = this.pass(row.pass);
    pass.tokens.push(token);
    this.count(pass, token.css);
    return token;
  }

  /** Whether a token belongs to fenced code, its fences included. */
  inCode(text) {
    const parts = (this.tail + text).split(FENCE);
    const wasOpen = this.fences % 2 === 1;
    this.fences += parts.length - 1;
    this.tail = parts.at(-1).slice(1 - FENCE.length); // a fence may be spread over tokens
    return wasOpen || parts.length > 1;
  }

  count(pass, kind) {
    const last = pass.parts.at(-1);
    if (last?.kind === kind) last.count += 1;
    else pass.parts.push({ kind, count: 1 });
  }

  /** Adds the tokens that a pass over masks settled. */
  settle(graph) {
    this.masked = true;
    const pass = this.pass(graph.pass);
    for (const row of graph.settled) {
      if (this.places.has(row.place)) continue;
      const token = { ...row, shown: row.text.startsWith("bytes:") ? "\ufffd" : row.text, pass: graph.pass };
      this.places.set(row.place, token);
      pass.tokens.push(token);
      this.count(pass, "unmasked");
    }
    this.width = Math.max(this.width, ...graph.masks.map((place) => place + 1));
  }

  /** The answer is complete: draws its final text. */
  close(reason) {
    this.finish = reason;
    const shown = this.tokens.map((token) => token.shown);
    const last = this.tokens.at(-1);
    if (reason === "stop" && last && shown.slice(0, -1).join("").trim() === this.content.trim()) {
      last.shown = END; // the end-of-text token has no text
      last.mark = true;
    }
    if (this.masked) for (const token of this.tokens) token.css = this.shade(token.pass);
    this.text.replaceChildren();
    this.append(this.tokens);
    this.fresh = [];
    this.text.scrollTop = 0;
  }

  span(token, css) {
    const span = document.createElement("span");
    span.className = `token ${css}`;
    if (token.code) span.classList.add("code");
    if (token.mark) span.classList.add("mark");
    if (token.shown.includes("\n")) span.classList.add("break");
    span.dataset.pass = token.pass;
    span.textContent = token.shown;
    return span;
  }

  append(tokens) {
    const below = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    this.text.append(...tokens.filter((token) => token.shown).map((token) => this.span(token, token.css)));
    if (below) this.text.scrollTop = this.text.scrollHeight;
  }

  shade(number) {
    const index = this.indexOf(number);
    return `s${Math.min(SHADES - 1, Math.floor((SHADES * Math.max(index, 0)) / Math.max(this.passes.length, 1)))}`;
  }

  /** Draws the canvas: settled tokens by step, and masks. */
  drawCanvas() {
    this.text.replaceChildren(
      ...Array.from({ length: this.width }, (_, place) => {
        const token = this.places.get(place);
        if (token) return this.span(token, this.shade(token.pass));
        const mask = document.createElement("span");
        mask.className = "token mask";
        mask.textContent = "░";
        return mask;
      }),
    );
  }

  get emitted() {
    return this.masked && !this.finish ? this.places.size : this.tokens.length;
  }

  get counted() {
    return this.usage?.outstride.passes ?? this.passes.length;
  }

  get seconds() {
    return ((this.state === "runs" ? performance.now() : this.ended) - this.started) / 1000;
  }

  /** Updates the screen; called at a fixed rate, because chunks may come by the hundred. */
  show(scale) {
    if (this.dirty && this.masked && !this.finish) this.drawCanvas();
    else if (this.fresh.length && !this.masked) this.append(this.fresh.splice(0));
    const { passes, tokens, mean, acceptance, seconds } = this.figures;
    passes.textContent = this.counted;
    tokens.textContent = this.emitted;
    mean.textContent = this.counted ? (this.emitted / this.counted).toFixed(2) : "–";
    const { proposed = 0, accepted = 0 } = this.usage?.outstride ?? {};
    acceptance.textContent = proposed ? `${Math.round((100 * accepted) / proposed)}%` : "–";
    seconds.textContent = this.seconds.toFixed(1);
    if (this.dirty || this.scale !== JSON.stringify(scale)) {
      this.dirty = false;
      this.scale = JSON.stringify(scale);
      this.bin = chart(this.box, this.passes, scale, this.chosen);
    }
  }

  say(text) {
    this.note.textContent = text;
    this.note.hidden = !text;
  }

  /** Marks the first token that differs. */
  differ(index) {
    const at = this.tokens.slice(0, index).filter((token) => token.shown).length;
    this.text.children[at]?.classList.add("differs");
  }
}
