// The panel beside the text: numbers of an answer, and one of its steps.

import { draw, element, tabulate } from "./tree.js";
import { mark, named, sentence, totals } from "./steps.js";
import { download, picture, pngFile, svgFile } from "./picture.js";
import { writeTrace } from "./trace.js";

const $ = (id) => document.getElementById(id);
const one = (value) => value.toFixed(value < 10 ? 2 : 1);
let shown = null; // {answer, index, node, walking}
queueMicrotask(clear);

export function make(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

// Show a step of an answer; `node` is that of the token pointed at. `walking` dims what was decoded later.
export function show(answer, index = answer.steps.length - 1, { node = null, walking = false } = {}) {
  if (!answer.steps.length) return clear();
  const step = answer.steps[index];
  const same = shown?.answer === answer && shown.index === index && shown.node === node;
  if (shown?.answer !== answer) highlight(shown?.answer, null);
  shown = { answer, index, node, walking };
  showNumbers(answer);
  for (const id of ["figures", "walk", "key", "save"]) $(id).hidden = false;
  $("step-title").textContent = `Step ${index + 1} of ${answer.steps.length}`;
  Object.assign($("slider"), { max: answer.steps.length, value: index + 1 });
  $("slider").setAttribute("aria-valuetext", `${index + 1} of ${answer.steps.length}. ${sentence(step, answer.judged)}`);
  $("back").disabled = index === 0;
  $("next").disabled = index === answer.steps.length - 1;
  strip(answer.steps, index);
  highlight(answer, index, walking);
  if (same) return;
  $("said").textContent = sentence(step, answer.judged);
  $("tree").hidden = $("nodes").hidden = false;
  $("tree").replaceChildren(draw(step, answer.judged, node));
  const picked = $("tree").querySelector(".chosen rect"); // of a tree that is wider than the panel
  if (picked) $("tree").scrollLeft = Math.max(0, picked.x.baseVal.value - $("tree").clientWidth / 2);
  $("nodes").querySelector("table").replaceChildren(...tabulate(step, answer.judged));
}

// Show an answer that has changed at the same step as before, unless another one is shown.
export function refresh(answer) {
  if (shown?.answer === answer) show(answer, shown.index, shown);
}

export function clear() {
  shown = null;
  for (const id of ["figures", "walk", "tree", "key", "nodes", "save"]) $(id).hidden = true;
  $("plain").replaceChildren();
  $("step-title").textContent = "Steps";
  $("said").textContent = "Each pass of the model is a step. Answers and traces show theirs here.";
}

function showNumbers(answer) {
  const sum = totals(answer.steps);
  const spent = sum.draft + sum.pass + sum.other; // milliseconds
  const seconds = answer.stats ? answer.stats.seconds - answer.stats.prefill_seconds : spent / 1e3;
  answer.rate = answer.stats?.decode_tokens_per_second ?? (spent ? sum.tokens / seconds : 0);
  const facts = [
    ["Tokens per pass", sum.steps ? one(sum.tokens / sum.steps) : "0"],
    ["Tokens/s", one(answer.rate)],
    ["Tokens, passes", `${sum.tokens}, ${sum.steps}`],
    ["Accepted", `${sum.accepted} of ${sum.nodes}`],
  ];
  $("numbers").replaceChildren(
    ...facts.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))),
  );
  const whole = Math.max(1e3 * seconds, spent) || 1;
  const parts = [["Drafts", sum.draft], ["Target\u2019s passes", sum.pass], ["Other", whole - sum.draft - sum.pass]];
  const bar = make("div", { className: "bar" });
  bar.setAttribute("aria-hidden", "true");
  const list = make("ul");
  parts.forEach(([name, ms], place) => {
    const piece = make("span", { className: `part${place}` });
    piece.style.flexGrow = ms;
    bar.append(piece);
    const said = `${name} ${Math.round((100 * ms) / whole)}%, ${one(ms / Math.max(1, sum.steps))} ms a step`;
    list.append(make("li", { className: `part${place}`, textContent: said }));
  });
  $("cost").replaceChildren(bar, list);
  $("legend").replaceChildren(
    ...[...sum.sources].map(([source, count]) =>
      make("li", {}, make("span", { className: `t ${mark(source)}`, textContent: named(source) }), ` ${count}`),
    ),
  );
  const { drafter } = answer.settings;
  $("drafter").textContent = drafter ? `Drafter ${drafter}` : "";
  showPlain(answer);
}

