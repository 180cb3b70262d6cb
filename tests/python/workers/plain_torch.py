"""Load saved models without megatron_sb, and write what they compute.

`plain_torch.py FOLDER NAME..`: FOLDER/NAME is a saved model, FOLDER/inputs.pt its inputs. Writes FOLDER/results.pt, by
name, and FOLDER/again/NAME, the first model saved again. The first model is also the repository me/NAME in the cache of
the Hub.
"""

import importlib.abc
import sys
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.computed import computed


class Hidden(importlib.abc.MetaPathFinder):
    """Hide the package: an import fails as if it were not installed."""

    def find_spec(self, name, path=None, target=None):
        """Raise ModuleNotFoundError for megatron_sb and its modules."""
        if name.partition(".")[0] == "megatron_sb":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())

torch.set_num_threads(1)
folder, names = Path(sys.argv[1]), sys.argv[2:]
inputs, results = torch.load(folder / "inputs.pt"), {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True)
        results[name] = computed(model, inputs)
        if name == names[0]:
            model.save_pretrained(folder / "again" / name)
            model = AutoModelForCausalLM.from_pretrained(f"me/{name}", trust_remote_code=True)
            results["repository"] = model(inputs["ids"], use_cache=False).logits.detach()
            tokenizer = AutoTokenizer.from_pretrained(f"me/{name}")
            results["text"] = tokenizer.decode(tokenizer("naïve")["input_ids"])
results["warnings"] = [str(warning.message) for warning in caught]
results["modules"] = sorted(name for name in sys.modules if name.startswith("megatron_sb"))
torch.save(results, folder / "results.pt")
