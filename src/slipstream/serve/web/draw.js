// Draws answers token by token, what is known about one token, and draft trees.

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

function percent(probability) {
  return `${(100 * probability).toFixed(probability < 0.01 ? 2 : 1)} %`;
}

// One answer: its element, its tokens and its counts.
export class Answer {
  constructor(title, onChoose) {
    this.tokens = [];
    this.steps = [];
    this.began = performance.now();
    this.first = null;
    this.onChoose = onChoose;
    this.text = element("div", { className: "text", tabIndex: 0, role: "group" });
    this.text.setAttribute("aria-label", `${title}: use the arrow keys to step through the tokens`);
    this.foot = element("footer");
    this.element = element("article", { className: "answer" }, element("h3", {}, title), this.text, this.foot);
    this.chosen = null;
    this.text.addEventListener("keydown", (event) => this.#key(event));
    this.text.addEventListener("pointerover", (event) => this.#point(event));
    this.text.addEventListener("click", (event) => this.#point(event));
  }

  add(choice) {
    for (const step of choice.steps ?? []) {
      const number = this.steps.push(step) - 1;
      if (this.first === null) {
        this.first = performance.now();
        this.firstTokens = step.tokens.length;
      }
      this.last = performance.now();
      step.tokens.forEach((token, i) => {
        const known = choice.logprobs?.content?.[i];
        const made = element("span", { className: `token ${token.drafted ? "drafted" : "own"}` }, token.text);
        made.dataset.index = this.tokens.length;
        this.tokens.push({ ...token, known, step: number, made });
        this.text.append(made);
      });
    }
  }

  get content() {
    return this.tokens.map((token) => token.text).join("");
  }

  get counts() {
    const drafts = this.steps.filter((step) => step.tree.length > 1);
    const accepted = this.tokens.filter((token) => token.drafted).length;
    const seconds = (this.last - this.first) / 1000;
    const positions = [];
    for (const step of drafts) {
      const depth = depths(step.tree);
      const kept = step.tokens.filter((token) => token.drafted).length;
      for (let i = 0; i < Math.max(...depth); i++) {
        positions[i] ??= 0;
        positions[i] += kept > i ? 1 : 0;
      }
    }
    return {
      tau: this.steps.length ? this.tokens.length / this.steps.length : 0,
      rate: seconds > 0 ? (this.tokens.length - this.firstTokens) / seconds : 0,
      share: this.tokens.length ? accepted / this.tokens.length : 0,
      positions: positions.map((count) => count / drafts.length),
    };
  }

  choose(index) {
    if (index < 0 || index >= this.tokens.length) return;
    const token = this.tokens[index];
    this.chosen = index;
    for (const other of document.querySelectorAll(".token.chosen, .token.same-step")) {
      other.classList.remove("chosen", "same-step");
    }
    for (const other of this.tokens) other.made.classList.toggle("same-step", other.step === token.step);
    token.made.classList.add("chosen");
    this.onChoose(token, this.steps[token.step], this.tokens.filter((t) => t.step === token.step).indexOf(token));
  }

  #key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const at = this.chosen ?? -1;
    if (event.key in moves) this.choose(Math.min(Math.max(at + moves[event.key], 0), this.tokens.length - 1));
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(this.tokens.length - 1);
    else return;
    event.preventDefault();
  }

  #point(event) {
    const token = event.target.closest(".token");
    if (token) this.choose(Number(token.dataset.index));
  }
}

function depths(tree) {
  const depth = [];
  for (const node of tree) depth.push(node.parent < 0 ? 0 : depth[node.parent] + 1);
  return depth;
}

// What is known about a token, as a list of nodes.
export function about(token, step, place) {
  const origin = token.drafted ? "drafted, then accepted" : "the model's own choice";
  const lines = [element("p", {}, element("code", {}, visible(token.text)), ` ${origin}`)];
  if (token.known) {
    const rows = token.known.top_logprobs.map((other) =>
      element("tr", {}, element("td", {}, element("code", {}, visible(other.token))), element("td", {}, percent(Math.exp(other.logprob)))),
    );
    lines.push(element("p", {}, `probability ${percent(Math.exp(token.known.logprob))}`));
    if (rows.length) lines.push(element("table", {}, element("caption", { className: "visually-hidden" }, "Likeliest tokens here"), ...rows));
  }
  const drafted = step.tree.length - 1;
  const kept = step.tokens.filter((t) => t.drafted).length;
  const source = step.source ? ` by ${step.source}` : "";
  lines.push(
    element("p", { className: "hint" }, drafted
      ? `Token ${place + 1} of ${step.tokens.length} of one pass: ${drafted} drafted${source}, ${kept} accepted.`
      : "A pass without a draft."),
  );
  if (drafted) lines.push(tree(step.tree));
  return lines;
}

// The tree from left to right, accepted nodes and edges marked, described in words for who cannot see it.
export function tree(nodes) {
  const depth = depths(nodes);
  const children = nodes.map((_, i) => nodes.flatMap((node, j) => (node.parent === i ? [j] : [])));
  const row = [];
  let rows = 0;
  const place = (i) => {
    if (!children[i].length) row[i] = rows++;
    else {
      children[i].forEach(place);
      row[i] = row[children[i][0]];
    }
  };
  place(0);
  const label = nodes.map((node) => visible(node.text).slice(0, 10));
  const wide = Math.max(...label.map((text) => text.length)) * 7.5 + 14;
  const x = (i) => depth[i] * (wide + 22) + 2;
  const y = (i) => row[i] * 30 + 2;
  const space = "http://www.w3.org/2000/svg";
  const make = (name, attributes) => {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const svg = make("svg", {
    width: (Math.max(...depth) + 1) * (wide + 22),
    height: rows * 30 + 2,
    role: "img",
    "aria-label": describe(nodes, children),
  });
  nodes.forEach((node, i) => {
    if (node.parent < 0) return;
    const [x0, y0, x1, y1] = [x(node.parent) + wide, y(node.parent) + 12, x(i), y(i) + 12];
    const curve = `M${x0} ${y0} C${x0 + 11} ${y0} ${x1 - 11} ${y1} ${x1} ${y1}`;
    svg.append(make("path", { d: curve, class: node.accepted ? "accepted" : "" }));
  });
  nodes.forEach((node, i) => {
    const group = make("g", { class: node.accepted ? "accepted" : "" });
    group.append(make("rect", { x: x(i), y: y(i), width: wide, height: 24, rx: 5 }));
    const text = make("text", { x: x(i) + wide / 2, y: y(i) + 12 });
    text.textContent = label[i];
    group.append(text);
    svg.append(group);
  });
  return element("div", { className: "tree", tabIndex: 0 }, svg);
}

function describe(nodes, children) {
  const say = (i) => {
    const own = `${visible(nodes[i].text)}${i && nodes[i].accepted ? " (accepted)" : ""}`;
    const after = children[i].map(say);
    return after.length ? `${own} then ${after.length > 1 ? `either ${after.join(", or ")}` : after[0]}` : own;
  };
  return `Draft tree: ${say(0)}`;
}
