# SPDX-License-Identifier: Apache-2.0
"""Files of measurements, as JSON: cost tables, and sensitivities of a model's layers."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from sparsebalance_megatron.config import (
    AttentionImplementation,
    DenseAttention,
    check_range,
    flag_name,
)
from sparsebalance_megatron.cost.parts import (
    NEVER_TIMED,
    OF_EVERY_MODEL,
    Direction,
    Part,
    SegmentCost,
)
from sparsebalance_megatron.cost.work_model import work_model_named
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.json_file import UnreadableFileError, checked, read_json

Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
"""A size, length or number, far below where numbers of 64 bits lose digits."""
MeasuredMs = Annotated[float, msgspec.Meta(ge=1e-7, le=1e7)]
"""From less than a clock can tell to hours."""
SpreadMs = Annotated[float, msgspec.Meta(ge=0.0, le=1e7)]

_REMEDY = "measure again with `sparse-balance profile` and this model's flags"


class CostTableError(ValueError):
    """A cost table cannot be read, is damaged, or was measured for something else."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Routed experts of a layer, which get as many tokens each, and shared ones.

    Attributes:
        ffn_hidden_size: of one routed expert.
        shared_ffn_hidden_size: of a layer's shared experts together.
        layers_share: of the model's layers, those that have experts. The others have a dense MLP.
    """

    experts: Count
    top_k: Count
    ffn_hidden_size: Count
    shared_ffn_hidden_size: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0
    layers_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(
                f"--moe-router-topk {self.top_k}: a token takes at most all experts of a layer; "
                f"use at most --num-experts {self.experts}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that a layer's cost depends on, as Megatron's flags name them.

    ``value_head_dim``: of values, where it is not that of queries and keys. ``attention_weights``:
    of one layer's projections to and from attention, where they are not those of plain attention.
    ``experts``: of the layers that have them, in place of their MLP of ``ffn_hidden_size``.
    """

    hidden_size: Count
    ffn_hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count
    head_dim: Count
    vocab_size: Count
    gated_linear_unit: bool
    tensor_parallel_size: Count
    value_head_dim: Count | None = None
    attention_weights: Count | None = None
    experts: ExpertShape | None = None

    @property
    def value_dim(self) -> int:
        """Head dim of values."""
        return self.value_head_dim or self.head_dim

    @property
    def rank_heads(self) -> tuple[int, int]:
        """Query and KV heads of a tensor-parallel rank."""
        ranks = self.tensor_parallel_size
        return self.num_attention_heads // ranks, max(1, self.num_query_groups // ranks)

    def mlp_weights(self, ffn_hidden_size: int) -> int:
        """Weights of an MLP, without biases."""
        return self.hidden_size * ffn_hidden_size * (3 if self.gated_linear_unit else 2)

    @property
    def layer_weights(self) -> float:
        """Weights that every token takes in a layer, without biases and routed experts, on all
        ranks together: the mean of all layers."""
        heads = self.num_attention_heads + self.num_query_groups
        plain = self.hidden_size * heads * (self.head_dim + self.value_dim)
        attention, experts = self.attention_weights or plain, self.experts
        dense = self.mlp_weights(self.ffn_hidden_size)
        if experts is None:
            return attention + dense
        shared, share = self.mlp_weights(experts.shared_ffn_hidden_size), experts.layers_share
        return attention + (1.0 - share) * dense + share * shared + self.expert_router_weights

    @property
    def expert_router_weights(self) -> float:
        """Weights that choose a token's experts, on every rank: the mean of all layers."""
        experts = self.experts
        return experts.layers_share * self.hidden_size * experts.experts if experts else 0.0

    def routed_weights(self, experts_of_layer: int) -> float:
        """Weights of so many routed experts of every expert layer: the mean of all layers."""
        if self.experts is None:
            return 0.0
        one = self.mlp_weights(self.experts.ffn_hidden_size)
        return self.experts.layers_share * experts_of_layer * one

    def flat(self) -> dict[str, Any]:
        """``shape.FIELD`` -> value."""
        return {f"shape.{name}": value for name, value in asdict(self).items()}

    @property
    def vocabulary_weights(self) -> int:
        """Weights of the embedding, or of the output head, on all ranks together."""
        return self.hidden_size * self.vocab_size


