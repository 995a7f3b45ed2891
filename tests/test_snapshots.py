"""What the pipeline makes of one layer: short, long and undecided prefill, and decode.

A snapshot shows the matrix products, the ops of this package and the cache writes; what Inductor
fuses around them is left out. ``EXPECTTEST_ACCEPT=1`` writes new snapshots.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from _packed_layer import build, inputs
from _uncompiled import passes_only
from expecttest import assert_expected_inline

from dsafx.passes import collect

NAMED = re.compile(r"^\w+(?=:)|\barg\d+_1\b")
NUMBER = re.compile(r"\d*(_\d+)?$")
WORD = re.compile(r"(?<![\w.])[a-z]\w*\b")
SHOWN = re.compile(r"^(inputs|\w+: (dsafx\.\w+|aten\.(mm|bmm|index_put|copy_)\(|output)|output)")


class Names:
    """Names of values, numbered in the order of the graphs: torch's own differ by release."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._uses: Counter[str] = Counter()

    def shown(self, text: str) -> str:
        """The lines of a graph that a snapshot holds."""
        lines = text.split("\n")[1:]
        for name in (name for line in lines for name in NAMED.findall(line)):
            if name not in self._names:
                kind = NUMBER.sub("", name)
                number = self._uses[kind]
                self._names[name] = f"{kind}_{number}" if number else kind
                self._uses[kind] += 1
        return self.renamed("\n".join(line for line in lines if SHOWN.match(line)))

    def renamed(self, text: str) -> str:
        return WORD.sub(lambda word: self._names.get(word[0], word[0]), text)


def snapshot(tokens: int, length: int, *, dynamic: bool = False, **options: Any) -> tuple[str, str]:
    """The graph of a layer whose selection nobody else reads, before and after the pipeline."""
    layer = build()
    step = torch.compile(
        lambda args, caches: layer(*args, **caches)[0],
        backend=passes_only,
        dynamic=dynamic,
        fullgraph=True,
        options=options,
    )
    with torch.no_grad(), collect() as reports:
        step(*inputs(tokens, length))
    report, names = reports[0], Names()
    before, after = names.shown(report.before), names.shown(report.after)
    return before, f"{after}\n{names.renamed(str(report))}"


def fused(tokens: int, length: int, **how: Any) -> str:
    """Of the graph with fused norms: our ops, the cache writes, and what the fusing pass says."""
    _, after = snapshot(tokens, length, fuse="always", **how)
    kept = ("dsafx.", "aten.index_put", "fuse_norm_rope:")
    return "\n".join(line for line in after.split("\n") if any(part in line for part in kept))


