"""What `tokenbus doctor` judges: each check with its healthy range, the value seen, what an abnormal one means, and what to do.

A check is a function from what is known to one `Finding`; it reads, and asks nobody. `CHECKS` is the list, in the order of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .facts import Facts

Level = Literal["ok", "unknown", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    area: str
    check: str
    level: Level
    value: str
    healthy: str
    meaning: str = ""
    """What it means that the value is not in its range; "" when it is."""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    facts: Facts
    features: Mapping[str, Any]
    """The answer of GET /v1/tokenbus/features."""
    metrics: bool
    """/metrics answers."""
    seconds: float
    """How long it was watched."""


@dataclass(frozen=True, slots=True)
class Check:
    area: str
    name: str
    healthy: str
    meaning: str
    advice: str
    judge: Callable[[Patient], tuple[Level, str]]

    def run(self, patient: Patient) -> Finding:
        level, value = self.judge(patient)
        told = level in {"warning", "bad"}
        meaning, advice = (self.meaning, self.advice) if told else ("", "")
        return Finding(self.area, self.name, level, value, self.healthy, meaning, advice)


def examine(patient: Patient) -> list[Finding]:
    return [check.run(patient) for check in CHECKS]


def _range(value: float | None, shown: str, *, warning: float, bad: float) -> tuple[Level, str]:
    """Judges a value that is better the smaller it is."""
    if value is None:
        return "unknown", "nothing to judge by yet"
    return ("bad" if value >= bad else "warning" if value >= warning else "ok"), shown


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


# ---- queue ----------------------------------------------------------------------------------------------------------------------


def _state(patient: Patient) -> tuple[Level, str]:
    server = patient.facts.server
    doubt = server.get("doubt", "")
    state = str(server.get("state", "unknown"))
    return ("bad" if doubt or state != "ready" else "ok"), f"{state}: {doubt}" if doubt and doubt != state else state


def _waiting(patient: Patient) -> tuple[Level, str]:
    waiting, most = patient.facts.engine.get("waiting"), patient.facts.limits.get("max_waiting")
    share = None if waiting is None or not most else waiting / most
    return _range(share, f"{waiting} of {most}", warning=0.5, bad=0.95)


def _oldest(patient: Patient) -> tuple[Level, str]:
    oldest = patient.facts.oldest_wait
    return _range(oldest, f"{oldest:.1f} s", warning=10.0, bad=60.0)


def _refused(patient: Patient) -> tuple[Level, str]:
    kinds = {kind: n for kind, n in patient.facts.slow.get("refused", {}).items() if kind[:3] in {"429", "503"}}
    ended = patient.facts.slow.get("ended", {}).get("requests", 0)
    share = sum(kinds.values()) / max(1, sum(kinds.values()) + ended)
    shown = ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items())) or "none"
    return _range(share, shown, warning=1e-9, bad=0.2)


def _errors(patient: Patient) -> tuple[Level, str]:
    finished = patient.facts.slow.get("finished", {})
    errors = {kind: n for kind, n in finished.items() if kind not in {"stop", "length", "cancelled", "tool_calls"}}
    share = sum(errors.values()) / max(1, sum(finished.values()))
    shown = ", ".join(f"{n} x {kind}" for kind, n in sorted(errors.items())) or "none"
    return _range(share, f"{shown} of {sum(finished.values())}", warning=0.01, bad=0.1)


# ---- batch ----------------------------------------------------------------------------------------------------------------------


def _cap(patient: Patient) -> tuple[Level, str]:
    engine, most = patient.facts.engine, patient.facts.limits.get("max_running")
    if not engine or not most:
        return "unknown", "nothing to judge by yet"
    capped = engine["running"] >= most and engine["waiting"] > 0
    return ("warning" if capped else "ok"), f"{engine['running']} of {most} running, {engine['waiting']} waiting"


def _stalled(patient: Patient) -> tuple[Level, str]:
    facts = patient.facts
    age = facts.slow.get("lag", {}).get("engine", {}).get("step_age", 0.0)
    if facts.engine and not age and facts.engine["open"] and not facts.steps:
        return "bad", f"{facts.engine['open']} open requests and no step in {patient.seconds:g} s"
    return _range(age, f"the step that runs is {age:.1f} s old" if age else "no step runs long", warning=5.0, bad=30.0)


def _idle(patient: Patient) -> tuple[Level, str]:
    share = patient.facts.idle_share
    return _range(share, _percent(share), warning=0.2, bad=0.5)


def _uneven(patient: Patient) -> tuple[Level, str]:
    durations = sorted(step["duration"] for step in patient.facts.steps)
    if len(durations) < 20:
        return "unknown", "nothing to judge by yet"
    middle, long = durations[len(durations) // 2], durations[-max(1, len(durations) // 50)]
    return _range(long / max(1e-6, middle), f"{1e3 * middle:.0f} ms, longest {1e3 * long:.0f} ms", warning=20.0, bad=100.0)


def _encoding(patient: Patient) -> tuple[Level, str]:
    share = patient.facts.encode_share
    return ("ok", "no pictures or sounds") if share is None else _range(share, _percent(share), warning=0.5, bad=0.9)


# ---- KV pool --------------------------------------------------------------------------------------------------------------------


def _kv(patient: Patient) -> tuple[Level, str]:
    used = patient.facts.kv_used
    level, shown = _range(used, _percent(used), warning=0.9, bad=0.98)
    return ("warning" if level == "bad" and not patient.facts.engine["waiting"] else level), shown


def _preempted(patient: Patient) -> tuple[Level, str]:
    ended = patient.facts.slow.get("ended", {})
    steps = sum(len(step["preempted"]) for step in patient.facts.steps)
    share = max(ended.get("preemptions", 0) / max(1, ended.get("requests", 0)), steps / max(1, len(patient.facts.steps)))
    shown = f"{ended.get('preemptions', 0)} in {ended.get('requests', 0)} ended requests, {steps} in the steps watched"
    return _range(share, shown, warning=0.05, bad=0.5)


def _failures(patient: Patient) -> tuple[Level, str]:
    engine, new = patient.facts.engine, patient.facts.new_failures
    if not engine:
        return "unknown", "nothing to judge by yet"
    return (
        "warning" if new else "ok"
    ), f"{new} in {patient.seconds:g} s, {engine['allocation_failures']} since the engine began"


def _room(patient: Patient) -> tuple[Level, str]:
    info = patient.facts.info
    if not info:
        return "unknown", "nothing to judge by yet"
    fits = info["num_blocks"] * info["block_size"] / max(1, info["max_model_len"])
    return ("warning" if fits < 2 else "ok"), f"{fits:.1f} requests of {info['max_model_len']} tokens"


def _hits(patient: Patient) -> tuple[Level, str]:
    on = patient.features.get("features", {}).get("prefix_cache", {}).get("on", False)
    ended = patient.facts.slow.get("ended", {})
    if not on:
        return "ok", "prefix_cache is off"
    if not ended.get("prompt_tokens"):
        return "unknown", "nothing to judge by yet"
    return "ok", f"{100 * ended['cached_tokens'] / ended['prompt_tokens']:.0f} % of prompt tokens"


# ---- kernels --------------------------------------------------------------------------------------------------------------------


def _attention(patient: Patient) -> tuple[Level, str]:
    holder = str(patient.features.get("slots", {}).get("attention", ""))
    if not holder:
        return "unknown", "nothing to judge by yet"
    return ("warning" if "torch" in holder else "ok"), holder


def _lossless(patient: Patient) -> tuple[Level, str]:
    info = patient.facts.info
    if not info:
        return "unknown", "nothing to judge by yet"
    return ("ok", "yes") if info["lossless"] else ("warning", f"no: {info.get('lossless_reason', '')}")


def _machine(patient: Patient) -> tuple[Level, str]:
    share = patient.facts.machine_share
    if share is None:
        return "unknown", "nothing to judge by yet"
    return ("ok" if share >= 0.2 else "warning"), _percent(share)


# ---- distribution, quantisation, observability ----------------------------------------------------------------------------------


def _restarts(patient: Patient) -> tuple[Level, str]:
    server = patient.facts.server
    restarts, suspects = server.get("restarts", 0), server.get("suspects", 0)
    shown = f"{restarts} restarts" + (f", {suspects} suspected requests are tried one by one" if suspects else "")
    return ("bad" if suspects else "warning" if restarts else "ok"), shown


def _lag(process: str) -> Callable[[Patient], tuple[Level, str]]:
    def judge(patient: Patient) -> tuple[Level, str]:
        seconds = patient.facts.slow.get("lag", {}).get(process, {}).get("seconds")
        return _range(seconds, "" if seconds is None else f"{1e3 * seconds:.0f} ms", warning=0.1, bad=1.0)

    return judge


def _quantisation(patient: Patient) -> tuple[Level, str]:
    holder, info = patient.features.get("slots", {}).get("quantization"), patient.facts.info
    if not holder or not info:
        return "unknown", "nothing to judge by yet"
    table = patient.features.get("features", {})
    names = [name for name, one in table.items() if name.startswith("quantization.") and one.get("on")]
    failed = [name for name, one in table.items() if name.startswith("quantization.") and one.get("failed")]
    shown = f"{', '.join(names) or holder}; weights {info['weights_bytes'] / 2**20:.0f} MiB, K/V {info['kv_bytes_per_token']} bytes a token"
    return ("bad", f"{', '.join(failed)} failed") if failed else ("ok", shown)


def _plugins(patient: Patient) -> tuple[Level, str]:
    table = patient.features.get("features", {})
    failed = [f"{name}: {one['failed']}" for name, one in sorted(table.items()) if one.get("failed")]
    return ("bad", "; ".join(failed)) if failed else ("ok", f"{sum(one['on'] for one in table.values())} on, none failed")


def _metrics(patient: Patient) -> tuple[Level, str]:
    return ("ok", "/metrics answers") if patient.metrics else ("warning", "/metrics does not answer")


def _feed(patient: Patient) -> tuple[Level, str]:
    lost, missed = patient.facts.lost_steps, patient.facts.missed_frames
    return ("warning" if missed else "ok"), f"{lost} steps not shown, {missed} frames missed"


CHECKS = (
    Check("queue", "server", "ready", "requests get 503", "look for engine_died in the log, and at /ready", _state),
    Check(
        "queue", "requests waiting", "below 50 % of max_waiting", "more comes in than is worked off; at 100 % clients get 429",
        "more servers, fewer clients, or a larger scheduler.max_running if the KV pool has room", _waiting,
    ),
    Check(
        "queue", "longest wait", "below 10 s", "clients wait for their first token",
        "see batch and KV below for what holds it up; scheduling.priority lets some pass", _oldest,
    ),
    Check("queue", "refused for load", "none", "clients were sent away", "they should honour Retry-After; else as above", _refused),
    Check("queue", "ended with an error", "below 1 %", "answers broke off", "the log names plugin and hook for each", _errors),
    Check(
        "batch", "request cap", "nobody waits while it is reached", "the cap, not memory, limits the batch",
        "raise scheduler.max_running if step times allow", _cap,
    ),
    Check(
        "batch", "steps", "a step ends within 5 s", "everybody waits for one step; the engine is killed at supervision.step_deadline",
        "keep chunked_prefill on, or lower scheduler.token_budget", _stalled,
    ),
    Check(
        "batch", "idle between steps while there is work", "below 20 %", "the processor waits for the engine's loop",
        "look for other load on these cores, and for slow plugins in tokenbus_step_phase_seconds_total", _idle,
    ),
    Check(
        "batch", "evenness of steps", "longest below 20 times the median", "running streams pause while long prompts run",
        "keep chunked_prefill on; lower scheduler.token_budget", _uneven,
    ),
    Check(
        "batch", "time in the encoder of pictures and sounds", "below half of all steps", "running streams wait for it",
        "lower scheduler.encoder_budget, so that a step encodes less; have clients send smaller or fewer pictures", _encoding,
    ),
    Check(
        "kv", "blocks in use", "below 90 %", "new requests wait for blocks, running ones lose theirs",
        "more cache.kv_memory_mb, quantization.kv_int8, or a smaller scheduler.max_running", _kv,
    ),
    Check(
        "kv", "preemptions", "below 5 % of requests", "work is thrown away and done again", "as for blocks in use", _preempted,
    ),
    Check("kv", "failed allocations", "none while watched", "the pool is too small for this load", "as for blocks in use", _failures),
    Check(
        "kv", "room", "at least 2 of the longest requests", "one long request keeps all others out",
        "more cache.kv_memory_mb, or a smaller model.max_model_len", _room,
    ),
    Check("kv", "prefix cache hits", "as many as prompts have in common", "", "", _hits),
    Check(
        "kernels", "attention", "compiled kernels", "torch computes attention, which is slower",
        "install a C++ compiler (g++) and start anew, or switch attention.cpu on", _attention,
    ),
    Check(
        "kernels", "lossless", "yes", "answers may depend on what else runs", "docs/determinism.md says which kernels are", _lossless,
    ),
    Check(
        "kernels", "share of the machine's limit", "20 % or more", "steps are slower than memory and arithmetic would allow",
        "look for other load on these cores; model.threads should be the number of real cores", _machine,
    ),
    Check(
        "distribution", "engine process", "0 restarts", "the engine died and was started again; requests went on, later",
        "engine_died in the log has the reason", _restarts,
    ),
    Check(
        "distribution", "front's loop lag", "below 100 ms", "streams stutter: the front process is short of CPU",
        "leave it a core (model.threads)", _lag("front"),
    ),
    Check(
        "distribution", "engine's loop lag", "below 100 ms", "steps are planned late: the engine process is short of CPU",
        "leave it a core (model.threads)", _lag("engine"),
    ),
    Check(
        "quantisation", "weights and K/V", "no plugin failed", "the model does not run as it was asked to", "see the log",
        _quantisation,
    ),
    Check(
        "observability", "plugins", "none failed", "requests that need them get 503", "switch them off, or repair them and restart",
        _plugins,
    ),
    Check("observability", "metrics", "/metrics answers", "nobody's alarms will fire", "switch the plugin metrics on", _metrics),
    Check(
        "observability", "this watcher", "0 frames missed", "it could not keep up with the server", "watch from a quieter machine",
        _feed,
    ),
)  # fmt: skip