def latent_attention_weights(
    *, hidden_size: int, heads: int, q_rank: int | None, kv_rank: int, qk_dim: int,
    rotary_dim: int, value_dim: int,
) -> int:  # fmt: skip
    """Weights of one layer's multi-latent attention (arXiv:2405.04434, section 2.1), without norms.

    Args:
        q_rank: of compressed queries; None where queries are not compressed.
        qk_dim, rotary_dim: of a head's queries and keys, without and with rotary embeddings.
    """
    query_rows = heads * (qk_dim + rotary_dim)
    query = q_rank * (hidden_size + query_rows) if q_rank else hidden_size * query_rows
    latent = hidden_size * (kv_rank + rotary_dim) + kv_rank * heads * (qk_dim + value_dim)
    return query + latent + heads * value_dim * hidden_size


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Facts that latencies depend on besides lengths and budgets; ``dtype`` is torch's name without
    the prefix."""

    device: str
    dtype: str
    block_size: Count
    selection: str
    shape: ModelShape


class CostRow(msgspec.Struct, frozen=True, kw_only=True, rename={"part": "kind"}):
    """One measurement: a part of the model on one packed micro-batch.

    ``lengths_tokens``: one per document. ``budget_blocks``: of every document; None means all
    visible blocks. ``ms_spread``: median absolute deviation over ``repeats`` runs.
    """

    part: Part
    direction: Direction
    lengths_tokens: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    budget_blocks: Count | None
    ms_median: MeasuredMs
    ms_spread: SpreadMs
    repeats: Count


class ExchangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of keys and values travelling between ``width`` ranks that share a sequence;
    each receives ``received_bytes``."""

    width: Annotated[int, msgspec.Meta(ge=2, le=2**40)]
    received_bytes: Count
    ms_median: MeasuredMs
    ms_spread: SpreadMs
    repeats: Count


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Measurements and what they were measured on.

    ``exchanges``: none in a table of one rank. ``segments``: None leaves the defaults.
    ``list_kernel``, ``dense_kernel``: who attended to lists, and densely, the fastest that served.
    ``threads``: of the host. ``path``: where the table was read from.
    """

    identity: RunIdentity
    versions: dict[str, str]
    date: str
    threads: int
    rows: tuple[CostRow, ...]
    exchanges: tuple[ExchangeRow, ...] = ()
    segments: SegmentCost | None = None
    list_kernel: AttentionImplementation = "auto"
    dense_kernel: DenseAttention = "torch"
    format_version: Literal[1] = 1
    path: str | None = field(default=None, compare=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CostTable":
        """Read and check a table; :class:`CostTableError` says what is wrong with it."""
        place = os.fspath(path)
        try:
            document = read_json(Path(path), dict[str, Any])
            identity = checked(document, RunIdentity)
            from_file = {"format_version": None} | document
            table = checked(from_file | {"identity": asdict(identity), "path": place}, cls)
        except UnreadableFileError as error:
            raise CostTableError(f"cost table {place}: {error}; {_REMEDY}") from error
        table.validate()
        return table

    def text(self) -> str:
        """The file's text, of a table that has been checked."""
        self.validate()
        document = msgspec.to_builtins(self)
        del document["path"]
        header = {"format_version": document.pop("format_version"), **document.pop("identity")}
        return _indented(header | document)

    def validate(self) -> None:
        """Check every value; the error names the field or row that no measurement can have."""
        shape = self.identity.shape
        try:
            checked(msgspec.to_builtins(self), CostTable)
            size = self.identity.block_size
            check_range("block_size", size, f"block_size {size}")
            work_model_named(self.identity.selection)
        except (UnreadableFileError, ConfigError) as error:
            raise CostTableError(f"{self.place}: {error}; {_REMEDY}") from error
        if shape.num_attention_heads % shape.num_query_groups:
            raise CostTableError(
                f"{self.place}: shape.num_query_groups {shape.num_query_groups}: must divide the "
                f"{shape.num_attention_heads} attention heads; {_REMEDY}"
            )
        measured = self.rows_by_part.keys() | NEVER_TIMED
        for part, direction in product(OF_EVERY_MODEL, Direction):
            if (part, direction) not in measured:
                raise CostTableError(f"{self.place}: no row for {part} {direction}; {_REMEDY}")

    def check_matches(self, run: Mapping[str, Any]) -> None:
        """Check that the table was measured for a run: fields of its identity, and of its shape as
        ``shape.FIELD``; what it lacks is not compared."""
        own = vars(self.identity) | self.identity.shape.flat()
        differences = [
            f"{name} is {own[name]} in the table, {value} in this run"
            for name, value in run.items()
            if own[name] != value
        ]
        if differences:
            raise CostTableError(f"{self.place}: {'; '.join(differences)}; {_REMEDY}")

    @property
    def rows_by_part(self) -> dict[tuple[Part, Direction], list[CostRow]]:
        """What was timed -> its rows, forwards first."""
        rows_of: dict[tuple[Part, Direction], list[CostRow]] = {}
        for direction, part in product(Direction, Part):
            timed = part, direction
            if rows := [row for row in self.rows if (row.part, row.direction) == timed]:
                rows_of[timed] = rows
        return rows_of

    @property
    def place(self) -> str:
        """Name of the table in messages."""
        return "cost table" if self.path is None else f"cost table {self.path}"


def _indented(document: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


_MEASURE_IT = "measure it with `sparse-balance sensitivity`"


class Sensitivities(msgspec.Struct, frozen=True, kw_only=True):
    """How sensitive each layer of a model is, to any scale, and what it was measured on.

    ``measure``: attention of a layer's best head to far tokens that the text repeats
    (:mod:`..attention.repetitions`). ``block_size``: of the blocks that say what is far.
    ``cuts``: nats that a copied token loses where that layer alone reads the least budget, and all
    others everything; empty where it was not measured.
    """

    sensitivities: tuple[Annotated[float, msgspec.Meta(ge=0.0, le=1e6)], ...]
    measure: str
    block_size: int
    samples: int
    versions: dict[str, str]
    date: str
    cuts: tuple[float, ...] = ()
    format_version: Literal[1] = 1

    def text(self) -> str:
        """The file's text."""
        return _indented(self)


def read_sensitivities(path: Path, layers: int) -> np.ndarray:
    """The sensitivities [L] in a file.

    Raises:
        ConfigError: the file cannot be read, is of another number of layers, or all are 0.
    """
    place = f"{flag_name('sensitivity')} {path}"
    try:
        found: Sensitivities = read_json(path, Sensitivities)
    except UnreadableFileError as error:
        raise ConfigError(f"{place}: {error}; {_MEASURE_IT}") from error
    sensitivity_L = np.array(found.sensitivities)
    if len(sensitivity_L) != layers:
        raise ConfigError(
            f"{place}: is of {len(sensitivity_L)} layers, the model has {layers}; {_MEASURE_IT}"
        )
    if not sensitivity_L.any():
        raise ConfigError(f"{place}: all sensitivities are 0; {_MEASURE_IT} on longer documents")
    return sensitivity_L
