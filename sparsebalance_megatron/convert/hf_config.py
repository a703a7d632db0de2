# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face config.json, and refuse by name what Megatron's GPT cannot express.

Missing keys take the defaults of the family's configuration class in ``transformers``; settings of
RoPE are read in both places where its versions write them (``rope_parameters``, or ``rope_theta``
with ``rope_scaling``).
"""

from pathlib import Path
from typing import Annotated, Literal

import torch
from msgspec import UNSET, Meta, Struct, UnsetType, field

from sparsebalance_megatron.errors import ConvertError
from sparsebalance_megatron.json_file import UnreadableFileError, checked, read_json, without_nulls

_REMEDY = (
    "give a directory that save_pretrained wrote of a llama, mistral, qwen2, qwen3 or qwen3_moe "
    "model; other models: use Megatron-Bridge (docs/CONVERT.md)"
)
_LLAMA3_CONSTANTS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's RotaryEmbedding has built in."""

_LARGEST = 2**24
_MOST_LAYERS = 2**12
_MOST_EXPERTS = 2**18
"""Ten times the experts of all layers of the largest models."""

_Size = Annotated[int, Meta(ge=1, le=_LARGEST)]
_Layers = Annotated[int, Meta(ge=1, le=_MOST_LAYERS)]
_Experts = Annotated[int, Meta(ge=0, le=_MOST_EXPERTS)]
_Share = Annotated[float, Meta(ge=0, lt=1)]
_Epsilon = Annotated[float, Meta(gt=0, lt=1)]
_Positive = Annotated[float, Meta(gt=0, le=_LARGEST)]
_Scale = Annotated[float, Meta(ge=0, le=_LARGEST)]
_Stretch = Annotated[float, Meta(ge=1, le=_LARGEST)]
_Whole = Annotated[float, Meta(ge=1, le=2**40, multiple_of=1)]
_Dtype = Literal["float32", "float16", "bfloat16", "auto"]
_AllHeads = Annotated[float, Meta(ge=1, le=1)]
"""Megatron rotates whole heads here."""


class Rope(Struct, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding, by the names of config.json.

    ``beta_fast``, ``beta_slow`` and both mscales are those of YaRN (arXiv:2309.00071), whose scale
    Megatron derives from the factor.
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"] | None = None
    type: Literal["default", "linear", "llama3", "yarn"] | None = None
    rope_theta: _Whole | None = None
    partial_rotary_factor: _AllHeads = 1
    factor: _Stretch | None = None
    original_max_position_embeddings: _Size | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    mscale: _Scale = 0.0
    mscale_all_dim: _Scale = 0.0
    truncate: bool = True
    attention_factor: None = None
    finetuned: None = None
    beta_mscale: None = None

    def complete(self, rope_theta: float, max_positions: int) -> None:
        """Fill in what is absent. Raises ValueError if Megatron cannot express the stretching."""
        self.rope_type = self.rope_type or self.type or "default"
        self.type = None
        self.rope_theta = self.rope_theta or rope_theta
        self.original_max_position_embeddings = (
            self.original_max_position_embeddings or max_positions
        )
        if self.rope_type != "default" and self.factor is None:
            raise ValueError(f"factor: {self.rope_type} needs one")
        if self.rope_type == "linear" and self.factor != int(self.factor or 0):
            raise ValueError(f"factor {self.factor}: Megatron interpolates by whole numbers")
        if self.rope_type == "llama3":
            for key, built_in in _LLAMA3_CONSTANTS.items():
                if (value := getattr(self, key)) != built_in:
                    raise ValueError(f"{key} {value}: Megatron has {built_in} built in")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast:g}: must exceed beta_slow")
        if not self.truncate:
            raise ValueError("truncate False: Megatron truncates YaRN's bounds")
        if not (self.mscale and self.mscale_all_dim):
            # Either alone has no effect in transformers.
            self.mscale, self.mscale_all_dim = 1.0, 0.0

    def describe(self) -> str:
        factor = "" if self.factor is None else f", factor {self.factor:g}"
        return f"{self.rope_type}{factor}, rope_theta {self.rope_theta:.0f}"


