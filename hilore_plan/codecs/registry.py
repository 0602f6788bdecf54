"""The codecs by name: ours, and those that other packages bring.

A package joins with an entry point in the group `hilore_plan.codecs`, whose name is the codec's and whose object is a
codec, or a class or function that gives one when called without arguments:

    [project.entry-points."hilore_plan.codecs"]
    int6 = "my_package.codecs:Int6"
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

from hilore_plan.codecs.base import Codec
from hilore_plan.codecs.cast import Cast
from hilore_plan.codecs.format import Format
from hilore_plan.codecs.fp8 import FP8_E4M3, FP8_E4M3_RAW
from hilore_plan.codecs.fused import Fused
from hilore_plan.codecs.grouped import GroupCodec
from hilore_plan.codecs.int4 import INT4
from hilore_plan.codecs.int8 import INT8, INT8_ASYM
from hilore_plan.errors import CodecError

GROUP = "hilore_plan.codecs"
FORMATS = (INT8, INT8_ASYM, FP8_E4M3, FP8_E4M3_RAW, INT4)


def _built_in() -> dict[str, Codec]:
    fused = Fused()
    grouped = {form.name: GroupCodec(form, fused, f"{_module(form)}_triton") for form in FORMATS}
    return {"cast": Cast(), **grouped}


def _module(form: Format) -> str:
    """The module of a format's formulas; its Triton kernels lie beside it."""
    return form.encode.__module__


CODECS = _built_in()


def find(name: str) -> Codec:
    """The codec of this name, always the same object.

    Raises:
        CodecError: there is none, or its entry point gives no codec.
    """
    own = CODECS.get(name)
    return own if own is not None else _load(name)


def names() -> tuple[str, ...]:
    """Names of all codecs: ours first, then those of other packages. Loads nothing."""
    return (*CODECS, *sorted({point.name for point in entry_points(group=GROUP)} - CODECS.keys()))


@functools.cache
def _load(name: str) -> Codec:
    points = tuple(entry_points(group=GROUP, name=name))
    if not points:
        raise CodecError(f"there is no codec {name!r}", f"codecs here: {', '.join(names())}")
    if len({point.value for point in points}) > 1:
        values = ", ".join(sorted(point.value for point in points))
        raise CodecError(f"codec {name!r} is brought by several packages: {values}", "uninstall all but one")
    return load_entry_point(points[0])


def load_entry_point(point: EntryPoint) -> Codec:
    """The codec behind an entry point.

    Raises:
        CodecError: it cannot be imported or made, or is no codec, or calls itself something else.
    """
    where = f"entry point {point.name} = {point.value} of group {GROUP}"
    try:
        thing = point.load()
        codec = thing if isinstance(thing, Codec) and not isinstance(thing, type) else thing()
    except Exception as error:
        raise CodecError(f"{where}: {type(error).__name__}: {error}", "ask the package's author") from error
    if not isinstance(codec, Codec):
        raise CodecError(
            f"{where} gives a {type(codec).__name__}, which is no codec", "see hilore_plan.codecs.base.Codec"
        )
    if codec.name != point.name:
        raise CodecError(f"{where} gives a codec named {codec.name!r}", "give both the same name")
    return codec
