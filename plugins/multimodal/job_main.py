"""The process that makes processes for the front's pictures and sounds.

Started once for a model (`-m ... --fd N`); imports the decoders and the model's processors, some seconds, then forks for every job. A job
has a socket of its own, limits on its memory and time that the kernel upholds, and ends with its answer, or when its socket is closed: what
a file does to it touches nothing else and leaves nothing behind. It ends when the front does.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import hashlib
import os
import resource
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...core.media import MediaItem, TensorBytes
from . import jobs
from .families import family_of
from .family import Sound
from .images import RefusedError, check_size, open_image, prepare
from .sounds import from_samples, open_sound

if TYPE_CHECKING:
    from PIL import Image

    from .family import Family, Processed

NICENESS = 5
"""Of jobs that do not only take idle time, too. Beside others in one session they have a quarter of a core that is wanted by both."""


def serve(control: socket.socket) -> None:
    hello: jobs.Hello = jobs.receive(control, jobs.Hello)
    try:
        prepare()
        family = family_of(Path(hello.folder), hello.config)
        assert family is not None, "nobody asks for a model of no family"
        family.load()
    except Exception as error:
        jobs.send(control, jobs.Ready(f"{type(error).__name__}: {error}"[:1000]))
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()
    jobs.send(control, jobs.Ready())
    while True:
        told, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not told:
            return
        with socket.socket(fileno=fds[0]) as sock:
            if os.fork() == 0:
                if told == jobs.IN_IDLE_TIME:
                    with suppress(OSError):  # where that is filtered it has an ordinary share
                        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                try:
                    control.close()
                    run(sock, family, hello)
                finally:
                    os._exit(0)


def run(sock: socket.socket, family: Family, hello: jobs.Hello) -> None:
    """One job, in its own process. It takes no longer than it may: signals that it doesn't handle end it."""
    signal.setitimer(signal.ITIMER_REAL, hello.wall_seconds)
    job: jobs.Job = jobs.receive(sock, jobs.Job)
    jobs.send(sock, jobs.Begun(os.getpid()))
    end_with(sock)
    bound_memory(hello.memory_mb)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, hello.cpu_seconds)
    try:
        done = done_of(job, family)
    except RefusedError as error:
        done = jobs.Done(refused=str(error))
    except MemoryError:
        done = jobs.Done(refused=f"can't be processed within {hello.memory_mb} MiB of memory: send a smaller one")
    except Exception as error:
        done = jobs.Done(fault=f"{type(error).__name__}: {error}"[:1000])
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    jobs.send(sock, done)


def end_with(sock: socket.socket) -> None:
    """From now on this process ends when the other end of the socket is closed, or says anything: by SIGIO, which nothing handles."""
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([sock], [], [], 0)[0]:  # before that
        os._exit(0)


def bound_memory(mebibytes: int) -> None:
    """At most this much more than now, where the system can say how much that is."""
    try:
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most := now + mebibytes * 2**20, most))
    except (OSError, ValueError):
        return


def done_of(job: jobs.Job, family: Family) -> jobs.Done:
    media, origin = picture(job) if job.kind == "image" else sound(job, family.sampling_rate)
    size = [len(media.samples)] if isinstance(media, Sound) else list(media.size)
    try:
        made = family.process(job.kind, media)
    except ValueError as error:  # processors say so of shapes that they can't take
        raise RefusedError(f"can't be read by this model: {error}") from None
    tensors = {name: _bytes(array) for name, array in made.tensors.items()}
    item = MediaItem(
        kind=job.kind,
        digest=digest(tensors, made, {"family": family.name, "options": family.options, "origin": origin, "size": size}),
        start=0,
        length=0,
        bidirectional=made.bidirectional,
        tensors=tensors,
        grid=made.grid,
    )
    return jobs.Done(item=item, text=made.text, rows=made.rows)


def picture(job: jobs.Job) -> tuple[Image.Image, str]:
    if job.form == "pixels":
        from PIL import Image

        height, width = job.shape
        check_size(width, height, job.max_pixels)
        return Image.frombytes("RGB", (width, height), job.data), job.origin
    return open_image(file_of(job), job.max_pixels)


def sound(job: jobs.Job, rate: int) -> tuple[Sound, str]:
    if job.form == "samples":
        import numpy as np

        count, channels, given = job.shape
        samples = np.frombuffer(job.data, np.float32).reshape(count, channels)
        return from_samples(samples, given, rate, job.max_seconds)
    return open_sound(file_of(job), job.declared, rate, job.max_seconds)


def file_of(job: jobs.Job) -> bytes:
    """RefusedError for what is no base64, or too large, or nothing."""
    data = job.data
    if job.form == "base64":
        import base64
        import binascii

        try:
            data = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise RefusedError(f"is not valid base64 ({error})") from None
    if not data:
        raise RefusedError("is empty")
    if len(data) > job.max_bytes:
        raise RefusedError(f"has {len(data)} bytes; at most {job.max_bytes} are allowed")
    return data


def _bytes(array: Any) -> TensorBytes:
    import numpy as np

    array = np.ascontiguousarray(array)
    return TensorBytes(array.dtype.name, array.shape, array.tobytes())


def digest(tensors: dict[str, TensorBytes], made: Processed, more: dict[str, Any]) -> str:
    """SHA-256 over everything that `MediaItem.digest` speaks of."""
    head = {
        **more,
        "tensors": {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
        "text": made.text,
        "bidirectional": made.bidirectional,
        "grid": made.grid,
    }
    total = hashlib.sha256(msgspec.json.encode(head, order="sorted"))
    for name in sorted(tensors):
        total.update(tensors[name].data)
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    with suppress(OSError):
        os.nice(NICENESS)
    with socket.socket(fileno=parser.parse_args().fd) as control:
        serve(control)


if __name__ == "__main__":
    main()
