from __future__ import annotations

import time

import torch

from tokenbus.kernels.torch_ops import linear, probe


def test_holds_on_this_machine_and_keeps_the_thread_count():
    before = torch.get_num_threads()
    assert probe.numerics_probe() == (True, "")
    assert torch.get_num_threads() == before


def test_says_what_does_not_hold(monkeypatch):
    monkeypatch.setattr(linear.TiledLinear, "__call__", lambda self, x: torch.zeros(len(x), 1) + len(x))
    ok, reason = probe.numerics_probe()
    assert not ok
    assert "linear layer" in reason


def test_is_quick():
    started = time.thread_time()
    probe.numerics_probe()
    assert time.thread_time() - started < 1.0
