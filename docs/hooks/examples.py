"""Lets griffe read the docstring section `Example:` as code, as it reads `Examples:`."""

import re

import griffe


class Examples(griffe.Extension):
    """Rename the section in every docstring."""

    def on_object(self, *, obj, **kwargs):
        """Rename the section of one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
