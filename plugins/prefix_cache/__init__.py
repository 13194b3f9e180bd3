"""Prefix cache: K/V blocks are found again by what they hold, and shared.

A block is known by a hash over everything that its K/V depends on: all tokens up to its end, and who may share them.

    root     = sha256(tag "tokenbus.kv", version, block size, then each of kernels, tenant and cache_salt that is set)
    hash[i]  = sha256(hash[i-1] or root, the block's token ids as little-endian uint32, then each picture or sound among them)

A picture or sound is known by its content's digest, which covers size, mode and processor options, and by where its span lies.

Every part of the root carries its type and length, so that no salt can be taken for a tenant, or for two parts. Only full blocks are
indexed, after their K/V is written. The pool keeps them when their last user is gone, until it needs the space, least recently used first,
the end of a sequence before its beginning. When two requests computed the same block, the first copy is the one that is found.
"""

from __future__ import annotations

import hashlib
import struct
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...core.contexts import PrefixMatch
from ...core.errors import FieldError
from ...core.plugin import Plugin, PluginInfo, StashKey, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.contexts import AdmissionContext, EngineContext
    from ...core.kv.pool import BlockPool
    from ...core.media import MediaItem
    from ...core.plugin import Role
    from ...core.request import Request

MAX_SALT_CHARS = 256


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    separate_tenants: bool = True
    """Requests under different API keys never share blocks: response times tell nobody what others sent."""
    max_salt_chars: Annotated[int, msgspec.Meta(ge=1)] = MAX_SALT_CHARS


def root_hash(block_size: int, tenant: str, salt: str | None, kernels: str = "") -> bytes:
    parts = [("version", b"1"), ("block_size", str(block_size).encode())]
    if kernels:
        parts.append(("kernels", kernels.encode()))
    if tenant:
        parts.append(("tenant", tenant.encode()))
    if salt is not None:
        parts.append(("salt", salt.encode("utf-8", "surrogatepass")))
    digest = hashlib.sha256(b"tokenbus.kv")
    for kind, value in parts:
        digest.update(struct.pack("<II", len(kind), len(value)) + kind.encode() + value)
    return digest.digest()


def media_bytes(media: Sequence[MediaItem], begin: int, end: int) -> bytes:
    """What K/V of the positions [begin, end) depends on beside token ids. Each item has a fixed length, and ids before it have too."""
    return b"".join(
        hashlib.sha256(f"{item.kind} {item.digest} {item.bidirectional}".encode()).digest()
        + struct.pack("<qq", item.start - begin, item.length)
        for item in media
        if item.start < end and item.end > begin
    )


class PrefixCache(Plugin):
    info = PluginInfo(
        name="prefix_cache",
        summary="shares K/V blocks of equal prompt beginnings",
        scope="request",
        lossless=True,
        claims={"cache_salt"},
        default=True,
    )
    Settings = CacheSettings

    def __init__(self, settings: Any, role: Role) -> None:
        super().__init__(settings, role)
        self.seconds = 0.0
        """Time spent in this plugin's hooks, all together."""
        self.hits = 0
        """Blocks found, counted when they are looked up."""
        self._chain_of: StashKey[tuple[str, list[bytes]]] = StashKey("prefix_cache")
        """The kernel set that the hashes are of, and the hashes."""
        """The root and the hashes of a request's full blocks so far. One key an instance: a new one has nothing indexed."""
        self._pool: BlockPool | None = None
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._pack: dict[int, struct.Struct] = {}

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> None:
        salt = fields["cache_salt"]
        if not isinstance(salt, str) or not salt:
            raise FieldError("cache_salt", "must be a string of at least one character")
        if len(salt) > self.settings.max_salt_chars:
            raise FieldError("cache_salt", f"must have at most {self.settings.max_salt_chars} characters, got {len(salt)}")

    @hookimpl
    def engine_started(self, engine: EngineContext) -> None:
        self._pool = engine.pool

    @hookimpl
    def engine_stopped(self) -> None:
        """Give back every block that is kept for us."""
        if self._pool is not None:
            for block in self._hash_of:
                self._pool.forget(block)
        self._block_of.clear()
        self._hash_of.clear()

    @hookimpl
    def match_prefix(self, request: Request, pool: BlockPool) -> PrefixMatch | None:
        began = time.perf_counter()
        self._pool = pool
        size = pool.block_size
        chain = self._chain(request, size)
        blocks: list[int] = []
        for index in range((len(request.tokens) - 1) // size):
            if index + 1 >= len(chain):
                self._extend(chain, request, size)
            block = self._block_of.get(chain[index + 1])
            if block is None:
                break
            blocks.append(block)
        self.hits += len(blocks)
        self.seconds += time.perf_counter() - began
        return PrefixMatch(blocks=blocks, num_tokens=len(blocks) * size) if blocks else None

    @hookimpl
    def blocks_filled(self, request: Request, first: int, last: int, pool: BlockPool) -> None:
        began = time.perf_counter()
        self._pool = pool
        if self._known(request) is None:
            first = (
                0  # switched on while the request runs, or nothing was looked up for it: its earlier blocks are new to us too
            )
        chain = self._chain(request, pool.block_size)
        block_of, hash_of = self._block_of, self._hash_of
        for index in range(first, last):
            while index + 1 >= len(chain):
                self._extend(chain, request, pool.block_size)
            digest = chain[index + 1]
            if digest not in block_of:
                block = request.blocks[index]
                block_of[digest] = block
                hash_of[block] = digest
                pool.retain(block)
        self.seconds += time.perf_counter() - began

    @hookimpl
    def block_evicted(self, block_id: int) -> None:
        began = time.perf_counter()
        digest = self._hash_of.pop(block_id, None)
        if digest is not None:
            del self._block_of[digest]
        self.seconds += time.perf_counter() - began

    def _chain(self, request: Request, block_size: int) -> list[bytes]:
        """The request's hashes so far: the root, then one for each full block of its tokens that was asked about."""
        chain = self._known(request)
        if chain is None:
            tenant = request.admitted.tenant if self.settings.separate_tenants else ""
            root = root_hash(block_size, tenant, request.fields.get("cache_salt"), request.kernels)
            chain = [root]
            request.stash[self._chain_of] = request.kernels, chain
        return chain

    def _known(self, request: Request) -> list[bytes] | None:
        kernels, chain = request.stash.get(self._chain_of) or ("", None)
        return chain if kernels == request.kernels else None

    def _extend(self, chain: list[bytes], request: Request, block_size: int) -> None:
        """Hash one more block. Its tokens are all known, and known tokens never change."""
        pack = self._pack.get(block_size)
        if pack is None:
            pack = self._pack[block_size] = struct.Struct(f"<{block_size}I")
        begin = (len(chain) - 1) * block_size
        block = chain[-1] + pack.pack(*request.tokens[begin : begin + block_size])
        if request.admitted.media:
            block += media_bytes(request.admitted.media, begin, begin + block_size)
        chain.append(hashlib.sha256(block).digest())

    def check_integrity(self) -> None:
        """RuntimeError unless the index is one-to-one and the pool keeps every block in it."""
        if self._block_of != {digest: block for block, digest in self._hash_of.items()}:
            raise RuntimeError("prefix cache: the two directions of the index differ")
        if self._pool is not None and (lost := [block for block in self._hash_of if not self._pool.is_retained(block)]):
            raise RuntimeError(f"prefix cache: blocks {lost} are not kept by the pool")

    @property
    def num_blocks(self) -> int:
        """Blocks in the index."""
        return len(self._hash_of)
