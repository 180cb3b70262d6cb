"""lm-eval loads a saved model and evaluates it on a task that this file defines."""

import json

import pytest
import torch
from support.fork_server import run_python
from support.lm_eval_tasks import TASK
from transformers import AutoTokenizer

from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM, byte_tokenizer

pytest.importorskip("lm_eval")
# `lm_eval` without its own 14,000 tasks. It would read all their files first, for half the time of the test. The forked
# process has imported megatron_sb; test_attention_interface.py loads a model in a program that has not.
LM_EVAL = """
import functools
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
cli_evaluate()
"""


def test_tokens_are_bytes(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n\treturn 'naïve ½ 漢字' #  é\x00\x7f"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256 and len(tokenizer) == 257


def likelihood(model, question, choice):
    """Compute log P(choice | question) with a whole forward for each token."""
    ids, total = list(question.encode()), 0.0
    for byte in choice.encode():
        with torch.no_grad():
            total += model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)[byte].item()
        ids.append(byte)
    return total


def test_multiple_choice(tmp_path):
    """lm-eval pads rows of different lengths and reports the likelihoods of whole forwards and the accuracy."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "remainder_bias": True, "initializer_range": 0.3, "eos_token_id": 256}
    model = StickBreakingForCausalLM(StickBreakingConfig(**sizes, **heads)).eval()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    questions = ["What is 2 + 2?", "A", "Which of these words is the longest one of all of them?", "Ça va?"]
    docs = [
        {"question": question, "choices": [" four", " five", " a much longer answer"], "answer": index % 3}
        for index, question in enumerate(questions)
    ]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (tasks / "local_choices.yaml").write_text(TASK.replace("FILE", str(tasks / "docs.jsonl")))
    (tmp_path / "evaluate.py").write_text(LM_EVAL)
    arguments = ["run", "--model", "hf", "--tasks", "local_choices", "--batch_size", "3", "--include_path", tasks]
    arguments += ["--model_args", f"pretrained={tmp_path / 'model'},trust_remote_code=True,dtype=float32"]
    arguments += ["--log_samples", "--device", "cpu", "--output_path", tmp_path / "out"]
    environment = {"HF_HOME": str(tmp_path / "home")}
    done = run_python([tmp_path / "evaluate.py", *arguments], environment=environment, seconds=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (tmp_path / "out").rglob("results*.json")
    (samples,) = (tmp_path / "out").rglob("samples*.jsonl")
    expected = [[likelihood(model, doc["question"], choice) for choice in doc["choices"]] for doc in docs]
    right = [torch.tensor(row).argmax().item() == doc["answer"] for row, doc in zip(expected, docs, strict=True)]
    assert json.loads(results.read_text())["results"]["local_choices"]["acc,none"] == sum(right) / len(docs)
    found = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        found[sample["doc_id"]] = [float(answer[0][0]) for answer in sample["resps"]]
    for index, row in enumerate(expected):
        assert found[index] == pytest.approx(row, rel=1e-4)
