// The page: a conversation with the model of this server, and recorded traces. Texts of the model are only ever set as
// text, never as HTML.

import { Failure, chat, get, post, setKey } from "./api.js";
import { clear, make, refresh, show } from "./inspector.js";
import { emitted, mark } from "./steps.js";
import { addTexts, readTrace } from "./trace.js";

const $ = (id) => document.getElementById(id);
const SAMPLES = [
  "Name three rivers in Europe and describe each in one sentence.",
  "Write a Python function that returns the n-th Fibonacci number.",
  "Repeat this twice: the quick brown fox jumps over the lazy dog.",
];
let turns = []; // {question, answer}
let running = null; // the AbortController of the answer that is being decoded
let properties = {};

// -- texts of tokens ---------------------------------------------------------------------------------------------

// Appends the tokens of steps to an answer. Lines between fences are set in a monospaced font.
function append(answer, steps) {
  for (const step of steps) {
    const index = answer.steps.push(step) - 1;
    for (const { node, source, piece } of emitted(step)) {
      if (!piece) continue; // its character ends with a later token
      const token = make("span", { className: `t ${mark(source)}`, textContent: piece, tabIndex: answer.text.firstChild ? -1 : 0 });
      Object.assign(token.dataset, { step: index, node });
      token.classList.toggle("code", fenced(answer, piece));
      answer.text.append(token);
    }
  }
}

function fenced(answer, piece) {
  const before = answer.code || answer.line.startsWith("```");
  for (const letter of piece) {
    if (letter !== "\n") answer.line += letter;
    else {
      answer.code = answer.line.startsWith("```") ? !answer.code : answer.code;
      answer.line = "";
    }
  }
  return before || answer.code || answer.line.startsWith("```");
}

const answers = new Map(); // by the element of their tokens

function newAnswer(title, label) {
  const text = make("div", { className: "text" });
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", label);
  const answer = { title, text, steps: [], judged: true, line: "", code: false, followed: true, settings: {}, words: "" };
  answers.set(text, answer);
  return answer;
}

function pointed(event) {
  const token = event.target.closest?.(".t[data-step]");
  const answer = token && answers.get(token.parentElement);
  if (!answer) return;
  answer.followed = false;
  show(answer, Number(token.dataset.step), { node: Number(token.dataset.node) });
  if (event.type === "focusin") {
    for (const each of token.parentElement.querySelectorAll("[tabindex='0']")) each.tabIndex = -1;
    token.tabIndex = 0;
    if (!running) $("status").textContent = `${token.textContent}: ${$("said").textContent}`;
  }
}

const token = (from, way) => {
  const step = Number(from.dataset.step);
  const all = [...from.parentElement.children];
  const firsts = all.filter((each, place) => each.dataset.step !== all[place - 1]?.dataset.step);
  return {
    ArrowRight: () => from.nextElementSibling,
    ArrowLeft: () => from.previousElementSibling,
    ArrowDown: () => firsts.find((each) => Number(each.dataset.step) > step),
    ArrowUp: () => firsts.findLast((each) => Number(each.dataset.step) < step),
    Home: () => all[0],
    End: () => all.at(-1),
  }[way]?.();
};

$("messages").addEventListener("pointerover", pointed);
$("messages").addEventListener("focusin", pointed);
$("messages").addEventListener("keydown", (event) => {
  if (event.key === "Escape") return void $("prompt").focus();
  if (!event.target.matches(".t") || event.ctrlKey || event.metaKey || event.altKey) return;
  const to = token(event.target, event.key);
  if (!to) return;
  event.preventDefault();
  to.focus();
});

// -- the conversation --------------------------------------------------------------------------------------------

const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function requestOf(question) {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.answer.words) {
      messages.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answer.words });
    }
  }
  messages.push({ role: "user", content: question });
  const body = { model: $("name").value || undefined, messages, anabranch: { steps: true }, max_tokens: number("most") };
  body.temperature = number("temperature");
  body.seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31); // known, so that it can be decoded again
  const schema = $("schema").value.trim();
  if (schema) {
    let read;
    try {
      read = JSON.parse(schema);
    } catch (error) {
      throw new Failure(0, `the JSON Schema in the settings is not JSON: ${error.message}`);
    }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: read } };
  }
  return body;
}

