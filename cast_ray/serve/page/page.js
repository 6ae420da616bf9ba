// The live page: asks /status every two seconds, and streams from the API. It loads nothing from elsewhere.
"use strict";

const EVERY_MS = 2000;
const COLOURS = 4;
const KEY = "cast-ray-key";
const at = (id) => document.getElementById(id);
let before = null;
let running = null;
let trees = [];

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function drawing(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const shown = (number, digits = 1) => (Number.isFinite(number) ? number.toFixed(digits) : "–");
const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);

function say(state, text) {
  const health = at("health");
  if (health.textContent !== text) health.textContent = text;
  health.dataset.state = state;
}

async function look() {
  try {
    const answer = await fetch("status", { headers: headers() });
    at("key-form").hidden = answer.status !== 401 && !sessionStorage.getItem(KEY);
    if (answer.status === 401) {
      say("bad", "an API key is needed");
    } else if (!answer.ok) {
      say("bad", `the server says ${answer.status}`);
    } else {
      show(await answer.json());
    }
  } catch {
    say("bad", "the server does not answer");
  }
  setTimeout(look, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

// What was counted between two looks at one replica.
function since(name, engine) {
  const old = before && before.engines[name];
  if (!old || engine.rounds < old.rounds) return null;
  const rounds = engine.rounds - old.rounds;
  return {
    tokens: engine.tokens_generated - old.tokens_generated,
    rounds,
    width: rounds ? (engine.nodes_verified - old.nodes_verified) / rounds : null,
    length: rounds ? engine.mean_round_length * engine.rounds - old.mean_round_length * old.rounds : 0,
  };
}

function show(status) {
  at("model").textContent = status.model;
  const count = status.replicas.length;
  say(count ? "ok" : "bad", count ? `healthy, ${count} replica${count === 1 ? "" : "s"}` : "no replica answers");
  const engines = status.replicas.map((one) => one.engine || {});
  const news = status.replicas.map((one) => since(one.name, one.engine || {}));
  const rounds = sum(news.map((one) => one && one.rounds));
  const seconds = before ? status.now - before.now : NaN;
  at("rate").textContent = shown(sum(news.map((one) => one && one.tokens)) / seconds);
  at("length").textContent = shown(rounds ? sum(news.map((one) => one && one.length)) / rounds : NaN, 2);
  at("width").textContent = shown(rounds ? sum(news.map((one) => one && one.width * one.rounds)) / rounds : NaN);
  at("running").textContent = sum(engines.map((one) => one.running));
  at("waiting").textContent = sum(engines.map((one) => one.waiting));
  const pages = sum(engines.map((one) => one.kv_pages));
  const used = pages - sum(engines.map((one) => one.kv_pages_free));
  at("pages").textContent = pages ? `${Math.round((100 * used) / pages)}%` : "–";
  percentiles("ttft", status.recent.time_to_first_token_ms);
  percentiles("gap", status.recent.time_per_token_ms);
  percentiles("total", status.recent.request_ms);
  at("replicas").replaceChildren(
    ...(count ? status.replicas.map((one, place) => card(one, news[place])) : [element("p", "None has answered yet.")]),
  );
  at("batches").replaceChildren(...(status.batches.length ? status.batches.map(batch) : [element("li", "None is running.")]));
  before = { now: status.now, engines: Object.fromEntries(status.replicas.map((one) => [one.name, one.engine || {}])) };
}

function percentiles(id, found) {
  const cells = at(id).querySelectorAll("td");
  ["p50", "p90", "p99"].forEach((name, place) => {
    cells[place].textContent = found ? shown(found[name]) : "–";
  });
}

function batch(one) {
  const counts = one.request_counts;
  return element("li", `${one.id}: ${one.status}, ${counts.completed} of ${counts.total} done, ${counts.failed} failed`);
}

function card(replica, news) {
  const engine = replica.engine || {};
  const device = engine.device || {};
  const made = element("article", undefined, "card");
  made.append(element("h3", replica.name));
  const list = element("dl");
  const width = news && news.width !== null ? news.width : engine.mean_nodes;
  const facts = {
    device: `${device.name || "?"}, ${device.dtype || "?"}`,
    "tokens/s at a full batch": shown(replica.tokens_per_s),
    "round length": shown(engine.mean_round_length, 2),
    width: `${shown(width)} (${(engine.width && engine.width.width) || "?"})`,
    aboard: `${replica.aboard}, ${replica.outstanding_tokens} tokens outstanding`,
    answered: `${replica.finished.online} online, ${replica.finished.batch} of batches`,
    "time in": times(engine),
  };
  for (const [name, value] of Object.entries(facts)) list.append(element("dt", name), element("dd", value));
  made.append(list);
  const curve = latency(engine.latency, width);
  if (curve) made.append(curve);
  return made;
}

function times(engine) {
  const parts = ["draft", "verify", "host", "prefill"].map((name) => [name, engine[`${name}_ms`] || 0]);
  const all = sum(parts.map((part) => part[1]));
  return all ? parts.map(([name, ms]) => `${name} ${Math.round((100 * ms) / all)}%`).join(", ") : "–";
}

// Milliseconds of a verification over the candidates verified, at the smallest batch and context that was measured.
function latency(table, width) {
  if (!table || !table.verify || !table.verify.length) return null;
  const least = (name) => Math.min(...table.verify.map((point) => point[name]));
  const batchSize = least("batch");
  const context = least("context");
  const points = table.verify
    .filter((point) => point.batch === batchSize && point.context === context)
    .map((point) => [point.tokens / Math.max(1, batchSize) - 1, point.ms])
    .sort((one, other) => one[0] - other[0]);
  const right = Math.max(1, ...points.map((point) => point[0]));
  const top = Math.max(...points.map((point) => point[1]));
  const x = (nodes) => 40 + (nodes / right) * 350;
  const y = (ms) => 125 - (ms / top) * 110;
  const text = `Verification latency over candidates at batch ${batchSize}: up to ${shown(top)} ms; present width ${shown(width)}`;
  const svg = drawing("svg", { viewBox: "0 0 400 150", role: "img", "aria-label": text });
  svg.append(
    drawing("line", { x1: 40, y1: 125, x2: 390, y2: 125, class: "axis" }),
    drawing("line", { x1: 40, y1: 10, x2: 40, y2: 125, class: "axis" }),
    drawing("polyline", { points: points.map((point) => `${x(point[0])},${y(point[1])}`).join(" "), class: "curve" }),
    drawing("text", { x: 2, y: 18 }, `${shown(top, 0)} ms`),
    drawing("text", { x: 40, y: 142 }, "0"),
    drawing("text", { x: 390, y: 142, "text-anchor": "end" }, `${right} candidates`),
  );
  if (Number.isFinite(width)) {
    const place = x(Math.min(width, right));
    svg.append(drawing("line", { x1: place, y1: 10, x2: place, y2: 125, class: "present" }));
  }
  const figure = element("figure");
  figure.append(svg, element("figcaption", `Verification latency at batch ${batchSize}; dashed: the present width`));
  return figure;
}

function body() {
  const chat = at("kind").value === "chat";
  const prompt = at("prompt").value;
  const asked = {
    model: at("model").textContent,
    max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value),
    stream: true,
    stream_options: { include_usage: true, include_trees: true },
  };
  if (at("seed").value !== "") asked.seed = Number(at("seed").value);
  return chat
    ? ["v1/chat/completions", { ...asked, messages: [{ role: "user", content: prompt }] }]
    : ["v1/completions", { ...asked, prompt }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function generate(event) {
  event.preventDefault();
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("answer").replaceChildren();
  at("summary").textContent = "";
  trees = [];
  at("tree").hidden = true;
  const began = performance.now();
  try {
    const [path, asked] = body();
    const response = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(asked),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    let first = null;
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (first === null) first = performance.now() - began;
      for (const choice of chunk.choices) write(choice, chunk.round);
      grow(chunk.round);
      if (chunk.usage) summarise(chunk.usage, first, performance.now() - began);
    }
  } catch (error) {
    const text = error.name === "AbortError" ? "Stopped." : error.message;
    at("answer").append(element("p", text, error.name === "AbortError" ? "note" : "failure"));
  }
  at("send").disabled = false;
  at("stop").disabled = true;
  running = null;
}

function write(choice, round) {
  const delta = choice.delta || { content: choice.text };
  const text = delta.reasoning_content || delta.content || (delta.tool_calls ? JSON.stringify(delta.tool_calls) : "");
  if (!text) return;
  const made = element("span", text, round ? `round-${round.number % COLOURS}` : "");
  if (delta.reasoning_content) made.classList.add("reasoning");
  if (round) made.title = `round ${round.number}: ${round.tokens} token${round.tokens === 1 ? "" : "s"}`;
  at("answer").append(made);
  if (round && round.tokens > 1) {
    const mark = element("sup", String(round.tokens));
    mark.setAttribute("aria-hidden", "true");
    at("answer").append(mark);
  }
}

// The rounds come one by one; whoever looks at the last one sees the next.
function grow(round) {
  if (!round || !round.trees) return;
  const range = at("round");
  const follows = Number(range.value) >= trees.length;
  trees.push(...round.trees);
  range.max = trees.length;
  if (follows) range.value = trees.length;
  if (follows || at("tree").hidden) drawTree();
  at("tree").hidden = false;
}

const MOST_DRAWN = 64;
const readable = (text) => text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "∅";

function drawTree() {
  const number = Number(at("round").value);
  const tree = trees[number - 1];
  const path = new Set(tree.accepted);
  const right = tree.accepted.map((node) => readable(tree.texts[node])).join(" ");
  const name = `${number} of ${trees.length}: ${tree.texts.length} candidates, ${path.size} accepted; committed ${tree.emitted.map(readable).join(" ")}`;
  at("round-name").textContent = name;
  at("round").setAttribute("aria-valuetext", name);
  // Heaviest first, and a parent comes before its children: so many of the first are a tree too.
  const count = Math.min(MOST_DRAWN, tree.texts.length);
  const depths = [];
  for (let node = 0; node < count; node++) depths.push(tree.parents[node] < 0 ? 1 : depths[tree.parents[node]] + 1);
  const order = rows(tree, count, path);
  const x = (depth) => (depth ? 50 + (depth - 1) * 92 : 12);
  const y = (node) => 14 + 20 * (node < 0 ? 0 : order[node]);
  const height = 28 + 20 * Math.max(0, ...order);
  const width = x(Math.max(0, ...depths)) + 96;
  const text = `Tree of round ${number}: ${tree.texts.length} candidates; accepted: ${right || "none"}`;
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": text });
  for (let node = 0; node < count; node++) {
    const parent = tree.parents[node];
    const from = x(parent < 0 ? 0 : depths[parent]) + (parent < 0 ? 0 : 6);
    const to = x(depths[node]) - 6;
    const bend = `M${from},${y(parent)} C${from + 10},${y(parent)} ${to - 14},${y(node)} ${to},${y(node)}`;
    svg.append(drawing("path", { d: bend, class: path.has(node) ? "edge taken" : "edge" }));
  }
  svg.append(drawing("circle", { cx: x(0), cy: y(-1), r: 4, class: "node" }));
  for (let node = 0; node < count; node++) {
    const [left, top] = [x(depths[node]) - 6, y(node) - 6];
    const box = { x: left, y: top, width: 12, height: 12, rx: 2, "fill-opacity": Math.max(0.12, tree.masses[node]) };
    svg.append(drawing("rect", { ...box, class: path.has(node) ? "node taken" : "node" }));
    const word = drawing("text", { x: left + 16, y: y(node) + 4, class: "word" }, readable(tree.texts[node]).slice(0, 9));
    word.append(drawing("title", {}, `${readable(tree.texts[node])}: mass ${tree.masses[node].toFixed(3)}`));
    svg.append(word);
  }
  at("tree").querySelector(".scroll").replaceChildren(svg);
}

// A line for each branch: the accepted path straight on top, others below it.
function rows(tree, count, path) {
  const children = new Map();
  for (let node = 0; node < count; node++) {
    const parent = tree.parents[node];
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  const order = [];
  let next = 0;
  const place = (node, line) => {
    if (node >= 0) order[node] = line;
    const below = (children.get(node) || []).sort((one, other) => path.has(other) - path.has(one));
    below.forEach((child, index) => place(child, index ? ++next : line));
  };
  place(-1, 0);
  return order;
}

function summarise(usage, first, total) {
  const speculation = usage.speculation;
  const rate = (1000 * usage.completion_tokens) / total;
  at("summary").textContent =
    `${usage.completion_tokens} tokens in ${speculation.rounds} rounds of ${shown(speculation.mean_round_length, 2)} tokens; ` +
    `${speculation.nodes_verified} candidates verified; first token after ${shown(first, 0)} ms, ${shown(rate)} tokens/s.`;
}

at("ask").addEventListener("submit", generate);
at("round").addEventListener("input", drawTree);
at("stop").addEventListener("click", () => running && running.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  at("key").value = "";
  look();
});
look();
