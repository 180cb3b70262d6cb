"""A saved model runs without this package: in pure torch, with the results of the package."""

import ast
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support import decoders
from support.computed import computed, make_inputs
from support.decoders import BIASES, EUCLIDEAN, EXPERTS, GATES, HEAD_VECTORS
from support.messages import mentions
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_sb.huggingface import StickBreakingForCausalLM, StickBreakingModel, byte_tokenizer
from megatron_sb.huggingface.saved_folder import MODULES, saved_name

WORKER = Path(__file__).parents[1] / "workers/plain_torch.py"
SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "mass_threshold": 0.0,  # The plain operators never skip keys.
}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
ALL = HEAD_VECTORS | MULTIPLIERS | {"attend_current": True, "head_dim": 16, "attention_multiplier": 0.1}
MODELS = {  # name of the folder -> dtype and fields
    "plain": (torch.float32, {}),
    "plain64": (torch.float64, {}),
    "all": (torch.float64, ALL | {"tie_word_embeddings": True}),
    "biases": (torch.float64, BIASES),
    "gates": (torch.float32, GATES),
    "gates64": (torch.float64, GATES | HEAD_VECTORS | {"attend_current": True}),
    "euclidean": (torch.float64, EUCLIDEAN),
    "both": (torch.float64, GATES | EUCLIDEAN | {"remainder_bias": True}),
    "both16": (torch.bfloat16, GATES | EUCLIDEAN | {"remainder_bias": True}),
    "experts": (torch.float64, EXPERTS | GATES | {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
}
ALLOWED = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1}  # of the largest element


def run_python(arguments, home):
    caches = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_MODULES_CACHE": str(home / "modules")}
    environment = os.environ | caches | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def put_in_hub_cache(saved, home):
    """Let transformers find a folder as the repository me/NAME, as if it had been downloaded."""
    repository, commit = home / f"hub/models--me--{saved.name}", "0123456789" * 4
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the saved models, and with the results of `computed` without the package."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    torch.save(make_inputs(SIZES["vocab_size"]), folder / "inputs.pt")
    for name, (dtype, fields) in MODELS.items():
        decoders.make_model(dtype, **SIZES | fields).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    put_in_hub_cache(folder / "plain", folder / "home")
    done = run_python([WORKER, folder, *MODELS], folder / "home")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", MODELS)
def test_results_equal_those_of_the_package(name, folder, results):
    """Logits, loss, gradients and tokens, for packed and padded rows, with dynamic and static caches."""
    dtype, fields = MODELS[name]
    model = decoders.make_model(dtype, **SIZES | fields)
    expected, found = computed(model, torch.load(folder / "inputs.pt")), results[name]
    assert found.keys() == expected.keys()
    assert f"gradient of {'lm_head' if 'all' not in name else 'model.embed_tokens'}.weight" in expected
    assert expected["logits"].float().std() > 0.1
    for what, tensor in expected.items():
        assert found[what].dtype == tensor.dtype
        if what.startswith("tokens"):
            if dtype != torch.bfloat16:  # where two tokens can have the same logit
                assert torch.equal(found[what], tensor), what
            continue
        scale = tensor.abs().max().item()
        assert scale > 0, what
        torch.testing.assert_close(found[what], tensor, atol=ALLOWED[dtype] * scale, rtol=0, msg=what)


@pytest.mark.parametrize(("name", "field", "value"), [("gates64", "forget_gate", False), ("both", "logits", "dot")])
def test_the_options_matter(name, field, value, folder, results):
    """So the comparison above detects that the saved code ignores them."""
    dtype, fields = MODELS[name]
    model = decoders.make_model(dtype, **SIZES | fields)
    setattr(model.config, field, value)
    if field == "forget_gate":
        for layer in model.model.layers:
            layer.self_attn.gate_proj = None
    ids = torch.load(folder / "inputs.pt")["ids"]
    assert (model(ids, use_cache=False).logits - results[name]["logits"]).abs().max() > 0.01


def test_one_warning_names_the_package(results):
    """One for each folder, whose modules are loaded once, and one for the repository."""
    ours = [text for text in results["warnings"] if "megatron_sb" in text]
    assert len(ours) == len(MODELS) + 1
    for text in ours:
        assert re.search(mentions("megatron_sb imported slow install"), text)
    assert results["modules"] == []


def test_a_downloaded_repository(results):
    """transformers finds all files of the code, and the tokenizer."""
    assert torch.equal(results["repository"], results["plain"]["logits"])
    assert results["text"] == "naïve"


def test_saved_again(folder):
    """A model that runs without the package saves the same files, which the package can read."""
    again = folder / "again/plain"
    code = sorted(path.name for path in (folder / "plain").glob("*.py"))
    assert len(code) == len(MODULES) + 1
    assert sorted(path.name for path in again.glob("*.py")) == code
    for name in (*code, "README.md"):
        assert (again / name).read_bytes() == (folder / "plain" / name).read_bytes(), name
    loaded = AutoModelForCausalLM.from_pretrained(again)
    assert type(loaded) is StickBreakingForCausalLM
    for name, tensor in decoders.make_model(**SIZES).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_package_is_used_where_it_is_installed(folder, tmp_path):
    """It gives its own classes, without a warning. Saving such a model again changes neither the code nor auto_map."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*megatron_sb")
        model, base, config = (
            auto.from_pretrained(folder / "plain", trust_remote_code=True)
            for auto in (AutoModelForCausalLM, AutoModel, AutoConfig)
        )
    assert type(model) is StickBreakingForCausalLM and type(base) is StickBreakingModel
    model.save_pretrained(tmp_path)
    files = [{path.name for path in saved.iterdir()} for saved in (tmp_path, folder / "plain")]
    assert files[0] == {name for name in files[1] if "tokenizer" not in name}
    assert AutoConfig.from_pretrained(tmp_path).auto_map == config.auto_map


LOAD = """
import sys
BREAK
sys.modules["megatron_sb"] = None
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def test_errors_name_what_is_missing(folder, tmp_path):
    """A file of the folder, or a function that older versions of transformers lack."""
    shutil.copytree(folder / "plain", tmp_path / "model")
    old = "import transformers.masking_utils\ndel transformers.masking_utils.AttentionMaskInterface"
    done = run_python(["-c", LOAD.replace("BREAK", old), tmp_path / "model"], tmp_path / "home")
    assert done.returncode != 0
    wanted = "transformers 5.17 AttentionMaskInterface pip install"
    assert re.search(mentions(wanted), done.stderr.splitlines()[-1]), done.stderr[-4000:]
    (tmp_path / "model/packing_stick_breaking.py").unlink()
    done = run_python(["-c", LOAD.replace("BREAK", ""), tmp_path / "model"], tmp_path / "home")
    assert done.returncode != 0
    assert "packing_stick_breaking.py" in done.stderr.splitlines()[-1], done.stderr[-4000:]


@pytest.mark.parametrize("module", MODULES)
def test_saved_code_imports_only_torch_and_transformers(module, folder):
    """And what transformers requires itself."""
    path = folder / "plain" / f"{saved_name(module)}.py"
    tree, imported = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.partition(".")[0])
        if isinstance(node, ast.ImportFrom) and node.level:
            assert (path.parent / f"{node.module}.py").exists()
    others = {"torch", "transformers", "safetensors", "huggingface_hub"}
    assert imported <= sys.stdlib_module_names | others
