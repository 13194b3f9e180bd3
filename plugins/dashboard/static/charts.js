// ---- batch, KV pool, latency -------------------------------------------------------------------------------------------------------------

function drawBatch(model) {
  const { pen, width, height } = begin(by("batch"));
  const left = 46;
  const right = width - 52;
  const bottom = height - 8;
  const steps = model.steps.slice(-Math.floor((right - left) / 4));
  if (!steps.length) return;
  const most = roundUp(Math.max(1, ...steps.map((s) => s.prompt + s.decode + s.draft)));
  const longest = roundUp(Math.max(0.001, ...steps.map((s) => s.duration)));
  drawScale(pen, left, right, bottom, 10, count(most), seconds(longest));
  const size = Math.min(14, (right - left) / steps.length);
  const up = (bottom - 10) / most;
  steps.forEach((step, i) => {
    let y = bottom;
    for (const [kind, n] of [["decode", step.decode], ["verify", step.draft], ["prefill", step.prompt]]) {
      pen.fillStyle = colours[kind];
      pen.fillRect(left + i * size, y - n * up, Math.max(1, size - 1), n * up);
      y -= n * up;
    }
  });
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1.5;
  pen.beginPath();
  steps.forEach((step, i) => pen.lineTo(left + (i + 0.5) * size, bottom - ((bottom - 10) * step.duration) / longest));
  pen.stroke();
  const last = steps[steps.length - 1];
  say(by("batch"), `Tokens of the last ${steps.length} steps. The last one: ${last.prompt} prompt, ${last.decode} decode, ${last.draft} drafts, ${seconds(last.duration)}.`);
}

function drawScale(pen, left, right, bottom, top, leftText, rightText) {
  pen.strokeStyle = colours.grid;
  pen.lineWidth = 1;
  for (const y of [top, (top + bottom) / 2, bottom]) {
    pen.beginPath();
    pen.moveTo(left, Math.round(y) + 0.5);
    pen.lineTo(right, Math.round(y) + 0.5);
    pen.stroke();
  }
  pen.fillStyle = colours.quiet;
  pen.textAlign = "right";
  pen.fillText(leftText, left - 5, top);
  pen.fillText("0", left - 5, bottom - 4);
  pen.textAlign = "left";
  if (rightText) pen.fillText(rightText, right + 5, top);
}

function drawPool(model) {
  const { pen, width, height } = begin(by("kv"));
  const parts = model.blocks;
  const engine = model.frame?.engine ?? model.slow?.engine;
  if (!parts.length || !engine) return;
  let size = 26;
  while (size > 3 && Math.floor(width / size) * Math.floor(height / size) < parts.length) size--;
  const columns = Math.floor(width / size);
  const cell = size - (size > 5 ? 2 : 1);
  parts.forEach(([used, retained, free], i) => {
    const x = (i % columns) * size;
    const y = Math.floor(i / columns) * size;
    const all = used + retained + free;
    pen.fillStyle = colours.free;
    pen.fillRect(x, y, cell, cell);
    pen.fillStyle = colours.used;
    pen.fillRect(x, y + cell * (1 - used / all), cell, (cell * used) / all);
    pen.fillStyle = colours.retained; // half as wide: told apart without its colour
    pen.fillRect(x, y + cell * (1 - (used + retained) / all), cell / 2, (cell * retained) / all);
  });
  const inUse = engine.num_blocks - engine.free_blocks - engine.retained_blocks;
  const text = `${count(inUse)} used, ${count(engine.retained_blocks)} retained, ${count(engine.free_blocks)} free of ${count(engine.num_blocks)} blocks`;
  const per = Math.ceil(engine.num_blocks / parts.length);
  put(by("kv-note"), `${text}${per > 1 ? `; a cell is ${per} blocks` : ""}` +
    (engine.allocation_failures ? `; ${count(engine.allocation_failures)} times too few` : ""));
  say(by("kv"), text);
}

function drawLatency(model) {
  const shown = model.slow;
  if (!shown) return;
  const rows = [["First token", shown.latency.ttft], ["Inter-token", shown.latency.inter_token]];
  const body = by("latency").tBodies[0];
  while (body.rows.length < rows.length) {
    const row = body.insertRow();
    row.append(element("th"));
    row.cells[0].scope = "row";
    for (let i = 0; i < 5; i++) row.insertCell();
  }
  rows.forEach(([name, found], i) => {
    const texts = [name, seconds(found.p50), seconds(found.p95), seconds(found.p99), seconds(found.max), count(found.count)];
    texts.forEach((text, j) => put(body.rows[i].cells[j], text));
  });
  put(by("latency-note"), `Of requests that ended in the last ${shown.window_seconds / 60} minutes. The curves are the 95 % values since this page was opened, each on a scale of its own.`);
  drawSpark(model.samples);
}

function drawSpark(samples) {
  const { pen, width, height } = begin(by("spark"));
  const told = [];
  for (const [key, colour, name, dash] of [["ttft", "prefill", "TTFT", []], ["itl", "decode", "inter-token", [5, 3]]]) {
    const known = samples.map((sample) => sample[key]).filter((value) => value !== undefined);
    if (!known.length) continue;
    const top = roundUp(Math.max(...known));
    const step = (width - 156) / Math.max(30, samples.length);
    pen.strokeStyle = pen.fillStyle = colours[colour];
    pen.lineWidth = 2;
    pen.setLineDash(dash);
    pen.beginPath();
    let end = 0;
    samples.forEach((sample, i) => {
      if (sample[key] === undefined) return;
      end = height - 5 - ((height - 12) * sample[key]) / top;
      pen.lineTo((i + Math.max(0, 30 - samples.length)) * step, end);
    });
    pen.stroke();
    pen.setLineDash([]);
    told.push([end, `${name} ${seconds(known[known.length - 1])}`, colours.ink]);
  }
  if (told.length === 2 && Math.abs(told[0][0] - told[1][0]) < 14) {
    const upper = told[0][0] <= told[1][0] ? 0 : 1;
    told[1 - upper][0] = Math.min(height - 6, told[upper][0] + 14);
    told[upper][0] = Math.min(told[upper][0], told[1 - upper][0] - 14);
  }
  for (const [y, text, colour] of told) {
    pen.fillStyle = colour;
    pen.fillText(text, width - 144, Math.max(7, Math.min(height - 6, y)));
  }
  say(by("spark"), told.length ? `95 % values now: ${told.map(([, text]) => text).join(", ")}` : "no history yet");
}
