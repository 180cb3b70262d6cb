"""Makes griffe read the docstring section `Example:` as it reads `Examples:`: as code."""

import re

import griffe


class Examples(griffe.Extension):
    """Renames the section in every docstring."""

    def on_object(self, *, obj, **kwargs):
        """Rename the section of one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
