"""Tasks of lm-eval that need no download."""

# Multiple choice. FILE stands for the file with its questions, in JSON lines.
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
