// Steps of decoding, in the form of a trace: what they emitted, what proposed it, and what they cost.

// A source's family ("stream 2" -> "stream") has a colour and a line under its tokens; the class is the same in text,
// tree and legend. Others than these take the next free mark in the order in which they appear.
const MARKS = { target: "own", stream: "m0", quantized: "m1", prompt_lookup: "m2", copy: "m3", grammar: "m4", prediction: "m5" };
const FREE = ["m6", "m7", "m2", "m3", "m1"];
let taken = 0;

export const family = (source) => source.replace(/ \d+$/, "");
export const named = (source) => (source === "target" ? "the target itself" : source.replaceAll("_", " "));

export function mark(source) {
  const of = family(source);
  if (!Object.hasOwn(MARKS, of)) MARKS[of] = FREE[taken++ % FREE.length];
  return MARKS[of];
}

// The tokens that a step emitted, each with its place in the tree; -1 is the target's own.
export function emitted(step) {
  const nodes = [...step.path.slice(1), -1].slice(0, step.kept);
  return nodes.map((node, place) => ({
    node,
    source: node < 0 ? "target" : step.sources[node],
    text: node < 0 ? step.next_text : step.texts[node],
    piece: step.pieces[place] ?? "",
  }));
}

// "accepted", "rejected", "cut" (accepted, but after the end of the text), "unjudged" or "root"
export function outcome(step, node, judged) {
  if (node === 0) return "root";
  if (!judged) return "unjudged";
  const place = node < 0 ? step.path.length : step.path.indexOf(node);
  return place < 0 ? "rejected" : place > step.kept ? "cut" : "accepted";
}

// The drafter's probability of a node given its parent; null where it gave none.
export function probability(step, node) {
  if (node < 1 || !step.log_probs || step.log_probs[node] == null) return null;
  return Math.exp(step.log_probs[node] - (step.log_probs[step.parents[node]] ?? 0));
}

// Sums over steps. Milliseconds: drafting before and after the pass, the target's pass, and the rest of the step.
export function totals(steps) {
  const sum = { steps: steps.length, tokens: 0, nodes: 0, accepted: 0, draft: 0, pass: 0, other: 0, sources: new Map() };
  for (const step of steps) {
    const [draft, forward, verify, commit, prepare] = step.ms;
    sum.tokens += step.kept;
    sum.nodes += step.tokens.length - 1;
    sum.accepted += step.path.length - 1;
    sum.draft += draft + prepare;
    sum.pass += forward;
    sum.other += verify + commit;
    for (const { source } of emitted(step)) sum.sources.set(family(source), (sum.sources.get(family(source)) ?? 0) + 1);
  }
  return sum;
}

// A text in which nothing is invisible, for labels.
export function visible(text, most = 18) {
  const shown = text
    .replaceAll(" ", "\u00b7")
    .replaceAll("\n", "\u23ce")
    .replaceAll("\t", "\u21e5")
    .replace(/[\p{C}\p{Z}]/gu, (each) => `\\u${each.codePointAt(0).toString(16)}`);
  const letters = [...shown];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}\u2026` : shown || "\u2205";
}

// One sentence about a step, for everyone and for screen readers.
export function sentence(step, judged) {
  const parts = emitted(step).map(({ text, source }) => `\u201c${visible(text)}\u201d by ${named(source)}`);
  const nodes = step.tokens.length - 1;
  const accepted = step.path.length - 1;
  const draft = !judged
    ? `${nodes} drafted tokens, recorded without verifying them.`
    : nodes
      ? `${accepted} of ${nodes} drafted tokens accepted.`
      : "Nothing was drafted.";
  return `${draft} Emitted: ${parts.join(", ")}.`;
}
