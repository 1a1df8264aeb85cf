"""A LLaMA from transformers, made from its widths and a seed; nothing is downloaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unsilent.errors import UsageError
from unsilent.training.presets import Preset

LossFn = Callable[[nn.Module, torch.Tensor], torch.Tensor]

MAX_POSITIONS = 4096


def build_model(preset: Preset, *, seed: int, device: torch.device | str = "cpu", attention: str = "sdpa") -> nn.Module:
    """A ``LlamaForCausalLM`` in fp32, in training mode; same seed, same bits. The global generators are not moved.

    On device "meta" it has shapes only.
    """
    with _quiet_transformers():
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise UsageError(
                "training needs the package transformers: install it with  pip install 'unsilent[train]'"
            ) from error
        config = LlamaConfig(
            vocab_size=preset.vocabulary,
            hidden_size=preset.hidden_size,
            intermediate_size=preset.ffn_size,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            num_key_value_heads=preset.heads,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=False,
            use_cache=False,  # a cache object in the output would only be in the way of replays
            attn_implementation=attention,  # pyright: ignore[reportCallIssue]
        )
        if torch.device(device).type == "meta":
            with torch.device("meta"):
                return LlamaForCausalLM(config).train()
        # Always drawn on the CPU, so that the bits do not depend on the device.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = LlamaForCausalLM(config)
    return model.float().to(device).train()  # pyright: ignore[reportArgumentType, reportCallIssue]


def make_loss_fn(*, bf16: bool = False) -> LossFn:
    """``loss_fn(model, batch)``: mean cross-entropy of the next byte; ``batch`` holds one token more than is read.

    With ``bf16`` the forward runs under autocast on the batch's device; the loss itself is taken in fp32.
    """

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits: torch.Tensor = model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    return loss_fn


def weights_sha256(model: nn.Module) -> str:
    """One hash of all parameters and buffers that a checkpoint would hold, names and shapes included."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Only errors of transformers are printed while a model is made; its level is put back afterwards."""
    logger: Any = logging.getLogger("transformers")
    # The import itself sets the level when it is first made, so it is imported before the level is noted.
    with suppress(ImportError):
        import transformers  # noqa: F401
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
