// One pass: the draft tree, with accepted and rejected nodes.

import { draw } from "./chart.js";
import { count } from "./messages.js";

const ROW = 32;
const PILL = 24;
const SPACING = 34;
const LONGEST = 16;
const ROUND = 12;

const MEANINGS = {
  given: "settled before this pass",
  accepted: "drafted and accepted",
  bonus: "the model's own token",
  rejected: "drafted and rejected",
  probe: "scored to learn from",
};

/** A token as a label, with visible blanks and line ends. */
function label(text) {
  const seen = text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "▒";
  return seen.length > LONGEST ? `${seen.slice(0, LONGEST - 1)}…` : seen;
}

/** The nodes of a pass as a tree; the model's own tokens follow the accepted ones. */
export function tree(pass, kindOf) {
  const nodes = (pass.graph?.nodes ?? []).map((node, index) => ({
    ...node,
    index,
    css: node.state === "accepted" ? kindOf({ kind: "drafted", source: node.source }) : node.state,
    children: [],
    onPath: node.state === "accepted" || node.state === "given",
  }));
  for (const node of nodes) nodes[node.parent]?.children.push(node);
  let tip = nodes[0];
  for (let next = tip; next; next = next.children.find((child) => child.state === "accepted")) tip = next;
  for (const token of pass.tokens.filter((one) => one.kind === "bonus" || one.kind === "plain")) {
    const own = { text: token.text, state: "bonus", css: token.kind === "plain" ? "own" : "bonus", children: [], onPath: true };
    tip?.children.push(own);
    nodes.push(own);
    tip = own;
  }
  return nodes;
}

function place(root) {
  let row = 0;
  const widths = [];
  const walk = (node, depth) => {
    node.depth = depth;
    node.label = label(node.text);
    node.width = Math.max(30, node.label.length * 8.2 + 18);
    widths[depth] = Math.max(widths[depth] ?? 0, node.width);
    node.children.sort((a, b) => b.onPath - a.onPath);
    if (!node.children.length) node.row = row++;
    for (const child of node.children) walk(child, depth + 1);
    if (node.children.length) node.row = node.children[0].row;
  };
  walk(root, 0);
  const starts = widths.reduce((found, width) => [...found, found.at(-1) + width + SPACING], [2]);
  return { rows: row, starts, width: starts.at(-1) - SPACING + 2 };
}

function picture(nodes) {
  const root = nodes[0];
  const { rows, starts, width } = place(root);
  const height = rows * ROW + 4;
  const middle = (node) => node.row * ROW + ROW / 2;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  const edges = draw("g");
  const pills = draw("g");
  for (const node of nodes.filter((one) => one.depth !== undefined)) {
    const x = starts[node.depth];
    for (const child of node.children) {
      const [x1, x2] = [x + node.width, starts[child.depth]];
      const turn = Math.min(x1 + 24, x2);
      const d = `M${x1} ${middle(node)}C${turn} ${middle(node)} ${x2 - 18} ${middle(child)} ${x2} ${middle(child)}`;
      edges.append(draw("path", { class: child.onPath ? "edge accepted" : "edge", d }));
    }
    const box = { x, y: middle(node) - PILL / 2, width: node.width, height: PILL, rx: ROUND };
    const title = draw("title", {}, `${node.text}: ${MEANINGS[node.state]}${node.source && node.state !== "given" ? `, by ${node.source}` : ""}`);
    const text = draw("text", { x: x + node.width / 2, y: middle(node) + 4.5, "text-anchor": "middle" }, node.label);
    pills.append(draw("g", { class: `node ${node.css}` }, title, draw("rect", box), text));
  }
  svg.append(edges, pills);
  const path = nodes.filter((node) => node.onPath).map((node) => node.text).join("");
  svg.setAttribute("aria-label", `A draft tree of ${count(nodes.length, "node")}. Accepted: ${path}`);
  return svg;
}

