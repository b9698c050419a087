"use strict";
// The dashboard of Morph. Reads /morph/events, draws, and runs one prompt under three layouts. No dependency, no build.

const $ = (id) => document.getElementById(id);
const HISTORY = 240;
const state = { history: [], about: null, controller: null, watching: false };

// ---- theme

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", String(dark));
  draw();
}
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem("morph-theme", dark ? "dark" : "light");
  setTheme(dark);
});

// ---- talking to the server

function headers(more = {}) {
  const key = sessionStorage.getItem("morph-key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function status(text, kind) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").dataset.state = kind;
}

// Server-sent events by fetch: EventSource cannot send a key.
async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trim()).join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function watch() {
  if (state.watching) return;
  state.watching = true;
  let wait = 500;
  for (;;) {
    try {
      const response = await fetch("/morph/events", { headers: headers() });
      if (response.status === 401 || response.status === 403) {
        const key = sessionStorage.getItem("morph-key");
        $("key-note").textContent = key ? "The server does not know this key." : "Kept in this tab only.";
        $("login").hidden = false;
        status("needs a key", "lost");
        state.watching = false;
        return;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      $("login").hidden = true;
      for await (const data of events(response)) {
        wait = 500;
        take(JSON.parse(data));
      }
    } catch (error) {
      console.debug("events", error);
    }
    status("no connection, trying again", "lost");
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, 8000);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("morph-key", $("key").value);
  watch();
});

// ---- drawing

function take(snapshot) {
  if (state.history.length && snapshot.now < state.history[state.history.length - 1].at) state.history = [];
  state.history = state.history.concat(snapshot.history).slice(-HISTORY);
  const first = state.about === null;
  state.about = snapshot;
  status(snapshot.alive ? "live" : "the engine has stopped", snapshot.alive ? "live" : "lost");
  if (first) {
    $("model").textContent = snapshot.model;
    $("budget").value = snapshot.budget;
    showBudget();
    $("server-budget").hidden = !(snapshot.adaptive && snapshot.gates);
    $("sb").value = snapshot.budget;
    $("sb-value").textContent = snapshot.budget;
    const auto = document.querySelector('[data-layout="auto"]');
    const ssm = document.querySelector('[data-layout="ssm"]');
    auto.hidden = !(snapshot.adaptive && snapshot.gates);
    ssm.hidden = !snapshot.adaptive;
  }
  draw();
}

const text = (id, value) => { if ($(id).textContent !== String(value)) $(id).textContent = value; };
const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function strip(element, layout) {
  if (element.dataset.layout === layout) return;
  element.dataset.layout = layout;
  element.replaceChildren(...[...layout].map((bit) => {
    const cell = document.createElement("span");
    cell.className = `bit ${bit === "1" ? "on" : "off"}`;
    return cell;
  }));
  const count = [...layout].filter((bit) => bit === "1").length;
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `${count} of ${layout.length} blocks on attention: ${layout}`);
}

function draw() {
  const now = state.about;
  if (!now) return;
  text("running", now.running);
  text("waiting", now.waiting);
  text("finished", now.finished);
  text("distinct", now.distinct_layouts);
  const last = state.history[state.history.length - 1];
  text("share", percent(last && last.share));
  drawRequests(now);
  drawLatency("ttft", now.ttft);
  drawLatency("tpot", now.tpot);
  drawMemory(now);
  drawHeat(now.blocks);
  drawLoad();
}

function drawRequests(now) {
  const body = $("requests");
  const known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  const rows = now.requests.map((request) => {
    const row = known.get(request.id) || document.createElement("tr");
    if (!row.dataset.id) {
      row.dataset.id = request.id;
      for (let i = 0; i < 6; i++) row.insertCell();
      row.cells[0].textContent = request.id.slice(-8);
      row.cells[1].append(document.createElement("div"));
      row.cells[1].firstChild.className = "strip";
    }
    const decided = request.layout !== null;
    if (decided) strip(row.cells[1].firstChild, request.layout);
    const share = decided ? [...request.layout].filter((b) => b === "1").length / request.layout.length : null;
    row.cells[2].textContent = decided ? `${percent(share)} (${request.source})` : "undecided";
    row.cells[3].textContent = request.prompt_tokens;
    row.cells[4].textContent = request.tokens;
    row.cells[5].textContent = request.seconds.toFixed(1);
    return row;
  });
  body.replaceChildren(...rows);
  $("idle").hidden = rows.length > 0 && !now.not_shown;
  text("idle", now.not_shown ? `and ${now.not_shown} more` : "No request is running.");
}

