// ---- what is known of the server, made from frames ---------------------------------------------------------------------------------

const KEPT_STEPS = 240;
const KEPT_SAMPLES = 150;
const RATE_SECONDS = 5;

class Model {
  constructor() {
    this.frame = null; // the newest frame
    this.slow = null; // the newest frame that has the slow part
    this.requests = [];
    this.blocks = [];
    this.steps = []; // {at, id, started, duration, prompt, decode, draft, ...}; `at` counts 1, 2, 3, lost ones leave a gap
    this.rows = new Map(); // request id -> {id, runs: [{kind, from, to, n, accepted}]}, in order of first appearance
    this.samples = []; // latency percentiles over time
    this.lostSteps = 0;
    this.missedFrames = 0;
    this.at = 0;
  }

  take(frame) {
    if (frame.missed_frames) {
      this.missedFrames += frame.missed_frames;
      return;
    }
    this.frame = frame;
    if (frame.latency) {
      this.slow = frame;
      this.samples.push({ ttft: frame.latency.ttft.p95, itl: frame.latency.inter_token.p95 });
      if (this.samples.length > KEPT_SAMPLES) this.samples.shift();
    }
    if (frame.requests) {
      this.requests = frame.requests.map(asRequest);
      this.blocks = frame.blocks;
    }
    if (!frame.steps) return;
    if (frame.lost_steps) {
      this.lostSteps += frame.lost_steps;
      this.at += 2;
    }
    let decode = [];
    for (const step of frame.steps) {
      decode = step.decode ?? decode;
      this.takeStep(step, frame.ids, decode);
    }
    this.forget();
  }

  takeStep(step, ids, decode) {
    const at = ++this.at;
    let accepted = 0;
    for (const place of decode) this.mark(ids[place], "decode", at, 1, 0);
    for (const [place, n] of Object.entries(step.prefill)) this.mark(ids[place], "prefill", at, n, 0);
    for (const [place, [n, good]] of Object.entries(step.verify)) {
      accepted += good;
      this.mark(ids[place], "verify", at, n, good);
    }
    for (const place of step.preempted) this.mark(ids[place], "preempt", at, 0, 0);
    const known = Object.keys(step.verify).length + step.num_decodes;
    this.steps.push({
      at, id: step.step_id, started: step.started, duration: step.duration, prompt: step.prompt_tokens, decode: known,
      draft: step.draft_tokens, accepted, sampled: step.sampled, requests: known + Object.keys(step.prefill).length,
      running: step.running, waiting: step.waiting, phases: step.phases,
      media: step.media_tokens ?? 0,
    });
  }

  // Decodes of successive steps are one run; every other piece of work is a run of its own.
  mark(id, kind, at, n, accepted) {
    let row = this.rows.get(id);
    if (!row) this.rows.set(id, (row = { id, runs: [] }));
    const last = row.runs[row.runs.length - 1];
    if (kind === "decode" && last && last.kind === "decode" && last.to === at - 1) last.to = at;
    else row.runs.push({ kind, from: at, to: at, n, accepted });
  }

  forget() {
    if (this.steps.length > KEPT_STEPS) this.steps.splice(0, this.steps.length - KEPT_STEPS);
    const first = this.steps.length ? this.steps[0].at : 0;
    for (const [id, row] of this.rows) {
      const runs = row.runs;
      let old = 0;
      while (old < runs.length && runs[old].to < first) old++;
      if (old === runs.length) this.rows.delete(id);
      else if (old) runs.splice(0, old);
    }
  }

  // Of the steps of the last few seconds by the server's clock.
  rates() {
    const since = this.frame.time - RATE_SECONDS;
    const recent = this.steps.filter((step) => step.started + step.duration >= since);
    const sum = (pick) => recent.reduce((total, step) => total + pick(step), 0);
    const n = recent.length;
    const first = n ? Math.max(since, recent[0].started) : since;
    const span = Math.max(0.001, Math.min(RATE_SECONDS, this.frame.time - first));
    return {
      steps: n, tokens: sum((s) => s.sampled) / span, prompt: sum((s) => s.prompt) / span, media: sum((s) => s.media) / span,
      step: n ? sum((s) => s.duration) / n : null, requests: n ? sum((s) => s.requests) / n : null,
      drafts: sum((s) => s.draft), accepted: sum((s) => s.accepted),
    };
  }
}

function asRequest([id, running, prompt, computed, output, maxOutput, arrival, blocks, cached, preemptions, arm]) {
  return { id, running, prompt, computed, output, maxOutput, arrival, blocks, cached, preemptions, arm };
}
