"""A layer with hand-made weights that answers questions, and fails loudly where DSA is done wrong.

Each token carries a key and a value, and some ask for one key. A distractor carries an asked key
with another value, and full attention would follow it. The indexer scores distractors lowest, and
exactly ``TOPK`` of the tokens that a longer row sees are none, so that such a row answers right
only from the exact selection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dsafx.models.config import DSAConfig
from dsafx.models.layer import DSAAttention

TOPK = 256
CODE, KEYS, VALUES = 32, 48, 16
ROPE, INDEX_DIM, HEADS, INDEX_HEADS = 4, 16, 2, 8
# Hidden dims: the key's code, the asked key's code, whether it distracts, a constant, the value.
ASKED, DISTRACTS, CONSTANT, VALUE = CODE, 2 * CODE, 2 * CODE + 1, 2 * CODE + 2
HIDDEN = VALUE + VALUES
NOPE = CODE + 1
LATENT = CODE + 1 + VALUES
CAPACITY = 1024
DECODE_STEPS = 4

CONFIG = DSAConfig(
    model_type="glm_moe_dsa",
    hidden_size=HIDDEN,
    num_heads=HEADS,
    q_lora_rank=NOPE,
    kv_lora_rank=LATENT,
    qk_nope_head_dim=NOPE,
    qk_rope_head_dim=ROPE,
    v_head_dim=VALUES,
    index_num_heads=INDEX_HEADS,
    index_head_dim=INDEX_DIM,
    topk=TOPK,
    schedule=("full",),
    mla_rope_style="interleaved_to_half",
    index_rope_style="interleaved_to_half",
    rope_theta=1e4,
    softmax_scale=(NOPE + ROPE) ** -0.5,
    index_weight_scale=INDEX_HEADS**-0.5 * INDEX_DIM**-0.5,
)


def set_weights(layer: DSAAttention) -> None:
    """Write the weights by hand; every norm weight stays 1, every RoPE dim of the attention 0."""
    pattern = torch.tensor([1.0, -1.0]).repeat((INDEX_DIM - ROPE) // 2)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        q_a, kv_a = layer.q_a_proj.weight, layer.kv_a_proj_with_mqa.weight
        q_a[:CODE, ASKED : ASKED + CODE] = torch.eye(CODE)
        q_a[CODE, CONSTANT] = 1
        kv_a[:CODE, :CODE] = torch.eye(CODE)
        kv_a[CODE, DISTRACTS] = 1
        kv_a[CODE + 1 : LATENT, VALUE:] = 4 * torch.eye(VALUES)
        q_b = layer.q_b_proj.weight.view(HEADS, NOPE + ROPE, NOPE)
        # A match scores 32 * 11 / sqrt(37), about 58, a distractor about 10 more, another key 29.
        q_b[:, :CODE, :CODE] = 11 * torch.eye(CODE)
        q_b[:, CODE, CODE] = 60
        kv_b = layer.kv_b_proj.weight.view(HEADS, NOPE + VALUES, LATENT)
        kv_b[:, :NOPE, :NOPE] = torch.eye(NOPE)
        kv_b[:, NOPE:, NOPE:] = torch.eye(VALUES)
        layer.o_proj.weight[VALUE:] = torch.eye(VALUES).repeat(1, HEADS)
        indexer = layer.indexer
        indexer.wk.weight[ROPE:, CONSTANT] = pattern
        indexer.wk.weight[ROPE:, DISTRACTS] = -2 * pattern
        wq_b = indexer.wq_b.weight.view(INDEX_HEADS, INDEX_DIM, NOPE)
        wq_b[:, ROPE:, CODE] = pattern
        indexer.weights_proj.weight[:, CONSTANT] = 1


@dataclass
class Prompt:
    """Hidden states of ``length + DECODE_STEPS`` tokens, and the values that are asked for."""

    hidden: Tensor
    answers: list[int]


def make_prompt(length: int, seed: int) -> Prompt:
    """A prompt whose last token asks for a key at a position >= TOPK, where it is that long.

    A row of n > TOPK keys sees n - TOPK distractors. Those of a prompt that is longer are in it,
    and each decode token is one for its own question. Those of a prompt that is not lie in it
    early, each for a question that is asked past TOPK: a key write that the short prefill dropped
    lets them in.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    total = length + DECODE_STEPS
    values = [pick(0, VALUES) for _ in range(total)]
    # Key 0 is what nobody asks for; question i asks for key i + 1, which stands at one position.
    keys = [0] * total
    needle = pick(TOPK, length) if length > TOPK else pick(0, length)
    others = [p for p in range(length) if p != needle]
    shuffled = [others[p] for p in torch.randperm(len(others), generator=generator).tolist()]
    if length > TOPK:
        misled = dict.fromkeys(shuffled[: length - TOPK], 0)
        misled |= {length - 1 + i: i for i in range(1, DECODE_STEPS + 1)}
    else:
        late = range(max(TOPK - length + 1, 0), DECODE_STEPS + 1)
        # Among equal scores the lowest position wins, so the one that must go first lies last.
        early = sorted((p for p in shuffled if p < length // 2), reverse=True)
        misled = dict(zip(early, late, strict=False))
    answering = [needle, *(p for p in shuffled if p not in misled)][: DECODE_STEPS + 1]
    for question, position in enumerate(answering):
        keys[position] = question + 1
    answers = [values[position] for position in answering]
    for position, question in misled.items():
        keys[position] = question + 1
        values[position] = (answers[question] + 1 + pick(0, VALUES - 1)) % VALUES

    codes, hidden = _codes(), torch.zeros(total, HIDDEN)
    hidden[:, :CODE] = codes[keys]
    hidden[length - 1 :, ASKED : ASKED + CODE] = codes[1 : DECODE_STEPS + 2]
    hidden[list(misled), DISTRACTS] = 1
    hidden[:, CONSTANT] = 1
    hidden[range(total), [VALUE + value for value in values]] = 1
    return Prompt(hidden, answers)


def _codes() -> Tensor:
    """[KEYS, CODE] of +-1 whose products with one another stay at half of the match or below."""
    generator = torch.Generator().manual_seed(0)
    codes: list[Tensor] = []
    while len(codes) < KEYS:
        code = torch.randint(0, 2, (CODE,), generator=generator) * 2.0 - 1
        if all(abs(float(code @ other)) <= CODE / 2 for other in codes):
            codes.append(code)
    return torch.stack(codes)


class Session:
    """Caches of one request, filled by a prefill and then by one decode step at a time."""

    def __init__(self, forward: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self.forward = forward
        self.caches = {
            "kv_c_cache": torch.zeros(CAPACITY + DECODE_STEPS, LATENT),
            "k_pe_cache": torch.zeros(CAPACITY + DECODE_STEPS, ROPE),
            "index_k_cache": torch.zeros(CAPACITY + DECODE_STEPS, INDEX_DIM),
        }
        self.length = 0

    def step(self, hidden: Tensor) -> int:
        """Feed tokens; the value that the last of them is answered with."""
        tokens = hidden.shape[0]
        positions = torch.arange(self.length, self.length + tokens)
        self.length += tokens
        angles = positions[:, None] * torch.tensor([1.0, 0.01])
        out, _ = self.forward(
            hidden,
            angles.cos(),
            angles.sin(),
            torch.zeros(tokens, dtype=torch.int32),
            (positions + 1).to(torch.int32),
            self.length,
            tokens,
            write_positions=positions,
            **self.caches,
        )
        return int(out[-1, VALUE:].argmax())


def answers(
    forward: Callable[..., tuple[Tensor, Tensor | None]], prompt: Prompt, chunks: Sequence[int] = ()
) -> list[int]:
    """The answer after prefill (in one piece, or cut at ``chunks``) and after each decode step."""
    session, length = Session(forward), prompt.hidden.shape[0] - DECODE_STEPS
    cuts = [0, *chunks, length]
    for start, stop in pairwise(cuts):
        answer = session.step(prompt.hidden[start:stop])
    last = range(length, length + DECODE_STEPS)
    return [answer, *(session.step(prompt.hidden[p : p + 1]) for p in last)]