/** A canvas at one pass: settled before, settled now, still masked. */
function canvas(pane, pass) {
  const box = document.createElement("div");
  box.className = "canvas";
  const open = new Set(pass.graph.masks);
  for (let place = 0; place < pane.width; place++) {
    const token = pane.places.get(place);
    const when = token ? pane.indexOf(token.pass) - pane.indexOf(pass.number) : 1;
    const cell = document.createElement("span");
    cell.className = `cell ${when < 0 ? "before" : when === 0 ? "now" : open.has(place) ? "open" : "later"}`;
    cell.textContent = when <= 0 ? label(token.shown) : "░";
    box.append(cell);
  }
  return box;
}

function summary(pass, nodes) {
  const got = pass.tokens.length;
  if (pass.graph?.masks.length) {
    return `${count(pass.graph.masks.length, "position")} of the canvas masked, ${got} of them settled by this pass.`;
  }
  const drafted = nodes.filter((node) => ["accepted", "rejected"].includes(node.state));
  const accepted = pass.tokens.filter((token) => token.kind === "drafted").length;
  const probes = nodes.filter((node) => node.state === "probe").length;
  const learnt = probes ? ` ${count(probes, "node")} more scored to learn from.` : "";
  if (!drafted.length) return `No draft: ${count(got, "token")} in one pass.${learnt}`;
  const bonus = got > accepted ? `, ${got - accepted} added by the model` : "";
  return `${count(drafted.length, "token")} drafted, ${accepted} accepted${bonus}: ${count(got, "token")} in one pass.${learnt}`;
}

function legend(pane, pass, nodes) {
  if (pass.graph?.masks.length) {
    return [["cell now", "settled by this pass"], ["cell before", "settled before"], ["cell open", "masked"], ["cell later", "not part of this pass"]];
  }
  const found = new Map();
  for (const node of nodes) {
    if (node.state === "accepted") found.set(node.css, `accepted, drafted by ${node.source.replaceAll("+", " and ")}`);
    else found.set(node.css, MEANINGS[node.state]);
  }
  return [...found].map(([css, text]) => [`swatch ${css}`, text]);
}

export class PassView {
  constructor(dialog) {
    this.dialog = dialog;
    const find = (name) => dialog.querySelector(`#pass-${name}`);
    this.parts = { title: find("title"), summary: find("summary"), graph: find("graph"), legend: find("legend") };
    [this.back, this.on] = [find("back"), find("on")];
    this.back.addEventListener("click", () => this.open(this.pane, this.index - 1));
    this.on.addEventListener("click", () => this.open(this.pane, this.index + 1));
    find("close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("close", () => this.pane?.light(null));
    dialog.addEventListener("keydown", (event) => {
      if (event.target === this.parts.graph) return; // arrows scroll the graph
      if (event.key === "ArrowLeft" && !this.back.disabled) this.open(this.pane, this.index - 1);
      if (event.key === "ArrowRight" && !this.on.disabled) this.open(this.pane, this.index + 1);
    });
  }

  open(pane, index) {
    const pass = pane.passes[index];
    if (!pass) return;
    [this.pane, this.index] = [pane, index];
    const nodes = tree(pass, (row) => pane.palette.kind(row));
    this.parts.title.textContent = `Pass ${index + 1} of ${pane.passes.length}: ${pane.label}`;
    this.parts.summary.textContent = summary(pass, nodes);
    const masked = pass.graph?.masks.length;
    this.parts.graph.replaceChildren(masked ? canvas(pane, pass) : nodes.length ? picture(nodes) : "");
    this.parts.legend.replaceChildren(...legend(pane, pass, nodes).map(([css, text]) => entry(css, text)));
    [this.back.disabled, this.on.disabled] = [index === 0, index === pane.passes.length - 1];
    if (document.activeElement?.disabled) (this.on.disabled ? this.back : this.on).focus();
    pane.choose(index);
    if (!this.dialog.open) this.dialog.showModal();
  }
}

/** An entry of a legend. */
export function entry(css, text) {
  const item = document.createElement("li");
  const mark = document.createElement("span");
  mark.className = css;
  mark.setAttribute("aria-hidden", "true");
  item.append(mark, text);
  return item;
}
