// ---- requests, plugins, experiments, events ---------------------------------------------------------------------------------------------

const REQUEST_ROW = 24; // CSS pixels, as in the style sheet

// Only rows in view are in the document, so that a thousand cost as much as ten.
class RequestTable {
  constructor(model) {
    this.model = model;
    this.scroll = by("requests-scroll");
    this.body = by("requests").tBodies[0];
    this.which = by("which");
    this.scroll.addEventListener("scroll", () => this.draw());
    this.which.addEventListener("change", () => this.draw());
  }

  draw() {
    const which = this.which.value;
    const all = this.model.requests.filter((one) => which === "all" || one.running === (which === "running"));
    const visible = Math.ceil(this.scroll.clientHeight / REQUEST_ROW) + 1;
    const from = Math.max(0, Math.min(all.length - visible, Math.floor(this.scroll.scrollTop / REQUEST_ROW)));
    const rows = all.slice(from, from + visible);
    const now = this.model.frame?.time ?? 0;
    while (this.body.rows.length < rows.length + 2) {
      const row = this.body.insertRow();
      for (let i = 0; i < 6; i++) row.insertCell();
    }
    while (this.body.rows.length > rows.length + 2) this.body.deleteRow(-1);
    this.spacer(this.body.rows[0], from);
    rows.forEach((one, i) => this.fill(this.body.rows[i + 1], one, now));
    this.spacer(this.body.rows[rows.length + 1], all.length - from - rows.length);
    const engine = this.model.slow?.engine ?? this.model.frame?.engine;
    const more = engine ? engine.open - this.model.requests.length : 0;
    put(by("requests-note"), `${all.length} listed${more > 0 ? `; ${count(more)} more are open` : ""}`);
  }

  spacer(row, rows) {
    row.className = "spacer";
    row.style.height = `${rows * REQUEST_ROW}px`;
    for (const cell of row.cells) put(cell, "");
  }

  fill(row, one, now) {
    row.className = "";
    row.style.height = "";
    const known = one.prompt + one.output;
    const prefilling = one.running && one.computed < one.prompt;
    const state = !one.running ? (one.preemptions ? "preempted" : "waiting") : prefilling ? `prefill ${percent(one.computed, known)}` : "decode";
    const prompt = one.cached ? `${count(one.prompt)} (${count(one.cached)} cached)` : count(one.prompt);
    const texts = [shortId(one.id), state, prompt, `${count(one.output)} of ${count(one.maxOutput)}`, count(one.blocks), seconds(Math.max(0, now - one.arrival))];
    texts.forEach((text, i) => put(row.cells[i], text));
    row.cells[0].title = one.arm ? `${one.id}, arm ${one.arm}` : one.id;
  }
}

class PluginList {
  constructor() {
    this.list = by("plugins");
    this.items = new Map();
    this.busy = false;
  }

  async refresh() {
    if (this.busy) return;
    this.show(await ask("/v1/tokenbus/features"));
  }

  show(state) {
    for (const [name, one] of Object.entries(state.features)) this.item(name, one);
    const held = Object.entries(state.slots).map(([slot, holder]) => `${slot}: ${holder}`);
    put(by("slots"), held.join(" · "));
  }

  item(name, one) {
    let item = this.items.get(name);
    if (!item) {
      const row = element("li");
      const button = element("button");
      button.type = "button";
      button.setAttribute("role", "switch");
      button.setAttribute("aria-label", name);
      button.dataset.plugin = name;
      button.addEventListener("click", () => this.toggle(name));
      const words = element("div");
      const why = element("div", "", "why quiet");
      words.append(element("span", name, "name"), " ", element("span", "", "quiet"));
      row.append(button, words, why);
      this.list.append(row);
      item = { button, facts: words.lastChild, why, on: false };
      this.items.set(name, item);
    }
    item.on = one.on;
    item.button.setAttribute("aria-checked", String(one.on));
    const scope = { request: "per request", step: "live", engine: "at start" }[one.scope] ?? one.scope;
    put(item.facts, `${scope}${one.slot ? `, slot ${one.slot}` : ""}, ${one.lossless ? "lossless" : "may change answers"}`);
    put(item.why, one.failed ? `failed: ${one.failed}` : one.on ? "" : `off: ${one.because ?? "not on by default"}`);
    item.why.classList.toggle("failed", Boolean(one.failed));
  }

