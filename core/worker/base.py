"""The contract between engine and worker: four coroutines over serialisable messages. No implementation here."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from ..plan import StepInput, StepResult


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker found out while it loaded the model."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    """Tokens the model itself can take (before KV memory and settings)."""
    eos_token_ids: tuple[int, ...]
    weights_bytes: int
    kv_bytes_per_token: int
    free_bytes: int
    """Memory that is free once the weights are loaded: of the machine (the cgroup's limit counts), or of the GPU, less what the largest
    step takes beside the cache."""
    lossless: bool
    lossless_reason: str = ""
    phases: dict[str, float] = {}
    """Seconds by start-up phase: "import", "weights", ..."""
    read_bytes_per_second: float = 0.0
    """Measured while loading: what this machine reads from memory (kernels/torch_ops/limits.py)."""
    flops_per_second: float = 0.0
    """Measured while loading: what its plain matrix product reaches in the model's dtype."""
    ahead: bool = False
    """The engine had better send a step while the one before it computes: waiting for an order costs this worker something."""
    encodes_in_pieces: bool = False
    """It honours `StepInput.encode`, and encoding takes so long that it should be told."""
    kv_memory_fraction: float = 0.25
    """What `cache.kv_memory_fraction` is if nobody sets it: less where others want memory too."""


class Worker(ABC):
    """Owns the model, the K/V tensors and every request's sampling state. Messages apply in order.

    One call at a time, but for `execute`: a second order may come while the first one computes (it says so: `StepInput.ahead`), waits
    until that one is done, and then runs. If the first one failed, nothing of the second is run; `turns.py` sees to that.

    Raises WorkerError when a step fails as a whole (the engine then fails the requests in it and goes on when it can; after a
    StepMemoryError it tries smaller steps), ModelError
    from `load`. A worker process that dies makes `execute` raise EngineDiedError: the engine exits and is restarted.
    """

    @abstractmethod
    async def load(self) -> WorkerInfo:
        """Load the model. Runs off the event loop; may take minutes."""

    @abstractmethod
    async def allocate(self, num_blocks: int) -> None:
        """Make the K/V tensors. Called once, after `load`."""

    @abstractmethod
    async def execute(self, order: StepInput) -> StepResult:
        """Run one step, after all that were ordered before. The event loop stays free while it computes."""

    @abstractmethod
    async def close(self) -> None:
        """Stop after the current step; free everything. Safe to call twice."""
