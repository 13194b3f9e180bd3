"""An encoder that pauses: the same rows in as many pieces as it takes, given up or failing in the middle, and kept like any others."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from tokenbus.core.errors import RequestError, WorkerError
from tokenbus.core.media import MediaItem
from tokenbus.core.models.media import Encoded, MediaEncoder
from tokenbus.core.plan import EncodeOrder
from tokenbus.core.worker.encoder import ENCODED_ITEMS, ENCODED_PIECES, Encoders, MediaPiece, MediaState
from tokenbus.core.worker.pieces import Pieces

LAYERS = 6


def item(digest: str, length: int = 3) -> MediaItem:
    return MediaItem(kind="image", digest=digest, start=0, length=length)


class Slow(MediaEncoder):
    """Says on which threads it ran and how far it came."""

    pauses = True
    weights_bytes = 0

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.ended: list[str] = []
        self.layers = 0
        self.fails = ""

    def encode(self, item: MediaItem) -> Encoded:
        rows = torch.full((item.rows, 4), float(len(item.digest)))
        for _ in range(LAYERS):
            self.pause()
            self.threads.add(threading.current_thread().name)
            self.layers += 1
            if item.digest == self.fails and self.layers % LAYERS == 3:
                raise RequestError("can't be read")
            rows = rows * 1.5 + 0.25
        self.ended.append(item.digest)
        return Encoded(rows)


def order(digest: str, seconds: float = 0.0, *, given: bool = True) -> EncodeOrder:
    return EncodeOrder(digest=digest, item=item(digest) if given else None, seconds=seconds)


def done(encoders: Encoders, digest: str, *, given: bool = False, seconds: float = 0.0) -> bool:
    """Goes on with it; whether the engine is told that nothing is left to do."""
    encoders.take_news()
    encoders.beforehand(order(digest, seconds, given=given))
    return digest in encoders.take_news()[0]


def load(encoders: Encoders, digest: str) -> torch.Tensor:
    """The rows, as a step that runs its tokens gets them."""
    state = MediaState((item(digest),), 8, encoders.encoder)
    encoders.load(MediaPiece(state, 0, 3))
    return state.held[0].rows


def alone(digest: str) -> torch.Tensor:
    return Slow().encode(item(digest)).rows


def test_it_pauses_when_time_is_up_and_gives_the_same_rows() -> None:
    encoder = Slow()
    pieces = Pieces(encoder)
    pieces.begin(item("a"))
    given, layers = [], []
    while not given or given[-1] is None:
        given.append(pieces.go_on(0.0))
        layers.append(encoder.layers)
    assert layers == list(range(LAYERS + 1)), "the first pause is before the first layer"
    assert torch.equal(given[-1].rows, alone("a"))
    assert encoder.threads == {"encoder"}
    assert pieces.digest is None
    pieces.begin(item("bb"))
    whole = pieces.go_on(60.0)
    assert whole is not None
    assert torch.equal(whole.rows, alone("bb"))
    pieces.close()
    assert all(thread.name != "encoder" for thread in threading.enumerate())


def test_in_one_piece_it_does_not_pause() -> None:
    encoder = Slow()
    pieces = Pieces(encoder)
    pieces.begin(item("a"))
    assert pieces.go_on(0.0) is None
    assert torch.equal(encoder.encode(item("bb")).rows, alone("bb"))
    assert encoder.threads == {"MainThread"}
    pieces.close()
    assert encoder.ended == ["bb"]


def test_an_item_that_is_given_up_leaves_nothing_behind() -> None:
    encoder = Slow()
    pieces = Pieces(encoder)
    pieces.begin(item("a"))
    for _ in range(3):
        assert pieces.go_on(0.0) is None
    pieces.begin(item("bb"))
    found = pieces.go_on(60.0)
    assert found is not None
    assert torch.equal(found.rows, alone("bb"))
    assert encoder.ended == ["bb"]
    pieces.begin(item("ccc"))  # never begun
    pieces.begin(item("a"))
    assert pieces.go_on(60.0) is not None
    pieces.close()


def test_a_failure_is_raised_where_it_is_waited_for_and_the_next_item_goes() -> None:
    encoder = Slow()
    encoder.fails = "a"
    pieces = Pieces(encoder)
    pieces.begin(item("a"))
    with pytest.raises(RequestError, match="can't be read"):
        while pieces.go_on(0.0) is None:
            pass
    assert pieces.digest is None
    encoder.layers = 0
    pieces.begin(item("bb"))
    assert pieces.go_on(60.0) is not None
    pieces.close()


def test_it_goes_on_for_as_long_as_it_may_and_stops_at_the_next_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tokenbus.core.worker.pieces.time.perf_counter", lambda: now)

    class Ticking(Slow):
        def encode(self, item: MediaItem) -> Encoded:
            nonlocal now
            for _ in range(LAYERS):
                self.pause()
                now += 1.0
                self.layers += 1
            return Encoded(torch.zeros(item.rows, 4))

    encoder = Ticking()
    pieces = Pieces(encoder)
    pieces.begin(item("a"))
    assert pieces.go_on(2.5) is None
    assert encoder.layers == 3
    assert pieces.go_on(1.0) is None
    assert encoder.layers == 4
    pieces.close()


def test_an_item_that_nobody_goes_on_with_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its tensors, by the encoder's thread itself; whoever wants it again has it from the beginning."""
    monkeypatch.setattr("tokenbus.core.worker.pieces.KEPT_SECONDS", 0.02)
    unwound = threading.Event()

    class Tidy(Slow):
        def encode(self, item: MediaItem) -> Encoded:
            try:
                return super().encode(item)
            finally:
                unwound.set()

    encoder = Tidy()
    encoders = Encoders(encoder, 1 << 20)
    encoders.beforehand(order("a"))
    encoders.beforehand(order("a", given=False))
    assert unwound.wait(10)
    encoders.beforehand(order("a", given=False))
    assert encoders.take_news() == (["a"], []), "nothing can be done beforehand: the item is gone"
    monkeypatch.setattr("tokenbus.core.worker.pieces.KEPT_SECONDS", 60.0)
    assert torch.equal(load(encoders, "a"), alone("a"))
    for index in range(LAYERS + 1):
        encoders.beforehand(order("bb", given=index == 0))
    assert torch.equal(load(encoders, "bb"), alone("bb"))
    encoders.close()


