"""Files to pictures: RGB, upright, first frame. Runs in a process that can be killed; every limit that a header can tell is checked before
pixels are decoded.

What odd but valid pictures become: animations their first frame; transparency is laid over white; CMYK, greyscale and palettes RGB;
16 bits a channel 8, rounded; the EXIF orientation is applied. Colour profiles are not.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is tried, by the file's own first bytes; phones' multi-picture files are JPEG."""
WIDE_MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I")
"""One channel of 16 bits, as Pillow calls it."""


class RefusedError(Exception):
    """The client's file is at fault; the message says how."""


def prepare() -> None:
    """Once, before the first file: the decoders are imported, and Pillow's own limit gives way to ours."""
    Image.MAX_IMAGE_PIXELS = None
    Image.init()


def open_image(data: bytes, max_pixels: int) -> tuple[Image.Image, str]:
    """The picture, and its format and mode before it was made RGB. RefusedError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(image.width, image.height, max_pixels)
            origin = f"{image.format} {image.mode}"
            image.load()
            return upright_rgb(image), origin
    except UnidentifiedImageError:
        raise RefusedError(f"is not an image that can be read; there are {', '.join(FORMATS)}") from None
    except MemoryError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise RefusedError(f"is an image that is damaged or cut short ({error})") from None  # what Pillow's decoders raise


def check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise RefusedError(f"is an image of {width} x {height} pixels: there is nothing in it")
    if width * height > max_pixels:
        raise RefusedError(f"is an image of {width} x {height} pixels; at most {max_pixels} pixels are allowed")


def upright_rgb(image: Image.Image) -> Image.Image:
    """A picture of any mode as RGB, turned as its EXIF data say (if those can be read), transparency over white."""
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # EXIF that can't be read says nothing
        image.getexif().clear()
    if image.mode in WIDE_MODES:
        return _from_16_bits(image).convert("RGB")
    if image.has_transparency_data:
        above = image.convert("RGBA")
        white = Image.new("RGBA", above.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, above).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    import numpy as np

    wide = np.asarray(image).astype(np.uint32)
    narrow = ((wide.clip(0, 65535) + 128) // 257).astype(np.uint8)
    if isinstance(see_through := image.info.get("transparency"), int):
        narrow[wide == see_through] = 255
    return Image.fromarray(narrow)


def from_object(value: Any, max_pixels: int) -> tuple[Image.Image, str]:
    """A PIL image or an array of a Python caller's. RefusedError."""
    import numpy as np

    if isinstance(value, np.ndarray):
        value = _from_array(value)
    if not isinstance(value, Image.Image):
        raise RefusedError("must be a PIL image, an array, a path or bytes")
    check_size(value.width, value.height, max_pixels)
    try:
        value.load()
    except OSError as error:
        raise RefusedError(f"is an image that can't be read ({error})") from None
    return upright_rgb(value), f"object {value.mode}"


def _from_array(value: np.ndarray) -> Image.Image:
    import numpy as np

    shape = value.shape[2:]
    if value.dtype != np.uint8 or value.ndim not in (2, 3) or shape not in ((), (1,), (3,), (4,)) or 0 in value.shape:
        raise RefusedError(
            f"must be an array of uint8, [height, width] or [height, width, 1, 3 or 4], got {value.dtype} {list(value.shape)}"
        )
    return Image.fromarray(np.ascontiguousarray(value[:, :, 0] if shape == (1,) else value))
