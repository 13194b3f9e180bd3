"""Keyed hashes of blocks, tenants and salts: equal ones can be told, nothing can be guessed from them without the key.

The key is random, lives in the recording process only, and is the same for all parts of one recording.

    hash[i] = BLAKE2b(key, hash[i-1] or nothing, the block's token ids as little-endian uint32, each picture or sound among them)
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence

from ..media import MediaItem
from .frames import HASH_BYTES


class KeyedHash:
    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)

    def of(self, kind: bytes, value: bytes) -> bytes:
        """kind keeps a tenant from equalling a salt."""
        return hashlib.blake2b(value, digest_size=HASH_BYTES, key=self._key, person=kind).digest()

    def blocks(self, tokens: Sequence[int], block_size: int, known: bytes = b"", media: Sequence[MediaItem] = ()) -> bytes:
        """Hashes of all full blocks of `tokens`, HASH_BYTES each. known: those of the first ones, which are not made again; they are part
        of the answer. media: what placeholders among the tokens stand for."""
        pack = struct.Struct(f"<{block_size}I")
        made = bytearray(known)
        last = known[-HASH_BYTES:]
        for begin in range(len(known) // HASH_BYTES * block_size, len(tokens) - block_size + 1, block_size):
            block = last + pack.pack(*tokens[begin : begin + block_size])
            for item in media:
                if item.start < begin + block_size and item.end > begin:
                    block += struct.pack("<qq", item.start - begin, item.length) + item.digest.encode()
            last = self.of(b"block", block)
            made += last
        return bytes(made)
