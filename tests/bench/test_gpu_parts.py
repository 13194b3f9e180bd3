"""The parts of scripts/gpu, tiny and without a GPU: what they would measure on one, and that they notice a wrong result."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from gpu import attention, checks, ids, limits, linears, model, served, timing, tune, tune_rules
from gpu.engine_child import union
from gpu.record import Record
from gpu.served import Measured, Wave
from gpu.shapes import SHAPES, products, tensor_shapes
from gpu.timing import Times
from gpu.warm import compile_beforehand

from tokenbus.core.messages import StepOutput, StepReport
from tokenbus.kernels.triton import configs


class Heard(Record):
    """A record that keeps what it was told."""

    def __init__(self, known=None):
        super().__init__(None, known)
        self.lines = []

    def _write(self, line):
        self.lines.append(line)

    def rows(self, table):
        return [line["cells"] for line in self.lines if line["kind"] == "row" and line["table"] == table]

    def failures(self):
        return [line["name"] for line in self.lines if line["kind"] == "check" and not line["ok"]]

    def checks(self):
        return [line["name"] for line in self.lines if line["kind"] == "check"]


# ---- correctness ----------------------------------------------------------------------------------------------------------------

SMALL = checks.Sizes("cpu", ((3, 40, 64),), (1, 37), (1, 20), 64, 200, 3, (torch.float32,))


def test_every_kernel_is_checked_and_right():
    record = Heard()
    checks.run(record, SMALL)
    assert record.failures() == []
    names = " ".join(record.checks())
    for what in (
        "attention", "KV fp8", "KV int8", "KV write", "product", "W8A8 int8", "W8A8 fp8", "W8A16", "W4A16", "RMSNorm", "silu", "gelu",
        "rotary", "embedding", "greedy", "top-k", "drafts", "bit by bit",
    ):  # fmt: skip
        assert what in names, what


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        ("matmul", lambda *args, **options: torch.zeros(args[0].shape[0], args[1].shape[0])),
        ("paged_attention", lambda q, *args, **options: q + float("nan")),
        ("int4_matmul", lambda x, weight, bias, *, invariant: torch.randn(x.shape[0], weight.out_features)),
    ],
)
def test_a_wrong_kernel_is_noticed(kernel, wrong, monkeypatch):
    monkeypatch.setattr(checks, kernel, wrong)
    record = Heard()
    checks.run(record, SMALL)
    assert record.failures()


def test_a_kernel_that_raises_is_a_failed_check_and_the_others_go_on(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(checks, "verify", broken)
    record = Heard()
    checks.run(record, SMALL)
    assert record.failures() == ["verification of drafts"]
    assert "greedy sampling" in record.checks()


class Truth:
    """Finds the two best tokens equally likely behind [1, 5], and nowhere else."""

    def margin(self, tokens, chosen, other):
        return 1e-5 if tokens == [1, 5] else 0.5


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        ([[5, 6], [7, 8], [1, 1], [2, 2]], True),
        ([[5, 9], [7, 8], [1, 1], [2, 2]], True),
        ([[4, 6], [7, 8], [1, 1], [2, 2]], False),
        ([[5, 6], [7], [1, 1], [2, 2]], False),
    ],
    ids=["equal", "tie", "different", "short"],
)
def test_ids_must_be_equal_or_a_tie(found, ok):
    record = Heard()
    ids.compare(record, "some way", Truth(), [[1], [2], [3], [4]], [[5, 6], [7, 8], [1, 1], [2, 2]], found)
    assert (record.failures() == []) == ok


def test_ties_are_the_exception():
    class Undecided:
        def margin(self, tokens, chosen, other):
            return 0.0

    record = Heard()
    ids.compare(record, "some way", Undecided(), [[1], [2]], [[5], [6]], [[6], [5]])
    assert len(record.failures()) == 1


def test_prompts_are_what_the_scale_says():
    for scale in (ids.DEVICE, ids.TINY):
        made = ids.prompts(scale)
        assert [len(prompt) for prompt in made] == [n for n in scale.lengths for _ in range(scale.each)]
    assert len(ids.prompts(ids.DEVICE)) >= 16
    assert ids.DEVICE.new >= 64


# ---- speed ----------------------------------------------------------------------------------------------------------------------


def test_limits_are_figures():
    record = Heard()
    limits.run(record, "cpu", scale=256)
    assert record.known.keys() == {"limit.copy", "limit.matmul"}
    assert min(record.known.values()) > 0


def test_times_are_medians_with_their_spread():
    times = Times((3e-6, 1e-6, 2e-6))
    assert times.median == 2e-6
    assert times.shown() == "2 (1 ... 3)"
    called = []
    assert len(timing.measure(called.append, copies=3).samples) == timing.LEAST
    assert set(called) == {0, 1, 2}


@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8"])
def test_decode_attention_is_compared_with_the_limit_and_torch(kv, monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 1)
    record = Heard({"limit.copy": 1e9, "decode.bf16.40.seconds": 1.0})
    attention.decode(record, attention.Decode(40, kv, heads=8, kv_heads=1, main=True), batch=2, device="cpu")
    assert record.failures() == []
    assert record.known["decode." + kv + ".40.share"] > 0
    row = record.rows("Decode attention, batch 2, head 128")[0]
    if kv == "bf16":
        assert row["which"].startswith("flash")
        assert record.known["decode.bf16.40.over_sdpa"] > 0
    else:
        assert record.known[f"decode.{kv}.40.speedup"] > 0


def test_prompt_attention_is_compared_too(monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 1)
    record = Heard({"limit.matmul": 1e12})
    attention.prompt(record, [70, 70], heads=2, kv_heads=1, device="cpu")
    assert record.failures() == []
    assert record.rows("Prompt attention, causal, head 128, bf16")[0]["case"] == "2 x 70 tokens, 2 / 1 heads"


def test_wrong_attention_is_noticed_where_it_is_timed(monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 1)
    monkeypatch.setattr(attention, "paged_attention", lambda q, *args, **options: 1.1 * q)
    record = Heard({"limit.copy": 1e9})
    attention.decode(record, attention.Decode(20, heads=2, kv_heads=1), batch=2, device="cpu")
    assert len(record.failures()) == 1


def test_the_judged_cases_are_those_of_the_reaches():
    judged = [(case.context, case.kv) for case in attention.cases() if case.main]
    assert judged == list(itertools.product(attention.CONTEXTS, ("bf16", "fp8")))
    assert all(case.heads // case.kv_heads == 8 for case in attention.cases() if case.main)


def test_what_is_compiled_beforehand_and_fails_is_noted():
    record = Heard()
    compile_beforehand(record, math.sqrt, [4.0, -1.0])
    notes = [line["text"] for line in record.lines if line["kind"] == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("could not be compiled beforehand: -1.0: ")
    assert record.failed == 0


def test_what_is_compiled_beforehand_is_what_is_measured(monkeypatch):
    """Every case's kernel is among those warmed, by what it is compiled for."""
    warmed = []
    monkeypatch.setattr(attention, "compile_beforehand", lambda record, call, items: warmed.extend(items))
    monkeypatch.setattr(attention, "prompt", lambda *_: None)
    monkeypatch.setattr(attention, "decode", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["attention"])
    with pytest.raises(SystemExit) as ended:
        attention.main()
    assert ended.value.code == 0
    assert warmed[0] == 0
    compiled = {(case.kv, case.heads, case.kv_heads, case.block_size) for case in warmed[1:]}
    assert compiled == {(case.kv, case.heads, case.kv_heads, case.block_size) for case in attention.cases()}


