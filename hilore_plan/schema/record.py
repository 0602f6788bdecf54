"""What all documents share: the record base class, and the facts about the workload, the model and the machine."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

Head = Literal["fused", "full"]
Norm = Literal["l2", "l1"]
# what a micro-batch begins with: gradients of others before it in the step, or none at all
GradientState = Literal["none", "live"]
# what the `graph_hash` of a block without a graph begins with; the reason follows
UNCAPTURED: Final = "uncaptured: "


def uncaptured_reason(graph_hash: str) -> str | None:
    """Why a class of blocks has no graph; None if it has one."""
    return graph_hash.removeprefix(UNCAPTURED) if graph_hash.startswith(UNCAPTURED) else None


class Record(BaseModel):
    """A frozen record that rejects fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Environment(Record):
    """Where and with what a measurement was made."""

    hilore: str
    python: str
    torch: str
    transformers: str | None = None
    device: str
    device_name: str
    threads: int
    platform: str


class Workload(Record):
    """The actor update that was measured: `micro_batches` of `batch` rows of prompt and response tokens each."""

    source: str
    dtype: str
    attention: str
    lora_rank: int = 0
    head: Head
    batch: int = Field(ge=1)
    prompt_tokens: int = Field(ge=0)
    response_tokens: int = Field(ge=1)
    accumulation: bool = True
    micro_batches: int = Field(default=2, ge=1)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch, padding included."""
        return self.batch * (self.prompt_tokens + self.response_tokens)

    @property
    def last_begins(self) -> GradientState:
        """What the last micro-batch of an update begins with."""
        return "live" if self.accumulation else "none"

    def share(self, gradients: GradientState) -> float:
        """The part of an update's micro-batches that begin so, if only the first one begins without gradients."""
        first = 1 / self.micro_batches
        return first if gradients == "none" else 1 - first


class Model(Record):
    """What the model is: its class, and its sizes in elements."""

    name: str
    parameters: int
    trainable: int


class Mode(Record):
    """One complete actor update as measured: seconds of the whole step, bytes of the highest device memory in use."""

    step_seconds: float = Field(ge=0)
    peak_bytes: int = Field(ge=0)
