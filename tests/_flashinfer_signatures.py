"""Signatures of FlashInfer 0.6.18.post1, 0.7.2.post1 and 0.7.4, read from the wheels' source.

A parameter that ends in "=" has a default; methods are written without ``self``. Of an overloaded
method this is the implementation. A name that is missing is not in that version.
"""

from __future__ import annotations

_V0_6_18: dict[str, str] = {
    "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla": (
        "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, "
        "block_tables, seq_lens, max_seq_len, sparse_mla_top_k=, out=, bmm1_scale=, "
        "bmm2_scale=, sinks=, skip_softmax_threshold_scale_factor=, enable_pdl=, backend=, "
        "is_var_seq=, uses_shared_paged_kv_idx=, lse=, return_lse=, cute_dsl_impl=, "
        "kv_scale_format=, cum_seq_lens_q=, max_q_len=, multi_ctas_kv_counter_buffer=, "
        "sparse_mla_top_k_lens=, enable_dcp=, cp_world=, cp_rank=, causal_seqlens_kv_global=, "
        "use_fp16_softmax="
    ),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper": (
        "float_workspace_buffer, use_cuda_graph=, qo_indptr=, kv_indptr=, kv_indices=, "
        "kv_len_arr=, backend="
    ),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.plan": (
        "qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, "
        "page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler="
    ),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.run": (
        "q_nope, q_pe, ckv_cache, kpe_cache, out=, lse=, return_lse=, profiler_buffer=, "
        "kv_len=, page_table=, return_lse_base_on_e=, o_scale=, *, ckv_scale=, "
        "ckv_scale_arr=, kpe_scale="
    ),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper": (
        "float_workspace_buffer, kv_layout=, use_cuda_graph=, qo_indptr_buf=, kv_indptr_buf=, "
        "custom_mask_buf=, mask_indptr_buf=, backend=, jit_args=, jit_kwargs="
    ),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=, "
        "custom_mask=, packed_custom_mask=, causal=, pos_encoding_mode=, "
        "use_fp16_qk_reduction=, window_left=, logits_soft_cap=, sm_scale=, rope_scale=, "
        "rope_theta=, q_data_type=, kv_data_type=, o_data_type=, non_blocking=, "
        "prefix_len_ptr=, token_pos_in_items_ptr=, token_pos_in_items_len=, "
        "max_item_len_ptr=, fixed_split_size=, disable_split_kv=, seq_lens=, seq_lens_q=, "
        "max_token_per_sequence=, max_sequence_kv=, v_indptr=, o_indptr="
    ),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run": (
        "q, k, v, *args, q_scale=, k_scale=, v_scale=, o_scale=, out=, lse=, return_lse=, "
        "enable_pdl=, kv_cache_sf="
    ),
    "flashinfer.prefill.trtllm_ragged_attention_deepseek": (
        "query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, "
        "bmm2_scale, o_sf_scale, batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, "
        "enable_pdl, is_causal, return_lse, attention_sinks=, "
        "skip_softmax_threshold_scale_factor=, out=, lse=, sage_attn_sfs=, "
        "num_elts_per_sage_attn_blk=, backend=, q_seq_lens_cpu=, kv_seq_lens_cpu=, "
        "use_fp16_softmax=, uses_spcompress=, skip_all_rows_active_check="
    ),
    "flashinfer.top_k_ragged_transform": (
        "input, offsets, lengths, k, deterministic=, tie_break=, dsa_graph_safe=, row_starts="
    ),
    "flashinfer.merge_state": "v_a, s_a, v_b, s_b",
}