def test_warming_calls_run(monkeypatch):
    monkeypatch.setattr(attention, "WARM_TOKENS", 20)
    attention.warm(attention.Decode(4096, "fp8", heads=8, kv_heads=1), device="cpu")
    monkeypatch.setattr(linears, "products", lambda _: [(16, 64)])
    for name, _ in linears.kinds():
        linears.warm(name, device="cpu")


def test_every_kind_of_weight_is_multiplied(monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 1)
    record = Heard({"limit.copy": 1e9})
    for name, make in linears.kinds():
        linears.run(record, name, make, [(16, 64)], device="cpu")
    rows = record.rows("The four products of a layer, 8B")
    assert len(rows) == len(list(linears.kinds())) >= 9
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    for name, make in linears.kinds():
        product, nbytes = make(weight)
        error = (product(x).float() - x.float() @ weight.float().T).norm() / (x.float() @ weight.float().T).norm()
        assert error < 0.2, name
        assert 0 < nbytes <= weight.nbytes


def test_shapes_are_those_of_the_real_models():
    def size(shape):
        return sum(torch.Size(dims).numel() for dims in tensor_shapes(SHAPES[shape]).values())

    assert 1.3e8 < size("135M") < 1.4e8
    assert 1.2e9 < size("1B") < 1.3e9
    assert 8.0e9 < size("8B") < 8.1e9
    assert products(SHAPES["8B"]) == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


