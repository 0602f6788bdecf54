"""Finding codecs: ours, other packages', and what is said of those that do not fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import codec_rows as rows
import pytest
import torch

from hilore_plan.codecs import registry
from hilore_plan.codecs.base import Codec, decode, encode
from hilore_plan.errors import CodecError

MODULE = """
import torch

class Halved:
    name = "halved"
    def refuses(self, tensor): return None if tensor.is_floating_point() else "it takes floats"
    def bytes_for(self, elements, dtype): return 2 * elements
    def encode_flat(self, flat): return (flat.to(torch.float16),)
    def decode_flat(self, parts, elements, dtype): return parts[0].to(dtype)

class Renamed(Halved):
    name = "other"

ready = Halved()
nothing = 3
def fails(): raise ValueError("no licence")
def gives_text(): return "codec"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "their_codecs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._load.cache_clear()
    yield tmp_path
    registry._load.cache_clear()
    sys.modules.pop("their_codecs", None)


def install(folder: Path, name: str, *points: str) -> None:
    """What an installed package leaves on the path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n" + "\n".join(points) + "\n")


def test_our_codecs() -> None:
    assert registry.names()[:6] == ("cast", "int8", "int8_asym", "fp8_e4m3", "fp8_e4m3_raw", "int4")
    for name in registry.CODECS:
        assert isinstance(registry.find(name), Codec)
        assert registry.find(name).name == name
        assert registry.find(name) is registry.find(name)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(CodecError, match="no codec 'int9'") as caught:
        registry.find("int9")
    assert "int8, int8_asym" in caught.value.hint


@pytest.mark.parametrize("thing", ["Halved", "ready"])
def test_a_package_brings_a_codec(package: Path, thing: str) -> None:
    install(package, "theirs", f"halved = their_codecs:{thing}")
    assert registry.names()[-1] == "halved"
    codec = registry.find("halved")
    assert registry.find("halved") is codec
    tensor = rows.elements(torch.float32).transpose(0, 2)
    assert torch.equal(decode(encode(codec, tensor)), tensor)


def test_our_names_are_ours(package: Path) -> None:
    install(package, "theirs", "int8 = their_codecs:Halved")
    assert registry.find("int8") is registry.CODECS["int8"]
    assert registry.names().count("int8") == 1


def test_two_packages_with_one_name(package: Path) -> None:
    install(package, "one", "halved = their_codecs:Halved")
    install(package, "two", "halved = their_codecs:ready")
    with pytest.raises(CodecError, match="several packages: their_codecs:Halved, their_codecs:ready"):
        registry.find("halved")


@pytest.mark.parametrize(
    ("thing", "what"),
    [
        ("their_codecs:nothing", "TypeError"),
        ("their_codecs:fails", "ValueError: no licence"),
        ("their_codecs:gives_text", "gives a str, which is no codec"),
        ("their_codecs:Renamed", "gives a codec named 'other'"),
        ("their_codecs:missing", "AttributeError"),
        ("no_such_module:Codec", "ModuleNotFoundError"),
    ],
)
def test_what_does_not_fit_is_named(package: Path, thing: str, what: str) -> None:
    point = EntryPoint("halved", thing, registry.GROUP)
    with pytest.raises(CodecError, match=f"entry point halved = {thing} .*{what}"):
        registry.load_entry_point(point)
