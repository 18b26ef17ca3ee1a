"use strict";
// The playground: sends the prompt to every model of the server that writes text, and shows the streamed tokens.

const $ = (id) => document.getElementById(id);
const panes = [];
const ALTERNATIVES = 5;

const headers = () => {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
};

// White space and control characters of a token, visible.
const visible = (text) =>
  text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣").replace(/[\u0000-\u001f\u007f]/g, "·") || "∅";

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

async function connect() {
  const answer = await fetch("v1/models", { headers: headers() });
  const body = await answer.json();
  $("key-row").hidden = answer.status !== 401 && !$("key").value;
  if (!answer.ok) {
    $("summary").textContent = answer.status === 401 ? "This server needs a key." : "The server does not answer.";
    throw new Error(body.error.message);
  }
  const models = body.data;
  $("summary").textContent = models.map((m) => `${m.id} (${m.max_model_len.toLocaleString("en")} positions)`).join(" · ");
  $("panes").replaceChildren();
  panes.length = 0;
  for (const model of models) panes.push(new Pane(model));
  const writers = panes.filter((pane) => pane.writes);
  $("generate").disabled = !writers.length;
  $("chat-row").hidden = !writers.some((pane) => pane.chats);
  if (writers.length) $("max_tokens").max = Math.min(...writers.map((pane) => pane.model.max_model_len - 1), 2048);
  showSettings();
}

class Pane {
  constructor(model) {
    this.model = model;
    this.writes = model.capabilities.includes("completions");
    this.chats = model.capabilities.includes("chat");
    const root = $("pane").content.cloneNode(true);
    this.status = root.querySelector(".status");
    this.text = root.querySelector(".text");
    root.querySelector("h2").textContent = model.id;
    this.text.setAttribute("aria-label", `Text of ${model.id}`);
    if (!this.writes) this.status.textContent = "This model does not write text; it has /v1/embeddings.";
    this.text.addEventListener("pointerover", (event) => this.point(event.target.closest(".token")));
    this.text.addEventListener("pointerleave", () => this.point(null));
    this.text.addEventListener("keydown", (event) => this.move(event));
    this.text.addEventListener("blur", () => this.point(null));
    $("panes").append(root);
  }

  async generate(settings, prompt, chat) {
    this.text.replaceChildren();
    const start = document.createElement("span");
    start.className = "prompt";
    start.textContent = prompt;
    this.text.append(start);
    this.waiting = [];
    this.count = this.length = 0;
    this.abort = new AbortController();
    const begin = performance.now();
    this.status.textContent = "waiting ...";
    let reason = "stopped";
    try {
      const body = { ...settings, model: this.model.id, stream: true };
      if (chat) Object.assign(body, { messages: [{ role: "user", content: prompt }], logprobs: true, top_logprobs: ALTERNATIVES });
      else Object.assign(body, { prompt, logprobs: ALTERNATIVES });
      for await (const event of this.events(chat ? "v1/chat/completions" : "v1/completions", body)) {
        const choice = event.choices[0];
        if (!choice) continue;
        this.add(choice.text ?? choice.delta.content ?? "", choice.logprobs);
        reason = choice.finish_reason ?? reason;
        this.report(begin, "");
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        reason = "failed";
        showError(`${this.model.id}: ${error.message}`);
      }
    }
    this.report(begin, ` · ${{ length: "length reached", stop: "ended" }[reason] ?? reason}`);
  }

  async *events(path, body) {
    const answer = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: this.abort.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        const event = JSON.parse(part.slice("data: ".length));
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  }

