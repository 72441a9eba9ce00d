// Pictures of what is shown: the marked text as it is laid out on the page, its numbers, and the tree of a step.

import { element, line } from "./tree.js";

const COPIED = ["fill", "fill-opacity", "stroke", "stroke-width", "opacity", "font-family", "font-size", "font-weight", "text-decoration-line"];
const MARGIN = 20, HEADING = 56, TINT = 0.16;

// A drawing that needs no style sheet: what the page's gives is written into its elements.
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const [all, copies] = [svg, copy].map((each) => [...each.querySelectorAll("*")]);
  all.forEach((original, place) => {
    if (original.tagName === "title") return;
    const style = getComputedStyle(original);
    for (const name of COPIED) copies[place].setAttribute(name.replace("-line", ""), style.getPropertyValue(name));
    copies[place].removeAttribute("class");
  });
  return copy;
}

// The marked tokens within an element where they stand in it, from `top` on.
function marked(within, top) {
  const frame = within.getBoundingClientRect();
  const drawn = [];
  for (const token of within.querySelectorAll(".t")) {
    const kind = [...token.classList].find((name) => /^m\d$/.test(name));
    const style = getComputedStyle(token);
    for (const { words, left, right, top: from, height } of pieces(token)) {
      const [x, y, width] = [left - frame.left + MARGIN, from - frame.top + top, right - left];
      if (kind) {
        drawn.push(element("rect", { x, y, width, height, rx: 3, fill: style.textDecorationColor, "fill-opacity": TINT }));
        for (const each of line(kind, x, y + height - 1, width)) {
          const given = each.getAttribute("stroke-width") ?? 1.6;
          for (const [name, value] of [["stroke", style.textDecorationColor], ["fill", "none"], ["stroke-width", given]]) {
            each.setAttribute(name, value);
          }
          drawn.push(each);
        }
      }
      const font = { fill: style.color, "font-family": style.fontFamily, "font-size": style.fontSize };
      drawn.push(element("text", { x, y: y + 0.77 * height, ...font, "xml:space": "preserve" }, words));
    }
  }
  return drawn;
}

// An SVG element: a heading, the text and the legend as they stand on the page, and the tree.
export function picture(heading, text, legend, tree) {
  const page = getComputedStyle(document.body);
  const [words, names] = [text, legend].map((each) => each.getBoundingClientRect());
  const between = HEADING + words.height + MARGIN;
  const lowest = between + names.height + MARGIN;
  const small = standalone(tree);
  small.setAttribute("x", MARGIN);
  small.setAttribute("y", lowest);
  const width = Math.max(words.width, names.width, tree.width.baseVal.value) + 2 * MARGIN;
  const height = lowest + tree.height.baseVal.value + MARGIN;
  return element(
    "svg", { width, height, viewBox: `0 0 ${width} ${height}` },
    element("rect", { width, height, fill: page.backgroundColor }),
    element("text", { x: MARGIN, y: 34, fill: page.color, "font-family": page.fontFamily, "font-size": 14 }, heading),
    ...marked(text, HEADING), ...marked(legend, between), small,
  );
}

// The parts of a token that stand on different lines, with their places.
function pieces(token) {
  const parts = [];
  const range = document.createRange();
  let at = 0;
  for (const letter of token.textContent) {
    range.setStart(token.firstChild, at);
    range.setEnd(token.firstChild, (at += letter.length));
    const [rect] = range.getClientRects();
    if (!rect || letter === "\n") continue;
    const last = parts.at(-1);
    if (last?.top === rect.top) Object.assign(last, { words: last.words + letter, right: rect.right });
    else parts.push({ words: letter, left: rect.left, right: rect.right, top: rect.top, height: rect.height });
  }
  return parts;
}

// characters that a text may have and XML may not
const FORBIDDEN = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu;
const source = (svg) => new XMLSerializer().serializeToString(svg).replace(FORBIDDEN, "\ufffd");

export const svgFile = (svg) => new Blob([source(svg)], { type: "image/svg+xml" });

export async function pngFile(svg) {
  const url = URL.createObjectURL(svgFile(svg));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = document.createElement("canvas");
    const scale = Math.min(2, 16384 / Math.max(image.width, image.height)); // the largest canvas of browsers
    [canvas.width, canvas.height] = [image.width * scale, image.height * scale];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((made) => canvas.toBlob(made, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
