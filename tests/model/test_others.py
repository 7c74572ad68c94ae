"""Models of Hugging Face and torchvision, from a configuration, with random weights."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from chain import Chain, cut, total
from test_partition import assert_equal, close
from torch import Tensor, nn

from pdmpi.config.run import ModelConfig
from pdmpi.model.build import build_model
from pdmpi.model.trace import TracedModel, trace_model
from pdmpi.model.tree import tensors_of


class Plain(nn.Module):
    """A Hugging Face model that returns plain values and keeps no cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, return_dict=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    return Plain(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16,
                        hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # fmt: skip
    return Plain(BertForMaskedLM(config))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0,
                      use_cache=False, decoder_start_token_id=0)  # fmt: skip
    return Plain(T5ForConditionalGeneration(config))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                       image_size=16, patch_size=8, num_labels=5,
                       hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # fmt: skip
    return Plain(ViTForImageClassification(config))


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=5)


def inception() -> nn.Module:
    from torchvision.models import inception_v3

    return inception_v3(num_classes=5, init_weights=False, dropout=0.0)


def _ids(*names: str) -> Callable[[], dict[str, Tensor]]:
    def make() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {name: torch.randint(1, 50, (2, 9), generator=generator) for name in names}

    return make


def _masked() -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return {**_ids("input_ids")(), "attention_mask": mask}


CASES: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "gpt2": ("transformers", _ids("input_ids")),
    "bert": ("transformers", _masked),
    "t5": ("transformers", _ids("input_ids", "decoder_input_ids")),
    "vit": ("transformers", lambda: {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64)}),
    "resnet": ("torchvision", lambda: torch.randn(2, 3, 64, 64, dtype=torch.float64)),
    "inception": ("torchvision", lambda: torch.randn(2, 3, 299, 299, dtype=torch.float64)),
}


@functools.cache
def traced_other(name: str) -> TracedModel:
    config = ModelConfig(factory=f"test_others:{name}")
    return trace_model(config, CASES[name][1](), seed=2, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_others_models_in_parts(name: str) -> None:
    package, example = CASES[name]
    try:
        importlib.import_module("torchvision.models" if package == "torchvision" else package)
    except ImportError:
        pytest.skip(f"{package} is not installed (pip install 'pdmpi[others]' brings transformers)")
    except RuntimeError as error:
        pytest.skip(f"{package} does not import beside this torch: {error}")
    traced, batch = traced_other(name), example()
    assert len(traced.graph) > 10, traced.opaque
    model = build_model(traced)
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    loss = total(output)
    loss.backward()
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    draw = random.Random(name)
    for stages in (1, 2, 3, 4):
        cuts = draw.sample(range(1, len(traced.graph)), stages - 1)
        chain = Chain(traced, cut(traced, cuts))
        found, result = chain.step(batch)
        # T5 and others compute their softmax in float32, whatever the type of the model.
        assert close(found, loss, 1e-6)
        assert all(close(a, b, 1e-6) for a, b in zip(tensors_of(result), tensors_of(output), strict=True))
        assert_equal(chain, whole, dict(model.named_buffers(remove_duplicate=False)), 1e-5)