class Decoder(Struct, kw_only=True):
    """A decoder of RMSNorm, (grouped-query) attention with RoPE, and SwiGLU: a config.json.

    After reading, ``rope_parameters`` has all there is to know of RoPE, and ``num_experts`` is the
    number of experts under either of its names.
    """

    model_type: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
    num_hidden_layers: _Layers
    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size = 0
    head_dim: _Size = 0
    vocab_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: _Epsilon = 1e-6
    attention_dropout: _Share = 0.0
    rope_theta: _Whole = 10000
    rope_parameters: Rope = field(default_factory=Rope)
    rope_scaling: Rope = field(default_factory=Rope)
    partial_rotary_factor: _AllHeads = 1
    tie_word_embeddings: bool = False
    dtype: _Dtype | None = None
    torch_dtype: _Dtype | None = None
    num_experts: _Experts = 0
    num_local_experts: _Experts = 0
    num_experts_per_tok: _Size = 0
    moe_intermediate_size: _Size = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: _Size = 1
    mlp_only_layers: list[Annotated[int, Meta(ge=0, le=_MOST_LAYERS)]] = []
    # What would change the mathematics of these families.
    hidden_act: Literal["silu"] = "silu"
    layer_types: list[Literal["full_attention"]] = []
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | UnsetType | None = UNSET
    quantization_config: None = None

    def __post_init__(self) -> None:
        if not self.num_key_value_heads:
            if self.model_type != "llama":
                raise ValueError("Object missing required field num_key_value_heads")
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads}: must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if not self.head_dim and self.model_type == "qwen3":
            # In the other families hidden_size decides.
            self.head_dim = 128
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads {self.num_attention_heads}: must divide hidden_size "
                    f"{self.hidden_size}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types: it has {len(self.layer_types)}, num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if getattr(self, key):
                raise ValueError(f"{key} True: not supported")
        # Qwen keeps a window that use_sliding_window switches off. Mistral's is 4096 where absent.
        window = self.sliding_window
        absent = window is None or (window is UNSET and self.model_type == "llama")
        if not (absent or self.model_type.startswith("qwen")):
            shown = "absent means 4096 tokens" if window is UNSET else f"is {window}"
            raise ValueError(f"sliding_window {shown}: not supported; must be null")
        self._check_experts()
        self._check_rope()

    def _check_experts(self) -> None:
        if self.num_experts and self.num_local_experts not in (0, self.num_experts):
            raise ValueError(
                f"num_experts {self.num_experts} contradicts num_local_experts "
                f"{self.num_local_experts}: keep one"
            )
        if self.model_type != "qwen3_moe":
            for key in ("num_experts", "num_local_experts"):
                if number := getattr(self, key):
                    raise ValueError(f"{key} {number}: {self.model_type} models have none")
            return
        self.num_experts = self.num_experts or self.num_local_experts
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if not getattr(self, key):
                raise ValueError(f"Object missing required field {key}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok}: there are {self.num_experts} "
                "experts"
            )
        if self.num_experts_per_tok == 1 and self.norm_topk_prob:
            raise ValueError("norm_topk_prob True: Megatron needs num_experts_per_tok of 2 or more")
        if (matrices := self.num_experts * self.num_hidden_layers) > _MOST_EXPERTS:
            raise ValueError(
                f"num_experts {self.num_experts} x num_hidden_layers {self.num_hidden_layers}: "
                f"{matrices} experts, more than {_MOST_EXPERTS}"
            )
        if max(self.mlp_only_layers, default=0) >= self.num_hidden_layers:
            raise ValueError(
                f"mlp_only_layers {max(self.mlp_only_layers)}: the last of num_hidden_layers "
                f"{self.num_hidden_layers} is {self.num_hidden_layers - 1}"
            )
        if not any(self.expert_layers):
            raise ValueError("mlp_only_layers, decoder_sparse_step: no layer has experts")

    def _check_rope(self) -> None:
        given = {"rope_parameters": self.rope_parameters, "rope_scaling": self.rope_scaling}
        given = {key: rope for key, rope in given.items() if rope != Rope()}
        self.rope_parameters = next(iter(given.values()), self.rope_parameters)
        for key, rope in (given or {"rope_parameters": self.rope_parameters}).items():
            try:
                rope.complete(self.rope_theta, self.max_position_embeddings)
            except ValueError as error:
                raise ValueError(f"{key}.{error}") from error
        if any(rope != self.rope_parameters for rope in given.values()):
            raise ValueError(
                f"rope_scaling ({self.rope_scaling.describe()}) contradicts rope_parameters "
                f"({self.rope_parameters.describe()}): keep one, with rope_theta in it"
            )

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts in place of one MLP."""
        return tuple(
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
            for layer in range(self.num_hidden_layers)
        )

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases; nothing else has."""
        return self.model_type == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Whether the query and the key of every head pass a norm before RoPE."""
        return self.model_type.startswith("qwen3")

    @property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype that config.json names, if it does."""
        name = self.dtype or self.torch_dtype or "auto"
        return None if name == "auto" else getattr(torch, name)


def read_config(directory: Path) -> Decoder:
    """The model that ``directory/config.json``, or a file of that kind, describes.

    Raises:
        ConvertError: the file is missing or damaged, or asks for what is not supported.
    """
    path = directory if directory.suffix == ".json" else directory / "config.json"
    try:
        # Null counts as absent, as it does in ``transformers``, but for Mistral's window.
        model: Decoder = checked(without_nulls(read_json(path), but="sliding_window"), Decoder)
    except UnreadableFileError as error:
        raise ConvertError(f"{path}: {error}; {_REMEDY}") from error
    return model
