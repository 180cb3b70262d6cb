"""Options of the attention: names, defaults and what they may be."""

from megatron_sb.validation import check_flag, check_number, check_tensor

DEFAULT_MASS_THRESHOLD = 2.0**-24
LOGITS = ("dot", "euclidean")


def check_options(scale: object, attend_current: object, mass_threshold: object) -> None:
    """Types alone: values are the operators' to check."""
    if scale is not None:
        check_number("scale", scale)
    check_flag("attend_current", attend_current)
    check_number("mass_threshold", mass_threshold)


def check_mass_threshold(value: object) -> None:
    check_number("mass_threshold", value, "0 (no skipping) up to, not including, 1", lambda x: 0 <= x < 1)


def variant_arguments(logits: object, forget_gate: object) -> dict[str, object]:
    """The operators' arguments for the variant of the logit."""
    check_logits(logits)
    if forget_gate is not None:
        check_tensor("forget_gate", forget_gate)
    return {"forget_gate": forget_gate, "euclidean": logits == "euclidean"}


def check_logits(logits: object) -> None:
    if logits not in LOGITS:
        raise ValueError(f"logits is {logits!r}; {' and '.join(map(repr, LOGITS))} are allowed")