  async toggle(name) {
    if (this.busy) return;
    const item = this.items.get(name);
    const wish = !item.on;
    this.busy = true;
    item.button.setAttribute("aria-busy", "true");
    by("refusal").hidden = true;
    try {
      this.show(await ask("/v1/tokenbus/features", { features: { [name]: wish } }));
    } catch (error) {
      by("refusal").hidden = false;
      put(by("refusal"), `${name} was not switched ${wish ? "on" : "off"}: ${error.message}`);
    } finally {
      this.busy = false;
      item.button.removeAttribute("aria-busy");
    }
  }
}

// Present only where the server has experiments. Arms stand side by side; what they were given comes from the server, how they fare from frames.
class ExperimentList {
  constructor(model) {
    this.model = model;
    this.there = true;
  }

  async refresh() {
    if (!this.there) return;
    try {
      this.show((await ask("/v1/tokenbus/experiments")).experiments);
    } catch (error) {
      if (error instanceof Refused && error.status === 404) this.there = false;
      else throw error;
    }
  }

  show(experiments) {
    const names = Object.keys(experiments);
    by("experiments-part").hidden = !names.length;
    by("experiments").replaceChildren(...names.map((name) => this.one(name, experiments[name])));
  }

  one(name, experiment) {
    const box = element("div", "", "experiment");
    const arms = Object.entries(experiment.arms ?? {});
    const traffic = experiment.traffic === undefined ? "" : `, ${percent(experiment.traffic, 1)} of traffic`;
    const table = element("table");
    const caption = element("caption", `${name}: ${experiment.status ?? ""}, split by ${experiment.split ?? "?"}${traffic}`);
    table.append(caption);
    const fared = (arm) => this.model.slow?.arms?.[`${name}/${arm}`] ?? this.model.slow?.arms?.[arm];
    const flags = (arm) => Object.entries(arm.features ?? {}).map(([flag, on]) => `${flag} ${on ? "on" : "off"}`).join(", ") || "as the server";
    const lines = [
      ["Arm", ([arm]) => arm],
      ["Switches", ([, arm]) => flags(arm)],
      ["Share", ([, arm]) => (arm.share === undefined ? "–" : percent(arm.share, 1))],
      ["State", ([, arm]) => (arm.off ? `off: ${arm.off}` : "on")],
      ["Counted", ([, arm]) => count(arm.counted)],
      ["Failed", ([, arm]) => count(arm.failed)],
      ["TTFT 95 %", ([arm]) => seconds(fared(arm)?.ttft.p95)],
      ["Inter-token 95 %", ([arm]) => seconds(fared(arm)?.inter_token.p95)],
    ];
    for (const [title, pick] of lines) {
      const row = table.insertRow();
      row.append(element("th", title));
      row.cells[0].scope = "row";
      for (const arm of arms) row.append(element("td", pick(arm)));
    }
    box.append(table);
    if (experiment.note) box.append(element("p", experiment.note, "quiet"));
    return box;
  }
}

let eventsShown = "";
function drawEvents(model) {
  const events = model.slow?.events ?? [];
  const key = JSON.stringify(events);
  if (key !== eventsShown) {
    eventsShown = key;
    by("events").replaceChildren(
      ...events.toReversed().map((event) => {
        const row = element("li");
        const when = new Date(event.when * 1000);
        const time = element("time", when.toLocaleTimeString());
        time.dateTime = when.toISOString();
        row.append(time, event.text);
        return row;
      }),
    );
  }
  const losses = [];
  const refused = Object.entries(model.slow?.refused ?? {}).map(([kind, n]) => `${n} × ${kind}`);
  const errors = Object.entries(model.slow?.finished ?? {}).filter(([kind]) => !["stop", "length", "tool_calls", "cancelled"].includes(kind));
  if (refused.length) losses.push(`refused lately: ${refused.join(", ")}`);
  if (errors.length) losses.push(`ended with errors: ${errors.map(([kind, n]) => `${n} × ${kind}`).join(", ")}`);
  if (model.missedFrames) losses.push(`this page was too slow for ${model.missedFrames} frames`);
  put(by("loss-note"), losses.join("; "));
}