def test_a_thread_that_cannot_be_had_is_the_steps_failure_and_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    encoders = Encoders(Slow(), 1 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        encoders.beforehand(order("a"))
        assert encoders.take_news() == (["a"], [])
        with pytest.raises(WorkerError, match="can't start new thread"):
            load(encoders, "a")
    assert torch.equal(load(encoders, "a"), alone("a"))
    encoders.close()


def test_the_thread_ends_with_its_encoder() -> None:
    encoders = Encoders(Slow(), 1 << 20)
    encoders.beforehand(order("a", seconds=60.0))
    assert any(thread.name == "encoder" for thread in threading.enumerate())
    del encoders
    gc.collect()
    assert all(thread.name != "encoder" for thread in threading.enumerate())


def test_the_cpu_time_of_the_encoders_thread_is_counted() -> None:
    class Spins(Slow):
        def encode(self, item: MediaItem) -> Encoded:
            until = time.thread_time() + 0.03
            while time.thread_time() < until:
                self.pause()
            return Encoded(torch.zeros(item.rows, 4))

    encoders = Encoders(Spins(), 1 << 20)
    count = 0
    while not done(encoders, "a", given=count == 0, seconds=0.005):
        count += 1
    assert encoders.take_cpu_seconds() > 0.02
    assert encoders.take_cpu_seconds() == 0.0
    encoders.close()


def test_what_is_encoded_beforehand_is_found_by_the_step_that_needs_it() -> None:
    encoders = Encoders(Slow(), 1 << 20)
    assert [done(encoders, "a", given=index == 0) for index in range(LAYERS + 1)] == [False] * LAYERS + [True]
    assert done(encoders, "a"), "it is there"
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoders.take_counts() == {ENCODED_ITEMS: 1, ENCODED_PIECES: LAYERS + 1}
    encoders.check_integrity()
    encoders.close()


def test_a_step_that_needs_an_unfinished_item_ends_it() -> None:
    encoder = Slow()
    encoders = Encoders(encoder, 1 << 20)
    for index in range(3):
        assert not done(encoders, "a", given=index == 0)
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoder.layers == LAYERS, "nothing was done twice"
    assert encoders.take_counts()[ENCODED_ITEMS] == 1
    encoders.close()


def test_another_item_in_between_does_no_harm() -> None:
    encoders = Encoders(Slow(), 1 << 20)
    assert not done(encoders, "a", given=True)
    assert torch.equal(load(encoders, "bb"), alone("bb"))
    assert not done(encoders, "a")
    assert not done(encoders, "ccc", given=True), "gives up a"
    assert done(encoders, "a"), "unknown: nothing can be done beforehand"
    assert torch.equal(load(encoders, "a"), alone("a"))
    encoders.close()


def test_a_failure_beforehand_is_the_steps() -> None:
    encoder = Slow()
    encoder.fails = "a"
    encoders = Encoders(encoder, 1 << 20)
    assert [done(encoders, "a", given=index == 0) for index in range(4)] == [False] * 3 + [True]
    encoder.layers = 0
    with pytest.raises((RequestError, WorkerError), match="can't be read"):
        load(encoders, "a")
    encoders.close()


def test_an_item_too_large_to_be_kept_is_encoded_once_all_the_same() -> None:
    encoder = Slow()
    encoders = Encoders(encoder, 8)
    assert done(encoders, "a", given=True, seconds=60.0)
    assert done(encoders, "a")
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoder.layers == LAYERS
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoder.layers == 2 * LAYERS, "it was kept for one use"
    encoders.check_integrity()
    encoders.close()


def test_the_engine_is_told_what_is_kept_and_what_no_longer() -> None:
    rows = 3 * 4 * 4
    encoders = Encoders(Slow(), 2 * rows)
    for digest in ("a", "bb"):
        load(encoders, digest)
    assert encoders.take_news() == (["a", "bb"], [])
    assert done(encoders, "a"), "now used last"
    load(encoders, "ccc")
    assert encoders.take_news() == (["ccc"], ["bb"])
    encoders.clear()
    assert encoders.take_news() == ([], ["a", "ccc"])
    encoders.max_bytes = rows - 1
    assert done(encoders, "a", given=True, seconds=60.0)
    load(encoders, "a")
    assert encoders.take_news() == ([], ["a"]), "it was kept for one use"
    encoders.close()
