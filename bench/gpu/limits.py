"""What the card reaches by the plainest means; every other part is compared with it.

copy     a large tensor onto another: bytes read plus bytes written, over time
matmul   torch's product of two 8192 x 8192 matrices of normal numbers in bfloat16
"""

from __future__ import annotations

import torch

from .record import Record, finish, make_record, part_options
from .timing import measure

GIB = 2**30
SIDE = 8192


def run(record: Record, device: str = "cuda", scale: int = 1) -> None:
    """scale: what sizes are divided by, to try this without a GPU."""
    best = 0.0
    for gib in (1, 4):
        source = torch.randn(gib * GIB // 4 // scale, device=device)
        target = torch.empty_like(source)
        times = measure(lambda _, a=source, b=target: b.copy_(a))
        rate = 2 * source.nbytes / times.median
        best = max(best, rate)
        record.row("Limits", what=f"copy of {gib} GiB, read + written", time_us=times.shown(), rate=f"{rate / 1e12:.3f} TB/s")
        times = measure(lambda _, a=source: a.sum())
        record.row(
            "Limits",
            what=f"sum of {gib} GiB of float32, read only",
            time_us=times.shown(),
            rate=f"{source.nbytes / times.median / 1e12:.3f} TB/s",
        )
        del source, target
    record.figure("limit.copy", best)
    side = SIDE // scale
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in "ab")
    times = measure(lambda _: a @ b)
    rate = 2 * side**3 / times.median
    record.row("Limits", what=f"bfloat16 product, {side}^3", time_us=times.shown(), rate=f"{rate / 1e12:.1f} TFLOP/s")
    record.figure("limit.matmul", rate)


if __name__ == "__main__":
    made = make_record(part_options(__doc__).parse_args())
    run(made)
    finish(made)