def test_a_short_prefill_is_dense_and_selects_nothing():
    before, after = snapshot(12, 12)
    assert_expected_inline(
        before,
        """\
mm: aten.mm(arg_1, permute)
mm_1: aten.mm(arg_1, permute_1)
layer_norm: dsafx.layer_norm(mm_1, arg_3, arg_4, 1e-06)
mm_2: aten.mm(arg_1, permute_2)
rms_norm: dsafx.rms_norm(mm_2, arg_6, 1e-06)
mm_3: aten.mm(rms_norm, permute_3)
mm_4: aten.mm(rms_norm, permute_4)
rope: dsafx.rope(getitem_7, arg_9, arg_10, 'interleaved_to_half')
rms_norm_1: dsafx.rms_norm(getitem, arg_11, 1e-06)
index_put: aten.index_put(arg_12, [arg_13], rms_norm_1)
rope_1: dsafx.rope(getitem_1, arg_9, arg_10, 'interleaved_to_half')
index_put_1: aten.index_put(arg_14, [arg_13], rope_1)
rope_2: dsafx.rope(getitem_4, arg_9, arg_10, 'interleaved_to_half')
rope_3: dsafx.rope(getitem_2, arg_9, arg_10, 'interleaved_to_half')
index_put_2: aten.index_put(arg_15, [arg_13], cat_1)
mm_5: aten.mm(arg_1, permute_5)
index_select: dsafx.index_select(cat, index_put_2, mul, arg_17, arg_18, 12, 16)
mla_attention: dsafx.mla_attention(getitem_6, rope, index_put, index_put_1, arg_19, index_select, arg_17, arg_18, 12, 12, 16, 0.2041241452319315, '...')
mm_6: aten.mm(view_2, permute_6)
copy_: aten.copy_(arg_12, index_put)
copy__1: aten.copy_(arg_14, index_put_1)
copy__2: aten.copy_(arg_15, index_put_2)
output: [mm_6]""",
    )
    assert_expected_inline(
        after,
        """\
mm: aten.mm(arg_1, permute)
mm_1: aten.mm(arg_1, permute_1)
mm_2: aten.mm(arg_1, permute_2)
mm_4: aten.mm(mul_4, permute_4)
index_put: aten.index_put(arg_12, [arg_13], mul_10)
index_put_1: aten.index_put(arg_14, [arg_13], cat_3)
index_put_2: aten.index_put(arg_15, [arg_13], cat_1)
mm_7: aten.mm(index_put, permute_7)
dense_mha: dsafx.dense_mha(getitem_6, slice_6, slice_7, arg_17, arg_18, 12, 0.2041241452319315, None, False, cat_2, index_put_1)
mm_6: aten.mm(view_2, permute_6)
copy_: aten.copy_(arg_12, index_put)
copy__1: aten.copy_(arg_14, index_put_1)
copy__2: aten.copy_(arg_15, index_put_2)
output: [mm_6]
resolve_route: 1 rewritten; mla_attention became dense MHA: no row sees more keys than the dense limit, and expanding them costs less
close_selection: 0 rewritten; index_select removed: nothing reads it
fuse_norm_rope: 0 rewritten; rope_1 declined: norm_rope_index of the cpu provider is not faster than its parts
fuse_index_query: 0 rewritten
fuse_cache_write: 0 rewritten
lower: 6 rewritten
verify: 8 proved""",
    )


def test_a_long_prefill_is_scored():
    _, after = snapshot(40, 40)
    assert_expected_inline(
        after,
        """\
mm: aten.mm(arg_1, permute)
mm_1: aten.mm(arg_1, permute_1)
mm_2: aten.mm(arg_1, permute_2)
mm_3: aten.mm(mul_4, permute_3)
mm_4: aten.mm(mul_4, permute_4)
index_put: aten.index_put(arg_12, [arg_13], mul_10)
index_put_1: aten.index_put(arg_14, [arg_13], cat_3)
index_put_2: aten.index_put(arg_15, [arg_13], cat_1)
mm_5: aten.mm(arg_1, permute_5)
index_select: dsafx.index_select(cat, index_put_2, mul, arg_17, arg_18, 40, 16)
bmm: aten.bmm(permute_7, slice_8)
sparse_mla: dsafx.sparse_mla(permute_8, cat_2, index_put, index_put_1, index_select, arg_17, 0.2041241452319315, False)
bmm_1: aten.bmm(permute_9, permute_10)
mm_6: aten.mm(view_2, permute_6)
copy_: aten.copy_(arg_12, index_put)
copy__1: aten.copy_(arg_14, index_put_1)
copy__2: aten.copy_(arg_15, index_put_2)
output: [mm_6]
resolve_route: 1 rewritten; mla_attention became top-k MQA: absorbing the query and reading the selected keys costs less
close_selection: 0 rewritten; index_select declined: rows may see more than K keys
fuse_norm_rope: 0 rewritten; rope_1 declined: norm_rope_index of the cpu provider is not faster than its parts
fuse_index_query: 0 rewritten; index_select declined: index_query of the cpu provider is not faster than its parts
fuse_cache_write: 0 rewritten
lower: 7 rewritten
verify: 9 proved""",
    )


