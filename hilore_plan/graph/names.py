"""Names of ops and values that a person can read, equal across variants, processes and machines."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

MATMULS = ("mm", "addmm", "bmm", "baddbmm")
OUTPUT_NAMES = {"sdpa": ("out", "lse")}


def op_name(node: fx.Node, seen: Counter[str]) -> str:
    """The path of the submodule and what the op does there; an ordinal where this repeats."""
    label = op_label(node)
    path = node.meta.get("path", "")
    name = ".".join(part for part in (path, label) if part) or "block"
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}.{seen[name]}"


def op_label(node: fx.Node) -> str:
    """What the op does: `upcast`, `sdpa`, `silu`; nothing for the matmul that a linear layer is named after."""
    label = packet_name(node)
    module = node.meta.get("module", "")
    if label in MATMULS and (module.endswith("Linear") or module == "Conv1D"):
        return ""
    if label == "to_copy":
        return _copy_label(node)
    return "sdpa" if label.startswith("scaled_dot_product") else label


def output_name(name: str, label: str, index: int) -> str:
    """The name of one of several outputs."""
    known = OUTPUT_NAMES.get(label, ())
    return f"{name}.{known[index] if index < len(known) else index}"


def packet_name(node: fx.Node) -> str:
    """The operator's name without namespace, overload and leading underscores."""
    packet = getattr(node.target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))
    return name.lstrip("_")


def _copy_label(node: fx.Node) -> str:
    source = node.args[0]
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    if not torch.is_tensor(before) or not torch.is_tensor(after):
        return "copy"
    if after.dtype.itemsize == before.dtype.itemsize:
        return "copy" if after.dtype == before.dtype else "cast"
    return "upcast" if after.dtype.itemsize > before.dtype.itemsize else "downcast"
