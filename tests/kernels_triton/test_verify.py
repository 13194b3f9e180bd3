"""Verification against the rule as the model runner has it, in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from tokenbus.kernels.triton.verify import verify

pytestmark = pytest.mark.usefixtures("where_kernels_run")


def ragged(drafts, sampled, *, ids=torch.int64, starts=torch.int32):
    start = [0]
    for some in drafts:
        start.append(start[-1] + len(some))
    flat = [torch.tensor([token for some in lists for token in some], dtype=ids) for lists in (drafts, sampled)]
    return flat[0], torch.tensor(start, dtype=starts), flat[1]


def rule(drafts, tokens):
    """core/worker/sampling.py: the tokens up to the first that is not the draft at its place."""
    right = next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))
    return tokens[: right + 1]


def check(drafts, sampled, **kinds):
    found = verify(*ragged(drafts, sampled, **kinds), config={"BLOCK": 4})
    wanted = [rule(some, tokens) for some, tokens in zip(drafts, sampled, strict=True)]
    assert found.accepted.tolist() == [len(tokens) - 1 for tokens in wanted]
    assert found.last.tolist() == [tokens[-1] for tokens in wanted]
    padded = [tokens + [-1] * (len(some) + 1 - len(tokens)) for some, tokens in zip(drafts, wanted, strict=True)]
    assert found.tokens.tolist() == [token for tokens in padded for token in tokens]
    assert found.accepted.dtype == torch.int32
    return found


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("starts", [torch.int32, torch.int64])
def test_right_wrong_and_no_drafts(ids, starts):
    found = check(
        [[1, 2, 3], [], [5, 6], [7, 8, 9], [4]],
        [[1, 2, 3, 11], [12], [9, 6, 1], [7, 0, 9, 1], [4, 4]],
        ids=ids,
        starts=starts,
    )
    assert found.tokens.dtype == found.last.dtype == ids


def test_any_lengths():
    dice = random.Random(3)
    for _ in range(6):
        drafts = [[dice.randrange(3) for _ in range(dice.randrange(11))] for _ in range(5)]
        sampled = [[token if dice.random() < 0.8 else 5 for token in some] + [dice.randrange(9)] for some in drafts]
        check(drafts, sampled)


def test_a_draft_that_is_right_behind_a_wrong_one_does_not_count():
    assert check([[1, 2, 3, 4, 5, 6]], [[1, 0, 3, 4, 5, 6, 7]]).accepted.tolist() == [1]


def test_a_row_that_could_not_be_sampled_counts_only_where_it_is_reached():
    found = check([[1, 2], [1, 2], [3]], [[1, 9, -1], [1, -1, 5], [3, -1]])
    assert found.last.tolist() == [9, -1, -1]


def test_no_drafts_and_no_requests():
    check([[], []], [[4], [5]])
    empty = torch.empty(0, dtype=torch.int64)
    assert verify(empty, torch.tensor([0]), empty).accepted.shape == (0,)


def test_strided_and_wrong_arguments():
    drafts, start, sampled = ragged([[1, 2], [3]], [[1, 2, 5], [4, 6]])
    wide = torch.stack([sampled, sampled], dim=1)
    assert verify(drafts, start, wide[:, 0]).accepted.tolist() == [2, 0]
    for arguments, words in (
        ((drafts, start, sampled[:-1]), "sampled is"),
        ((drafts.float(), start, sampled), "drafts is"),
        ((drafts, start.float(), sampled), "draft_start is"),
        ((drafts, start[:0], sampled), "draft_start is empty"),
        ((drafts[None], start, sampled), "drafts is"),
    ):
        with pytest.raises(ValueError, match=words):
            verify(*arguments)