def test_an_undecided_prefill_stays_one_op_that_decides_when_it_runs():
    _, after = snapshot(40, 40, dynamic=True, specialize="never")
    assert_expected_inline(
        after,
        """\
mm: aten.mm(arg_1, permute)
mm_1: aten.mm(arg_1, permute_1)
mm_2: aten.mm(arg_1, permute_2)
mm_3: aten.mm(mul_3, permute_3)
mm_4: aten.mm(mul_3, permute_4)
index_put: aten.index_put(arg_13, [arg_14], mul_9)
index_put_1: aten.index_put(arg_15, [arg_14], cat_3)
index_put_2: aten.index_put(arg_16, [arg_14], cat_1)
mm_5: aten.mm(arg_1, permute_5)
index_select: dsafx.index_select(cat, index_put_2, mul_tensor, arg_19, arg_20, arg_21, 16)
mla_attention: dsafx.mla_attention(getitem_6, cat_2, index_put, index_put_1, arg_22, index_select, arg_19, arg_20, arg_21, arg_23, 16, 0.2041241452319315, '...')
mm_6: aten.mm(view_2, permute_6)
copy_: aten.copy_(arg_13, index_put)
copy__1: aten.copy_(arg_15, index_put_1)
copy__2: aten.copy_(arg_16, index_put_2)
output: [mm_6]
resolve_route: 0 rewritten; mla_attention declined: decides at run time: whether a row may see more keys than the dense limit is not known yet
close_selection: 0 rewritten; index_select declined: rows may see more than K keys
fuse_norm_rope: 0 rewritten; rope_1 declined: norm_rope_index of the cpu provider is not faster than its parts
fuse_index_query: 0 rewritten; index_select declined: its weights are scaled by a number that is known only when it runs
fuse_cache_write: 0 rewritten
lower: 7 rewritten
verify: 9 proved""",
    )


def test_a_decode_step_is_absorbed():
    _, after = snapshot(1, 40)
    assert_expected_inline(
        after,
        """\
mm: aten.mm(arg_1, permute)
mm_1: aten.mm(arg_1, permute_1)
mm_2: aten.mm(arg_1, permute_2)
mm_3: aten.mm(mul_4, permute_3)
mm_4: aten.mm(mul_4, permute_4)
index_put: aten.index_put(arg_12, [arg_13], mul_10)
index_put_1: aten.index_put(arg_14, [arg_13], cat_3)
index_put_2: aten.index_put(arg_15, [arg_13], cat_1)
mm_5: aten.mm(arg_1, permute_5)
index_select: dsafx.index_select(cat, index_put_2, mul, arg_17, arg_18, 40, 16)
bmm: aten.bmm(permute_7, slice_8)
sparse_mla: dsafx.sparse_mla(permute_8, cat_2, index_put, index_put_1, index_select, arg_17, 0.2041241452319315, False)
bmm_1: aten.bmm(permute_9, permute_10)
mm_6: aten.mm(view_2, permute_6)
copy_: aten.copy_(arg_12, index_put)
copy__1: aten.copy_(arg_14, index_put_1)
copy__2: aten.copy_(arg_15, index_put_2)
output: [mm_6]
resolve_route: 1 rewritten; mla_attention became top-k MQA: absorbing the query and reading the selected keys costs less
close_selection: 0 rewritten; index_select declined: rows may see more than K keys
fuse_norm_rope: 0 rewritten; rope_1 declined: norm_rope_index of the cpu provider is not faster than its parts
fuse_index_query: 0 rewritten; index_select declined: index_query of the cpu provider is not faster than its parts
fuse_cache_write: 0 rewritten
lower: 7 rewritten
verify: 9 proved""",
    )


