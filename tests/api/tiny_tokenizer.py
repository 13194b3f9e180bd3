"""A tokenizer of 256 byte tokens, three control tokens and two merges; V = 261."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from tokenbus.core.front.token_bytes import byte_alphabet
from tokenbus.core.front.tokenizer import Tokenizer

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(*, adds_bos: bool = False, special: tuple[str, ...] = ()) -> Tokenizer:
    chars = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {chars[byte]: byte for byte in range(256)} | {"th": 256, "the": 257}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (START, END, PAD, *special)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, backend.token_to_id(START))]
        )
    return Tokenizer(backend, {"bos_token": START, "eos_token": {"content": END}})
