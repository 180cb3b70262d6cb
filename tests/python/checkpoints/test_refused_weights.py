"""Missing, unexpected and misshapen weights are errors that name the weights."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import decoders
from support.decoders import BIASES, EXPERTS, GATES, HEAD_VECTORS, TO_CONVERT

from megatron_sb import checkpoints, cli
from megatron_sb.megatron.weights import read_weights, write_weights
from megatron_sb.validation import InputError

LAYERS = {"dolomite": "n_layer"}  # the name of num_hidden_layers in config.json, if it differs


class Folder:
    """A small model saved in one of the formats. Tests change its weights and its configuration."""

    def __init__(self, path, kind, **fields):
        self.path, self.kind, self.model = path / "saved", kind, decoders.make_model(**TO_CONVERT | fields)
        self.config = path / "config"
        checkpoints.save(self.model, self.path, kind)
        self.model.config.save_pretrained(self.config)

    def change(self, edit):
        """Rewrite the weights after edit(weights) has changed the dict of them."""
        if self.kind == "megatron":
            folder, config = self.path / "release", self.model.config
            weights = read_weights(folder)
            edit(weights)
            shutil.rmtree(folder)
            folder.mkdir()
            write_weights(folder, weights, config.num_hidden_layers, config.num_experts)
        else:
            file = self.path / "model.safetensors"
            weights = load_file(file)
            edit(weights)
            save_file(weights, file, {"format": "pt"})

    def configure(self, name, value):
        file = (self.config if self.kind == "megatron" else self.path) / "config.json"
        name = LAYERS.get(self.kind, name) if name == "num_hidden_layers" else name
        fields = json.loads(file.read_text())
        assert name in fields
        file.write_text(json.dumps(fields | {name: value}))

    def load(self):
        return checkpoints.load(self.path, self.config if self.kind == "megatron" else None)

    def expect_error(self, problem, names=""):
        message = rf"{problem} in the checkpoint {re.escape(str(self.path))}[^ ]*: {re.escape(names)}"
        with pytest.raises(ValueError, match=message):
            self.load()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("megatron", "decoder.layers.self_attention.linear_qkv.bias"),
        ("megatron", "decoder.layers.self_attention.q_layernorm.weight"),
        ("megatron", "decoder.layers.mlp.linear_fc1.layer_norm_bias"),
        ("megatron", "decoder.layers.1.mlp.linear_fc2.bias"),
        ("megatron", "decoder.layers.input_layernorm.weight"),
        ("megatron", "decoder.layers.mlp.router.expert_bias"),
        ("megatron", "decoder.layers.mlp.shared_experts.linear_fc1.weight"),
        ("megatron", "decoder.final_layernorm.bias"),
        ("megatron", "embedding.position_embeddings.weight"),
        ("megatron", "mtp.layers.0.eh_proj.weight"),
        ("dolomite", "transformer.h.0.attn.c_attn.bias"),
        ("dolomite", "transformer.h.1.attn.forget_gate.weight"),
        ("dolomite", "transformer.wpe.weight"),
        ("fla", "model.layers.0.attn.q_proj.bias"),
        ("fla", "model.layers.0.mlp.gate_proj.bias"),
        ("huggingface", "model.layers.0.self_attn.q_proj.bias"),
        ("huggingface", "model.layers.0.mlp.gate_proj.bias"),
    ],
)
def test_unexpected_weights(kind, name, tmp_path):
    """One extra weight: a bias, another norm, a position embedding, a gate or a shared expert."""
    folder = Folder(tmp_path, kind)
    folder.change(lambda weights: weights.update({name: torch.randn(2, 32)}))
    stacked = kind == "megatron" and name.startswith("decoder.layers.") and ".1." not in name
    named = name.replace("layers.", "layers.0.") if stacked else name
    named = named.replace(".attn.", ".self_attn.") if kind == "fla" else named
    folder.expect_error("Unexpected weights", named)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("megatron", HEAD_VECTORS),
        ("megatron", EXPERTS),
        ("megatron", GATES),
        ("megatron", BIASES),
        ("dolomite", HEAD_VECTORS),
        ("dolomite", EXPERTS),
        ("dolomite", BIASES),
        ("fla", {}),
        ("fla", BIASES),
        ("huggingface", HEAD_VECTORS),
        ("huggingface", EXPERTS),
        ("huggingface", GATES),
        ("huggingface", BIASES),
    ],
)
def test_every_weight_is_required(kind, fields, tmp_path):
    """Removing any single weight is an error: no weight is initialised silently."""
    folder = Folder(tmp_path, kind, **fields)
    every = {}
    folder.change(every.update)
    for name in every:
        folder.change(lambda weights, name=name: (weights.update(every), weights.pop(name)))
        folder.expect_error("Missing weights")
    folder.change(lambda weights: weights.update(every))
    assert torch.equal(folder.load().model.norm.weight, folder.model.model.norm.weight)


@pytest.mark.parametrize(
    ("fields", "kept", "problem"),
    [
        ({}, (), "Missing weights .*self_attn.norm_bias, .*self_attn.norm_weight, .*self_attn.remainder_bias"),
        ({}, ("head_bias",), "Missing weights .*self_attn.norm_bias"),
        ({}, ("head_bias", "norm"), None),
        ({"reach": None, "remainder_bias": False}, ("head_bias", "norm"), "Unexpected weights .*self_attn.remainder_"),
        ({"reach": None, "remainder_bias": False, "head_norm": True}, ("norm",), None),
        ({"reach": None, "remainder_bias": False, "head_norm": False}, (), None),
        ({"reach": None}, (), "Missing weights .*self_attn.norm_bias"),
    ],
)
def test_head_vectors_of_dolomite_blocks(fields, kept, problem, tmp_path):
    """Models of blocks always have both, and those of the patched lm-engine have what config.json says."""
    mixer = {"sequence_mixer_type": "stickbreaking_attention", "num_attention_heads": 4, "num_key_value_heads": 4}
    mlp = {"mlp_type": "MLP", "intermediate_size": 24, "activation_function": "swiglu", "add_bias": False}
    config = {"model_type": "gpt_base", "vocab_size": 61, "hidden_size": 32, "num_layers": 1}
    config |= {"normalization_function": "rmsnorm", "position_embedding_type": "nope", "mlp_blocks": [mlp]}
    config["sequence_mixer_blocks"] = [mixer | {"add_bias": False} | fields]
    shapes = {"ln_1.weight": (32,), "ln_2.weight": (32,), "mlp_block.c_fc.weight": (48, 32)}
    shapes |= {"mlp_block.c_proj.weight": (32, 24), "sequence_mixer.c_attn.weight": (96, 32)}
    shapes |= {"sequence_mixer.c_proj.weight": (32, 32), "sequence_mixer.head_bias": (4, 8)}
    shapes |= {"sequence_mixer.norm.weight": (32,), "sequence_mixer.norm.bias": (32,)}
    optional = {name for name in shapes if "head_bias" in name or "norm." in name}
    names = {name for name in shapes if name not in optional or name.split(".")[1] in kept}
    weights = {f"transformer.h.0.{name}": torch.randn(shapes[name]) for name in names}
    weights |= {"transformer.wte.weight": torch.randn(61, 32), "transformer.ln_f.weight": torch.rand(32)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    if problem is None:
        found = checkpoints.load(tmp_path).config
        assert (found.remainder_bias, found.head_norm) == ("head_bias" in kept, "norm" in kept)
    else:
        with pytest.raises(InputError, match=problem):
            checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "second_layer"),
    [
        ("megatron", "decoder.layers.1."),
        ("dolomite", "transformer.h.1."),
        ("fla", "model.layers.1."),
        ("huggingface", "model.layers.1."),
    ],
)
def test_wrong_number_of_layers(kind, second_layer, tmp_path):
    folder = Folder(tmp_path, kind)
    folder.configure("num_hidden_layers", 1)
    folder.expect_error("Unexpected weights", second_layer)
    folder.configure("num_hidden_layers", 3)
    folder.expect_error("Missing weights")


@pytest.mark.parametrize("kind", ["megatron", "dolomite", "huggingface"])
def test_wrong_number_of_experts(kind, tmp_path):
    folder = Folder(tmp_path, kind, **EXPERTS)
    folder.configure("num_experts", 2)
    folder.expect_error("Unexpected weights", "model.layers.0.mlp.experts.2.down_proj.weight")
    folder.configure("num_experts", 4)
    folder.expect_error("Missing weights", "model.layers.0.mlp.experts.3.down_proj.weight")


@pytest.mark.parametrize("kind", ["megatron", "huggingface"])
def test_gates_that_the_configuration_lacks(kind, tmp_path):
    folder = Folder(tmp_path, kind, **GATES)
    folder.configure("forget_gate", False)
    folder.expect_error("Unexpected weights", "model.layers.0.self_attn.gate_proj.bias")


@pytest.mark.parametrize(
    ("kind", "field", "first"),
    [
        ("megatron", "qkv_bias", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("dolomite", "add_qkv_bias", "transformer.h.0.attn.c_attn.bias"),
        ("fla", "qkv_bias", "model.layers.0.self_attn.k_proj.bias"),
        ("huggingface", "qkv_bias", "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_biases_that_the_configuration_lacks(kind, field, first, tmp_path):
    folder = Folder(tmp_path, kind, **BIASES)
    folder.configure(field, False)
    folder.expect_error("Unexpected weights", first)


@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_a_tied_model_has_one_output_layer(kind, tmp_path):
    """A stored output layer is read if it equals the embedding; otherwise it is an error."""
    name = "output_layer.weight" if kind == "megatron" else "lm_head.weight"
    folder = Folder(tmp_path, kind, tie_word_embeddings=True)
    embedding = folder.model.model.embed_tokens.weight.detach()
    folder.change(lambda weights: weights.update({name: embedding.clone()}))
    assert torch.equal(folder.load().lm_head.weight, embedding)
    folder.change(lambda weights: weights.update({name: embedding + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings must be False"):
        folder.load()


def test_heads_that_do_not_divide_the_rows(tmp_path):
    folder = Folder(tmp_path, "megatron")
    folder.configure("num_key_value_heads", 4)
    with pytest.raises(ValueError, match=r"config must describe the model .* num_kv_heads is 2, .* where it is 4"):
        folder.load()
    folder.change(lambda weights: None)  # without the record of the heads, which older versions did not write
    with pytest.raises(ValueError, match=r"rows .* must be a multiple of .* = 12, got 64"):
        folder.load()


@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_integers_are_no_weights(kind, tmp_path):
    folder = Folder(tmp_path, kind)
    folder.change(lambda weights: weights.update({name: x.to(torch.int8) for name, x in weights.items()}))
    folder.expect_error("Weights of the wrong dtype")


def test_weights_that_cannot_be_read(tmp_path, capsys):
    """As in the cache of a download, where a file is a link, and its target was deleted."""
    file = Folder(tmp_path, "huggingface").path / "model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "deleted")
    assert cli.main(["convert", str(file.parent), str(tmp_path / "out"), "--to", "fla"]) == 2
    assert f"{file} cannot be read: " in capsys.readouterr().err


def test_other_tensors_are_ignored(tmp_path):
    """Optimizer state and the extra state that fp8 modules save are not weights."""
    folder = Folder(tmp_path, "megatron")
    name = "decoder.layers.mlp.linear_fc1."
    names = (f"optimizer.state.exp_avg.{name}weight", f"{name}_extra_state")
    folder.change(lambda weights: weights.update({name: torch.randn(2, 32) for name in names}))
    assert torch.equal(folder.load().lm_head.weight, folder.model.lm_head.weight)


@pytest.mark.parametrize("kind", ["dolomite", "fla", "huggingface"])
def test_wrong_shape(kind, tmp_path):
    folder = Folder(tmp_path, kind)
    folder.configure("vocab_size", 60)
    first = "lm_head.weight (must be (60, 32), got (61, 32)), model.embed_tokens.weight ("
    folder.expect_error("Weights of the wrong shape", first)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(kind, fields) for kind in ("megatron", "dolomite") for fields in (HEAD_VECTORS, EXPERTS, BIASES)],
)
def test_wrong_shape_of_a_weight_that_is_split(kind, fields, tmp_path):
    """The error names the weight and its shape, also where the conversion splits or reorders it."""
    folder = Folder(tmp_path, kind, **fields)
    every = {}
    folder.change(every.update)
    edits = (lambda x: x.new_ones(()), lambda x: x.flatten(), lambda x: x[None], lambda x: x[..., :-1].clone())
    for name, x in every.items():
        if ".1." in name:
            continue
        for edited in (edit(x) for edit in edits):
            is_layout_of_vector = name.endswith("head_bias") and edited.shape == (32,)
            if edited.shape == x.shape or is_layout_of_vector:
                continue
            folder.change(lambda weights, name=name, edited=edited: weights.update(every | {name: edited}))
            with pytest.raises(
                InputError, match=r"(wrong shape|(Missing|Unexpected) weights) in the checkpoint|rows of"
            ):
                folder.load()


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("attn.c_proj.weight", lambda x: x[:, :-1], r"must be \(32, 32\), got \(32, 31\)"),
        ("attn.c_attn.weight", lambda x: x[0], r"must be \(any, 32\), got \(32,\)"),
        ("mlp.c_fc.weight", lambda x: x[:1], r"must be \(48, 32\), got \(1, 32\)"),
        ("attn.norm.weight", lambda x: x[:-1], r"must be \(32,\) or \(4, 8\), got \(31,\)"),
        ("attn.head_bias", lambda x: x.T, r"must be \(32,\) or \(4, 8\), got \(8, 4\)"),
    ],
)
def test_the_message_of_a_wrong_shape(name, edit, message, tmp_path):
    folder, name = Folder(tmp_path, "dolomite", **HEAD_VECTORS), f"transformer.h.0.{name}"
    folder.change(
        lambda weights: weights.update({name: edit(weights[name]).clone(memory_format=torch.contiguous_format)})
    )
    with pytest.raises(InputError, match=rf"Weights of the wrong shape .*: {re.escape(name)} \({message}"):
        folder.load()


@pytest.mark.parametrize("kind", ["dolomite", "fla", "huggingface"])
def test_a_weight_in_two_files(kind, tmp_path):
    """For example, an earlier model left one of the files."""
    folder = Folder(tmp_path, kind)
    file = folder.path / "model.safetensors"
    save_file({"lm_head.weight": torch.zeros(61, 32)}, file.with_name("model-00002-of-00002.safetensors"))
    folder.expect_error("Weights that two files hold", "lm_head.weight")


def test_a_missing_file_of_several(tmp_path):
    """As after a download that was interrupted: the error names the files that the index names."""
    path, model = tmp_path / "sharded", decoders.make_model(**TO_CONVERT)
    model.save_pretrained(path, max_shard_size="20KB")
    files, index = sorted(path.glob("*.safetensors")), path / "model.safetensors.index.json"
    assert len(files) > 1 and torch.equal(checkpoints.load(path).lm_head.weight, model.lm_head.weight)
    files[0].rename(tmp_path / "moved")
    message = rf"Missing files, which {index.name} names, in the checkpoint {path}: {files[0].name}\."
    with pytest.raises(InputError, match=message):
        checkpoints.load(path)
    (tmp_path / "moved").rename(files[0])
    for text, message in (("{", "is damaged"), ("{}", "weight_map must be an object, got None")):
        index.write_text(text)
        with pytest.raises(InputError, match=rf"{index}:? {message}"):
            checkpoints.load(path)


def test_an_index_of_files_that_were_merged(tmp_path):
    """transformers ignores an index next to a single file, too."""
    folder = Folder(tmp_path, "huggingface")
    (folder.path / "model.safetensors.index.json").write_text("{}")
    assert torch.equal(folder.load().lm_head.weight, folder.model.lm_head.weight)


@pytest.mark.parametrize("kind", ["dolomite", "fla", "huggingface"])
def test_weights_of_several_dtypes(kind, tmp_path):
    """Each weight keeps its own dtype."""
    folder = Folder(tmp_path, kind)
    folder.change(lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].double() + 1e-9}))
    kept = folder.load().state_dict()
    assert kept["lm_head.weight"].dtype == torch.float64 and kept["model.norm.weight"].dtype == torch.float32
    assert torch.equal(kept["lm_head.weight"], folder.model.lm_head.weight.double() + 1e-9)


def test_the_generation_config_is_kept(tmp_path):
    folder = Folder(tmp_path, "huggingface")
    folder.model.generation_config.max_new_tokens = 7
    folder.model.save_pretrained(folder.path)
    checkpoints.save(folder.load(), tmp_path / "out", "huggingface")
    assert checkpoints.load(tmp_path / "out").generation_config.max_new_tokens == 7


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (kind, text, message)
        for text, message in (
            ("{", "config.json is damaged: "),
            ("[1, 2]", "config.json must hold a JSON object, got list"),
            ('"x"', "config.json must hold a JSON object, got str"),
            ("\xff", "config.json is damaged: "),
        )
        for kind in checkpoints.FORMATS
    ],
)
def test_a_damaged_config(kind, text, message, tmp_path, capsys):
    """`convert` names the file in one line, also one that --config names."""
    folder = Folder(tmp_path, kind)
    path = (folder.config if kind == "megatron" else folder.path) / "config.json"
    path.write_bytes(text.encode("latin-1"))
    config = ["--config", str(folder.config)] if kind == "megatron" else []
    capsys.readouterr()
    assert cli.main(["convert", str(folder.path), str(tmp_path / "out"), "--to", "huggingface", *config]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path.parent}/{message}" in line


@pytest.mark.parametrize("value", ["x", None, 0, [1]], ids=str)
@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_a_wrong_value_in_a_config(kind, value, tmp_path):
    """The error names the file and the field or the value."""
    folder = Folder(tmp_path, kind)
    folder.configure("num_hidden_layers", value)
    with pytest.raises(InputError, match=r"config\.json: .*(num_hidden_layers|n_layer)") as error:
        folder.load()
    assert repr(value) in str(error.value) or value is None


@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_a_token_that_is_no_number_in_a_config(kind, tmp_path):
    folder = Folder(tmp_path, kind)
    folder.configure("pad_token_id", "<pad>")
    with pytest.raises(InputError, match=r"config\.json: pad_token_id must be an int, got '<pad>'"):
        folder.load()


def test_a_dtype_that_is_a_list_in_a_config(tmp_path):
    folder = Folder(tmp_path, "huggingface")
    folder.configure("dtype", [])
    with pytest.raises(InputError, match=r"config\.json: "):
        folder.load()


@pytest.mark.parametrize("name", ["n_head", "n_layer", "n_embd", "vocab_size"])
def test_a_missing_field_in_a_config(name, tmp_path):
    folder = Folder(tmp_path, "dolomite")
    path = folder.path / "config.json"
    fields = json.loads(path.read_text())
    del fields[name]
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError, match=rf"config\.json: .*{'sequence_mixer_blocks' if name == 'n_embd' else name}"):
        folder.load()


def test_a_damaged_generation_config(tmp_path):
    folder = Folder(tmp_path, "huggingface")
    (folder.path / "generation_config.json").write_text("[")
    with pytest.raises(InputError, match=r"generation_config\.json is damaged"):
        folder.load()


def test_a_generation_config_that_transformers_only_warns_about(tmp_path):
    """It is converted as it is. Published models have such files."""
    folder = Folder(tmp_path, "huggingface")
    path = folder.path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.5, "do_sample": False}))
    assert cli.main(["convert", str(folder.path), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    assert json.loads((tmp_path / "out" / path.name).read_text())["temperature"] == 0.5


def test_another_model_as_config(tmp_path):
    folder = Folder(tmp_path, "megatron")
    (folder.config / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"config/config\.json: model_type must be 'stick_breaking', got 'llama'"):
        folder.load()