def test_a_short_prefill_with_fused_norms():
    assert_expected_inline(
        fused(12, 12),
        """\
norm_rope_index: dsafx.norm_rope_index(mm_2, arg_6, getitem, arg_11, getitem_1, mm_1, arg_3, arg_4, arg_9, arg_10, 1e-06, 'interleaved_to_half', 1e-06, 'interleaved_to_half')
index_put: aten.index_put(arg_12, [arg_13], getitem_10)
index_put_1: aten.index_put(arg_14, [arg_13], getitem_11)
index_put_2: aten.index_put(arg_15, [arg_13], getitem_12)
dense_mha: dsafx.dense_mha(getitem_6, slice_2, slice_3, arg_17, arg_18, 12, 0.2041241452319315, None, False, cat_2, index_put_1)
fuse_norm_rope: 1 rewritten; rope_1 became part of norm_rope_index""",
    )


def test_a_long_prefill_with_fused_norms():
    assert_expected_inline(
        fused(40, 40),
        """\
norm_rope_index: dsafx.norm_rope_index(mm_2, arg_6, getitem, arg_11, getitem_1, mm_1, arg_3, arg_4, arg_9, arg_10, 1e-06, 'interleaved_to_half', 1e-06, 'interleaved_to_half')
index_put: aten.index_put(arg_12, [arg_13], getitem_10)
index_put_1: aten.index_put(arg_14, [arg_13], getitem_11)
index_query: dsafx.index_query(view, mm_5, arg_9, arg_10, 'interleaved_to_half', False)
index_put_2: aten.index_put(arg_15, [arg_13], getitem_12)
index_select: dsafx.index_select(getitem_13, index_put_2, getitem_14, arg_17, arg_18, 40, 16)
sparse_mla: dsafx.sparse_mla(permute_8, cat_2, index_put, index_put_1, index_select, arg_17, 0.2041241452319315, False)
fuse_norm_rope: 1 rewritten; rope_1 became part of norm_rope_index""",
    )


def test_an_undecided_prefill_with_fused_norms():
    assert_expected_inline(
        fused(40, 40, dynamic=True, specialize="never"),
        """\
norm_rope_index: dsafx.norm_rope_index(mm_2, arg_6, getitem, arg_12, getitem_1, mm_1, arg_3, arg_4, arg_10, arg_11, 1e-06, 'interleaved_to_half', 1e-06, 'interleaved_to_half')
index_put: aten.index_put(arg_13, [arg_14], getitem_10)
index_put_1: aten.index_put(arg_15, [arg_14], getitem_11)
index_put_2: aten.index_put(arg_16, [arg_14], getitem_12)
index_select: dsafx.index_select(cat, index_put_2, mul_tensor, arg_19, arg_20, arg_21, 16)
mla_attention: dsafx.mla_attention(getitem_6, cat_2, index_put, index_put_1, arg_22, index_select, arg_19, arg_20, arg_21, arg_23, 16, 0.2041241452319315, '...')
fuse_norm_rope: 1 rewritten; rope_1 became part of norm_rope_index""",
    )


def test_a_decode_step_with_fused_norms():
    assert_expected_inline(
        fused(1, 40),
        """\
norm_rope_index: dsafx.norm_rope_index(mm_2, arg_6, getitem, arg_11, getitem_1, mm_1, arg_3, arg_4, arg_9, arg_10, 1e-06, 'interleaved_to_half', 1e-06, 'interleaved_to_half')
index_put: aten.index_put(arg_12, [arg_13], getitem_10)
index_put_1: aten.index_put(arg_14, [arg_13], getitem_11)
index_query: dsafx.index_query(view, mm_5, arg_9, arg_10, 'interleaved_to_half', False)
index_put_2: aten.index_put(arg_15, [arg_13], getitem_12)
index_select: dsafx.index_select(getitem_13, index_put_2, getitem_14, arg_17, arg_18, 40, 16)
sparse_mla: dsafx.sparse_mla(permute_8, cat_2, index_put, index_put_1, index_select, arg_17, 0.2041241452319315, False)
fuse_norm_rope: 1 rewritten; rope_1 became part of norm_rope_index""",
    )
