// ---- the timeline: a row for each request, a column for each step ---------------------------------------------------------------------

const LABEL = 112; // CSS pixels for the names of rows
const ROW = 16;
const LOW_ROW = 7; // with more than MANY rows: no names
const MANY = 60;
const HEAD = 18;
const STEP_WIDTH = 7; // CSS pixels at least, by step

class Timeline {
  constructor(model) {
    this.model = model;
    this.scroll = by("timeline-scroll");
    this.space = by("timeline-space");
    this.canvas = by("timeline");
    this.byTime = false;
    this.fit = false;
    this.scroll.addEventListener("scroll", () => this.draw());
  }

  draw() {
    const height = this.scroll.clientHeight;
    const room = height - HEAD;
    const first = this.shown(this.scroll.clientWidth - LABEL)[0]?.at ?? 0;
    const rows = [...this.model.rows.values()].filter((row) => row.runs[row.runs.length - 1].to >= first);
    const rowHeight = this.fit && rows.length ? Math.min(ROW, room / rows.length) : rows.length > MANY ? LOW_ROW : ROW;
    this.space.style.height = `${Math.max(height, HEAD + Math.ceil(rows.length * rowHeight))}px`;
    this.canvas.style.height = `${height}px`;
    const { pen, width } = begin(this.canvas, height);
    const label = rowHeight >= 11 ? LABEL : 8;
    const steps = this.shown(width - label);
    if (!steps.length) {
      pen.fillStyle = colours.quiet;
      pen.fillText("No step has run since this page was opened.", 12, height / 2);
      return;
    }
    const place = this.columns(steps, label, width);
    this.drawHead(pen, steps, place, width);
    const top = this.scroll.scrollTop;
    pen.save();
    pen.beginPath();
    pen.rect(0, HEAD, width, room);
    pen.clip();
    const from = Math.max(0, Math.floor(top / rowHeight));
    const to = Math.min(rows.length, Math.ceil((top + room) / rowHeight));
    for (const kinds of rowHeight < 3 ? ["decode", "others"] : ["all"]) {
      for (let i = from; i < to; i++) this.drawRow(pen, rows[i], HEAD + i * rowHeight - top, rowHeight, place, label, kinds);
    }
    pen.restore();
    this.describe(rows.length, steps, to - from);
  }

  shown(room) {
    const steps = this.model.steps;
    return steps.slice(-Math.min(steps.length, Math.max(1, Math.floor(room / STEP_WIDTH))));
  }

  // at -> [left, right] in CSS pixels; null for what is not shown
  columns(steps, label, width) {
    const places = new Map();
    const room = width - label - 4;
    const first = steps[0];
    const last = steps[steps.length - 1];
    if (this.byTime) {
      const span = Math.max(1e-6, last.started + last.duration - first.started);
      for (const step of steps) {
        const left = label + ((step.started - first.started) / span) * room;
        places.set(step.at, [left, left + Math.max(0.5, (step.duration / span) * room)]);
      }
    } else {
      const size = Math.min(28, room / (last.at - first.at + 1));
      for (const step of steps) places.set(step.at, [label + (step.at - first.at) * size, label + (step.at - first.at + 1) * size]);
    }
    return (at) => places.get(at) ?? null;
  }

  drawHead(pen, steps, place, width) {
    pen.fillStyle = colours.quiet;
    pen.strokeStyle = colours.grid;
    let free = 0;
    for (const step of steps) {
      const [left] = place(step.at);
      if (left < free || left > width - 40) continue;
      const text = String(step.id);
      pen.fillText(text, left + 2, HEAD / 2);
      pen.beginPath();
      pen.moveTo(left + 0.5, 0);
      pen.lineTo(left + 0.5, this.scroll.clientHeight);
      pen.stroke();
      free = left + Math.max(64, pen.measureText(text).width + 16);
    }
  }

  // kinds: of very low rows decodes are drawn first, so that what is rarer stays to be seen
  drawRow(pen, row, y, height, place, label, kinds) {
    const least = kinds === "others" ? 1.5 : 0.6;
    const inner = Math.max(least, height - (height > 5 ? 2 : height > 2 ? 0.6 : 0));
    if (label === LABEL) {
      pen.fillStyle = colours.quiet;
      pen.fillText(shortId(row.id), 6, y + height / 2);
    }
    for (const run of row.runs) {
      if (kinds !== "all" && (kinds === "decode") !== (run.kind === "decode")) continue;
      const ends = this.ends(run, place);
      if (!ends) continue;
      const [left, right] = ends;
      const size = Math.max(0.5, right - left - (right - left > 4 ? 1 : 0));
      if (run.kind === "preempt") {
        pen.fillStyle = colours.preempt;
        pen.fillRect(left, y, Math.min(4, size), inner);
        continue;
      }
      pen.fillStyle = colours[run.kind];
      if (run.kind === "decode") pen.fillRect(left, y + inner * 0.25, right - left, Math.max(0.6, inner * 0.5));
      else pen.fillRect(left, y, size, inner);
      if (run.kind === "verify" && inner >= 9) {
        pen.fillStyle = colours.ink; // the underline is as long as the share of drafts that were accepted
        pen.fillRect(left, y + inner - 3, size * (run.accepted / Math.max(1, run.n)), 3);
      }
      if (run.kind === "prefill" && height >= 13 && size > pen.measureText(String(run.n)).width + 4) {
        pen.fillStyle = "#1b1f24";
        pen.fillText(String(run.n), left + 2, y + inner / 2);
      }
    }
  }

  ends(run, place) {
    const steps = this.model.steps;
    let from = place(run.from);
    const to = place(run.to);
    if (!to) return null;
    for (let at = run.from; !from && at < run.to; at++) from = place(at);
    return steps.length ? [(from ?? to)[0], to[1]] : null;
  }

  describe(rows, steps, visible) {
    const last = steps[steps.length - 1];
    const noun = rows === 1 ? "request" : "requests";
    put(by("timeline-note"), `${rows} ${noun}, ${visible} in view; steps ${steps[0].id} to ${last.id}` +
      (this.model.lostSteps ? `; ${count(this.model.lostSteps)} steps were too many to show` : ""));
    say(this.canvas, `${rows} ${noun} over steps ${steps[0].id} to ${last.id}. Last step: ${last.prompt} prompt tokens, ` +
      `${last.decode} requests decoding, ${last.draft} drafts of which ${last.accepted} accepted, ${seconds(last.duration)}.`);
  }
}
