"""An encoder that pauses: the same rows in as many pieces as it takes, given up or failing in the middle, and kept like any others."""

from __future__ import annotations

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


def test_time_is_kept_to() -> None:
    encoder = Slow()
    naps = iter([0.0, 0.05, 0.0, 0.05, 0.0, 0.05])

    class Sleepy(Slow):
        def encode(self, item: MediaItem) -> Encoded:
            for nap in naps:
                self.pause()
                time.sleep(nap)
                self.layers += 1
            return Encoded(torch.zeros(item.rows, 4))

    encoder = Sleepy()
    pieces = Pieces(encoder)
    pieces.begin(item("a"))
    assert pieces.go_on(0.02) is None
    assert encoder.layers == 2, "it goes on for as long as it may, and stops at the next pause"
    pieces.close()


def test_what_is_encoded_beforehand_is_found_by_the_step_that_needs_it() -> None:
    encoders = Encoders(Slow(), 1 << 20)
    assert [encoders.beforehand(order("a", given=index == 0)) for index in range(LAYERS + 1)] == [False] * LAYERS + [True]
    assert encoders.beforehand(order("a", given=False)), "it is there"
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoders.take_counts() == {ENCODED_ITEMS: 1, ENCODED_PIECES: LAYERS + 1}
    encoders.check_integrity()
    encoders.close()


def test_a_step_that_needs_an_unfinished_item_ends_it() -> None:
    encoder = Slow()
    encoders = Encoders(encoder, 1 << 20)
    for index in range(3):
        assert not encoders.beforehand(order("a", given=index == 0))
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoder.layers == LAYERS, "nothing was done twice"
    assert encoders.take_counts()[ENCODED_ITEMS] == 1
    encoders.close()


def test_another_item_in_between_does_no_harm() -> None:
    encoders = Encoders(Slow(), 1 << 20)
    assert not encoders.beforehand(order("a"))
    assert torch.equal(load(encoders, "bb"), alone("bb"))
    assert not encoders.beforehand(order("a", given=False))
    assert not encoders.beforehand(order("ccc")), "gives up a"
    assert encoders.beforehand(order("a", given=False)), "unknown: nothing can be done beforehand"
    assert torch.equal(load(encoders, "a"), alone("a"))
    encoders.close()


def test_a_failure_beforehand_is_the_steps() -> None:
    encoder = Slow()
    encoder.fails = "a"
    encoders = Encoders(encoder, 1 << 20)
    assert [encoders.beforehand(order("a", given=index == 0)) for index in range(4)] == [False] * 3 + [True]
    encoder.layers = 0
    with pytest.raises((RequestError, WorkerError), match="can't be read"):
        load(encoders, "a")
    encoders.close()


def test_an_item_too_large_to_be_kept_is_encoded_once_all_the_same() -> None:
    encoder = Slow()
    encoders = Encoders(encoder, 8)
    assert encoders.beforehand(order("a", seconds=60.0))
    assert encoders.beforehand(order("a", given=False))
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoder.layers == LAYERS
    assert torch.equal(load(encoders, "a"), alone("a"))
    assert encoder.layers == 2 * LAYERS, "it was kept for one use"
    encoders.check_integrity()
    encoders.close()
