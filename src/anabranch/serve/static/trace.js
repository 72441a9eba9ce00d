// Traces as `anabranch generate --trace` records them (version 2): reading, and writing those of an answer.

const VERSION = 2;
const MOST = 64 * 2 ** 20; // bytes

const whole = (value, low = 0) => Number.isInteger(value) && value >= low;
const wholes = (values, low) => Array.isArray(values) && values.every((value) => whole(value, low));

// The sequences of a trace: {settings, judged, rows: [[step]]}. Throws Error with a sentence.
export async function readTrace(file) {
  if (file.size > MOST) throw new Error(`${file.name} has more than 64 MiB; record fewer prompts`);
  const lines = (await file.text()).split("\n");
  const header = parsed(lines[0]);
  if (!header || !("trace" in header)) {
    throw new Error(`${file.name} is not a trace; record one with: anabranch generate PROMPT --trace FILE`);
  }
  if (header.trace !== VERSION) throw new Error(`${file.name} is of version ${header.trace}, not ${VERSION}; record it again`);
  const names = ["target"];
  const rows = new Map();
  lines.slice(1).forEach((line, index) => {
    if (!line) return;
    const fields = parsed(line);
    if (!fields && index === lines.length - 2) return; // a recording that was interrupted
    if (fields && typeof fields.source === "string") return void names.push(fields.source);
    const step = fields && stepOf(fields, names);
    if (!step) throw new Error(`line ${index + 2} of ${file.name} is not a step; record the trace again`);
    if (!rows.has(fields.row)) rows.set(fields.row, []);
    rows.get(fields.row).push(step);
  });
  if (!rows.size) throw new Error(`${file.name} has no steps; record a decoding first`);
  return { settings: header.settings ?? {}, judged: !header.every_position, rows: [...rows.values()] };
}

function parsed(line) {
  try {
    const value = JSON.parse(line);
    return typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}

function stepOf(fields, names) {
  const { tokens, parents, sources, path, ms, log_probs: logs } = fields;
  const size = tokens?.length;
  const right =
    [fields.row, fields.at, fields.next, fields.kept, fields.drafted].every((value) => whole(value)) &&
    wholes(tokens) && size > 0 && wholes(parents, -1) && wholes(sources) && wholes(path) &&
    parents.length === size && sources.length === size && (logs == null || (Array.isArray(logs) && logs.length === size)) &&
    parents.every((parent, node) => (node ? parent >= 0 && parent < node : parent === -1)) &&
    sources.every((source) => source < names.length) &&
    path[0] === 0 && path.every((node, place) => node < size && (!place || parents[node] === path[place - 1])) &&
    fields.kept <= path.length && Array.isArray(ms) && ms.length === 5 && ms.every((value) => value >= 0);
  return right ? { ...fields, sources: sources.map((source) => names[source]) } : null;
}

// Give the steps of all rows the texts of their tokens: `texts` has one for each token id, or none for unknown ones.
export function addTexts(rows, texts) {
  const of = (token) => texts.get(token) ?? `\u27e8${token}\u27e9`;
  for (const steps of rows) {
    const decoder = new TextDecoder();
    for (const step of steps) {
      step.texts = step.tokens.map(of);
      step.next_text = of(step.next);
      const ids = [...step.path.slice(1).map((node) => step.tokens[node]), step.next].slice(0, step.kept);
      const end = step.finish === "stop" ? ids.length - 1 : -1; // an end token has no text
      step.pieces = ids.map((token, place) => (place === end ? "" : decoder.decode(bytesOf(of(token)), { stream: true })));
    }
  }
}

// The server writes a token that is part of a character as "bytes:\xe2\x80".
function bytesOf(text) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(text)) return new TextEncoder().encode(text);
  return Uint8Array.from(text.matchAll(/\\x(..)/g), ([, digits]) => parseInt(digits, 16));
}

// The steps of an answer as a trace, which `anabranch simulate` reads too.
export function writeTrace(steps, settings) {
  const names = ["target"];
  const lines = [{ trace: VERSION, rule: "match", every_position: false, settings }];
  for (const { texts, next_text, pieces, ...fields } of steps) {
    for (const source of fields.sources) {
      if (!names.includes(source)) {
        names.push(source);
        lines.push({ source });
      }
    }
    lines.push({ row: 0, ...fields, sources: fields.sources.map((source) => names.indexOf(source)) });
  }
  return lines.map((line) => `${JSON.stringify(line)}\n`).join("");
}
