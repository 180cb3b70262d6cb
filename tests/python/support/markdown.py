"""Read Markdown tables."""


def cells_of(line: str) -> list[str]:
    """Return the cells of one line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables_of(text: str) -> list[list[list[str]]]:
    """Return every table of a text as a list of rows of cells, without the line below the header."""
    blocks = [[line for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    return [[cells_of(line) for line in (lines[0], *lines[2:])] for lines in blocks if len(lines) > 1]
