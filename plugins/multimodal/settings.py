"""Limits of what requests may bring, and of what their processing may take."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class MultimodalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_images: PositiveInt = 32
    """Images in one request."""
    max_sounds: PositiveInt = 8
    """Sounds in one request."""
    max_item_mb: PositiveInt = 20
    """MiB of one image's or sound's file."""
    max_request_mb: PositiveInt = 64
    """MiB of all files of one request. Those inside the body are bounded by `limits.max_body_bytes` before."""
    max_pixels: PositiveInt = 50_000_000
    """Width times height of an image, as its header declares it."""
    max_sound_seconds: Positive = 600.0
    max_tokens: PositiveInt = 32768
    """Prompt tokens that all media of a request may take."""
    item_seconds: Annotated[float, Meta(gt=0, le=120)] = 10.0
    """CPU time that decoding and processing one of them may take; what takes longer is killed, and refused."""
    item_memory_mb: Annotated[int, Meta(ge=64)] = 1024
    """MiB that it may take."""
    request_seconds: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Wall time in which a request's media must be there and processed."""
    processes: Annotated[int, Meta(ge=1, le=64)] = 2
    """Images and sounds that are processed at the same time, each in a process of its own."""
    cache_mb: Annotated[int, Meta(ge=0)] = 256
    """MiB of processed media that are kept for files that come again; 0: none."""
    fetch_hosts: tuple[str, ...] = ()
    """Hosts from which http(s) URLs of clients are fetched: "images.example.com", "*.example.com" (those below it), "host:8443" (another
    port than 80 and 443), or "*" for all. Empty: nothing is fetched."""
    fetch_private: bool = False
    """Fetch from addresses that are not public (loopback, private networks, link-local) too."""
    fetch_seconds: Annotated[float, Meta(gt=0, le=120)] = 10.0
    """Wall time for one URL, redirects included."""
    fetch_redirects: Annotated[int, Meta(ge=0, le=10)] = 3