_V0_7_2: dict[str, str] = {
    **_V0_6_18,
    "flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla": (
        "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, "
        "block_tables, seq_lens, max_seq_len, sparse_mla_top_k=, out=, bmm1_scale=, "
        "bmm2_scale=, sinks=, skip_softmax_threshold_scale_factor=, enable_pdl=, backend=, "
        "is_var_seq=, uses_shared_paged_kv_idx=, lse=, return_lse=, cute_dsl_impl=, "
        "kv_scale_format=, cum_seq_lens_q=, max_q_len=, multi_ctas_kv_counter_buffer=, "
        "sparse_mla_top_k_lens=, enable_dcp=, cp_world=, cp_rank=, causal_seqlens_kv_global=, "
        "use_fp16_softmax=, return_lse_base="
    ),
    "flashinfer.mla.SparseMLASm120Wrapper": (
        "max_num_tokens=, max_num_heads=, *, d_v=, kv_scale_format=, kv_cache_format=, "
        "extra_kv_fp4=, compute_precision=, device=, backend="
    ),
    "flashinfer.mla.SparseMLASm120Wrapper.run": (
        "q, kv_cache, indices, output, sm_scale, *, topk_length=, attn_sink=, "
        "extra_kv_cache=, extra_indices=, extra_topk_length=, out_lse=, mid_out=, mid_lse=, "
        "prefill_impl=, return_lse=, lse_scale="
    ),
    "flashinfer.mla.MLAPlanMetadata.csr": "qo_indptr, kv_indptr, kv_indices, kv_len_arr",
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.plan": (
        "qo_indptr=, kv_indptr=, kv_indices=, kv_len_arr=, num_heads=, head_dim_ckv=, "
        "head_dim_kpe=, page_size=, causal=, sm_scale=, q_data_type=, kv_data_type=, "
        "use_profiler=, *, metadata=, cum_seq_lens_q=, block_tables=, seq_lens=, max_q_len=, "
        "query_layout=, kv_cache_layout=, lse_mode=, output_dtype=, output_scale=, "
        "scale_mode=, skip_softmax=, enable_pdl=, use_sinks="
    ),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.run": (
        "q_nope=, q_pe=, ckv_cache=, kpe_cache=, out=, lse=, return_lse=, profiler_buffer=, "
        "kv_len=, page_table=, return_lse_base_on_e=, o_scale=, *, query=, kv_cache=, "
        "ckv_scale=, ckv_scale_arr=, kpe_scale=, sinks=, "
        "skip_softmax_threshold_scale_factor=, bmm1_scale=, bmm2_scale="
    ),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper": (
        "float_workspace_buffer, kv_layout=, use_cuda_graph=, qo_indptr_buf=, kv_indptr_buf=, "
        "custom_mask_buf=, mask_indptr_buf=, backend=, jit_args=, jit_kwargs=, "
        "variant_owns_mask="
    ),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=, "
        "custom_mask=, packed_custom_mask=, causal=, pos_encoding_mode=, "
        "use_fp16_qk_reduction=, window_left=, logits_soft_cap=, sm_scale=, rope_scale=, "
        "rope_theta=, q_data_type=, kv_data_type=, o_data_type=, non_blocking=, "
        "prefix_len_ptr=, token_pos_in_items_ptr=, token_pos_in_items_len=, "
        "max_item_len_ptr=, fixed_split_size=, disable_split_kv=, seq_lens=, seq_lens_q=, "
        "max_token_per_sequence=, max_sequence_kv=, v_indptr=, o_indptr=, uniform_q_len="
    ),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run": (
        "q, k, v, *args, q_scale=, k_scale=, v_scale=, o_scale=, out=, lse=, return_lse=, "
        "lse_base=, lse_layout=, enable_pdl=, kv_cache_sf="
    ),
}

_V0_7_4: dict[str, str] = {
    **_V0_7_2,
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=, "
        "custom_mask=, packed_custom_mask=, causal=, pos_encoding_mode=, "
        "use_fp16_qk_reduction=, window_left=, logits_soft_cap=, sm_scale=, rope_scale=, "
        "rope_theta=, q_data_type=, kv_data_type=, o_data_type=, non_blocking=, "
        "prefix_len_ptr=, token_pos_in_items_ptr=, token_pos_in_items_len=, "
        "max_item_len_ptr=, fixed_split_size=, disable_split_kv=, seq_lens=, seq_lens_q=, "
        "max_token_per_sequence=, max_sequence_kv=, v_indptr=, o_indptr=, qo_indptr_cpu=, "
        "kv_indptr_cpu=, uniform_q_len=, use_token_head_sf="
    ),
}

SIGNATURES = {
    "0.6.18.post1": _V0_6_18,
    "0.7.2.post1": _V0_7_2,
    "0.7.4": _V0_7_4,
}
