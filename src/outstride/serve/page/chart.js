// A chart in SVG: tokens per pass as bars, the mean so far as a line.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 96;
const LEFT = 22;
const TOP = 8;
const BOTTOM = 18;
const MIN_PASSES = 32;
const MAX_BARS = 240; // of more passes, several share a bar

/** An SVG element with attributes. */
export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/**
 * Draws passes: each has `parts`, runs of tokens with a class and a count. Both panes share `scale`
 * ({passes, tokens}), so that lengths and heights can be compared. Returns the number of passes per bar.
 */
export function chart(box, passes, scale, chosen) {
  const width = Math.max(box.clientWidth, 120);
  const across = Math.max(scale.passes, MIN_PASSES);
  const up = Math.max(scale.tokens, 4);
  const bin = Math.ceil(across / MAX_BARS);
  const step = ((width - LEFT) / across) * bin;
  const high = HEIGHT - TOP - BOTTOM;
  const y = (tokens) => TOP + high * (1 - tokens / up);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  for (const tick of [0, 1, up]) {
    svg.append(draw("line", { class: "rule", x1: LEFT, x2: width, y1: y(tick), y2: y(tick) }));
    if (tick) svg.append(draw("text", { class: "tick", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
  }
  svg.append(draw("text", { class: "tick", x: LEFT, y: HEIGHT - 4 }, "tokens per pass"));
  svg.append(draw("text", { class: "tick", x: width, y: HEIGHT - 4, "text-anchor": "end" }, `${across} passes`));
  let line = "";
  let sum = 0;
  for (let index = 0; index * bin < passes.length; index++) {
    const shared = passes.slice(index * bin, (index + 1) * bin);
    const x = LEFT + index * step;
    const mine = index === Math.floor(chosen / bin);
    const group = draw("g", { class: mine ? "bar chosen" : "bar", "data-pass": shared[0].number });
    group.append(draw("rect", { class: "reach", x, y: TOP, width: step, height: high }));
    let below = 0;
    for (const part of merged(shared)) {
      const spacing = step > 5 ? 1 : step * 0.15;
      group.append(
        draw("rect", {
          class: `fill ${part.kind}`,
          x: x + spacing / 2,
          y: y(below + part.count),
          width: Math.max(step - spacing, 0.6),
          height: y(below) - y(below + part.count),
        }),
      );
      below += part.count;
    }
    sum += below * shared.length;
    line += `${index ? "L" : "M"}${x + step / 2} ${y(sum / (index * bin + shared.length))}`;
    svg.append(group);
  }
  if (passes.length > 1) svg.append(draw("path", { class: "mean", d: line }));
  box.replaceChildren(svg);
  return bin;
}

/** The parts of a bar: those of its pass, or the average of several. */
function merged(passes) {
  if (passes.length === 1) return passes[0].parts;
  const found = new Map();
  for (const { kind, count } of passes.flatMap((pass) => pass.parts)) {
    found.set(kind, (found.get(kind) ?? 0) + count / passes.length);
  }
  return [...found].map(([kind, count]) => ({ kind, count }));
}