async function ask(question) {
  $("welcome")?.remove();
  const answer = newAnswer($("name").value || "anabranch", `Answer ${turns.length + 1}, tokens`);
  const note = make("p", { className: "note" });
  const article = make("article", {}, make("p", { className: "question", textContent: question }), answer.text, note);
  $("messages").append(article);
  article.scrollIntoView({ block: "end" });
  const controller = (running = new AbortController());
  busy(true);
  answer.text.setAttribute("aria-busy", "true");
  note.textContent = "Reading\u2026";
  try {
    await begun;
    const body = requestOf(question);
    answer.settings = { ...body, model: properties.model_path, messages: undefined, anabranch: undefined };
    await read(body, answer, controller, note);
    answer.compare = () => compare(answer, body);
  } catch (error) {
    if (error.name !== "AbortError") failed(article, note, error, question);
    else note.textContent = "Stopped.";
  } finally {
    answer.text.removeAttribute("aria-busy");
    if (running === controller) {
      running = null;
      busy(false);
    }
    if (article.isConnected) {
      turns.push({ question, answer });
      refresh(answer);
      const passes = answer.steps.length;
      $("status").textContent = `${note.textContent} ${totalOf(answer)} tokens in ${passes} passes.`;
    }
  }
  if ($("compare").checked) await answer.compare?.();
}

const totalOf = (answer) => answer.steps.reduce((sum, step) => sum + step.kept, 0);

async function read(body, answer, controller, note) {
  const list = $("messages");
  let due = 0;
  const paint = () => {
    clearTimeout(due);
    due = 0;
    if (answer.followed && answer.text.isConnected) show(answer);
  };
  try {
    for await (const { choices } of chat(body, controller.signal)) {
      for (const { delta, anabranch, finish_reason: reason } of choices) {
        const below = list.scrollHeight - list.scrollTop - list.clientHeight;
        answer.words += delta.content ?? "";
        if (anabranch?.step) {
          note.textContent = "";
          append(answer, [anabranch.step]);
          due ||= setTimeout(paint, 100); // not each step: drawing takes the processor's time, which may be the model's
        }
        if (anabranch?.stats) {
          answer.stats = anabranch.stats;
          answer.settings.drafter = anabranch.drafter;
        }
        if (reason === "length") note.textContent = `Ended at ${totalOf(answer)} tokens, the limit.`;
        if (below < 80) list.scrollTop = list.scrollHeight; // unless the reader has scrolled up
      }
    }
  } finally {
    if (due) paint(); // an answer that has ended is shown whole
  }
}

function failed(article, note, error, question) {
  note.classList.add("error");
  note.setAttribute("role", "alert");
  note.textContent = `${error.message[0].toUpperCase()}${error.message.slice(1)}.`;
  const again = make("button", { type: "button", textContent: "Try again" });
  again.addEventListener("click", () => {
    if (running) return;
    turns = turns.filter((turn) => turn.answer.text.parentElement !== article);
    article.remove();
    ask(question);
  });
  note.append(" ", again);
  if (error.status === 401) unlock(error.message).then((given) => given && again.click());
}

async function compare(answer, body) {
  if (running) return;
  const controller = (running = new AbortController());
  busy(true);
  answer.plain = "running";
  refresh(answer);
  const again = async (drafter) => {
    const found = { words: "", rate: 0 };
    for await (const { choices } of chat({ ...body, drafter }, controller.signal)) {
      for (const { delta, anabranch } of choices) {
        found.words += delta.content ?? "";
        found.rate = anabranch?.stats?.decode_tokens_per_second ?? found.rate;
      }
    }
    return found;
  };
  try {
    // both once more: while the answer came, the page was drawing
    const [plain, drafted] = [await again("none"), await again("auto")];
    const same = [plain, drafted].every(({ words }) => words === answer.words);
    answer.plain = { rate: plain.rate, drafted: drafted.rate, same };
  } catch (error) {
    answer.plain = error.name === "AbortError" ? null : { error: error.message };
  }
  if (running === controller) {
    running = null;
    busy(false);
  }
  refresh(answer);
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (document.activeElement === document.body) $("prompt").focus();
}