# ---- an engine ------------------------------------------------------------------------------------------------------------------


def output(step, requests, prompt=0, moved=1000):
    report = StepReport(
        step_id=step, started=0.0, duration=0.0, phases={}, num_requests=requests, prompt_tokens=prompt, decode_tokens=requests,
        running=requests, waiting=0, free_blocks=0, num_blocks=0, preempted=0, allocation_failures=0, bytes_moved=moved, flops=0,
        gap=0.25,
    )  # fmt: skip
    return StepOutput(step_id=step, report=report)


def test_only_steps_that_decode_all_requests_are_timed():
    wave = Wave(4, steps=10, timed=(0.2, 0.8))
    steps = [(0.0, output(0, 2, prompt=99)), (5.0, output(1, 3))]
    steps += [(10.0 + 2 * i, output(2 + i, 4)) for i in range(9)]
    found = served.evaluate(wave, steps, {"busy": 30.0, "span": 40.0, "steps": 20})
    assert found.periods == [2.0] * 6
    assert found.busy == 1.5
    assert found.gap == 0.5
    assert found.idle == 0.25
    assert served.evaluate(wave, steps, None).gap is None
    with pytest.raises(RuntimeError, match="only 0 steps"):
        served.evaluate(Wave(5, steps=10), steps, None)


def test_overlapping_activity_counts_once():
    assert union([(0.0, 10.0), (5.0, 8.0), (9.0, 12.0), (20.0, 21.0)]) == {"busy": 13e-6, "span": 21e-6}
    assert union([]) == {"busy": 0.0, "span": 0.0}


def test_steps_become_the_figures_of_the_reaches():
    record = Heard({"limit.copy": 1e12})
    off, on = model.CASES[0], next(case for case in model.CASES if case.shape == "8B" and case.label == model.INVARIANT)
    model.tell(record, off, [Measured(Wave(32), [0.010] * 9, 8e9, 0.0098, 1e-4)])
    model.tell(record, on, [Measured(Wave(32), [0.0125] * 9, 8e9, None, 0.0)])
    assert record.known["step.8B.32.share"] == pytest.approx(0.8)
    assert record.known["step.8B.32.gap_ms"] == pytest.approx(0.2)
    assert record.known["determinism.8B.32.cost"] == pytest.approx(0.2)
    assert record.rows("Decode steps, bf16, through the engine")[1]["gap, ms"] == "-"


def test_the_cases_give_every_figure_that_a_reach_asks_for():
    from gpu.reaches import REACHES

    record = Heard({"limit.copy": 1e12})
    for case in model.CASES:
        model.tell(record, case, [Measured(wave, [0.01] * 9, 8e9, 0.009, 0.0) for wave in case.waves])
    asked = {name for reach in REACHES for name in reach.names if name.startswith(("step.", "determinism."))}
    assert asked <= record.known.keys()


@pytest.mark.slow
def test_an_engine_with_random_weights_serves_waves_and_is_watched_afterwards(monkeypatch):
    seen = []
    evaluate = served.evaluate
    monkeypatch.setattr(served, "evaluate", lambda *of: seen.append(of[2]) or evaluate(*of))
    settings = {"model": {"kernels": "torch", "threads": 1}}
    found = served.serve("tiny", [Wave(1, 20, 70), Wave(3, 20, 70)], settings, "float32")
    assert [measured.wave.requests for measured in found] == [1, 3]
    assert all(measured.period > 0 and measured.bytes_moved > 0 for measured in found)
    assert found[1].bytes_moved > found[0].bytes_moved
    assert [(one["requests"], one["steps"]) for one in seen] == [(1, 40), (3, 40)]
    assert all(measured.gap is None for measured in found), "there is no device here"


@pytest.mark.slow
def test_an_engine_that_is_late_is_ended():
    with pytest.raises(TimeoutError):
        served.serve(
            "tiny", [Wave(1, 20, 12)], {"model": {"kernels": "torch", "threads": 1}}, "float32", watch=False, seconds=0.01
        )


# ---- tuning ---------------------------------------------------------------------------------------------------------------------


