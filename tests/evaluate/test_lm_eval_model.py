# SPDX-License-Identifier: Apache-2.0
"""The model of lm-evaluation-harness, against the Hugging Face model that it wraps."""

import json
import shutil
from importlib.metadata import entry_points

import pytest
import torch
from harness import run_program
from sparse_hf_models import BLOCK, VOCABULARY, make_model

pytest.importorskip("lm_eval", reason="pip install 'sparsebalance-megatron[evaluate]'")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.evaluate.lm_eval_model import SparseBalanceLM

PROMPTS = [" ".join(f"w{(7 * i + n) % 89}" for i in range(n)) for n in (5, 4 * BLOCK, 70)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A saved model with its settings, and a tokenizer of one token per word."""
    path = tmp_path_factory.mktemp("model")
    make_model().float().save_pretrained(path)
    words = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i + 2 for i in range(VOCABULARY - 2)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    ).save_pretrained(path)
    return str(path)


def requests(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


def load(directory, **arguments):
    return SparseBalanceLM(directory, device="cpu", batch_size=3, **arguments)


def test_likelihoods_are_those_of_the_sparse_model(directory):
    model = load(directory)
    pairs = [(prompt, " w3 w4 w5") for prompt in PROMPTS]
    found = [likelihood for likelihood, _ in model.loglikelihood(requests("loglikelihood", pairs))]
    dense = load(directory, sparse=False)
    other = [likelihood for likelihood, _ in dense.loglikelihood(requests("loglikelihood", pairs))]
    for (prompt, ending), likelihood, by_dense in zip(pairs, found, other, strict=True):
        tokens = torch.tensor([model.tok_encode(prompt + ending)])
        with torch.no_grad():
            logits = model.model(tokens).logits[0, -4:-1].log_softmax(-1)
        expected = float(logits.gather(1, tokens[0, -3:, None]).sum())
        assert likelihood == pytest.approx(expected, abs=1e-4)
        assert (abs(likelihood - by_dense) > 1e-4) == (len(prompt.split()) > 3 * BLOCK)


@pytest.mark.parametrize("selection", ["token-query-head", "previous-block"])
def test_prompts_of_unequal_length_are_continued_as_each_alone(directory, selection):
    model = load(directory, sparse_selection=selection)
    arguments = [
        (prompt, {"max_gen_toks": 6, "do_sample": False, "until": []}) for prompt in PROMPTS
    ]
    answers = model.generate_until(requests("generate_until", arguments))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([model.tok_encode(prompt)])
        whole = model.model.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=False)
        assert answer.split() == model.tok_decode(whole[0, tokens.shape[1] :]).split()
    assert model.batch_size == 3


TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/words.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.mark.nightly
def test_the_harness_reports_density_beside_scores(directory, tmp_path):
    """The command of docs/EVALUATE.md, with a task that lies in a folder."""
    lines = [json.dumps({"text": prompt}) for prompt in PROMPTS]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    found = {}
    for reading in ("sparse=True", "sparse=False"):
        done = run_program(
            (
                *("-m", "sparsebalance_megatron.evaluate", "run", "--model", "sparse-balance"),
                *("--model_args", f"pretrained={directory},{reading}", "--tasks", "words"),
                *("--include_path", str(tmp_path), "--device", "cpu"),
                *("--output_path", str(tmp_path / reading / "found.json")),
            ),
            tmp_path,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (path,) = (tmp_path / reading).glob("*.json")
        found[reading] = json.loads(path.read_text())
        assert ("'whole_up_to_tokens': 48" in done.stdout + done.stderr) == (
            reading == "sparse=True"
        )
    sparse, dense = (each["results"]["words"]["bits_per_byte,none"] for each in found.values())
    assert abs(sparse - dense) > 1e-5
    settings, other = (each["config"] for each in found.values())
    assert settings["whole_up_to_tokens"] == 3 * BLOCK
    assert settings["density_by_tokens"]["1024"] < 0.15
    assert other["attention"] == "dense" and "density_by_tokens" not in other


def test_the_entry_point_is_the_registered_model():
    """As versions after 0.4.13 require: declared and decorated, they agree."""
    (entry,) = entry_points(group="lm_eval.models", name="sparse-balance")
    assert entry.load() is SparseBalanceLM is get_model("sparse-balance")
    assert entry.value == f"{SparseBalanceLM.__module__}:{SparseBalanceLM.__qualname__}"


def test_results_name_the_settings_and_the_density(directory):
    info = load(directory, sparse_topk_blocks=4).get_model_info()
    assert (info["sparse_block_size"], info["sparse_topk_blocks"]) == (BLOCK, 4)
    density = info["density_by_tokens"]
    assert 0 < density["131072"] < density["4096"] < 0.1
    assert load(directory, sparse=False).get_model_info()["attention"] == "dense"
    with pytest.raises(ConfigError, match="sparse_topk_blocks"):
        load(directory, sparse=False, sparse_topk_blocks=4)


def test_a_cut_file_of_weights_is_named(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"{tmp_path / 'cut'}: a safetensors file is damaged"):
        load(str(tmp_path / "cut"))


def test_a_model_without_settings_says_where_to_give_them(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "plain")
    path = tmp_path / "plain" / "config.json"
    values = json.loads(path.read_text())
    given = values.pop("sparse_attention_config")
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="or give these to lm-eval's --model_args"):
        load(str(path.parent), sparse_topk_blocks=2)
    settings = {name: given[name] for name in given if "_block_size" in name or "_sel" in name}
    load(str(path.parent), sparse_topk_blocks=2, **settings)
