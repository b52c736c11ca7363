"""Python's own parser, for tests that read code."""

import ast
import gc


def parsed(text: str) -> ast.Module:
    """What is written there. CPython counts how deep its parser is, and what garbage collection runs meanwhile throws that off: a SystemError now and then (cpython#106905)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_on:
            gc.enable()