def test_rules_cover_every_call_and_invariant_ones_do_not_look_at_rows():
    for kernel in tune_rules.tunable():
        made = list(tune_rules.rules(kernel))
        if "attention" not in kernel:
            assert set(made[-1].when) <= {"bits"}, "the last rule serves what the others don't"
        for rule in made:
            assert rule.cases
            first, *others = tune_rules.candidates(rule)
            assert first == tune_rules.default_config(rule)
            assert first not in others
            assert len(others) > 10
            if kernel.endswith(configs.INVARIANT):
                assert "m" not in rule.when


def test_every_kernel_of_the_default_table_that_has_candidates_can_be_tuned():
    names = {kernel.removesuffix(configs.INVARIANT) for kernel in tune_rules.tunable()}
    assert names >= {name for name in tune_rules.CALLS if "attention" not in name}


def test_the_quickest_right_candidate_wins(monkeypatch):
    rule = tune_rules.RuleToTune("matmul", {"bits": 16, "m": 16}, (tune_rules.Case(2, 32, 64), tune_rules.Case(3, 32, 64)))
    base = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 2}
    some = [base, {**base, "BLOCK_N": 16}, {**base, "num_warps": 8}, {**base, "BLOCK_K": 16}]
    real = tune_rules.matmul
    monkeypatch.setattr(
        tune_rules, "matmul", lambda x, weight, config: real(x, weight, config=config) * (0 if config["BLOCK_K"] == 16 else 1)
    )

    def timer(call, copies, seconds=0.0):
        config = call.__defaults__[0]
        return Times((1.0 if config["BLOCK_K"] == 16 else 2.0 if config["num_warps"] == 8 else 4.0,))

    config, ratio, measured = tune.best(rule, some, float("inf"), device="cpu", timer=timer)
    assert config["num_warps"] == 8
    assert ratio == pytest.approx(0.5)
    assert measured == 4


def test_a_table_is_written_that_configs_reads_and_old_kernels_stay(tmp_path, monkeypatch):
    facts = {"card": "Some GPU 9000", "driver": "1", "versions": {"torch": "2", "triton": "3"}}
    use = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
    tune.write_table(tmp_path, facts, {"int8_matmul": [{"use": use}]})
    path = tune.write_table(tmp_path, facts, {"matmul": [{"when": {"m": 16, "bits": 16}, "use": use}]})
    assert path.name == "some_gpu_9000.json"
    assert set(json.loads(path.read_text())["kernels"]) == {"int8_matmul", "matmul"}
    table = configs.parse(path.read_text(), path.name)
    assert table.tuned
    assert table.kernels["matmul"][0].fits({"m": 3, "bits": 16, "n": 8})
    with pytest.raises(ValueError, match="may not depend"):
        tune.write_table(tmp_path, facts, {"matmul_invariant": [{"when": {"m": 16}, "use": use}]})


def test_tuning_from_rules_to_the_tables(tmp_path, monkeypatch):
    facts = {"card": "Some GPU 9000", "driver": "1", "versions": {"torch": "2", "triton": "3"}}
    made = [
        tune_rules.RuleToTune("matmul", {"bits": 16, "m": 16}, (tune_rules.Case(2, 16, 64),)),
        tune_rules.RuleToTune("matmul", {"bits": 16}, (tune_rules.Case(2, 16, 64),)),
    ]
    monkeypatch.setattr(tune, "describe", lambda: facts)
    monkeypatch.setattr(tune, "rules", lambda kernel: made)
    monkeypatch.setattr(tune, "compiled", lambda rule, wanted, pool, until: wanted[:2])
    monkeypatch.setattr(timing, "LEAST", 1)
    (tmp_path / "tree").mkdir()
    (tmp_path / "logs").mkdir()
    record = Heard()
    tune.tune(record, ["matmul"], [tmp_path / "tree", tmp_path / "logs"], 1, device="cpu")
    texts = [(tmp_path / folder / "some_gpu_9000.json").read_text(encoding="utf-8") for folder in ("tree", "logs")]
    assert texts[0] == texts[1]
    rules = json.loads(texts[0])["kernels"]["matmul"]
    assert [rule["when"] for rule in rules] == [{"bits": 16, "m": 16}, {"bits": 16}]
    assert [row["measured"][:4] for row in record.rows("Tuned block sizes")] == ["2 of", "2 of"]