function send() {
  const question = $("prompt").value.trim();
  if (!question || running) return;
  $("prompt").value = "";
  ask(question);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("adjust").addEventListener("click", () => $("settings").showModal());
const welcome = $("welcome");
$("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  answers.clear();
  clear();
  $("messages").replaceChildren(welcome);
  $("prompt").focus();
});
for (const sample of SAMPLES) {
  const button = make("button", { type: "button", textContent: sample, onclick: () => !running && ask(sample) });
  $("samples").append(make("li", {}, button));
}

// -- traces ------------------------------------------------------------------------------------------------------

async function open(file) {
  const note = make("p", { className: "note" });
  const heading = make("h2", { textContent: file.name });
  const article = make("article", { className: "trace" }, heading, note);
  $("welcome")?.remove();
  $("messages").append(article);
  try {
    await begun;
    const { settings, judged, rows } = await readTrace(file);
    note.textContent = `Recorded with ${settings.model ?? "a model"}, drafter ${settings.drafter ?? "unknown"}.`;
    addTexts(rows, await textsOf(rows, note));
    if (settings.model !== properties.model_path) note.append(" Texts are those of this server\u2019s tokenizer.");
    if (!judged) note.append(" Drafts of every position, which were not verified.");
    const answer = Object.assign(newAnswer(file.name, "Trace, tokens"), { judged, settings });
    const pick = (row) => {
      Object.assign(answer, { steps: [], line: "", code: false });
      answer.text.replaceChildren();
      append(answer, rows[row]);
      show(answer, 0, { walking: true });
    };
    if (rows.length > 1) article.append(choice(rows, pick));
    article.append(answer.text);
    pick(0);
    $("slider").focus();
  } catch (error) {
    note.classList.add("error");
    note.setAttribute("role", "alert");
    note.textContent = error.message;
  }
  article.scrollIntoView({ block: "nearest" });
}

function choice(rows, pick) {
  const select = make("select", { onchange: () => pick(select.selectedIndex) });
  rows.forEach((steps, row) => select.append(make("option", { textContent: `${row + 1}: ${steps.length} steps` })));
  return make("label", {}, "Sequence ", select);
}

// The texts of all tokens of a trace, by id; of a model that this server does not know, ids are shown.
async function textsOf(rows, note) {
  const tokens = [...new Set(rows.flat().flatMap((step) => [...step.tokens, step.next]))];
  try {
    const { token_strs: texts } = await post("detokenize", { tokens, return_token_strs: true });
    return new Map(tokens.map((each, place) => [each, texts[place]]));
  } catch (error) {
    note.append(` Token ids are shown: ${error.message}.`);
    return new Map();
  }
}

$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  for (const file of $("file").files) open(file);
  $("file").value = "";
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  for (const file of event.dataTransfer.files) open(file);
});

// -- the server --------------------------------------------------------------------------------------------------

// Ask for the API key; resolves to whether one was given.
function unlock(refusal) {
  $("refusal").textContent = `The server says: ${refusal}.`;
  $("locked").showModal();
  return new Promise((resolve) => {
    $("locked").addEventListener("close", () => {
      const given = $("secret").value;
      $("secret").value = "";
      if (given) setKey(given);
      resolve(Boolean(given));
    }, { once: true });
  });
}

async function begin() {
  try {
    properties = await get("props");
    const { data } = await get("v1/models");
    $("name").replaceChildren(...data.map(({ id }) => make("option", { value: id, textContent: id })));
    const { dtype, quantize, drafter, n_ctx: context } = properties;
    $("model").textContent = `${data[0].id} \u00b7 ${quantize === "none" ? dtype : quantize} \u00b7 ${context.toLocaleString()} tokens of context`;
    $("model").title = `drafter ${drafter}`;
  } catch (error) {
    if (error.status === 401 && (await unlock(error.message))) return begin();
    $("model").textContent = error.message;
  }
}

const begun = begin(); // questions and traces wait for it: they use the model's name