function drawLatency(id, values) {
  ["p50", "p90", "p99"].forEach((name, i) => {
    $(id).cells[i + 1].textContent = values ? (values[name] * 1000).toFixed(values[name] < 0.1 ? 1 : 0) : "–";
  });
}

function drawMemory(now) {
  const names = { attention: "keys and values", ssm: "SSM states", cached: "context cache", free: "free" };
  const kinds = Object.keys(now.memory);
  const bar = $("memory");
  if (bar.children.length !== kinds.length) {
    bar.replaceChildren(...kinds.map((kind) => {
      const part = document.createElement("span");
      part.className = `k-${kind}`;
      return part;
    }));
    $("memory-legend").replaceChildren(...kinds.map(() => document.createElement("li")));
  }
  const words = kinds.map((kind, i) => {
    const share = now.memory[kind] / now.memory_total;
    bar.children[i].style.width = `${share * 100}%`;
    const item = $("memory-legend").children[i];
    const label = `${names[kind] || kind} ${(share * 100).toFixed(1)} %`;
    if (item.textContent !== label) {
      const swatch = document.createElement("span");
      swatch.className = `k-${kind}`;
      item.replaceChildren(swatch, label);
    }
    return label;
  });
  bar.setAttribute("aria-label", `Memory: ${words.join(", ")}`);
}

function drawHeat(blocks) {
  const canvas = $("heat");
  const context = canvas.getContext("2d");
  const cold = color("--cold").split(",").map(Number);
  const hot = color("--hot").split(",").map(Number);
  canvas.height = Math.max(120, Math.min(360, blocks * 8));
  context.fillStyle = color("--bg");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const width = canvas.width / HISTORY;
  const height = canvas.height / blocks;
  const shift = HISTORY - state.history.length;
  let seen = null;
  state.history.forEach((entry, i) => {
    if (!entry.blocks) return;
    seen = entry.blocks;
    entry.blocks.forEach((share, block) => {
      const mix = cold.map((c, j) => Math.round(c + (hot[j] - c) * share));
      context.fillStyle = `rgb(${mix})`;
      context.fillRect((shift + i) * width, block * height, Math.ceil(width), Math.ceil(height) - 1);
    });
  });
  const words = seen ? seen.map((s, b) => `block ${b} ${percent(s)}`).join(", ") : "no request yet";
  canvas.setAttribute("aria-label", `Attention share by block, latest: ${words}`);
}

