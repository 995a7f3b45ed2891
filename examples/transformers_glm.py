"""Generate with a DSA model of transformers as it is, with dsafx eager, and with dsafx compiled.

    python examples/transformers_glm.py               a small GLM-5.2-style model, random weights
    python examples/transformers_glm.py CHECKPOINT    your GLM-5 or DeepSeek-V3.2 model's folder

All that dsafx does to the model is in two lines, ``dsafx.enable`` and ``dsafx.compile``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

import dsafx


def write_small_checkpoint(folder: Path) -> None:
    """Save a GLM-5.2-style model: 3 layers, the second takes the selection of the first."""
    config = GlmMoeDsaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=64,
        indexer_types=["full", "shared", "full"],
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    GlmMoeDsaForCausalLM(config).save_pretrained(folder)


def generate(way: str, model: torch.nn.Module, prompt: torch.Tensor) -> list[int]:
    """Generate 12 tokens greedily, and print them with the time that took."""
    start = time.perf_counter()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    tokens = out[0, prompt.shape[1] :].tolist()
    print(f"{way:15} {time.perf_counter() - start:6.1f} s  {tokens}")
    return tokens


def main(checkpoint: Path) -> None:
    """Load ``checkpoint`` and generate in three ways after one prompt longer than index_topk."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    length = min(3 * model.config.index_topk, model.config.max_position_embeddings - 12)
    prompt = torch.randint(2, model.config.vocab_size, (1, length))

    plain = generate("transformers", model, prompt)

    model = dsafx.enable(model)  # from here on, sparse: eager
    eager = generate("dsafx eager", model, prompt)

    model = dsafx.compile(model)  # and compiled; the first call compiles
    compiled = generate("dsafx compiled", model, prompt)

    print("all equal" if plain == eager == compiled else "the tokens differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="folder of a saved checkpoint")
    given = parser.parse_args().checkpoint
    if given is not None:
        main(given)
    else:
        with tempfile.TemporaryDirectory() as made:
            write_small_checkpoint(Path(made))
            main(Path(made))
