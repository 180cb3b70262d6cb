"""What `import stickbreaking_attention` finds in the processes that a program starts with multiprocessing.

They get the `sys.path` of the program, with this folder, but none of its modules. Importing this file gives the module
that `megatron_sb.integrations.stickbreaking_attention.install` puts into sys.modules.
"""

import sys

from megatron_sb.integrations.stickbreaking_attention import install

del sys.modules[__name__]  # install would take this file for the published package
install()
