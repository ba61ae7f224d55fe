// The page: a chat that shows where every token came from.

import { model, ServerError, talk } from "./api.js";
import { about, Answer, element } from "./draw.js";

const at = (id) => document.getElementById(id);
const messages = [];
let running = null;
let card = null;

function number(id) {
  const value = at(id).value;
  return value === "" ? undefined : Number(value);
}

function tell(problem) {
  at("alert").textContent = problem;
  at("alert").hidden = !problem;
}

function state(text, bad = false) {
  at("state").textContent = text;
  at("state").classList.toggle("bad", bad);
}

async function connect() {
  try {
    card = await model(at("key").value);
  } catch (error) {
    state("not connected", true);
    tell(error.status === 401 ? "This server needs an API key: enter it under Settings." : error.message);
    return false;
  }
  tell("");
  state("ready");
  at("model").textContent = card.id;
  const { drafters, max_num_speculative_tokens: most } = card.speculative;
  const chosen = at("drafter").value || card.speculative.default;
  at("drafter").replaceChildren(
    ...Object.keys(drafters).map((name) => element("option", { value: name, selected: name === chosen }, name)),
  );
  at("length").max = most;
  at("prompt").placeholder = `${card.chat ? "Message" : "Text to go on from"} (Enter sends, Shift+Enter starts a line)`;
  return true;
}

function body(drafter) {
  const length = drafter === "none" ? undefined : number("length");
  return {
    messages,
    max_tokens: number("tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    logprobs: true,
    top_logprobs: 5,
    stream_options: { include_usage: true },
    speculative: { drafter, num_speculative_tokens: length, trace: true },
  };
}

function choose(token, step, place) {
  at("inspector").replaceChildren(...about(token, step, place));
}

function show(answer) {
  const { tau, rate, share, positions } = answer.counts;
  at("tau").textContent = tau.toFixed(2);
  at("rate").textContent = rate.toFixed(1);
  at("share").textContent = `${Math.round(100 * share)} %`;
  at("positions").replaceChildren(
    ...positions.map((value, i) =>
      element("li", {}, `${i + 1}`, element("meter", { value, ariaLabel: `position ${i + 1}` }), element("span", {}, `${Math.round(100 * value)} %`)),
    ),
  );
}

function scroll() {
  at("log").scrollTop = at("log").scrollHeight;
}

// Streams one answer into its place; gives the server's closing facts.
async function answer(drafter, made, live) {
  let timings = null;
  for await (const chunk of talk(card, body(drafter), at("key").value, running.signal)) {
    if (chunk.choices[0]) made.add(chunk.choices[0]);
    timings = chunk.timings ?? timings;
    if (live) show(made);
    scroll();
  }
  const rate = timings?.predicted_per_second ?? 0;
  if (live) at("rate").textContent = rate.toFixed(1); // the server's figure, which no network delays
  made.foot.textContent = `${made.tokens.length} tokens, ${rate.toFixed(1)} tokens/s, ${made.counts.tau.toFixed(2)} a pass`;
  return rate;
}

async function send(event) {
  event.preventDefault();
  const typed = at("prompt").value;
  const text = !card || card.chat ? typed.trim() : typed; // a text goes on from its last space or line, too
  if (!text || running || (!card && !(await connect()))) return;
  tell("");
  at("hint")?.remove();
  at("prompt").value = "";
  messages.push({ role: "user", content: text });
  at("log").append(element("p", { className: "question" }, text));
  running = new AbortController();
  busy(true);
  const drafter = at("drafter").value;
  const compare = at("compare").checked && drafter !== "none";
  const first = new Answer(drafter === "none" ? "Plain decoding" : `Drafting with ${drafter}`, choose);
  const second = compare ? new Answer("Plain decoding", choose) : null;
  const place = element("div", { className: "answers" }, first.element, ...(second ? [second.element] : []));
  at("log").append(place);
  at("plain-rate").textContent = "–";
  try {
    const rate = await answer(drafter, first, true);
    if (second) {
      // One after the other: together they would share the machine, and neither speed would be true.
      const plain = await answer("none", second, false);
      at("plain-rate").textContent = plain.toFixed(1);
      const same = second.content === first.content ? "the same words" : "other words";
      second.foot.textContent += ` – ${same}, ${(rate / plain).toFixed(2)}× as fast with drafts`;
    }
    at("announce").textContent = `Answer finished: ${first.foot.textContent}. ${first.content}`;
  } catch (error) {
    if (error.name === "AbortError") at("announce").textContent = "Answer stopped.";
    else {
      tell(error instanceof ServerError ? error.message : `The page failed: ${error.message}`);
      if (error.status === 0) state("not connected", true);
    }
  } finally {
    if (first.content) messages.push({ role: "assistant", content: first.content });
    else {
      messages.pop();
      place.remove();
    }
    running = null;
    busy(false);
  }
}

function busy(yes) {
  at("send").disabled = yes;
  at("reset").disabled = yes;
  at("stop").disabled = !yes;
  if (yes) state("answering");
  else if (!at("state").classList.contains("bad")) state("ready");
  if (!yes) at("prompt").focus();
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
}

at("form").addEventListener("submit", send);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit();
});
at("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("reset").addEventListener("click", () => {
  messages.length = 0;
  at("log").replaceChildren();
  at("prompt").focus();
});
at("key").addEventListener("change", connect);
at("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem("theme", next);
  theme(next);
});
theme(localStorage.getItem("theme"));
connect();