  // Adds a piece of text: one span for each token, and one for tokens that only together are characters.
  add(text, logprobs) {
    const tokens = logprobs?.content
      ? logprobs.content.map((t) => ({ token: t.token, value: t.logprob, offset: t.text_offset, top: t.top_logprobs.map((o) => [o.token, o.logprob]) }))
      : (logprobs?.tokens ?? []).map((token, n) => ({
          token, value: logprobs.token_logprobs[n], offset: logprobs.text_offset[n], top: Object.entries(logprobs.top_logprobs[n]).sort((a, b) => b[1] - a[1]), // an object lists numbers first
        }));
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    const characters = Array.from(text); // offsets count characters, not UTF-16 units
    tokens.forEach((token, n) => {
      this.waiting.push(token);
      const end = tokens[n + 1]?.offset ?? this.length + characters.length;
      const piece = characters.slice(token.offset - this.length, end - this.length).join("");
      if (piece) this.span(piece, this.waiting.splice(0));
    });
    if (text && !tokens.length) this.span(text, this.waiting.splice(0));
    this.count += tokens.length;
    this.length += characters.length;
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  span(text, tokens) {
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = text;
    span.tokens = tokens;
    // From 0 (certain) to 1 (one in a thousand, or less).
    if (tokens.length) span.style.setProperty("--surprise", Math.min(1, -tokens[0].value / Math.log(1000)).toFixed(3));
    this.text.append(span);
  }

  report(begin, end) {
    const seconds = (performance.now() - begin) / 1000;
    this.status.textContent = `${this.count} tokens · ${(this.count / seconds).toFixed(1)} tokens/s${end}`;
  }

  point(span) {
    this.current?.classList.remove("current");
    this.current = span;
    span?.classList.add("current");
    showTip(span);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const spans = [...this.text.querySelectorAll(".token")];
    if (!step || !spans.length) return;
    event.preventDefault();
    const place = spans.indexOf(this.current);
    const next = spans[Math.max(0, Math.min(spans.length - 1, place < 0 ? (step > 0 ? 0 : spans.length - 1) : place + step))];
    next.scrollIntoView({ block: "nearest" });
    this.point(next);
  }
}

function showTip(span) {
  const tip = $("tip");
  tip.hidden = !span?.tokens?.length;
  if (tip.hidden) return;
  const table = document.createElement("table");
  for (const { token, value, top } of span.tokens) {
    const rows = top.map(([name, logprob]) => [name, logprob, name === token]);
    if (!rows.some((row) => row[2])) rows.push([token, value, true]);
    let body;
    for (const [name, logprob, chosen] of rows) {
      const row = (body ??= table.createTBody()).insertRow();
      const share = Math.exp(logprob);
      const bar = document.createElement("div");
      bar.className = "bar";
      bar.style.width = `${share * 100}%`;
      row.className = chosen ? "chosen" : "";
      row.insertCell().textContent = visible(name);
      row.insertCell().append(bar);
      row.insertCell().textContent = `${(share * 100).toFixed(share < 0.1 ? 2 : 1)}%`;
    }
  }
  tip.replaceChildren(table);
  const box = span.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = box.bottom + 6 + tip.offsetHeight < window.innerHeight || box.top < tip.offsetHeight + 12;
  tip.style.left = `${Math.max(8, left) + window.scrollX}px`;
  tip.style.top = `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + window.scrollY}px`;
}

function showSettings() {
  for (const input of document.querySelectorAll("#settings input[type=range]")) {
    const value = Number(input.value);
    input.parentElement.querySelector("output").textContent = input.id === "top_k" && !value ? "all" : value;
  }
}

async function generate() {
  if (!$("cancel").disabled) return;
  showError("");
  try {
    if (!panes.length) await connect();
  } catch (error) {
    return showError(error.message);
  }
  const number = (id) => Number($(id).value);
  const settings = {
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"), max_tokens: number("max_tokens"),
    ...($("seed").value && { seed: number("seed") }),
    ...($("stop").value && { stop: $("stop").value.replaceAll("\\n", "\n") }),
  };
  $("cancel").disabled = false;
  $("generate").disabled = true;
  await Promise.all(panes.filter((pane) => pane.writes).map((pane) => pane.generate(settings, $("prompt").value, $("chat").checked && pane.chats)));
  $("cancel").disabled = true;
  $("generate").disabled = false;
}

const cancel = () => panes.forEach((pane) => pane.abort?.abort());

$("form").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("form").addEventListener("input", showSettings);
$("key").addEventListener("change", () => connect().then(() => showError(""), (error) => showError(error.message)));
$("cancel").addEventListener("click", cancel);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
  if (event.key === "Escape") cancel();
});
document.addEventListener("scroll", () => panes.forEach((pane) => pane.current && showTip(pane.current)), true);
showSettings();
connect().catch((error) => showError(error.message));