// Plain decoding is measured by decoding the same request again, without drafts and with them (`compare` in app.js).
function showPlain(answer) {
  const { plain } = answer;
  const into = $("plain");
  if (plain === "running") {
    return into.replaceChildren(make("p", { textContent: "Decoding it again, without drafts and with them\u2026" }));
  }
  if (plain?.error) return into.replaceChildren(make("p", { className: "error", textContent: plain.error }));
  if (plain) {
    const times = `${(plain.drafted / plain.rate).toFixed(2)} times plain decoding`;
    const said = `: ${one(plain.drafted)} against ${one(plain.rate)} tokens per second, one more run each. `;
    const same = plain.same ? "The texts are the same." : "The texts differ.";
    return into.replaceChildren(make("p", {}, make("b", { textContent: times }), said, same));
  }
  if (!answer.compare || !answer.stats) return into.replaceChildren();
  if (into.querySelector("button")?.answer === answer) return;
  into.replaceChildren(
    make("button", { type: "button", textContent: "Compare with plain decoding", answer, onclick: answer.compare }),
  );
}

// A column for each step, as high as it emitted tokens.
function strip(steps, index) {
  const most = steps.reduce((so, step) => Math.max(so, step.kept), 4);
  const svg = element("svg", { viewBox: `0 0 ${Math.max(steps.length, 40)} ${most}`, preserveAspectRatio: "none" });
  steps.forEach((step, place) => {
    const here = place === index ? "here" : "";
    svg.append(element("rect", { x: place + 0.1, y: most - step.kept, width: 0.8, height: step.kept, class: here }));
  });
  $("strip").replaceChildren(svg);
}

function highlight(answer, index, walking = false) {
  for (const token of answer?.text.children ?? []) {
    const here = Number(token.dataset.step) === index;
    token.classList.toggle("now", here);
    token.classList.toggle("picked", here && Number(token.dataset.node) === shown.node);
    token.classList.toggle("later", walking && Number(token.dataset.step) > index);
  }
}

const walk = (index) => {
  if (!shown) return;
  shown.answer.followed = false;
  show(shown.answer, Math.min(Math.max(index, 0), shown.answer.steps.length - 1), { walking: true });
};

$("slider").addEventListener("input", () => walk(Number($("slider").value) - 1));
$("back").addEventListener("click", () => walk(shown.index - 1));
$("next").addEventListener("click", () => walk(shown.index + 1));
$("strip").addEventListener("pointerdown", (event) => {
  const box = $("strip").getBoundingClientRect();
  walk(Math.floor(((event.clientX - box.left) / box.width) * Math.max(shown.answer.steps.length, 40)));
});

const drawn = () => {
  const { answer, index } = shown;
  const sum = totals(answer.steps);
  const heading = `${answer.title}: ${one(sum.tokens / sum.steps)} tokens per pass; step ${index + 1} of ${sum.steps}`;
  return picture(heading, answer.text, $("legend"), $("tree").querySelector("svg"));
};
$("svg").addEventListener("click", () => download(svgFile(drawn()), "anabranch.svg"));
$("png").addEventListener("click", async () => download(await pngFile(drawn()), "anabranch.png"));
$("jsonl").addEventListener("click", () => {
  const { answer } = shown;
  download(new Blob([writeTrace(answer.steps, answer.settings)], { type: "application/jsonl" }), "trace.jsonl");
});
