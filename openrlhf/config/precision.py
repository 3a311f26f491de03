"""The number formats that weights may have, one table for training, engines and the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """One number format.

    Attributes:
        name: what torch and vLLM call it.
        size: bytes of a number.
    """

    name: str
    size: int


# --ds.param_dtype -> the format.
PRECISIONS = {
    "bf16": Precision("bfloat16", 2),
    "fp16": Precision("float16", 2),
    "fp32": Precision("float32", 4),
}
