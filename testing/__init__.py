"""The kit for authors of plugins: try a plugin in milliseconds, without a model, a server or other processes.

    from tokenbus.testing import TinyEngine

    def test_it_shouts():
        engine = TinyEngine(Shout)
        assert engine.generate("hello", fields={"shout": True}).text.isupper()

TinyEngine     admission, scheduler, KV pool and model runner, the real ones, in this thread; `calls` says which hooks were called
FakeModel      what it runs: every token depends on all tokens before it, read from the KV blocks, so that a wrong block shows
assert_lossless  the same answers with the plugin and without, alone, in a batch, in chunks, out of blocks, switched live

Nothing here is used by the engine itself. See docs/plugins.md.
"""

from .engine import Answer, Request, TinyEngine
from .lossless import assert_lossless
from .model import EOS, VOCABULARY, FakeModel
from .tracer import HookCall, TracingHost

__all__ = ["EOS", "VOCABULARY", "Answer", "FakeModel", "HookCall", "Request", "TinyEngine", "TracingHost", "assert_lossless"]
