// ---- drawing ---------------------------------------------------------------------------------------------------------------------------

// Colours come from the style sheet, so that light and dark are said in one place.
class Colours {
  constructor() {
    this.read();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.read());
  }

  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["card", "ink", "quiet", "edge", "grid", "prefill", "decode", "verify", "preempt", "line", "used", "retained", "free"])
      this[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

const colours = new Colours();

// A canvas in CSS pixels, sharp on every screen: {pen, width, height}.
function begin(canvas, height = canvas.clientHeight) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return { pen, width, height };
}

function say(canvas, text) {
  if (canvas.getAttribute("aria-label") !== text) canvas.setAttribute("aria-label", text);
}

// The least of 1, 2, 5, 10, 20, 50, ... that is not below a value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((bound) => bound >= value * 0.999999);
}
