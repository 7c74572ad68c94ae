"""Following a model does not load torch's compiler, and finds what it finds with the compiler there."""

from __future__ import annotations

import subprocess
import sys

from launch import REPOSITORY

SCRIPT = """
import sys
import torch
from pdmpi.config.load import load_config
from pdmpi.model.example import example_batch
from pdmpi.model.trace import trace_model

HEAVY = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy")

def fingerprints():
    found = []
    for path in sys.argv[1:]:
        config = load_config(path)
        found.append(trace_model(config.model, example_batch(config)[0]).graph.fingerprint)
    return found

light = fingerprints()
assert not [name for name in HEAVY if name in sys.modules]
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
symbol = ShapeEnv().create_unbacked_symint()
assert not guard_or_false(symbol == 3)
assert torch._dynamo.is_compiling() is False
assert torch.relu(torch.ones(2, device="meta")).shape == (2,)
assert all(name in sys.modules for name in HEAVY)
assert fingerprints() == light
from torch._dynamo.utils import counters  # a submodule, of the real package
print("light")
"""


def test_models_are_followed_without_the_compiler_and_alike_with_it() -> None:
    configs = [REPOSITORY / "configs" / f"{name}-small.toml" for name in ("alexnet", "gpt2", "awd-lm")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, configs)], capture_output=True, text=True, timeout=900,
        cwd=REPOSITORY,
    )  # fmt: skip
    assert done.stdout == "light\n", done.stderr


STAND_IN = """
import sys
from pdmpi.model.no_compiler import without_compiler

with without_compiler():
    import torch
    import torch._dynamo as compiler
    from torch.fx.experimental import symbolic_shapes as shapes
    assert "ShapeEnv" not in vars(shapes) and shapes.sym_eq((1, 2), (1, 2))
    real = shapes.ShapeEnv
    assert sys.modules["torch.fx.experimental.symbolic_shapes"].ShapeEnv is real
    assert not shapes.guard_or_false(real().create_unbacked_symint() == 3)
    assert compiler.is_compiling() is False
print("real")
"""


def test_whoever_asks_for_more_gets_the_real_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN], capture_output=True, text=True, timeout=900, cwd=REPOSITORY
    )
    assert done.stdout == "real\n", done.stderr
