"""Run a program in a network namespace, see support/hosts.py.

on_host.py NAMESPACE SCRIPT.py ARGUMENTS..
on_host.py NAMESPACE -m MODULE ARGUMENTS..
"""

import os
import runpy
import sys

if __name__ == "__main__":
    _, namespace, *program = sys.argv
    with open(f"/run/netns/{namespace}") as file:
        # Of Python 3.12; support/hosts.py looks for it.
        os.setns(file.fileno(), os.CLONE_NEWNET)  # novm
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")
