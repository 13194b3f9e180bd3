"""Paged attention in plain torch, bit-invariant: a row depends on its own position and the K/V stored up to it, on nothing else.

How a row is computed, whatever batch it is in:

    scores    q . k / scale for every stored position, dot products over DEPTH of head_dim, in order; -inf where the row must not look
    maximum   over all of them (exact in any order)
    weights   exp(score - maximum); exactly 0 where masked
    sums      positions lie in tiles of TILE, counted from position 0 of the request. Each tile's weights are summed, and multiplied
              with its V, by themselves; tiles are added in order, in float32. A masked tile adds zeros, so it may also be left out.

What is batched is chosen for speed only: query rows (tokens x the query heads of one KV head) are padded to a multiple of ROWS, and
neither the number of rows, of tiles, of heads, of requests nor of threads changes a bit of MKL's float32 batched product, given
ROWS >= 8, DEPTH <= 160 and a V whose width is a multiple of V_LANES (tests/kernels measures it; `probe` checks it where we run).

A request that holds NaN or infinite K/V harms nobody else: a block is cleared when its first position is written.

Rows may see past their own position (`reach`, for spans that attend in both directions): the same sums with another mask. The K/V up to
there must have been stored, so such a span is one chunk.

Caches of one byte (int8, float8_e4m3fn) have rows of head_dim values and one float32 that these are multiplied with (`quantize`). They
are multiplied out when they are fetched, and all of the above holds of the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE = 128
ROWS = 8
V_LANES = 16
DEPTH = 128
FEW = 8
"""Requests with at most this many new tokens are computed together (decoding, verifying drafts); longer ones each by themselves."""
SMALLEST = torch.finfo(torch.float32).tiny
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each dtype of one byte."""
MAX_ELEMENTS = 1 << 21
"""Elements of K, of V, or of scores, that are worked on at once (float32: 8 MiB, so that they stay in a cache)."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer's grouping depends on; the three numbers in the middle only say how much is computed at once."""

    block_size: int
    kv_heads: int
    head_dim: int
    group_size: int
    """Query heads of one KV head."""
    window: int | None

    def heads_at_once(self, positions: int) -> int:
        """KV heads whose K for this many positions is worked on together."""
        return max(1, min(self.kv_heads, MAX_ELEMENTS // (positions * self.head_dim)))


@dataclass(frozen=True, slots=True)
class QueryTile:
    """New tokens that are computed together: `tokens` rows of each of the group's requests."""

    rows: torch.Tensor | None
    """int64 [U * tokens]: where they are in the batch. None: they are the whole batch, in order."""
    tokens: int
    first: int
    last: int
    """Columns of the group's K/V that they look at; multiples of TILE."""
    masked_from: int
    """Column from which on `mask` says what they may see; before it they see everything."""
    mask: torch.Tensor
    """bool [U, tokens, last - masked_from], True where a token must not look."""


@dataclass(frozen=True, slots=True)
class Group:
    """Requests whose K/V is fetched together."""

    requests: int
    columns: int
    """Positions fetched for each; a multiple of TILE."""
    index: torch.Tensor
    """int64: blocks (if `by_block`) or slots to fetch, `columns` positions for each request."""
    by_block: bool
    tiles: list[QueryTile]


class Scratch:
    """Working memory that is kept between calls: fresh pages from the operating system cost more than what is done with them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Contiguous, contents undefined; valid until the next call with this name. On like's device, in its dtype by default."""
        key = (name, dtype or like.dtype, like.device)
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        return buffer[:size].view(shape)


class RaggedPlan:
    """Index tensors of one step, made when first needed and shared by all layers. Lists as in core's AttentionBatch.

    `scratch` is used by one call at a time."""

    __slots__ = ("_blocks", "_groups", "block_tables", "context_len", "query_start", "reach", "scratch", "slots")

    def __init__(
        self,
        query_start: Sequence[int],
        context_len: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        slots: torch.Tensor,
        scratch: Scratch | None = None,
        reach: torch.Tensor | None = None,
    ) -> None:
        self.scratch = scratch or Scratch()
        self.reach = None if reach is None else reach.tolist()
        """By row: the position below which it sees. None: up to itself."""
        self.query_start = query_start
        self.context_len = context_len
        self.block_tables = block_tables
        self.slots = slots
        self._blocks: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._groups: dict[AttentionShape, list[Group]] = {}

    def places(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the new tokens: block, offset in it, and the blocks whose first position is among them."""
        found = self._blocks.get(block_size)
        if found is None:
            block, offset = self.slots // block_size, self.slots % block_size
            found = self._blocks[block_size] = (block, offset, block[offset == 0])
        return found

    def groups(self, shape: AttentionShape) -> list[Group]:
        found = self._groups.get(shape)
        if found is None:
            found = self._groups[shape] = _Grouping(self, shape).make()
        return found


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: RaggedPlan) -> None:
    """Store the new tokens' k, v [T, kv_heads, head_dim] (cast to the caches' dtype, or quantised); clear the rest of each block begun."""
    block, offset, begun = plan.places(k_cache.shape[1])
    for cache, x in ((k_cache, k), (v_cache, v)):
        rows = quantize(x, cache.dtype) if cache.dtype in LIMITS else x.to(cache.dtype)
        target, rows = (t.view(torch.int8) if cache.dtype in LIMITS else t for t in (cache, rows))
        if len(begun):
            target.index_fill_(0, begun, 0)
        target.index_put_((block, offset), rows)


def quantize(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """`dtype` [..., n + 4] (int8 or float8_e4m3fn) from x [..., n], n a multiple of 4: x / scale rounded to the nearest number of it, even
    if in the middle; then the four bytes of the scale, float32, max |x| / 127 or / 448. Zeros where it is below float32's smallest normal
    number. A row with a NaN or an infinity gets NaN as its scale, and zeros."""
    x, limit = x.float(), LIMITS[dtype]
    scale = x.abs().amax(dim=-1, keepdim=True) / limit
    scale = torch.where(scale < SMALLEST, 0, torch.where(scale.isfinite(), scale, torch.nan))
    values = (x * torch.where(scale > 0, 1 / scale, 0)).nan_to_num(0)
    values = values.round() if dtype == torch.int8 else values.clamp(-limit, limit)
    return torch.cat([values.to(dtype).view(torch.int8), scale.view(torch.int8)], dim=-1).view(dtype)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: RaggedPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, head_dim] over the paged caches [blocks, block_size, kv_heads, head_dim], or int8 or
    float8_e4m3fn with head_dim + 4.

    The new tokens' K/V must be stored already. window: position i sees j with i - window < j <= i. softcap: scores become
    softcap * tanh(scores / softcap). Returns [T, heads, head_dim] in q's dtype; all sums are float32.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    shape = AttentionShape(k_cache.shape[1], kv_heads, dim, heads // kv_heads, window)
    query = (q.float() * scale).view(tokens, kv_heads, heads // kv_heads, dim)
    out = torch.empty_like(query)
    for group in plan.groups(shape):
        together = shape.heads_at_once(group.requests * group.columns)
        for start in range(0, kv_heads, together):
            part = slice(start, start + together)
            keys = _fetch(k_cache[:, :, part], group, plan.scratch, "keys", dim, dim)
            values = _fetch(v_cache[:, :, part], group, plan.scratch, "values", dim, dim + -dim % V_LANES)
            for tile in group.tiles:
                _attend(query[:, part], keys, values, out[:, part], group, tile, softcap, plan.scratch)
    return out.view(tokens, heads, dim).to(q.dtype)


def _fetch(cache: torch.Tensor, group: Group, scratch: Scratch, name: str, dim: int, width: int) -> torch.Tensor:
    """float32 [requests, heads, columns, width] from a cache; zeros from head_dim on."""
    heads, row = cache.shape[2:]
    one_byte = cache.dtype in LIMITS
    moved = cache.view(torch.int8) if one_byte else cache
    source = moved if group.by_block else moved.flatten(0, 1)
    stored = scratch.take("stored", (len(group.index), *source.shape[1:]), moved)
    torch.index_select(source, 0, group.index, out=stored)
    found = scratch.take(name, (group.requests, heads, group.columns, width), cache, torch.float32)
    rows = stored.view(group.requests, group.columns, heads, row).transpose(1, 2)
    if one_byte:
        values = rows[..., :dim] if cache.dtype == torch.int8 else rows[..., :dim].view(cache.dtype).float()
        torch.mul(values, rows[..., dim:].view(torch.float32), out=found[..., :dim])
    else:
        found[..., :dim].copy_(rows)
    if width != dim:
        found[..., dim:].zero_()
    return found


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: Group,
    tile: QueryTile,
    softcap: float | None,
    scratch: Scratch,
) -> None:
    """One query tile: query [T, heads, group_size, head_dim] -> the same rows of `out`."""
    _, heads, group_size, dim = query.shape
    units, rows = group.requests, tile.tokens * group_size
    padded = -(-rows // ROWS) * ROWS
    batch = units * heads
    chosen = query if tile.rows is None else query.index_select(0, tile.rows)
    packed = scratch.take("query", (units, heads, padded, dim), query)
    packed[:, :, :rows].view(units, heads, tile.tokens, group_size, dim).copy_(
        chosen.view(units, tile.tokens, heads, group_size, dim).transpose(1, 2)
    )
    packed[:, :, rows:] = 0
    k, v = (x[:, :, tile.first : tile.last].flatten(0, 1) for x in (keys, values))
    scores = scratch.take("scores", (batch, padded, tile.last - tile.first), query)
    rows_of, keys_of = packed.view(batch, padded, dim), k.transpose(1, 2)
    torch.bmm(rows_of[..., :DEPTH], keys_of[:, :DEPTH], out=scores)
    for start in range(DEPTH, dim, DEPTH):
        scores.baddbmm_(rows_of[..., start : start + DEPTH], keys_of[:, start : start + DEPTH])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    by_token = scores.view(units, heads, padded, -1)[:, :, :rows].unflatten(2, (tile.tokens, group_size))
    by_token[..., tile.masked_from - tile.first :].masked_fill_(tile.mask[:, None, :, None], -torch.inf)
    weighted = _weigh(scores, v)[..., :dim].view(units, heads, padded, dim)[:, :, :rows]
    result = weighted.unflatten(2, (tile.tokens, group_size)).transpose(1, 2).flatten(0, 1)
    if tile.rows is None:
        out.copy_(result)
    else:
        out.index_copy_(0, tile.rows, result)


def _weigh(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(scores) @ values, tile by tile. scores [B, R, L] is overwritten; values [B, L, D] -> [B, R, D]."""
    batch, rows, columns = scores.shape
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    total = weights.view(batch, rows, columns // TILE, TILE).sum(-1)
    norm = total[..., 0].clone()
    out = values.new_zeros(batch, rows, values.shape[-1])
    for tile in range(columns // TILE):
        if tile:
            norm += total[..., tile]
        part = slice(tile * TILE, tile * TILE + TILE)
        out.baddbmm_(weights[:, :, part], values[:, part])
    return out.div_(norm[..., None])


class _Grouping:
    """Divides a batch into groups and query tiles."""

    def __init__(self, plan: RaggedPlan, shape: AttentionShape) -> None:
        self.plan = plan
        self.shape = shape
        self.window = shape.window
        self.device = plan.slots.device
        self.by_block = TILE % shape.block_size == 0

    def make(self) -> list[Group]:
        few: dict[tuple[int, int], list[int]] = {}
        groups = []
        for r in range(len(self.plan.context_len)):
            tokens = self._tokens(r)
            if tokens > FEW:
                groups.append(self._long(r))
                continue
            rows = -(-tokens * self.shape.group_size // ROWS)
            few.setdefault((rows, (self._last(r) - self._first(r) - 1).bit_length()), []).append(r)
        for members in few.values():
            groups.extend(self._few(members))
        return groups

    def _tokens(self, r: int) -> int:
        return self.plan.query_start[r + 1] - self.plan.query_start[r]

    def _position(self, r: int) -> int:
        """Of the request's first new token."""
        return self.plan.context_len[r] - self._tokens(r)

    def _first(self, r: int, position: int | None = None) -> int:
        """The first tile that a token at `position` (default: the request's first new one) can see."""
        position = self._position(r) if position is None else position
        return 0 if self.window is None else max(0, position - self.window + 1) // TILE

    def _last(self, r: int) -> int:
        """One past the last tile that the request's last token can see."""
        return -(-self.plan.context_len[r] // TILE)

    def _few(self, members: list[int]) -> list[Group]:
        """Requests with few tokens and about the same number of tiles, as many at once as MAX_ELEMENTS allows."""
        members.sort(key=lambda r: self._last(r) - self._first(r))
        groups, start = [], 0
        width = TILE * self.shape.kv_heads * self.shape.head_dim
        for end in range(1, len(members) + 1):
            size = self._last(members[end]) - self._first(members[end]) if end < len(members) else 0
            if end == len(members) or (end + 1 - start) * size * width > MAX_ELEMENTS:
                groups.append(self._together(members[start:end]))
                start = end
        return groups

    def _together(self, members: list[int]) -> Group:
        firsts = [self._first(r) for r in members]
        columns = max(self._last(r) - first for r, first in zip(members, firsts, strict=True)) * TILE
        tokens = max(self._tokens(r) for r in members)
        rows, positions, ends = [], [], []
        for r in members:
            count = self._tokens(r)
            steps = [min(i, count - 1) for i in range(tokens)]
            rows.extend(self.plan.query_start[r] + i for i in steps)
            positions.append([self._position(r) + i for i in steps])
            ends.append(self._ends(r, steps))
        everything = rows == list(range(self.plan.query_start[-1]))
        starts = [first * TILE for first in firsts]
        tile = QueryTile(
            None if everything else torch.tensor(rows, device=self.device),
            tokens,
            0,
            columns,
            0,
            self._mask(
                torch.tensor(positions, device=self.device),
                torch.tensor(ends, device=self.device),
                torch.tensor(starts, device=self.device),
                columns,
            ),
        )
        return Group(len(members), columns, self._index(members, starts, columns), self.by_block, [tile])

    def _long(self, r: int) -> Group:
        """A chunk of a prompt: its K/V is fetched once, its tokens are computed tile by tile."""
        begin = self._first(r) * TILE
        columns = self._last(r) * TILE - begin
        rows_at_once = max(8 * ROWS, MAX_ELEMENTS // (columns * self.shape.heads_at_once(columns)))
        step = max(1, rows_at_once // self.shape.group_size)
        position, start, count = self._position(r), self.plan.query_start[r], self._tokens(r)
        tiles = []
        for offset in range(0, count, step):
            size = min(step, count - offset)
            ends = self._ends(r, range(offset, offset + size))
            first, last = self._first(r, position + offset) * TILE, -(-max(ends) // TILE) * TILE
            masked = first if self.window is not None else (position + offset) // TILE * TILE
            positions = torch.arange(position + offset, position + offset + size, device=self.device)
            until = torch.tensor([ends], device=self.device)
            mask = self._mask(positions[None], until, torch.tensor([masked], device=self.device), last - masked)
            rows = torch.arange(start + offset, start + offset + size, device=self.device)
            tiles.append(QueryTile(rows, size, first - begin, last - begin, masked - begin, mask))
        return Group(1, columns, self._index([r], [begin], columns), self.by_block, tiles)

    def _ends(self, r: int, steps: Sequence[int]) -> list[int]:
        """One past the last position that each of these of the request's new tokens sees."""
        if self.plan.reach is None:
            position = self._position(r) + 1
            return [position + i for i in steps]
        start = self.plan.query_start[r]
        return [self.plan.reach[start + i] for i in steps]

    def _mask(self, positions: torch.Tensor, ends: torch.Tensor, starts: torch.Tensor, columns: int) -> torch.Tensor:
        """True where position [U, n], which sees up to ends [U, n], must not look at column c of `columns`, which holds position
        starts [U] + c."""
        at = (starts[:, None] + torch.arange(columns, device=self.device))[:, None]
        mask = at >= ends[..., None]
        return mask if self.window is None else mask | (at <= positions[..., None] - self.window)

    def _index(self, members: list[int], starts: list[int], columns: int) -> torch.Tensor:
        """Blocks or slots of `columns` positions from each start on. Past a request's end: the block of its start once more."""
        size = self.shape.block_size
        index: list[int] = []
        for r, start in zip(members, starts, strict=True):
            end = min(start + columns, self.plan.context_len[r])
            table = self.plan.block_tables[r]
            if self.by_block:
                found = list(table[start // size : -(-end // size)])
                index.extend(found)
                index.extend(found[:1] * (columns // size - len(found)))
            else:
                index.extend(table[p // size] * size + p % size for p in range(start, end))
                index.extend([table[start // size] * size + start % size] * (columns - (end - start)))
        return torch.tensor(index, device=self.device)
