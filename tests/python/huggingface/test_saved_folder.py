"""The model card of a saved model, and what push_to_hub uploads. No test connects to the Hub."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from support import decoders
from support.decoders import BIASES, EXPERTS, GATES
from support.messages import mentions

from megatron_sb import checkpoints
from megatron_sb.huggingface import byte_tokenizer, modeling
from megatron_sb.huggingface.saved_folder import LOADER

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("dtype", "fields", "words"),
    [
        (torch.float32, GATES, "F32 forget_gate=True logits='dot' qkv_bias=False"),
        (
            torch.bfloat16,
            EXPERTS | BIASES | {"tie_word_embeddings": True},
            "BF16 experts forget_gate=False qkv_bias=True",
        ),
    ],
)
def test_model_card(dtype, fields, words, tmp_path):
    """It has the number of parameters, sizes, options, and the call that loads the model."""
    model = decoders.make_model(dtype, **SIZES | fields)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert re.search(mentions(f"{model.num_parameters():,} 3 32 4 2 8 257 {words}"), card.text)
    assert 'from_pretrained("REPOSITORY", trust_remote_code=True)' in card.text


def test_a_card_is_kept(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    decoders.make_model(**SIZES).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_the_decoder_without_its_output_layer(tmp_path):
    """Its folder, too, has the code that config.json names."""
    decoders.make_model(**SIZES).model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModel"].startswith(f"{LOADER}.")
    assert (tmp_path / f"{LOADER}.py").exists() and (tmp_path / "modeling_stick_breaking.py").exists()


def test_only_the_main_process_writes(tmp_path):
    decoders.make_model(**SIZES).save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.glob("*.py")) and not (tmp_path / "README.md").exists()


def test_a_converted_folder_has_everything(tmp_path):
    """The code, a model card and the tokenizer: a folder that can be uploaded."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    checkpoints.save(decoders.make_model(**SIZES), tmp_path / "out", "huggingface", tokenizer=tmp_path / "tokenizer")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    wanted = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert wanted | {"tokenizer_config.json", f"{LOADER}.py", "modeling_stick_breaking.py"} <= names


class Hub:
    """Record the calls of HfApi. `files` are the files in the repository."""

    def __init__(self, files):
        self.files, self.calls, self.uploaded = files, [], {}

    def __call__(self, **options):
        self.calls.append(("HfApi", options))
        return self

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", options))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def create_branch(self, repo_id, **options):
        self.calls.append(("create_branch", options))

    def file_exists(self, repo_id, name, **options):
        return name in self.files

    def upload_folder(self, *, repo_id, folder_path, **options):
        self.calls.append(("upload_folder", options))
        self.uploaded = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return f"https://huggingface.co/{repo_id}/commit/1"


def test_push_to_hub(tmp_path, monkeypatch):
    """One commit with the files of save_pretrained. Tags are added to the card."""
    model, hub = decoders.make_model(**SIZES), Hub(files=())
    monkeypatch.setattr(modeling, "HfApi", hub)
    made = model.push_to_hub("model", private=True, token="secret", revision="new", tags=["code"])
    assert made == "https://huggingface.co/me/model/commit/1"
    calls = dict(hub.calls)
    assert calls["HfApi"]["token"] == "secret" and calls["create_repo"]["private"]
    assert calls["create_branch"]["branch"] == "new" and calls["upload_folder"]["revision"] == "new"
    model.save_pretrained(tmp_path)
    card = ModelCard(hub.uploaded.pop("README.md").decode())
    assert card.data.tags == ["code", "stick-breaking-attention"]
    assert card.text.strip() == ModelCard.load(tmp_path / "README.md").text.strip()
    (tmp_path / "README.md").unlink()
    assert hub.uploaded == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_push_to_hub_keeps_the_card_of_the_repository(monkeypatch):
    hub = Hub(files=("README.md",))
    monkeypatch.setattr(modeling, "HfApi", hub)
    decoders.make_model(**SIZES).push_to_hub("model")
    assert "README.md" not in hub.uploaded and f"{LOADER}.py" in hub.uploaded
