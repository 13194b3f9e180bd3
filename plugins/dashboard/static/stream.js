// ---- talking to the server -----------------------------------------------------------------------------------------------------------

const KEY = "tokenbus.adminKey";
const LONGEST_WAIT = 8000;
const SILENCE = 10000; // milliseconds without anything after which a stream counts as dead
const HIDDEN = 5000; // milliseconds after which a hidden page stops watching

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not in our form: the status has to do
  }
  return new Refused(response.status, message);
}

async function ask(path, body) {
  const options = { headers: headers(), cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Reads /v1/tokenbus/events for ever: takes up again by itself, and rests while the page is hidden or a key is needed.
class Stream {
  constructor(onFrame, onState) {
    this.onFrame = onFrame;
    this.onState = onState; // (state, detail): connecting, open, lost, key, refused, hidden
    this.wait = 500;
    this.wake = () => {};
    this.abort = null;
    let hiding = 0;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(hiding);
      if (document.hidden) hiding = setTimeout(() => this.abort?.abort(), HIDDEN);
      else this.now();
    });
  }

  now() {
    this.wait = 500;
    this.wake();
  }

  again() {
    this.now();
    this.abort?.abort();
  }

  async run() {
    for (;;) {
      if (document.hidden) this.onState("hidden", "");
      while (document.hidden) await this.pause(60000);
      try {
        await this.read();
        this.onState("lost", "the server has ended the stream");
      } catch (error) {
        if (error instanceof Refused && error.status === 401) this.onState("key", error.message);
        else if (error instanceof Refused) this.onState("refused", error.message);
        else this.onState("lost", "no connection");
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) await this.pause(1e9);
      }
      await this.pause(this.wait);
      this.wait = Math.min(LONGEST_WAIT, this.wait * 2);
    }
  }

  pause(milliseconds) {
    return new Promise((done) => {
      const timer = setTimeout(done, Math.min(milliseconds, 2 ** 31 - 1));
      this.wake = () => {
        clearTimeout(timer);
        done();
      };
    });
  }

  async read() {
    this.abort = new AbortController();
    this.onState("connecting", "");
    let silent = setTimeout(() => this.abort.abort(), SILENCE);
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(() => this.abort.abort(), SILENCE);
    };
    try {
      const options = { headers: headers(), cache: "no-store", signal: this.abort.signal };
      const response = await fetch("/v1/tokenbus/events", options);
      if (!response.ok) throw await refusal(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        heard();
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          if (!event.startsWith("data: ")) continue;
          if (event === "data: [DONE]") return;
          this.wait = 500;
          this.onFrame(JSON.parse(event.slice(6)));
          this.onState("open", "");
        }
      }
    } finally {
      clearTimeout(silent);
    }
  }
}
