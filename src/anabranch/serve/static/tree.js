// The draft tree of a step as SVG and as a table. The accepted path runs straight along the top; what the target
// rejected branches off below.

import { mark, named, outcome, probability, sentence, visible } from "./steps.js";

const SPACE = "http://www.w3.org/2000/svg";
const ROW = 32, HEIGHT = 24, GAP = 30, PAD = 9, EDGE = 6; // pixels
const LETTER = 7.3, SMALL = 6.1; // widths of the monospaced letters at 12 and 10 pixels

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The line under a box, which tells the mark without its colour.
export function line(kind, x, y, width) {
  const [from, to] = [x + 2, x + width - 2];
  const straight = (extra = {}, at = y) => element("path", { class: `line ${kind}`, d: `M${from} ${at}H${to}`, ...extra });
  if (kind === "own") return [];
  if (kind === "m1") return [straight({}, y - 1.5), straight({}, y + 1.5)];
  if (kind === "m2") return [straight({ "stroke-dasharray": "6 3" })];
  if (kind === "m3") return [straight({ "stroke-dasharray": "0.1 3.6", "stroke-linecap": "round" })];
  if (kind === "m5") return [straight({ "stroke-width": 4 })];
  if (kind === "m6") return [straight(), straight({}, y - HEIGHT + 1)];
  if (kind === "m7") return [straight({ "stroke-dasharray": "0.1 6", "stroke-linecap": "round", "stroke-width": 4 })];
  if (kind !== "m4") return [straight()];
  const waves = Math.max(1, Math.round((to - from) / 6));
  return [element("path", { class: "line m4", d: `M${from} ${y}` + "q1.5 -3 3 0t3 0".repeat(waves) })];
}

// Nodes to draw, in drawing order: {node, text, share, kind, state, depth, row, parent}; the target's own has node -1.
function layout(step, judged) {
  const children = step.tokens.map(() => []);
  step.parents.forEach((parent, node) => node && children[parent].push(node));
  const accepted = new Set(step.path);
  const share = (node) => probability(step, node) ?? 0;
  children.forEach((nodes) => nodes.sort((a, b) => accepted.has(b) - accepted.has(a) || share(b) - share(a) || a - b));
  const last = step.path.at(-1);
  const placed = [];
  const waiting = [{ node: 0, depth: 0, parent: null }];
  let rows = 0;
  while (waiting.length) {
    const { node, depth, parent } = waiting.pop();
    const first = !parent || parent.used === undefined;
    const at = {
      node, depth, parent,
      row: first ? (parent?.row ?? 0) : ++rows,
      text: visible(node < 0 ? step.next_text : step.texts[node]),
      share: probability(step, node),
      kind: mark(node < 0 ? "target" : step.sources[node]),
      state: node < 0 && outcome(step, node, judged) === "accepted" ? "next" : outcome(step, node, judged),
    };
    if (parent) parent.used = true;
    placed.push(at);
    const after = node < 0 ? [] : [...(node === last ? [-1] : []), ...children[node]];
    waiting.push(...after.reverse().map((child) => ({ node: child, depth: depth + 1, parent: at })));
  }
  return { placed, rows: rows + 1 };
}

// The tree; `chosen` is the node of the token that was pointed at, or null.
export function draw(step, judged, chosen = null) {
  const { placed, rows } = layout(step, judged);
  const widths = [];
  for (const each of placed) {
    each.percent = each.share === null ? "" : `${Math.round(100 * each.share)}%`;
    each.width = 2 * PAD + [...each.text].length * LETTER + (each.percent ? EDGE + each.percent.length * SMALL : 0);
    widths[each.depth] = Math.max(widths[each.depth] ?? 0, each.width);
  }
  const lefts = [EDGE];
  widths.forEach((width, depth) => lefts.push(lefts[depth] + width + GAP));
  const [wide, high] = [lefts.at(-1) - GAP + EDGE, rows * ROW + EDGE];
  const svg = element("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img" });
  svg.append(element("title", {}, sentence(step, judged)));
  const middle = (each) => EDGE + each.row * ROW + HEIGHT / 2;
  for (const each of placed.filter((one) => one.parent)) {
    const [from, to] = [lefts[each.parent.depth] + each.parent.width, lefts[each.depth]];
    const [y, then, bend] = [middle(each.parent), middle(each), GAP / 2];
    const d = `M${from} ${y}C${from + bend} ${y} ${to - bend} ${then} ${to} ${then}`;
    svg.append(element("path", { class: `edge ${each.state}`, d }));
  }
  for (const each of placed) {
    const [x, y, width] = [lefts[each.depth], middle(each) - HEIGHT / 2, each.width];
    const picked = each.node === chosen ? " chosen" : "";
    const group = element("g", { class: `node ${each.state} ${each.kind}${picked}` });
    group.append(element("rect", { x, y, width, height: HEIGHT, rx: EDGE, class: "box" }));
    group.append(element("text", { x: x + PAD, y: y + 16 }, each.text));
    if (each.percent) {
      group.append(element("text", { x: x + width - PAD, y: y + 16, "text-anchor": "end", class: "share" }, each.percent));
    }
    if (each.state !== "root") group.append(...line(each.kind, x, y + HEIGHT - 1, width));
    svg.append(group);
  }
  return svg;
}

const STATES = {
  root: "last token of the text", accepted: "accepted", rejected: "rejected", unjudged: "not verified",
  cut: "after the end", next: "the target's own",
};

// The rows of the same tree as a table: token, who proposed it, after which token, probability, outcome.
export function tabulate(step, judged) {
  const { placed } = layout(step, judged);
  const line = (cells, name) => {
    const row = document.createElement("tr");
    for (const text of cells) {
      const cell = document.createElement(name);
      if (name === "th") cell.scope = "col";
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  };
  const cells = placed.map((each) => [
    each.text,
    each.node === 0 ? "" : named(each.node < 0 ? "target" : step.sources[each.node]),
    each.parent?.text ?? "",
    each.share === null ? "" : `${(100 * each.share).toFixed(1)}%`,
    STATES[each.state],
  ]);
  const head = ["Token", "Proposed by", "After", "Probability", "Outcome"];
  return [line(head, "th"), ...cells.map((each) => line(each, "td"))];
}
