"""The fit of step times: exact where the formula holds, not led astray by outliers, and never a gain for more work."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenbus.core.recording.frames import Step
from tokenbus.core.recording.history import StepRecord
from tokenbus.core.recording.step_time import FEATURES, Run, StepTimes, features, nonnegative_least_squares


def random_runs(draw):
    runs = [Run(draw.randint(20, 400), 1, 0, True, prompt=False) for _ in range(draw.randint(0, 20))]
    runs += [
        Run(draw.randint(0, 300), draw.randint(2, 90), 0, draw.random() < 0.5, prompt=True) for _ in range(draw.randint(0, 2))
    ]
    return runs or [Run(9, 1, 0, True, prompt=False)]


def seconds(runs):
    decodes = [run for run in runs if not run.prompt]
    prompt = sum(run.n for run in runs if run.prompt)
    return 0.008 + 0.0003 * len(decodes) + 0.0004 * prompt + 2e-6 * sum(run.computed for run in runs)


def steps(count, noise=lambda i: 1.0, gap=0.0005, seed=3):
    draw, at, made = random.Random(seed), 0.0, []
    for i in range(count):
        runs = random_runs(draw)
        took = seconds(runs) * noise(i)
        made.append(StepRecord(Step(i, at, took, [], []), runs, [], 1))
        at += took + gap
    return made


def test_there_is_a_feature_for_each_name():
    assert len(features(random_runs(random.Random(1)))) == len(FEATURES)


def test_times_that_follow_the_formula_are_found_exactly():
    times = StepTimes(steps(200))
    assert times.fit.p90_error < 1e-9
    for runs in (random_runs(random.Random(i)) for i in range(50)):
        assert times.seconds(runs) == pytest.approx(seconds(runs), rel=1e-6)
    assert times.overhead(10) == pytest.approx(0.0005, rel=1e-6)


def test_noise_and_stalls_do_not_lead_it_astray():
    draw = random.Random(8)
    noisy = [draw.lognormvariate(0, 0.1) * (20 if i % 50 == 7 else 1) for i in range(600)]
    recorded = steps(600, noise=lambda i: noisy[i])
    times = StepTimes(recorded)
    plain = StepTimes(steps(600))
    scale = sum(one.step.seconds for one in recorded) / sum(plain.seconds(one.runs) for one in recorded)
    for runs in (random_runs(random.Random(i)) for i in range(50)):
        assert times.seconds(runs) == pytest.approx(scale * seconds(runs), rel=0.12)


def test_a_slow_time_of_the_machine_is_slow_in_a_simulation_of_that_time():
    recorded = steps(300, noise=lambda i: 2.0 if 100 <= i < 200 else 1.0)
    times = StepTimes(recorded)
    slow, fast = recorded[150], recorded[20]
    for one in (slow, fast):
        assert times.seconds(one.runs, one.step.at) == pytest.approx(one.step.seconds)
    assert times.noise_at(slow.step.at, chunked=False) > 1.4 * times.noise_at(fast.step.at, chunked=False)


def test_more_work_never_takes_less():
    draw = random.Random(5)
    times = StepTimes(steps(100, noise=lambda i: draw.lognormvariate(0, 0.5)))
    for i in range(50):
        runs = random_runs(random.Random(i))
        assert times.seconds([*runs, Run(50, 1, 0, True, prompt=False)]) >= times.seconds(runs)
        assert times.seconds([*runs, Run(0, 40, 0, True, prompt=True)]) >= times.seconds(runs)


@pytest.mark.parametrize("seed", range(5))
def test_nonnegative_least_squares_meets_the_conditions_of_an_optimum(seed):
    draw = np.random.default_rng(seed)
    a, b = draw.random((60, 7)), draw.standard_normal(60)
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (a @ x - b)
    assert (x >= 0).all()
    assert np.allclose(gradient[x > 0], 0, atol=1e-8)
    assert (gradient[x == 0] >= -1e-8).all()


def test_without_any_step_there_is_nothing_to_fit():
    with pytest.raises(ValueError, match="no step"):
        StepTimes([])
