// ---- the page ------------------------------------------------------------------------------------------------------------------------------

const REFRESH = 5000; // milliseconds between two looks at switches and experiments

const model = new Model();
const timeline = new Timeline(model);
const requests = new RequestTable(model);
const plugins = new PluginList();
const experiments = new ExperimentList(model);
let paused = false;
let asked = false;
let lastChange = "";

function draw() {
  asked = false;
  if (paused || !model.frame) return;
  drawTiles();
  timeline.draw();
  drawBatch(model);
  drawPool(model);
  drawLatency(model);
  requests.draw();
  drawEvents(model);
}

function drawSoon() {
  if (!asked) {
    asked = true;
    requestAnimationFrame(draw);
  }
}

function drawTiles() {
  const { frame, slow } = model;
  const engine = frame.engine ?? slow?.engine;
  const rates = model.rates();
  const tile = (name, value, rest) => {
    put(by(`t-${name}`), value);
    put(by(`t-${name}-of`), rest);
  };
  if (engine) {
    const used = engine.num_blocks - engine.free_blocks - engine.retained_blocks;
    const oldest = model.requests.filter((one) => !one.running).reduce((age, one) => Math.max(age, frame.time - one.arrival), 0);
    tile("running", count(engine.running), slow ? `of at most ${count(slow.limits.max_running)}` : "");
    tile("waiting", count(engine.waiting), engine.waiting ? `oldest ${seconds(oldest)}` : slow ? `room for ${count(slow.limits.max_waiting)}` : "");
    tile("kv", percent(used, engine.num_blocks), `${percent(engine.retained_blocks, engine.num_blocks)} retained`);
  }
  tile("rate", rates.steps ? `${count(rates.tokens)}/s` : "0/s", `prompt: ${count(rates.prompt)}/s${rates.media ? `, media: ${count(rates.media)}/s` : ""}`);
  tile("step", rates.step === null ? "–" : seconds(rates.step), rates.step === null ? "none lately" : `${count(rates.requests)} requests each`);
  tile("drafts", percent(rates.accepted, rates.drafts), rates.drafts ? `${count(rates.drafts)} in ${RATE_SECONDS} s` : "none lately");
  if (slow) {
    const { ttft, inter_token: itl } = slow.latency;
    tile("ttft", seconds(ttft.p95), ttft.count ? `half ${seconds(ttft.p50)}` : "no request has ended");
    tile("itl", seconds(itl.p95), itl.count ? `half ${seconds(itl.p50)}` : "");
    if (slow.info) put(by("model"), `${slow.info.model}, ${slow.info.dtype}${slow.info.lossless ? "" : ", not lossless"}`);
  }
}

function showState(kind, detail) {
  const words = { connecting: "connecting", lost: "reconnecting", key: "key needed", refused: "refused", hidden: "resting" };
  const server = model.frame?.server;
  const badge = by("state");
  const open = kind === "open" && server;
  put(badge, open ? server.state : words[kind] ?? "connecting");
  badge.classList.toggle("good", Boolean(open && server.state === "ready" && !server.doubt));
  badge.classList.toggle("bad", kind === "refused" || kind === "key" || kind === "lost");
  put(by("doubt"), open ? server.doubt : detail);
  by("key-form").hidden = kind !== "key";
  by("forget").hidden = !sessionStorage.getItem(KEY);
  if (kind === "key") {
    put(by("key-problem"), sessionStorage.getItem(KEY) ? "This key is not the right one." : "");
    if (document.activeElement === document.body) by("key").focus();
  }
}

async function refresh() {
  try {
    await Promise.all([plugins.refresh(), experiments.refresh()]);
  } catch {
    // the stream says what is wrong with the connection
  }
}

const stream = new Stream(
  (frame) => {
    const first = !model.slow;
    model.take(frame);
    const changes = model.slow?.events.filter((event) => event.kind !== "death") ?? [];
    const newest = changes.length ? JSON.stringify(changes[changes.length - 1]) : "";
    if (first || newest !== lastChange) refresh();
    lastChange = newest;
    drawSoon();
  },
  (kind, detail) => showState(kind, detail),
);

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, by("key").value);
  by("key").value = "";
  stream.again();
});

by("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  by("forget").hidden = true;
  stream.again();
});

function toggles(id, set) {
  const button = by(id);
  button.addEventListener("click", () => {
    const pressed = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(pressed));
    set(pressed);
    drawSoon();
  });
}

toggles("pause", (on) => (paused = on));
toggles("axis", (on) => (timeline.byTime = on));
toggles("fit", (on) => (timeline.fit = on));
addEventListener("resize", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
setInterval(() => document.hidden || refresh(), REFRESH);
stream.run();
