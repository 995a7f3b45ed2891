"""Generate with a DSA model of transformers whose heads are shared by several processes.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py               a small random model
    torchrun --nproc-per-node 2 examples/tensor_parallel.py CHECKPOINT    your model's folder

transformers shards the checkpoint while it loads it; ``dsafx.enable`` finds the layers sharded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers_glm import write_small_checkpoint

import dsafx


def generate(way: str, model: torch.nn.Module, prompt: torch.Tensor) -> list[int]:
    """Generate 12 tokens greedily; rank 0 prints them with the time that took."""
    start = time.perf_counter()
    prompt = prompt.to(model.device)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    tokens = out[0, prompt.shape[1] :].tolist()
    if dist.get_rank() == 0:
        print(f"{way:15} {time.perf_counter() - start:6.1f} s  {tokens}")
    return tokens


def main(checkpoint: Path, compare: bool) -> None:
    """Generate on all processes together and, to compare, on the first one alone."""
    shared = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=shared).eval()
    model = dsafx.enable(model)  # from here on, sparse; dsafx.compile(model) would compile it too

    length = min(3 * model.config.index_topk, model.config.max_position_embeddings - 12)
    torch.manual_seed(0)  # the same prompt on all ranks
    prompt = torch.randint(2, model.config.vocab_size, (1, length))
    with torch.no_grad(), dsafx.ops.options(check=True):
        model(prompt.to(model.device))  # raises on all ranks if two of them select different keys
    split = generate(f"{dist.get_world_size()} processes", model, prompt)

    if compare and dist.get_rank() == 0:
        whole = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        alone = generate("one process", whole, prompt)
        print("all equal" if alone == split else "the tokens differ")


def arguments() -> argparse.Namespace:
    """What the command line says, once it is known that torchrun started this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="folder of a saved checkpoint")
    parser.add_argument(
        "--no-compare",
        action="store_true",
        help="do not generate on one process too, which has to hold the whole model",
    )
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    if given.checkpoint is not None and not (given.checkpoint / "config.json").is_file():
        parser.error(f"{given.checkpoint} is no folder of a checkpoint: it holds no config.json")
    return given


if __name__ == "__main__":
    given = arguments()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    try:
        with tempfile.TemporaryDirectory() as made:
            folder = [str(given.checkpoint or made)]
            if given.checkpoint is None and dist.get_rank() == 0:
                write_small_checkpoint(Path(made))
            dist.broadcast_object_list(folder)  # rank 0's: the others wait until it is written
            main(Path(folder[0]), compare=not given.no_compare)
            dist.barrier()  # rank 0 deletes what it made when all have read it
    finally:
        dist.destroy_process_group()
