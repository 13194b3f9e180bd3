"""A GGUF file with its weights in another type, and all else (tokenizer, settings) as it was: what a peer needs to run the same model.

    python bench/gguf_make.py --type BF16|F16|F32|Q8_0|Q5_0|Q5_1|Q4_0|Q4_1 [--source demo|FILE.gguf] [--dir DIR]

Prints the path. Matrices are dequantised to float32 and quantised again by the gguf package; vectors (norms, biases) stay float32.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tokenbus.core.models import demo
from tokenbus.kernels.cache import cache_root

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
}
WRITTEN_ANYWAY = {"general.architecture", "general.file_type"}
"""Fields that the writer, or we, write anew."""


def cache_folder() -> Path:
    return cache_root() / "bench"


def make(source: Path, kind: str, folder: Path | None = None) -> Path:
    """The file in `folder`, made first when it is not there or older than `source`. kind: one of FILE_TYPES."""
    folder = folder or cache_folder()
    target = folder / f"{source.stem.rpartition('.')[0] or source.stem}.{kind}.gguf"
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}")
    try:
        _write(gguf.GGUFReader(source), kind, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors as they lie in the file."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


def _write(reader: gguf.GGUFReader, kind: str, path: Path) -> None:
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in WRITTEN_ANYWAY:
            _copy_field(writer, name, field)
    writer.add_file_type(FILE_TYPES[kind])
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        held = wanted if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        raw = held not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(tensor.name, gguf.quantize(values, held), raw_dtype=held if raw else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_field(writer: gguf.GGUFWriter, name: str, field: gguf.ReaderField) -> None:
    value: Any = field.contents()
    inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, value, field.types[0], sub_type=inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", required=True, choices=FILE_TYPES)
    parser.add_argument("--source", default="demo")
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    source = demo.fetch_demo() if options.source == "demo" else Path(options.source)
    print(make(source, options.type, options.dir))


if __name__ == "__main__":
    main()