function drawLoad() {
  const canvas = $("load");
  const context = canvas.getContext("2d");
  const points = state.history.filter((entry) => entry.share !== null);
  const most = Math.max(4, ...points.map((entry) => entry.running));
  const left = 40, bottom = canvas.height - 28, top = 12, right = canvas.width - 12;
  context.fillStyle = color("--card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.strokeStyle = color("--line");
  context.fillStyle = color("--soft");
  context.font = "13px system-ui, sans-serif";
  [0, 0.5, 1].forEach((share) => {
    const y = bottom - (bottom - top) * share;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.fillText(`${share * 100}%`, 2, y + 4);
  });
  [0, Math.ceil(most / 2), most].forEach((count) => {
    context.fillText(String(count), left + ((right - left) * count) / most - 4, canvas.height - 8);
  });
  context.fillStyle = color("--attention");
  context.globalAlpha = 0.55;
  points.forEach((entry) => {
    context.beginPath();
    context.arc(left + ((right - left) * entry.running) / most, bottom - (bottom - top) * entry.share, 4, 0, 7);
    context.fill();
  });
  context.globalAlpha = 1;
  const mean = points.length ? points.reduce((sum, entry) => sum + entry.share, 0) / points.length : null;
  canvas.setAttribute("aria-label", points.length ? `Mean attention share ${percent(mean)} at up to ${most} running requests` : "No data yet");
}

// ---- the playground

function showBudget() { $("budget-value").textContent = Number($("budget").value).toFixed(2); }
$("budget").addEventListener("input", showBudget);

// Words of `answer` that are not on a longest common subsequence with `base`.
function differing(base, answer) {
  const n = base.length, m = answer.length;
  const table = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--)
    for (let j = m - 1; j >= 0; j--)
      table[i][j] = base[i] === answer[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const marked = new Array(m).fill(true);
  for (let i = 0, j = 0; i < n && j < m; ) {
    if (base[i] === answer[j]) { marked[j] = false; i++; j++; }
    else if (table[i + 1][j] >= table[i][j + 1]) i++;
    else j++;
  }
  return marked;
}

const words = (value) => value.split(/(\s+)/).filter((part) => part.trim());

function showDifferences(articles) {
  const base = articles.find((article) => article.dataset.layout === "attention");
  const reference = words(base.dataset.answer || "");
  for (const article of articles) {
    if (article === base || article.hidden) continue;
    const answer = article.dataset.answer || "";
    const marked = differing(reference, words(answer));
    let at = 0;
    article.querySelector(".text").replaceChildren(...answer.split(/(\s+)/).map((part) => {
      if (!part.trim() || !marked[at++]) return document.createTextNode(part);
      const mark = document.createElement("mark");
      mark.textContent = part;
      return mark;
    }));
  }
}

async function runOne(article, prompt, budget, tokens, signal) {
  const layout = article.dataset.layout;
  const facts = article.querySelector(".facts");
  const target = article.querySelector(".text");
  article.dataset.answer = "";
  target.textContent = "";
  facts.textContent = "waiting";
  const begin = performance.now();
  let first = null, count = 0, info = null;
  const morph = layout === "auto" ? { layout, attention_budget: budget } : { layout };
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal, headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ model: state.about.model, messages: [{ role: "user", content: prompt }], temperature: 0, max_tokens: tokens, stream: true, morph }),
  });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error((body.error && body.error.message) || `status ${response.status}`);
  }
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.morph) info = chunk.morph;
    const delta = chunk.choices && chunk.choices[0] && chunk.choices[0].delta;
    if (delta && delta.content) {
      first = first ?? performance.now();
      count++;
      article.dataset.answer += delta.content;
      target.textContent = article.dataset.answer;
    }
    if (info && info.layout) strip(article.querySelector(".strip"), info.layout);
  }
  const seconds = (performance.now() - (first ?? begin)) / 1000;
  const blocks = info && info.layout ? `${info.attention_blocks} of ${info.layout.length} blocks on attention · ` : "";
  facts.textContent = `${blocks}first token ${Math.round((first ?? performance.now()) - begin)} ms · ${(count / Math.max(seconds, 1e-3)).toFixed(0)} tokens/s`;
}

$("play").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!state.about || state.controller) return;
  const articles = [...document.querySelectorAll("#answers article")];
  const controller = (state.controller = new AbortController());
  $("run").disabled = true;
  $("stop").disabled = false;
  const tokens = Math.max(1, Math.min(512, Number($("length").value) || 64));
  await Promise.all(articles.filter((article) => !article.hidden).map((article) =>
    runOne(article, $("prompt").value, Number($("budget").value), tokens, controller.signal).catch((error) => {
      article.querySelector(".facts").textContent = error.name === "AbortError" ? "stopped" : error.message;
    })));
  showDifferences(articles);
  state.controller = null;
  $("run").disabled = false;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => state.controller && state.controller.abort());

// ---- the server's budget

$("sb").addEventListener("input", () => { $("sb-value").textContent = Number($("sb").value).toFixed(2); });
$("sb-set").addEventListener("click", async () => {
  const response = await fetch("/morph/budget", {
    method: "PUT", headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ attention_budget: Number($("sb").value) }),
  });
  const body = await response.json().catch(() => ({}));
  $("sb-note").textContent = response.ok ? "Set; it holds for new requests." : (body.error && body.error.message) || `status ${response.status}`;
});

const kept = localStorage.getItem("morph-theme");
setTheme(kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
watch();
