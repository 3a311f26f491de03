"""The arithmetic and the layout of a dry run's plan. What has to be looked up is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from openrlhf.config.deepspeed import DeepSpeedConfig
from openrlhf.config.precision import PRECISIONS

GIB = 2**30

# Saved activations of one transformer layer, in bytes per token and hidden unit at 16 bits, attention scores not kept
# (Korthikanti et al., arXiv 2205.05198, equation 2 without its last term).
ACTIVATION_BYTES = 34
# float32 logits that exist at one time: log-probs are taken by chunks of about 256 MB, three such tensors at the peak.
LOGITS_BYTES = 3 * 256 * 2**20
# A weight in nf4 with its share of the quantised constants (arXiv 2305.14314, section 3): 4.127 bits.
PACKED_BYTES = 4.127 / 8


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model.

    Attributes:
        parameters: all of them, tied ones once.
        hidden: width of the residual stream.
        layers: transformer layers.
        vocab: rows of the output head; 1 for a scalar head.
        context: tokens that it was made for; None where its config names none.
        adapters: parameters of the adapters beside them, which alone are trained then; 0 where all are.
        packed: of ``parameters``, those that are held in 4 bits.
    """

    parameters: int
    hidden: int
    layers: int
    vocab: int
    context: int | None
    adapters: int = 0
    packed: int = 0

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return self.adapters or self.parameters


def training_memory(
    facts: ModelFacts, ds: DeepSpeedConfig, *, ranks: int, tokens: int, checkpointing: bool
) -> dict[str, float]:
    """Estimates what training takes on one rank.

    With P parameters of b bytes on N ranks: weights P b (over N from stage 3), gradients 4 P (over N from stage 2;
    they are accumulated in float32), optimizer 8 P for AdamW's two moments and, below 32 bits, 4 P for the float32
    weights (over N from stage 1). With adapters, P of gradients and optimizer counts those alone, and layers in 4 bits
    take about half a byte a weight. Activations are 34 T h bytes a layer at 16 bits for T tokens of width h; with
    gradient checkpointing each layer keeps its input alone and one layer at a time is recomputed. Logits are bounded
    by the chunks in which log-probs are computed.

    Args:
        tokens: of one micro-batch.

    Returns: bytes by part.
    """
    size = PRECISIONS[ds.param_dtype].size
    # Half precision without sharding keeps its states as stage 1 does.
    stage = 1 if ds.zero_stage == 0 and size == 2 else ds.zero_stage
    layer = ACTIVATION_BYTES * size / 2 * tokens * facts.hidden
    kept = size * tokens * facts.hidden * facts.layers + layer if checkpointing else layer * facts.layers
    return {
        "weights": _weights(facts, size) / (ranks if stage >= 3 else 1),
        "gradients": facts.trained * 4 / (ranks if stage >= 2 else 1),
        "optimizer": facts.trained * (12 if size == 2 else 8) / (ranks if stage >= 1 else 1),
        "activations": kept,
        "logits": logits_memory(facts, tokens),
    }


def _weights(facts: ModelFacts, size: int) -> float:
    return (facts.parameters - facts.packed + facts.adapters) * size + facts.packed * PACKED_BYTES


def inference_memory(facts: ModelFacts, ds: DeepSpeedConfig, *, ranks: int, tokens: int) -> dict[str, float]:
    """Estimates what a model that only answers takes on one rank: weights, one layer's activations, and logits.

    Returns: bytes by part.
    """
    size = PRECISIONS[ds.param_dtype].size
    return {
        "weights": facts.parameters * size / (ranks if ds.zero_stage == 3 else 1),
        "activations": ACTIVATION_BYTES * size / 2 * tokens * facts.hidden,
        "logits": logits_memory(facts, tokens),
    }


def logits_memory(facts: ModelFacts, tokens: int) -> float:
    """Returns: bytes of float32 logits at the peak."""
    return min(LOGITS_BYTES, 3 * 4 * tokens * facts.vocab)


def size_words(amount: float) -> str:
    """Returns: bytes as "1.5 GiB" or "3.2 MiB"."""
    return f"{amount / GIB:.1f} GiB" if amount >= GIB / 10 else f"{amount / 2**20:.1f} MiB"


def count_words(number: float) -> str:
    """Returns: a number of parameters as "8.03B", "0.86M" or "12"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale or (unit == "M" and number >= 1e5):
            return f"{number / scale:.2f}{unit}"
    return str(int(number))


@dataclass
class Plan:
    """What a run would do, as sections of aligned rows, and what deserves a look."""

    title: str
    sections: list[tuple[str, list[Sequence[str]]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, heading: str, rows: list[Sequence[str]]) -> None:
        """Adds a section; each row is a sequence of cells."""
        self.sections.append((heading, rows))

    def text(self) -> str:
        """Returns: the plan with its columns aligned, first cells over all sections alike."""
        first = max(len(row[0]) for _, rows in self.sections for row in rows)
        lines = [self.title]
        for heading, rows in self.sections:
            lines += ["", heading]
            columns = max(len(row) for row in rows)
            widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(1, columns)]
            for name, *cells in rows:
                if len(cells) == 1 and columns == 2:
                    lines.append(f"  {name:<{first}}  {cells[0]}")
                else:
                    padded = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
                    lines.append(f"  {name:<{first}}  {padded}".rstrip())
        lines += ["", *(f"note: {warning}" for warning in self.warnings)] if self.warnings else []
        return "\n".join(lines)


def memory_rows(memory: dict[str, dict[str, float]]) -> list[Sequence[str]]:
    """Lays out bytes by role and part.

    Args:
        memory: role -> part -> bytes.

    Returns: a head row, a row for each part and one for the sums.
    """
    parts = list(dict.fromkeys(part for role in memory.values() for part in role))
    rows: list[Sequence[str]] = [("", *memory)]
    for part in parts:
        rows.append((part, *(size_words(role[part]) if part in role else "-" for role in memory.values())))
    rows.append(("together", *(size_words(sum(role.values())) for role in memory.values())))
    return rows
